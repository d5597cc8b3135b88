package fleet

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"

	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// engine is a worker's health and model list.
type engine struct {
	*httptest.Server
	health atomic.Int32
	list   atomic.Value // string
	token  atomic.Value // string: the Authorization header last seen
}

func newEngine(t *testing.T, list string) *engine {
	e := &engine{}
	e.health.Store(http.StatusOK)
	e.list.Store(list)
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.token.Store(r.Header.Get("Authorization"))
		switch r.URL.Path {
		case "/health":
			w.WriteHeader(int(e.health.Load()))
		case "/v1/models":
			_, _ = w.Write([]byte(e.list.Load().(string)))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(e.Close)
	return e
}

const llama = `{"object":"list","data":[{"id":"llama","object":"model","created":7,"owned_by":"vllm","root":"meta/llama","parent":null,"max_model_len":4096}]}`

type catalog struct {
	pools   []kvcache.PoolID
	streams []store.Stream
	removed map[string]bool // workers
	err     error
}

func (c *catalog) Pools(context.Context) ([]kvcache.PoolID, error) {
	if c.pools == nil {
		return nil, c.err
	}
	return c.pools, nil
}

func (c *catalog) Streams(context.Context, kvcache.PoolID) ([]store.Stream, error) {
	return c.streams, c.err
}

func (c *catalog) Removed(_ context.Context, id store.StreamID) (bool, error) {
	return c.removed[id.Worker], c.err
}

var llamaPool = kvcache.PoolID{Tenant: "default", Model: "llama"}

func stream(worker string, rank int, url string) store.Stream {
	s := store.Stream{}
	s.Pool, s.Worker, s.Rank, s.URL, s.BlockSize = llamaPool, worker, rank, url, 16
	return s
}

func newFleet(t *testing.T, o Options) *Fleet {
	t.Helper()
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func ids(nodes []*Node) []string {
	var out []string
	for _, n := range nodes {
		out = append(out, n.ID)
	}
	return out
}

func TestHealthFollowsTheWorker(t *testing.T) {
	e := newEngine(t, llama)
	f := newFleet(t, Options{Workers: []Worker{{ID: "w1", URL: e.URL + "/"}}, Token: func() string { return "secret" }})
	if s := f.Snapshot(); s.Healthy() != 0 || s.Known() || !s.HasID("w1") {
		t.Fatal("a worker counts as healthy before it was asked")
	}
	f.Refresh(t.Context())
	target, ok := f.Snapshot().Target("", "llama")
	if !ok || !slices.Equal(ids(target.Nodes), []string{"w1"}) || target.Pool != llamaPool || target.MaxLen != 4096 {
		t.Fatalf("target %+v, %v", target, ok)
	}
	if got := e.token.Load(); got != "Bearer secret" {
		t.Errorf("Authorization %q", got)
	}
	if target.Nodes[0].URL.String() != e.URL {
		t.Errorf("URL %s, want it without the slash", target.Nodes[0].URL)
	}

	e.health.Store(http.StatusServiceUnavailable)
	f.Refresh(t.Context())
	s := f.Snapshot()
	target, ok = s.Target("default", "llama")
	if !ok || len(target.Nodes) != 0 || s.Healthy() != 0 || len(s.Models("default")) != 1 {
		t.Fatalf("a sick worker: target %+v, known %v, %d healthy", target, ok, s.Healthy())
	}
	if n := s.Nodes()[0]; n.State == Healthy || n.Cause == "" {
		t.Errorf("node %+v", n)
	}

	e.health.Store(http.StatusOK)
	e.list.Store(`{"data":[]}`)
	f.Refresh(t.Context())
	if f.Snapshot().Healthy() != 0 {
		t.Error("a worker that serves nothing counts as healthy")
	}
	e.list.Store(llama)
	f.Refresh(t.Context())
	if f.Snapshot().Healthy() != 1 {
		t.Error("the worker did not come back")
	}
	e.Close()
	f.Refresh(t.Context())
	if f.Snapshot().Healthy() != 0 {
		t.Error("a worker that refuses connections counts as healthy")
	}
}

// outcomes answers for the named hosts as if they were late, or refused connections.
type outcomes map[string]error

func (o outcomes) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := o[r.URL.Host]; err != nil {
		return nil, err
	}
	return http.DefaultTransport.RoundTrip(r)
}

// Where health checks of all workers of a model are late, this process or the network may be what is slow: they get the requests all the
// same. One that is late beside healthy ones gets none, nor does one that refuses, drains or answers with an error.
func TestAllWorkersAreLate(t *testing.T) {
	e1, e2 := newEngine(t, llama), newEngine(t, llama)
	host := func(e *engine) string { return strings.TrimPrefix(e.URL, "http://") }
	says := outcomes{}
	var log strings.Builder
	f := newFleet(t, Options{
		Workers: []Worker{{ID: "w1", URL: e1.URL}, {ID: "w2", URL: e2.URL}}, Transport: says, Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	for i, step := range []struct {
		w1, w2 error
		sick   int // status of w2's /health
		want   []string
		lines  int // that say so
	}{
		{nil, nil, 200, []string{"w1", "w2"}, 0},
		{os.ErrDeadlineExceeded, nil, 200, []string{"w2"}, 0},
		{os.ErrDeadlineExceeded, context.DeadlineExceeded, 200, []string{"w1", "w2"}, 1},
		{os.ErrDeadlineExceeded, context.DeadlineExceeded, 200, []string{"w1", "w2"}, 1},
		{os.ErrDeadlineExceeded, syscall.ECONNREFUSED, 200, []string{"w1"}, 1},
		{os.ErrDeadlineExceeded, nil, 503, []string{"w1"}, 1},
		{syscall.ECONNREFUSED, nil, 500, nil, 1},
		{nil, nil, 200, []string{"w1", "w2"}, 1},
		{nil, os.ErrDeadlineExceeded, 200, []string{"w1"}, 1},
		{os.ErrDeadlineExceeded, os.ErrDeadlineExceeded, 200, []string{"w1", "w2"}, 2},
	} {
		says[host(e1)], says[host(e2)] = step.w1, step.w2
		e2.health.Store(int32(step.sick))
		f.Refresh(t.Context())
		s := f.Snapshot()
		target, ok := s.Target("", "llama")
		if !ok || !slices.Equal(ids(target.Nodes), step.want) || s.Taking() != len(step.want) {
			t.Errorf("step %d: %v take requests, %d in all, want %v", i, ids(target.Nodes), s.Taking(), step.want)
		}
		if got := strings.Count(log.String(), "requests go to them all the same"); got != step.lines {
			t.Errorf("step %d: said %d times, want %d", i, got, step.lines)
		}
	}
}

// A worker that is late three times in a row is lost, but not where all are late.
func TestLostWorkers(t *testing.T) {
	for name, c := range map[string]struct {
		other error
		want  int // polls
	}{
		"another one answers":        {nil, lostAfter},
		"another one refuses":        {syscall.ECONNREFUSED, lostAfter},
		"the other one is late, too": {os.ErrDeadlineExceeded, allLostAfter},
	} {
		t.Run(name, func(t *testing.T) {
			e1, e2 := newEngine(t, llama), newEngine(t, llama)
			lost := map[string]int{}
			f := newFleet(t, Options{
				Workers:   []Worker{{ID: "w1", URL: e1.URL}, {ID: "w2", URL: e2.URL}},
				Transport: outcomes{strings.TrimPrefix(e1.URL, "http://"): os.ErrDeadlineExceeded, strings.TrimPrefix(e2.URL, "http://"): c.other},
				Lost:      func(k Key) { lost[k.ID]++ },
			})
			for n := 1; n <= allLostAfter+3; n++ {
				f.Refresh(t.Context())
				want := 0
				if n >= c.want {
					want = 1
				}
				if lost["w1"] != want {
					t.Fatalf("after %d polls it was lost %d times, want %d", n, lost["w1"], want)
				}
			}
		})
	}
}

// What comes instead of an answer may be of a prompt, since polls and requests share connections: it is not repeated.
func TestCauseRepeatsNothing(t *testing.T) {
	var says atomic.Value
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, says.Load().(string))
			}
			_ = c.Close()
		}
	}()
	f := newFleet(t, Options{Timeout: time.Minute, Workers: []Worker{{ID: "w1", URL: "http://" + l.Addr().String()}}})
	for _, s := range []string{"xyzzy\r\n", "HTTP/1.1 xyzzy\r\n\r\n", "HTTP/1.1 200 OK\r\nxyzzy plugh\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: xyzzy\r\n\r\n"} {
		says.Store(s)
		f.Refresh(t.Context())
		if cause := f.Snapshot().Nodes()[0].Cause; cause != "what it answers is no HTTP" {
			t.Errorf("%q: the cause is %q", s, cause)
		}
	}
	_ = l.Close()
	f.Refresh(t.Context())
	if cause := f.Snapshot().Nodes()[0].Cause; !strings.Contains(cause, "refused") {
		t.Errorf("nobody there: %q", cause)
	}
}

