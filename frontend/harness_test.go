package frontend

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/openai"
	"github.com/warmroute/warmroute/frontend/predict"
	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// engine is a worker with the part of vLLM's HTTP surface that a frontend uses. It tokenizes
// by one token per byte.
type engine struct {
	*httptest.Server
	id     string
	models string
	serve  func(w http.ResponseWriter, r *http.Request, body []byte) // OpenAI routes; nil answers {}
	tokens func(w http.ResponseWriter, r *http.Request, body []byte) // /tokenize

	vanished atomic.Bool // it takes connections, and answers no poll
	drains   atomic.Bool // /health is 503

	mu       sync.Mutex
	requests []*http.Request // of OpenAI routes
	bodies   [][]byte
	asked    int // /tokenize
}

const oneModel = `{"object":"list","data":[{"id":"llama","object":"model","owned_by":"vllm","max_model_len":100000}]}`

func newEngine(t testing.TB, id string) *engine {
	e := &engine{id: id, models: oneModel}
	e.Server = httptest.NewServer(http.HandlerFunc(e.handle))
	t.Cleanup(func() {
		e.CloseClientConnections() // a test that failed may have left handlers waiting
		e.Close()
	})
	return e
}

func (e *engine) handle(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if e.vanished.Load() {
		abort(w)
		return
	}
	switch {
	case r.URL.Path == "/health":
		if e.drains.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	case r.URL.Path == "/v1/models":
		_, _ = io.WriteString(w, e.models)
	case r.URL.Path == "/tokenize" && !bytes.Contains(body, []byte(`"proxied"`)):
		e.mu.Lock()
		e.asked++
		e.mu.Unlock()
		if e.tokens != nil {
			e.tokens(w, r, body)
			return
		}
		answerTokens(w, body)
	default:
		e.mu.Lock()
		e.requests = append(e.requests, r)
		e.bodies = append(e.bodies, body)
		e.mu.Unlock()
		if e.serve != nil {
			e.serve(w, r, body)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{}`)
	}
}

func answerTokens(w http.ResponseWriter, body []byte) {
	var q struct {
		Prompt   string
		Messages json.RawMessage
	}
	_ = json.Unmarshal(body, &q)
	_ = json.NewEncoder(w).Encode(map[string]any{"tokens": bytesAsTokens(q.Prompt + string(q.Messages)), "max_model_len": 100000})
}

func bytesAsTokens(s string) []uint32 {
	out := make([]uint32, len(s))
	for i := range s {
		out[i] = uint32(s[i])
	}
	return out
}

func (e *engine) served() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.requests)
}

func (e *engine) worker() Worker { return Worker{ID: e.id, URL: e.URL} }

// fakeIndex answers from what it holds. Its fields must be set before the frontend runs.
type fakeIndex struct {
	blockSize int
	hold      map[kvcache.WorkerRank][]kvcache.BlockHash // a chain from the first block on
	err       error
	state     kvcache.IndexState              // with err; default degraded
	lookup    func(ctx context.Context) error // called first in each Lookup
	streams   []store.Stream
	links     []store.LinkStatus
	dump      func(f func(kvcache.RouterEvent) error) error
	noPool    bool
	removed   bool // every stream was
	// choose answers for the loads that all frontends share; nil means that they are away.
	choose func(ctx context.Context, a store.Ask) (store.Choice, error)
	shared map[kvcache.WorkerRank]store.Load

	mu   sync.Mutex
	told []string // of reservations

	predicted []predict.Route
	asked     [][]kvcache.BlockHash
}

var llama = kvcache.PoolID{Tenant: "default", Model: "llama"}

func (x *fakeIndex) Lookup(ctx context.Context, _ kvcache.PoolID, blocks []kvcache.BlockHash, o store.LookupOptions) (kvcache.OverlapScores, kvcache.IndexState, error) {
	x.mu.Lock()
	x.asked = append(x.asked, blocks)
	x.mu.Unlock()
	out := kvcache.OverlapScores{Scores: map[kvcache.WorkerRank]kvcache.Overlap{}}
	if x.lookup != nil {
		if err := x.lookup(ctx); err != nil {
			return out, kvcache.Degraded, err
		}
	}
	for w, chain := range x.hold {
		n := 0
		for n < len(blocks) && n < len(chain) && blocks[n] == chain[n] {
			n++
		}
		if n > 0 {
			out.Scores[w] = kvcache.Overlap{Device: n, Host: n, Disk: n, Any: n}
			if o.TreeSizes {
				if out.TreeSizes == nil {
					out.TreeSizes = map[kvcache.WorkerRank]int{}
				}
				out.TreeSizes[w] = len(chain)
			}
		}
	}
	if x.err != nil {
		if x.state != "" {
			return out, x.state, x.err
		}
		return kvcache.OverlapScores{}, kvcache.Degraded, x.err
	}
	return out, kvcache.Exact, nil
}

func (x *fakeIndex) PoolConfig(_ context.Context, p kvcache.PoolID) (store.PoolConfig, bool, error) {
	if x.noPool || p != llama {
		return store.PoolConfig{}, false, x.err
	}
	return store.PoolConfig{BlockSize: x.blockSize, Shards: 1}, true, nil
}

func (x *fakeIndex) Pools(context.Context) ([]kvcache.PoolID, error) {
	if x.err != nil {
		return nil, x.err
	}
	return []kvcache.PoolID{llama}, nil
}

func (x *fakeIndex) Streams(context.Context, kvcache.PoolID) ([]store.Stream, error) {
	return x.streams, x.err
}

func (x *fakeIndex) Removed(context.Context, store.StreamID) (bool, error) { return x.removed, x.err }

func (x *fakeIndex) Select(ctx context.Context, _ kvcache.PoolID, a store.Ask) (store.Choice, error) {
	if x.choose == nil {
		return store.Choice{}, store.ErrUnavailable
	}
	return x.choose(ctx, a)
}

func (x *fakeIndex) tell(format string, args ...any) (bool, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.told = append(x.told, fmt.Sprintf(format, args...))
	return true, nil
}

func (x *fakeIndex) PrefillDone(_ context.Context, _ kvcache.PoolID, id string) (bool, error) {
	return x.tell("prefilled %s", id)
}

func (x *fakeIndex) OutputBlocks(_ context.Context, _ kvcache.PoolID, id string, n int) (bool, error) {
	return x.tell("output %s %d", id, n)
}

func (x *fakeIndex) Release(_ context.Context, _ kvcache.PoolID, id string) (bool, error) {
	return x.tell("release %s", id)
}

func (x *fakeIndex) ReleaseAll(ctx context.Context, p kvcache.PoolID, ids ...string) error {
	for _, id := range ids {
		_, _ = x.Release(ctx, p, id)
	}
	return nil
}

func (x *fakeIndex) Renew(context.Context, kvcache.PoolID, ...string) ([]string, error) {
	return nil, nil
}

func (x *fakeIndex) Predict(_ context.Context, p kvcache.PoolID, w kvcache.WorkerRank, blocks []kvcache.BlockHash, o store.PredictOptions) (store.Outcome, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.predicted = append(x.predicted, predict.Route{Pool: p, At: w, Blocks: blocks, PredictOptions: o})
	return store.Applied, nil
}

func (x *fakeIndex) Loads(context.Context, kvcache.PoolID) (map[kvcache.WorkerRank]store.Load, error) {
	return x.shared, x.err
}

func (x *fakeIndex) Reap(context.Context, kvcache.PoolID) error { return x.err }

func (x *fakeIndex) Links() []store.LinkStatus { return x.links }

func (x *fakeIndex) Dump(_ context.Context, _ kvcache.PoolID, f func(kvcache.RouterEvent) error) error {
	if x.dump == nil {
		return x.err
	}
	return x.dump(f)
}

// holding is an index in which workers hold the first n blocks of the prompt.
func holding(blockSize int, tokens []uint32, n map[string]int) *fakeIndex {
	x := &fakeIndex{blockSize: blockSize, hold: map[kvcache.WorkerRank][]kvcache.BlockHash{}}
	hashes := kvcache.HashTokens(kvcache.HashSpec{BlockSize: blockSize}, tokens)
	for w, n := range n {
		x.hold[kvcache.WorkerRank{Worker: w}] = hashes[:n]
	}
	return x
}

// running is a frontend under test.
type running struct {
	*Frontend
	t      testing.TB
	url    string
	reg    *prometheus.Registry
	stop   context.CancelFunc
	exited chan error
	moved  sync.Map // address of a worker → where connections to it go instead
}

// workerConn is a connection to a worker. After the worker has moved, nothing can be written to it.
type workerConn struct {
	net.Conn
	gone func() bool
}

func (c *workerConn) Write(p []byte) (int, error) {
	if c.gone() {
		return 0, net.ErrClosed
	}
	return c.Conn.Write(p)
}

// start runs a frontend until the test ends and waits until all configured workers were seen
// to be well.
func start(t testing.TB, o Options) *running {
	t.Helper()
	reg := prometheus.NewRegistry()
	o.Registerer, o.Gatherer = reg, reg
	if o.PollInterval == 0 {
		o.PollInterval = time.Hour // one round
	}
	if o.LookupBudget == 0 {
		o.LookupBudget = time.Minute // only what a test is about runs into it
	}
	if o.TokenizeTimeout == 0 {
		o.TokenizeTimeout = time.Minute
	}
	if o.PollTimeout == 0 {
		o.PollTimeout = time.Minute // a machine that is busy loses no worker
	}
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{Frontend: f, t: t, url: "http://" + f.Addr(), reg: reg, stop: cancel, exited: make(chan error, 1)}
	dial := f.transport.DialContext
	f.transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		to := addr
		if v, ok := r.moved.Load(addr); ok {
			to = v.(string)
		}
		c, err := dial(ctx, network, to)
		if err != nil {
			return nil, err
		}
		return &workerConn{c, func() bool {
			now, ok := r.moved.Load(addr)
			return ok && now != to
		}}, nil
	}
	go func() { r.exited <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-r.exited; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	r.waitWorkers(len(o.Workers))
	return r
}

// tokens asks for what is given, none for "".
func tokens(t testing.TB, client, query, admin string) *guard.Tokens {
	t.Helper()
	of := func(s string) guard.Secrets { return guard.Secrets{Values: strings.Fields(s)} }
	k, err := guard.NewTokens(guard.TokenOptions{Client: of(client), Query: of(query), Admin: of(admin)})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func (r *running) waitWorkers(n int) {
	for s := r.fleet.Snapshot(); s.Healthy() < n; s = r.fleet.Snapshot() {
		select {
		case <-s.Changed():
		case <-r.t.Context().Done():
			r.t.Fatal("the workers did not come up")
		}
	}
}

var client = &http.Client{Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 100}}

func (r *running) request(ctx context.Context, path, body string, header ...string) *http.Request {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return req
}

// post sends a request and reads the whole answer.
func (r *running) post(path, body string, header ...string) (*http.Response, string) {
	r.t.Helper()
	return r.do(r.request(r.t.Context(), path, body, header...))
}

func (r *running) get(path string) (*http.Response, string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, r.url+path, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.do(req)
}

func (r *running) do(req *http.Request) (*http.Response, string) {
	r.t.Helper()
	res, err := client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatalf("reading the answer: %v", err)
	}
	return res, string(b)
}

// metric is the sum over all series of a counter or gauge with the given label values,
// name, value, name, value.
func (r *running) metric(name string, labels ...string) float64 {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			have := map[string]string{}
			for _, l := range m.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			for i := 0; i < len(labels); i += 2 {
				if have[labels[i]] != labels[i+1] {
					continue series
				}
			}
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// wantIdle waits until nothing is in flight and checks that every count is exactly zero.
func (r *running) wantIdle() {
	r.t.Helper()
	r.eventually("requests end", func() bool { return r.underWay.used.Load() == 0 })
	if !r.inFlight.Idle() {
		r.t.Error("something counts as in flight after the end")
	}
	if n := r.buffered.used.Load(); n != 0 {
		r.t.Errorf("%d bytes still count as buffered", n)
	}
}

// eventually polls a condition that no channel announces, as fast as the scheduler lets it.
func (r *running) eventually(what string, ok func() bool) {
	r.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	timeout := time.After(30 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-timeout:
			r.t.Fatalf("never: %s", what)
		}
	}
}

// wantError checks OpenAI's error shape.
func wantError(t testing.TB, res *http.Response, body string, status int, code string) {
	t.Helper()
	var e struct {
		Error struct{ Message, Type, Code string }
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil || e.Error.Message == "" || e.Error.Type == "" {
		t.Errorf("not an OpenAI error: %.200s", body)
	}
	if res.StatusCode != status || e.Error.Code != code {
		t.Errorf("got %d %q (%s), want %d %q", res.StatusCode, e.Error.Code, e.Error.Message, status, code)
	}
	if res.Header.Get("Content-Type") != "application/json" {
		t.Errorf("Content-Type %q", res.Header.Get("Content-Type"))
	}
	if status == http.StatusServiceUnavailable && res.Header.Get("Retry-After") == "" {
		t.Error("503 without Retry-After")
	}
}

// refusing is the URL of a port that nobody listens on.
func refusing(t testing.TB) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "http://" + l.Addr().String()
}

// prompt is a completion request for n token ids from 1 on, and those ids.
func prompt(n int) (string, []uint32) {
	ids := make([]uint32, n)
	text := make([]string, n)
	for i := range ids {
		ids[i] = uint32(i + 1)
		text[i] = fmt.Sprint(i + 1)
	}
	return `{"model":"llama","prompt":[` + strings.Join(text, ",") + `]}`, ids
}

func (r *running) mustTarget() fleet.Target {
	r.t.Helper()
	target, ok := r.fleet.Snapshot().Target("", "llama")
	if !ok {
		r.t.Fatal("no target llama")
	}
	return target
}

// recorded is how many prompts the index has taken as predictions.
func (r *running) recorded() int {
	m := r.o.Index.(*counted)
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.recorded
}

// counted is an index that counts the predictions that it has taken.
type counted struct {
	*store.Store
	mu       sync.Mutex
	recorded int
}

func (c *counted) Predict(ctx context.Context, p kvcache.PoolID, w kvcache.WorkerRank, blocks []kvcache.BlockHash, o store.PredictOptions) (store.Outcome, error) {
	out, err := c.Store.Predict(ctx, p, w, blocks, o)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.recorded++
	return out, err
}

func mustParse(t testing.TB, body string) openai.Request {
	t.Helper()
	r, err := openai.Parse([]byte(body), openai.Chat, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return r
}
