package frontend

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

func openIndex(t *testing.T, url string, budget time.Duration) *store.Store {
	t.Helper()
	index, err := store.New(store.Options{URL: url, LookupBudget: budget})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = index.Close() })
	return index
}

// hold makes a worker known to the index, with the first blocks of a prompt.
func hold(t testing.TB, index *store.Store, e *engine, tokens []uint32) {
	t.Helper()
	st, _, err := index.Register(t.Context(), store.StreamID{Pool: llama, WorkerRank: kvcache.WorkerRank{Worker: e.id}},
		store.Registration{BlockSize: 16, URL: e.URL, Engine: "vLLM"})
	if err != nil {
		t.Fatal(err)
	}
	var b store.Batch
	b.Message(0)
	for i, h := range kvcache.HashTokens(kvcache.HashSpec{BlockSize: 16}, tokens) {
		b.Store(kvcache.Device, h, kvcache.EngineHash(i+1))
	}
	if o, _, err := index.Apply(t.Context(), st, &b); err != nil || o != store.Applied {
		t.Fatalf("%v, %v", o, err)
	}
}

// R06: clients that hang up while Redis takes its time say nothing about Redis.
func TestClientsThatHangUpDuringTheLookup(t *testing.T) {
	redis := storetest.Redis(t)
	index := openIndex(t, redis.URL, time.Minute)
	e := newEngine(t, "w1")
	body, ids := prompt(64)
	hold(t, index, e, ids)
	f := start(t, Options{Index: index, Workers: []Worker{e.worker()}})
	if res, _ := f.post(completions, body); res.Header.Get("x-kv-index-state") != "exact" || res.Header.Get("x-kv-overlap-blocks") != "4" {
		t.Fatalf("headers %v", res.Header)
	}
	before := index.Links()

	redis.Pause()
	const clients = 200
	ctx, hangUp := context.WithCancel(t.Context())
	defer hangUp()
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			if res, err := client.Do(f.request(ctx, completions, body)); err == nil {
				_ = res.Body.Close()
				t.Error("got an answer")
			}
		})
	}
	f.eventually("all clients wait", func() bool { return f.underWay.used.Load() == clients })
	hangUp()
	all.Wait()
	redis.Resume()
	f.wantIdle()

	if res, _ := f.post(completions, body); res.Header.Get("x-kv-index-state") != "exact" || res.Header.Get("x-kv-overlap-blocks") != "4" {
		t.Errorf("afterwards: %v", res.Header)
	}
	if after := index.Links(); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("links %v, before %v", after, before)
	}
	if n := f.metric("warmroute_index_fallbacks_total"); n != 0 {
		t.Errorf("%v fallbacks", n)
	}
	f.eventually("the requests are counted", func() bool {
		return f.metric("warmroute_requests_total", "endpoint", completions, "code", "499") == clients
	})
	if e.served() != 2 {
		t.Errorf("the worker got %d requests", e.served())
	}
}

// A frontend that starts while the way to Redis swallows every byte serves with what another one saw, says so,
// and comes back by itself. Each degraded answer is one fallback.
func TestStartWithRedisAway(t *testing.T) {
	redis := storetest.Redis(t)
	way := storetest.Proxy(t, redis.Addr)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	body, ids := prompt(64)
	direct := openIndex(t, redis.URL, time.Second)
	hold(t, direct, e1, ids)
	hold(t, direct, e2, nil)
	file := filepath.Join(t.TempDir(), "workers.json")

	first := start(t, Options{Index: direct, SnapshotFile: file, PollInterval: 5 * time.Millisecond})
	first.waitWorkers(2)
	first.eventually("the snapshot is written", func() bool {
		saved, _ := filepath.Glob(file)
		return len(saved) == 1
	})
	first.stop()

	for _, fault := range []redisproc.Mode{redisproc.Swallow, redisproc.Refuse} {
		way.Set(fault)
		index := openIndex(t, "redis://"+way.Addr, 50*time.Millisecond)
		f := start(t, Options{Index: index, SnapshotFile: file, PollInterval: 5 * time.Millisecond, BlockSize: 32})
		f.waitWorkers(2)
		const requests = 20
		used := map[string]bool{}
		for i := range requests {
			res, _ := f.post(completions, body, "x-session-id", fmt.Sprint(i))
			used[res.Header.Get("x-worker-instance-id")] = true
			if res.StatusCode != 200 || res.Header.Get("x-kv-index-state") != "degraded" || res.Header.Values("x-kv-overlap-blocks") != nil {
				t.Fatalf("%d %v", res.StatusCode, res.Header)
			}
			if got := res.Header.Get("x-kv-prompt-blocks"); got != "4" {
				t.Errorf("%s blocks: the snapshot's block size is not used", got)
			}
		}
		if len(used) != 2 {
			t.Errorf("only %v used", used)
		}
		if n := f.metric("warmroute_index_fallbacks_total"); n != requests {
			t.Errorf("%v fallbacks of %d requests", n, requests)
		}
		f.eventually("the list of the workers is late", func() bool { return !f.fleet.Snapshot().Catalog().Since.IsZero() })
		ready := readiness(t, f)
		if ready.Status != "ready" || !ready.Degraded || ready.Index.State != "degraded" || ready.Workers != 2 || ready.Sources["snapshot"] != 2 {
			t.Errorf("/ready: %+v", ready)
		}
		for _, c := range ready.Components {
			if strings.HasPrefix(c.Name, "index/") && (c.Status != "down" || c.Since == nil || c.Detail == "") {
				t.Errorf("/ready: %+v", c)
			}
		}
		if res, _ := f.get("/health"); res.StatusCode != 200 {
			t.Errorf("/health: %d", res.StatusCode)
		}

		way.Set(redisproc.Pass)
		f.eventually("the index is in use", func() bool {
			res, _ := f.post(completions, body)
			return res.Header.Get("x-kv-index-state") == "exact" && res.Header.Get("x-kv-overlap-blocks") == "4" && res.Header.Get("x-worker-instance-id") == "w1"
		})
		f.eventually("the index lists the workers", func() bool { return readiness(t, f).Sources["index"] == 2 })
		f.eventually("all links are up", func() bool { return !readiness(t, f).Degraded })
		if ready = readiness(t, f); ready.Index.State != "exact" || ready.Index.Age == nil || ready.Index.Updated == nil {
			t.Errorf("/ready: %+v", ready)
		}
		if a, b := f.metric("warmroute_index_fallbacks_total"), f.metric("warmroute_requests_total", "index_state", "degraded"); a != b {
			t.Errorf("%v fallbacks, %v degraded requests", a, b)
		}
		f.stop()
	}
}