// A worker that never was up is in the log too, once, and what to do about an engine that wants a key.
func TestNeverUpIsSaid(t *testing.T) {
	locked := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	defer locked.Close()
	var log bytes.Buffer
	f := newFleet(t, Options{Workers: []Worker{{ID: "w1", URL: locked.URL}}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	f.Refresh(t.Context())
	f.Refresh(t.Context())
	if got := log.String(); strings.Count(got, "worker down") != 1 || !strings.Contains(got, "GET /v1/models: status 401 (does the engine want a key? --worker-token)") {
		t.Errorf("log: %s", got)
	}
}

func TestAdapterBelongsToItsBase(t *testing.T) {
	both := newEngine(t, `{"data":[{"id":"llama","max_model_len":10},{"id":"sql","parent":"llama"}]}`)
	base := newEngine(t, llama)
	f := newFleet(t, Options{Workers: []Worker{{ID: "w1", URL: both.URL}, {ID: "w2", URL: base.URL}}})
	f.Refresh(t.Context())
	s := f.Snapshot()
	target, _ := s.Target("", "sql")
	if target.Pool != llamaPool || target.LoRA != "sql" || !slices.Equal(ids(target.Nodes), []string{"w1"}) {
		t.Errorf("adapter: %+v", target)
	}
	target, _ = s.Target("", "llama")
	if target.LoRA != "" || !slices.Equal(ids(target.Nodes), []string{"w1", "w2"}) || target.MaxLen != 4096 {
		t.Errorf("base: %+v", target)
	}
	if got := len(s.Models("")); got != 2 {
		t.Errorf("%d models, want each once", got)
	}
}

// A name that no pool can have, because it would draw on the terminals of those who look at it, say, is nobody's model.
func TestModelsWithImpossibleNames(t *testing.T) {
	e := newEngine(t, `{"data":[{"id":"llama"},{"id":"x\u001b[2J"},{"id":"a\nb","parent":"llama"},{"id":""},{"id":"`+strings.Repeat("x", 257)+`"}]}`)
	f := newFleet(t, Options{Workers: []Worker{{ID: "w1", URL: e.URL}}})
	f.Refresh(t.Context())
	if models := f.Snapshot().Models(""); len(models) != 1 || models[0].ID != "llama" {
		t.Errorf("%+v", models)
	}
}

func TestTenantsAreApart(t *testing.T) {
	e := newEngine(t, llama)
	f := newFleet(t, Options{Workers: []Worker{{ID: "w1", URL: e.URL, Tenant: "acme"}}})
	f.Refresh(t.Context())
	if _, ok := f.Snapshot().Target("", "llama"); ok {
		t.Error("another tenant's worker is offered")
	}
	if target, ok := f.Snapshot().Target("acme", "llama"); !ok || target.Pool.Tenant != "acme" {
		t.Errorf("%+v, %v", target, ok)
	}
}

func TestDiscovery(t *testing.T) {
	e1, e2 := newEngine(t, llama), newEngine(t, llama)
	c := &catalog{pools: []kvcache.PoolID{llamaPool}, streams: []store.Stream{
		stream("w1", 1, e1.URL), stream("w1", 0, e1.URL), stream("w9", 0, ""), stream("w8", 0, "ftp://x"),
	}}
	var gone []string
	f := newFleet(t, Options{Catalog: c, Grace: -1, Gone: func(k Key) { gone = append(gone, k.String()) }})
	f.Refresh(t.Context())
	s := f.Snapshot()
	if !slices.Equal(ids(s.Nodes()), []string{"w1"}) || s.Healthy() != 1 {
		t.Fatalf("nodes %v, %d healthy; want w1 alone: the others have no usable URL", ids(s.Nodes()), s.Healthy())
	}
	if n := s.Nodes()[0]; !slices.Equal(n.Ranks, []int{0, 1}) || n.Source != "index" {
		t.Errorf("node %+v", n)
	}

	c.streams = []store.Stream{stream("w2", 0, e2.URL)}
	c.err = errors.New("a shard is away")
	f.Refresh(t.Context())
	if got := ids(f.Snapshot().Nodes()); !slices.Equal(got, []string{"w1", "w2"}) {
		t.Fatalf("after a partial listing: %v, want w1 kept", got)
	}
	c.err = nil
	f.Refresh(t.Context())
	if got := ids(f.Snapshot().Nodes()); !slices.Equal(got, []string{"w2"}) || !slices.Equal(gone, []string{"w1"}) {
		t.Fatalf("after a full listing: %v, gone %v", got, gone)
	}
	c.pools, c.err = nil, errors.New("redis is away")
	f.Refresh(t.Context())
	if got := f.Snapshot().Healthy(); got != 1 {
		t.Fatalf("%d healthy with the index away, want w2 kept", got)
	}

	// The worker moves: the old address must not be used until the new one answers.
	e3 := newEngine(t, llama)
	e3.health.Store(http.StatusServiceUnavailable)
	c.pools, c.err = []kvcache.PoolID{llamaPool}, nil
	c.streams = []store.Stream{stream("w2", 0, e3.URL)}
	f.Refresh(t.Context())
	if n := f.Snapshot().Nodes()[0]; n.URL.String() != e3.URL || n.State == Healthy {
		t.Errorf("after a move: %+v", n)
	}
}

func TestConfiguredWorkerWins(t *testing.T) {
	e, other := newEngine(t, llama), newEngine(t, llama)
	c := &catalog{pools: []kvcache.PoolID{llamaPool}, streams: []store.Stream{
		stream("w1", 0, other.URL), stream("w1", 1, other.URL), stream("w2", 3, other.URL),
	}}
	f := newFleet(t, Options{Catalog: c, Workers: []Worker{{ID: "w1", URL: e.URL}, {ID: "w2", URL: e.URL, Ranks: 2}}})
	f.Refresh(t.Context())
	nodes := f.Snapshot().Nodes()
	if nodes[0].URL.String() != e.URL || !slices.Equal(nodes[0].Ranks, []int{0, 1}) {
		t.Errorf("w1: %+v, want its configured URL and the ranks of its streams", nodes[0])
	}
	if !slices.Equal(nodes[1].Ranks, []int{0, 1}) {
		t.Errorf("w2: ranks %v, want the configured two", nodes[1].Ranks)
	}
	c.streams = nil
	f.Refresh(t.Context())
	if got := ids(f.Snapshot().Nodes()); !slices.Equal(got, []string{"w1", "w2"}) {
		t.Errorf("configured workers left with their streams: %v", got)
	}
}

func TestHungWorkerDelaysNobody(t *testing.T) {
	release := make(chan struct{})
	hung := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(hung.Close)
	t.Cleanup(func() { close(release) })
	e := newEngine(t, llama)
	f := newFleet(t, Options{Workers: []Worker{{ID: "hung", URL: hung.URL}, {ID: "well", URL: e.URL}}, Timeout: time.Minute})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.Run(ctx) }()
	s := f.Snapshot()
	for s.Healthy() == 0 { // the well one shows while the other still hangs
		<-s.Changed()
		s = f.Snapshot()
	}
	cancel()
	<-done
	if n := f.Snapshot().Nodes()[1]; n.State != Healthy {
		t.Error("stopping marked a worker as down")
	}
}

func TestBadWorkersAreRefused(t *testing.T) {
	for name, workers := range map[string][]Worker{
		"no id":          {{URL: "http://x"}},
		"no url":         {{ID: "w"}},
		"relative url":   {{ID: "w", URL: "x:80/y"}},
		"wrong scheme":   {{ID: "w", URL: "ftp://x"}},
		"negative ranks": {{ID: "w", URL: "http://x", Ranks: -1}},
		"twice":          {{ID: "w", URL: "http://x"}, {ID: "w", URL: "http://y"}},
	} {
		if _, err := New(Options{Workers: workers}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// What routing does not need may have any form.
func TestOddModelListsServe(t *testing.T) {
	for _, list := range []string{
		`{"data":[{"id":"llama","created":1.5e9}]}`, `{"data":[{"id":"llama","created":"2024"}]}`,
		`{"data":[{"id":"llama","root":["x"],"parent":5}]}`, `{"data":[{"id":5},{"id":"llama","max_model_len":4096.0}]}`,
	} {
		e := newEngine(t, list)
		f := newFleet(t, Options{Workers: []Worker{{ID: "w", URL: e.URL}}})
		f.Refresh(t.Context())
		if target, ok := f.Snapshot().Target("", "llama"); !ok || len(target.Nodes) != 1 {
			t.Errorf("%s: not served: %v", list, f.Snapshot().Nodes()[0].Cause)
		}
	}
}
