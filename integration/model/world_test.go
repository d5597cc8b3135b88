package model

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime/pprof"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/indexer"
	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

var pool = kvcache.PoolID{Tenant: kvcache.DefaultTenant, Model: "m"}

const (
	numEngines  = 3
	numIndexers = 2
	// checkInterval is that of the first indexer: its check, with repair, is nearly always under way. It must find nothing.
	checkInterval = 50 * time.Millisecond
)

// world is everything that one run moves.
type world struct {
	t        *testing.T
	rng      *rand.Rand
	redis    *storetest.Server
	store    *store.Store // the test's own
	engines  []*engine
	indexers [numIndexers]*process
	reader   *reader
	diary    []string // the last steps
	journal  journal
}

// process is one indexer with its own way to Redis; nil while it does not run.
type process struct {
	path *redisproc.Proxy
	addr string // of its admin surface
	stop func(cut bool)
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 1)), redis: storetest.Redis(t)}
	w.store = w.open(w.redis.URL)
	for i := range numEngines {
		e := &engine{id: fmt.Sprint("e", i), rng: w.rng}
		w.engines = append(w.engines, e)
		e.newLife()
		e.proc = zmtptest.Start(t, zmtptest.Config{Router: "*"})
		e.path = storetest.Proxy(t, strings.TrimPrefix(e.proc.Endpoint, "tcp://"))
	}
	for i := range w.indexers {
		w.startIndexer(i)
	}
	for _, e := range w.engines {
		e.publish(e.sign())
	}
	return w
}

func (w *world) open(url string) *store.Store {
	w.t.Helper()
	s, err := store.New(store.Options{URL: url, Shards: 2, LookupBudget: 10 * time.Second})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = s.Close() })
	return s
}

func (w *world) note(format string, args ...any) {
	w.diary = append(w.diary, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
	if len(w.diary) > 60 {
		w.diary = w.diary[1:]
	}
}

func (w *world) startIndexer(i int) {
	w.t.Helper()
	path := storetest.Proxy(w.t, w.redis.Addr)
	st := w.open("redis://" + path.Addr)
	o := indexer.Options{Store: st, Listen: "127.0.0.1:0", Logger: w.journal.logger(i)}
	if i == 0 {
		o.CheckInterval = checkInterval
	}
	for _, e := range w.engines {
		o.Workers = append(o.Workers, indexer.Worker{
			ID: e.id, Model: pool.Model, BlockSize: blockSize, Endpoint: "tcp://" + e.path.Addr, ReplayEndpoint: e.proc.ReplayEndpoint,
		})
	}
	ix, err := indexer.New(o)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- ix.Run(ctx) }()
	p := &process{path: path, addr: ix.Addr().String()}
	p.stop = func(cut bool) {
		if cut {
			path.Set(redisproc.Refuse) // nothing that it still does reaches Redis
		}
		cancel()
		if err := <-ended; err != nil {
			w.t.Errorf("indexer %d: %v", i, err)
		}
		_ = st.Close()
		path.Close()
	}
	w.indexers[i] = p
	w.t.Cleanup(func() {
		if w.indexers[i] == p {
			p.stop(true)
		}
	})
}

// restartEngine ends an engine's process; another one takes its place and has done some work before anybody can listen.
func (w *world) restartEngine(e *engine) {
	e.proc.Kill()
	e.newLife()
	e.proc = zmtptest.Start(w.t, zmtptest.Config{Pub: e.proc.Endpoint, Router: e.proc.ReplayEndpoint})
	e.publish(e.sign())
	for range w.rng.IntN(40) {
		e.publish(e.work()...)
	}
}

// step does one thing.
func (w *world) step() {
	e := w.engines[w.rng.IntN(numEngines)]
	i := w.rng.IntN(numIndexers)
	switch n := w.rng.IntN(2000); {
	case n < 1880:
		e.publish(e.work()...)
	case n < 1900:
		e.forget()
		e.publish(wire.Event{Kind: wire.Cleared}, e.sign())
		e.vague = false
		w.note("%s clears", e.id)
	case n < 1915:
		seq, payload := e.take(e.work()...)
		e.proc.Lose("", seq, payload)
		w.note("%s loses message %d", e.id, seq)
	case n < 1920:
		seq, _ := e.take(e.work()...)
		e.vague = true
		w.note("%s burns message %d", e.id, seq)
	case n < 1930:
		e.repeat()
	case n < 1934:
		_, _ = e.take(e.work()...)
		e.proc.Publish("", e.next-1, []byte("rubbish"))
		e.vague = true
		w.note("%s publishes rubbish", e.id)
	case n < 1940:
		w.note("%s restarts", e.id)
		w.restartEngine(e)
	case n < 1946: // the network between an engine and the indexers
		w.note("%s is cut off for a moment", e.id)
		e.path.Set(redisproc.Refuse)
		for range w.rng.IntN(5) {
			e.publish(e.work()...)
		}
		e.path.Set(redisproc.Pass)
	case n < 1954:
		if p := w.indexers[i]; p != nil && w.indexers[1-i] != nil {
			cut := w.rng.IntN(4) > 0
			w.note("indexer %d ends, killed: %v", i, cut)
			p.stop(cut)
			w.indexers[i] = nil
		}
	case n < 1970:
		w.ensure(i)
	case n < 1982:
		if p := w.indexers[i]; p != nil {
			w.note("indexer %d gets no answers for a moment", i)
			p.path.Set([...]redisproc.Mode{redisproc.Deafen, redisproc.Refuse, redisproc.Swallow}[w.rng.IntN(3)])
			for range w.rng.IntN(10) {
				e.publish(e.work()...)
			}
			p.path.Set(redisproc.Pass)
		}
	case n < 1988:
		w.note("Redis forgets its scripts")
		w.do("SCRIPT", "FLUSH")
	case n < 1994:
		w.note("Redis saves")
		w.do("SAVE")
	case n < 1997:
		w.note("Redis is emptied")
		w.reader.losing(func() { w.do("FLUSHALL") })
	default:
		w.note("Redis dies and comes back as it was last saved")
		w.reader.losing(func() {
			w.redis.Stop()
			for range w.rng.IntN(20) {
				e.publish(e.work()...)
			}
			w.redis.Start()
		})
	}
}

// explain logs what can tell why a run has failed.
func (w *world) explain() {
	for i, p := range w.indexers {
		if p == nil {
			continue
		}
		if resp, err := http.Get("http://" + p.addr + "/workers"); err == nil {
			b, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			w.t.Logf("indexer %d: %s", i, b)
		}
	}
	var stacks strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&stacks, 1)
	for _, g := range strings.Split(stacks.String(), "\n\n") {
		if strings.Contains(g, "indexer.(*stream)") {
			w.t.Log(g)
		}
	}
}

func (w *world) ensure(i int) {
	if w.indexers[i] == nil {
		w.note("indexer %d starts", i)
		w.startIndexer(i)
	}
}

func (w *world) do(args ...any) {
	w.t.Helper()
	c := w.redis.Client()
	defer func() { _ = c.Close() }()
	if err := c.Do(w.t.Context(), args...).Err(); err != nil {
		w.t.Fatalf("%v: %v", args, err)
	}
}