type ready struct {
	Status     string
	Degraded   bool
	Workers    int
	Sources    map[string]int
	Index      indexHealth
	Components []component
}

func readiness(t *testing.T, f *running) (r ready) {
	t.Helper()
	res, text := f.get("/ready")
	if err := json.Unmarshal([]byte(text), &r); err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("/ready: %d %s", res.StatusCode, text)
	}
	return r
}

// R19, C11: one budget covers all that a request asks of the index, also where that does not end by itself; and
// after the first failure nothing more is asked.
func TestIndexThatIgnoresItsDeadline(t *testing.T) {
	body, _ := prompt(64)
	release := make(chan struct{})
	e := newEngine(t, "w1")
	x := &fakeIndex{blockSize: 16, lookup: func(context.Context) error { <-release; return nil }}
	f := start(t, Options{Index: x, Workers: []Worker{e.worker()}, LookupBudget: time.Millisecond})
	res, _ := f.post(completions, body) // hangs for ever without the budget
	close(release)
	if res.StatusCode != 200 || res.Header.Get("x-kv-index-state") != "degraded" || res.Header.Get("x-kv-prompt-blocks") != "4" {
		t.Errorf("%d %v", res.StatusCode, res.Header)
	}
	if n := f.metric("warmroute_index_fallbacks_total", "reason", "timeout"); n != 1 || f.metric("warmroute_index_fallbacks_total") != 1 {
		t.Errorf("%v timeouts counted, want 1", n)
	}

	x = &fakeIndex{noPool: true, err: store.ErrUnavailable}
	f = start(t, Options{Index: x, Workers: []Worker{e.worker()}})
	f.post(completions, body)
	if len(x.asked) != 0 {
		t.Error("the overlaps were asked for after the configuration could not be had")
	}
}

// punctualIndex keeps its deadlines, so that nobody watches it.
type punctualIndex struct{ *fakeIndex }

func (punctualIndex) Punctual() bool { return true }

// An index that keeps its deadlines is told them, and is no more trusted than others where it panics.
func TestPunctualIndex(t *testing.T) {
	body, ids := prompt(64)
	e := newEngine(t, "w1")
	x := holding(16, ids, map[string]int{"w1": 4})
	const budget = time.Minute
	var panics atomic.Bool
	x.lookup = func(ctx context.Context) error {
		if end, ok := ctx.Deadline(); !ok || time.Until(end) > budget {
			t.Errorf("deadline %v %v", end, ok)
		}
		if panics.Load() {
			panic("lost")
		}
		return nil
	}
	f := start(t, Options{Index: punctualIndex{x}, Workers: []Worker{e.worker()}, LookupBudget: budget})
	if res, _ := f.post(completions, body); res.Header.Get("x-kv-overlap-blocks") != "4" || res.Header.Get("x-kv-index-state") != "exact" {
		t.Errorf("%d %v", res.StatusCode, res.Header)
	}
	panics.Store(true)
	if res, _ := f.post(completions, body); res.StatusCode != 200 || res.Header.Get("x-kv-index-state") != "degraded" {
		t.Errorf("%d %v", res.StatusCode, res.Header)
	}
	if n := f.metric("warmroute_index_fallbacks_total", "reason", "corrupt"); n != 1 {
		t.Errorf("%v counted, want 1", n)
	}
}

// While all links are down a text is not tokenized: its tokens would be of no use. With one shard of two
// it is.
func TestNoTokensForAnIndexThatIsAway(t *testing.T) {
	e := newEngine(t, "w1")
	down := func(shard, reason string) store.LinkStatus { return store.LinkStatus{Shard: shard, Reason: reason} }
	for name, test := range map[string]struct {
		links  []store.LinkStatus
		reason string
		asked  int
	}{
		"pool of unknown shards": {[]store.LinkStatus{down("pools", "loading")}, "loading", 0},
		"another pool's shards":  {[]store.LinkStatus{down("pools", "loading"), {Shard: "default:llama#0", Up: true}}, "connection", 1},
		"all shards":             {[]store.LinkStatus{down("default:llama#0", "timeout"), down("default:llama#1", "timeout")}, "timeout", 0},
		"one of two":             {[]store.LinkStatus{down("default:llama#0", "timeout"), {Shard: "default:llama#1", Up: true}}, "connection", 1},
		"another pool":           {[]store.LinkStatus{down("default:llama2#0", "timeout")}, "connection", 1},
		"a word of no list":      {[]store.LinkStatus{down("default:llama#0", "what")}, "corrupt", 0},
	} {
		x := &fakeIndex{blockSize: 16, err: store.ErrUnavailable, links: test.links}
		f := start(t, Options{Index: x, Workers: []Worker{e.worker()}})
		e.asked = 0
		res, _ := f.post(completions, `{"model":"llama","prompt":"a text"}`)
		if res.StatusCode != 200 || res.Header.Get("x-kv-index-state") != "degraded" || e.asked != test.asked {
			t.Errorf("%s: %d %v, %d times tokenized", name, res.StatusCode, res.Header, e.asked)
		}
		if n := f.metric("warmroute_index_fallbacks_total", "reason", test.reason); n != 1 || f.metric("warmroute_index_fallbacks_total") != 1 {
			t.Errorf("%s: %v fallbacks with reason %s", name, n, test.reason)
		}
	}
}

// An overlap that nobody knows is not 0, in no answer and in no metric.
func TestUnknownOverlapIsNotZero(t *testing.T) {
	body, ids := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	x := holding(16, ids, map[string]int{"w2": 2})
	f := start(t, Options{Index: x, Workers: []Worker{e1.worker(), e2.worker()}})
	tokens, _ := json.Marshal(ids)
	ask := func(worker string) (header []string, overlap any, state string) {
		t.Helper()
		res, _ := f.post(completions, body, "x-worker-instance-id", worker)
		_, text := f.post("/select", fmt.Sprintf(`{"model":"llama","token_ids":%s,"pinned_worker":%q}`, tokens, worker))
		v := decode(t, text)
		if v["index_state"] != res.Header.Get("x-kv-index-state") || v["worker_id"] != worker || v["overlap"] == nil && v["effective_prefill_tokens"] != 64.0 {
			t.Errorf("/select: %s", text)
		}
		return res.Header.Values("x-kv-overlap-blocks"), v["overlap"], res.Header.Get("x-kv-index-state")
	}
	if h, o, state := ask("w1"); state != "exact" || len(h) != 1 || h[0] != "0" || o == nil {
		t.Errorf("exact: %v %v %s", h, o, state)
	}
	counted := f.metric("warmroute_overlap_ratio")
	x.err, x.state = store.ErrUnavailable, kvcache.Partial
	if h, o, state := ask("w1"); state != "partial" || h != nil || o != nil { // w1 may be on the shard that is away
		t.Errorf("partial: %v %v %s", h, o, state)
	}
	if got := f.metric("warmroute_overlap_ratio"); got != counted {
		t.Error("an unknown overlap counts as a miss")
	}
	if h, o, state := ask("w2"); state != "partial" || len(h) != 1 || h[0] != "2" || o == nil {
		t.Errorf("partial: %v %v %s", h, o, state)
	}
	x.state = ""
	if h, o, state := ask("w2"); state != "degraded" || h != nil || o != nil {
		t.Errorf("degraded: %v %v %s", h, o, state)
	}
}

// Redis that comes back empty takes no worker away.
func TestPoolThatTheIndexHasLostStaysServed(t *testing.T) {
	redis, url := storetest.Miniredis(t)
	index := openIndex(t, url, time.Second)
	e := newEngine(t, "w1")
	body, ids := prompt(64)
	hold(t, index, e, ids)
	f := start(t, Options{Index: index, PollInterval: time.Millisecond})
	f.waitWorkers(1)
	redis.FlushAll()
	read := f.fleet.Snapshot()
	for range 20 { // as many readings of an empty index
		<-read.Changed()
		read = f.fleet.Snapshot()
	}
	res, _ := f.post(completions, body)
	if res.StatusCode != 200 || res.Header.Get("x-worker-instance-id") != "w1" {
		t.Errorf("with an empty index: %d %v", res.StatusCode, res.Header)
	}
}
