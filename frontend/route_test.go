package frontend

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

const completions = "/v1/completions"

func TestWarmWorkerIsChosen(t *testing.T) {
	body, ids := prompt(64)
	engines := []*engine{newEngine(t, "w1"), newEngine(t, "w2"), newEngine(t, "w3")}
	f := start(t, Options{
		Index:   holding(16, ids, map[string]int{"w2": 3, "w3": 1}),
		Workers: []Worker{engines[0].worker(), engines[1].worker(), engines[2].worker()},
	})
	for range 5 {
		res, _ := f.post(completions, body)
		for name, want := range map[string]string{
			"x-worker-instance-id": "w2", "x-dp-rank": "0", "x-kv-overlap-blocks": "3", "x-kv-prompt-blocks": "4", "x-kv-index-state": "exact",
		} {
			if got := res.Header.Get(name); got != want {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
	}
	if n := engines[1].served(); n != 5 {
		t.Errorf("w2 served %d of 5", n)
	}
	f.wantIdle()
	if n := f.metric("warmroute_selected_total", "policy", "kv", "reason", "overlap", "pool", "default:llama"); n != 5 {
		t.Errorf("selected_total %v", n)
	}
	f.eventually("the requests are counted", func() bool {
		return f.metric("warmroute_requests_total", "endpoint", completions, "code", "200", "index_state", "exact") == 5
	})
}

func TestTextAndChatAreTokenizedByTheWorker(t *testing.T) {
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	messages := `[{"role":"user","content":"a question of some length"}]`
	for name, test := range map[string]struct{ path, body, text string }{
		"text": {completions, `{"model":"llama","prompt":"some forty characters of text for a prompt"}`, "some forty characters of text for a prompt"},
		"chat": {"/v1/chat/completions", `{"model":"llama","messages":` + messages + `}`, messages},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, Options{
				Index:   holding(8, bytesAsTokens(test.text), map[string]int{"w2": 2}),
				Workers: []Worker{e1.worker(), e2.worker()},
			})
			before := e1.asked + e2.asked
			for range 3 {
				res, _ := f.post(test.path, test.body)
				if res.Header.Get("x-worker-instance-id") != "w2" || res.Header.Get("x-kv-overlap-blocks") != "2" {
					t.Errorf("headers %v", res.Header)
				}
			}
			if n := e1.asked + e2.asked - before; n != 1 {
				t.Errorf("%d calls of /tokenize for one prompt three times, want 1", n)
			}
		})
	}
}

func TestAdapterAndSaltDecideTheHash(t *testing.T) {
	e := newEngine(t, "w1")
	e.models = `{"data":[{"id":"llama"},{"id":"sql","parent":"llama"}]}`
	x := &fakeIndex{blockSize: 4}
	f := start(t, Options{Index: x, Workers: []Worker{e.worker()}})
	f.post(completions, `{"model":"sql","prompt":[1,2,3,4],"cache_salt":"pepper"}`)
	want := kvcache.HashTokens(kvcache.HashSpec{BlockSize: 4, LoRA: "sql", Salt: "pepper"}, []uint32{1, 2, 3, 4})
	if len(x.asked) != 1 || len(x.asked[0]) != 1 || x.asked[0][0] != want[0] {
		t.Errorf("looked up %v, want %v", x.asked, want)
	}
}

func TestIndexErrorIsServedMarkedAndCountedOnce(t *testing.T) {
	body, _ := prompt(64)
	for name, test := range map[string]struct {
		index  *fakeIndex
		reason string
	}{
		"lookup":        {&fakeIndex{blockSize: 16, err: fmt.Errorf("x: %w", store.ErrUnavailable)}, "connection"},
		"timeout":       {&fakeIndex{blockSize: 16, err: fmt.Errorf("x: %w", context.DeadlineExceeded)}, "timeout"},
		"corrupt":       {&fakeIndex{blockSize: 16, err: fmt.Errorf("x: %w", store.ErrCorrupt)}, "corrupt"},
		"canceled":      {&fakeIndex{blockSize: 16, err: fmt.Errorf("x: %w", context.Canceled)}, "timeout"},
		"invalid":       {&fakeIndex{blockSize: 16, err: fmt.Errorf("x: %w", store.ErrInvalid)}, "corrupt"},
		"configuration": {&fakeIndex{noPool: true, err: store.ErrUnavailable}, "connection"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, "w1")
			f := start(t, Options{Index: test.index, Workers: []Worker{e.worker()}})
			res, _ := f.post(completions, body)
			if res.StatusCode != 200 || res.Header.Get("x-kv-index-state") != "degraded" || res.Header.Get("x-kv-prompt-blocks") != "4" {
				t.Errorf("status %d, headers %v", res.StatusCode, res.Header)
			}
			if _, ok := res.Header["X-Kv-Overlap-Blocks"]; ok {
				t.Error("an unknown overlap is reported as a number")
			}
			if n := f.metric("warmroute_index_fallbacks_total", "reason", test.reason); n != 1 || f.metric("warmroute_index_fallbacks_total") != 1 {
				t.Errorf("%v fallbacks with reason %s, %v in all; want 1", n, test.reason, f.metric("warmroute_index_fallbacks_total"))
			}
			if n := f.metric("warmroute_selected_total", "policy", "conversation-hash", "reason", "prompt"); n != 1 {
				t.Errorf("selected_total %v", n)
			}
			f.wantIdle()
		})
	}
}

func TestPartialAnswerIsUsed(t *testing.T) {
	body, ids := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	x := holding(16, ids, map[string]int{"w2": 2})
	f := start(t, Options{Index: x, Workers: []Worker{e1.worker(), e2.worker()}})
	x.err, x.state = store.ErrUnavailable, kvcache.Partial
	res, _ := f.post(completions, body)
	if res.Header.Get("x-kv-index-state") != "partial" || res.Header.Get("x-worker-instance-id") != "w2" || res.Header.Get("x-kv-overlap-blocks") != "2" {
		t.Errorf("headers %v", res.Header)
	}
	if n := f.metric("warmroute_index_fallbacks_total"); n != 0 {
		t.Errorf("%v fallbacks for a partial answer", n)
	}
}

func TestSlowIndexCostsTheBudgetAtMost(t *testing.T) {
	body, _ := prompt(64)
	e := newEngine(t, "w1")
	x := &fakeIndex{blockSize: 16, lookup: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}
	f := start(t, Options{Index: x, Workers: []Worker{e.worker()}, LookupBudget: 1})
	res, _ := f.post(completions, body) // hangs for ever without the budget
	if res.StatusCode != 200 || res.Header.Get("x-kv-index-state") != "degraded" {
		t.Errorf("status %d, headers %v", res.StatusCode, res.Header)
	}
	if n := f.metric("warmroute_index_fallbacks_total", "reason", "timeout"); n != 1 {
		t.Errorf("%v timeouts counted, want 1", n)
	}
}

func TestClientThatLeavesDuringTheLookupIsNoIndexFailure(t *testing.T) {
	body, _ := prompt(64)
	e := newEngine(t, "w1")
	looking := make(chan struct{})
	x := &fakeIndex{blockSize: 16, lookup: func(ctx context.Context) error {
		looking <- struct{}{}
		<-ctx.Done()
		return errors.New("a text that says nothing of a cancellation")
	}}
	f := start(t, Options{Index: x, Workers: []Worker{e.worker()}})
	const clients = 20
	var all sync.WaitGroup
	for range clients {
		ctx, cancel := context.WithCancel(t.Context())
		all.Go(func() {
			res, err := client.Do(f.request(ctx, completions, body))
			if err == nil {
				res.Body.Close()
				t.Error("got an answer")
			}
		})
		<-looking
		cancel()
	}
	all.Wait()
	f.wantIdle()
	if n := f.metric("warmroute_index_fallbacks_total"); n != 0 {
		t.Errorf("%v fallbacks", n)
	}
	f.eventually("the requests are counted", func() bool {
		return f.metric("warmroute_requests_total", "endpoint", completions, "code", "499") == clients
	})
	if e.served() != 0 {
		t.Error("a worker got a request whose client was gone")
	}
}

func TestBypass(t *testing.T) {
	body, ids := prompt(64)
	e := newEngine(t, "w1")
	x := holding(16, ids, map[string]int{"w1": 4})
	f := start(t, Options{Index: x, Workers: []Worker{e.worker()}})
	res, _ := f.post(completions, body, "x-kv-routing", "off")
	if res.Header.Get("x-kv-index-state") != "bypassed" || len(x.asked) != 0 || f.metric("warmroute_index_fallbacks_total") != 0 {
		t.Errorf("headers %v, %d lookups", res.Header, len(x.asked))
	}
	f.post("/tokenize", `{"model":"llama","prompt":"proxied","note":"proxied"}`)
	if len(x.asked) != 0 || e.served() != 2 {
		t.Errorf("/tokenize: %d lookups, %d served", len(x.asked), e.served())
	}
}

func TestWithoutIndex(t *testing.T) {
	body, _ := prompt(64)
	e := newEngine(t, "w1")
	f := start(t, Options{Workers: []Worker{e.worker()}})
	res, _ := f.post(completions, body)
	if res.StatusCode != 200 || res.Header.Get("x-kv-index-state") != "bypassed" || f.metric("warmroute_index_fallbacks_total", "reason", "disabled") != 1 {
		t.Errorf("status %d, headers %v", res.StatusCode, res.Header)
	}
}

func TestTiesAreUniform(t *testing.T) {
	const workers, requests = 4, 10_000
	f := bare(t, workers, PolicyKV)
	for name, state := range map[string]kvcache.IndexState{"empty overlaps": kvcache.Exact, "degraded": kvcache.Degraded} {
		counts := map[string]int{}
		for range requests {
			x := &exchange{tenant: "default", knowledge: knowledge{blockSize: 16}}
			x.parsed.Model = "llama"
			x.state, x.tokens, x.blocks, x.blockSize = state, 64, 4, 16
			if err := f.choose(t.Context(), x); err != nil {
				t.Fatal(err)
			}
			counts[x.chosen.Worker]++
			x.finish()
		}
		for w, n := range counts {
			if n < requests/workers*92/100 || n > requests/workers*108/100 { // 4.6 standard deviations
				t.Errorf("%s: %s got %d of %d, want a quarter", name, w, n, requests)
			}
		}
	}
}

// bare is a frontend that is not run, with workers that count as healthy.
func bare(t testing.TB, workers int, policy string) *Frontend {
	t.Helper()
	e := newEngine(t, "")
	list := make([]Worker, workers)
	for i := range list {
		list[i] = Worker{ID: fmt.Sprintf("w%02d", i), URL: e.URL}
	}
	f, err := New(Options{Workers: list, Index: &fakeIndex{blockSize: 16}, Policy: policy, LookupBudget: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.listener.Close() })
	f.fleet.Refresh(t.Context())
	if n := f.fleet.Snapshot().Healthy(); n != workers {
		t.Fatalf("%d workers healthy", n)
	}
	return f
}

// A burst of one uncached prompt must not go where the first of it went.
func TestBurstSpreads(t *testing.T) {
	const workers, burst = 8, 64
	f := bare(t, workers, PolicyKV)
	counts := map[string]int{}
	for range burst {
		x := &exchange{tenant: "default", knowledge: knowledge{blockSize: 16}}
		x.parsed.Model = "llama"
		x.state, x.tokens, x.blocks = kvcache.Exact, 640, 40
		if err := f.choose(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		counts[x.chosen.Worker]++
	}
	for w, n := range counts {
		if n != burst/workers {
			t.Errorf("%s got %d of %d, want %d", w, n, burst, burst/workers)
		}
	}
}

func TestPolicies(t *testing.T) {
	f := bare(t, 3, PolicyRoundRobin)
	var order string
	for range 6 {
		x := &exchange{tenant: "default", knowledge: knowledge{blockSize: 16}}
		x.parsed.Model = "llama"
		if err := f.choose(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		order += x.chosen.Worker + " "
	}
	if want := "w00 w01 w02 w00 w01 w02 "; order != want {
		t.Errorf("round robin: %s", order)
	}
	seen := map[int]bool{}
	for range 200 {
		i, _ := pickRandom(ranks(3, 1), []int{2, 1, 3})
		seen[i] = true
	}
	if len(seen) != 3 {
		t.Errorf("random reached %d of 3", len(seen))
	}
}

func TestWorkerThatOnlyTheIndexKnowsIsNeverChosen(t *testing.T) {
	body, ids := prompt(64)
	e := newEngine(t, "w1")
	x := holding(16, ids, map[string]int{"w9": 4})
	away := store.Stream{}
	away.Pool, away.Worker = llama, "w9" // registered without a URL
	dead := store.Stream{}
	dead.Pool, dead.Worker, dead.URL = llama, "w8", refusing(t)
	x.streams = []store.Stream{away, dead}
	f := start(t, Options{Index: x, Workers: []Worker{e.worker()}})
	for range 10 {
		res, _ := f.post(completions, body)
		if res.StatusCode != 200 || res.Header.Get("x-worker-instance-id") != "w1" || res.Header.Get("x-kv-overlap-blocks") != "0" {
			t.Fatalf("status %d, headers %v", res.StatusCode, res.Header)
		}
	}
}

func TestRegisteredWorkerServes(t *testing.T) {
	body, _ := prompt(64)
	e := newEngine(t, "w1")
	s := store.Stream{}
	s.Pool, s.Worker, s.URL = llama, "w1", e.URL
	f := start(t, Options{Index: &fakeIndex{blockSize: 16, streams: []store.Stream{s}}})
	f.waitWorkers(1)
	if res, _ := f.post(completions, body); res.StatusCode != 200 || res.Header.Get("x-worker-instance-id") != "w1" {
		t.Errorf("status %d, headers %v", res.StatusCode, res.Header)
	}
}

func TestPinAndRank(t *testing.T) {
	body, ids := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	w2 := e2.worker()
	w2.Ranks = 4
	x := holding(16, ids, map[string]int{"w1": 4})
	e3 := newEngine(t, "w3")
	e3.models = strings.ReplaceAll(oneModel, "llama", "qwen")
	f := start(t, Options{Index: x, Workers: []Worker{e1.worker(), w2, e3.worker()}})

	res, _ := f.post(completions, body, "x-worker-instance-id", "w2", "x-dp-rank", "3", "X-Data-Parallel-Rank", "1", "x-session-id", "s")
	if res.Header.Get("x-worker-instance-id") != "w2" || res.Header.Get("x-dp-rank") != "3" || res.Header.Get("x-kv-overlap-blocks") != "0" {
		t.Errorf("headers %v", res.Header)
	}
	got := e2.requests[0].Header
	if got.Get("X-Data-Parallel-Rank") != "3" {
		t.Errorf("X-Data-Parallel-Rank %q", got.Get("X-Data-Parallel-Rank"))
	}
	for _, h := range []string{headerWorker, headerRank, headerSession, headerRouting, headerAllowed} {
		if v, ok := got[h]; ok {
			t.Errorf("%s: %v reached the worker", h, v)
		}
	}
	f.post(completions, body, "x-worker-instance-id", "w1")
	if v, ok := e1.requests[0].Header["X-Data-Parallel-Rank"]; ok {
		t.Errorf("a worker with one rank got X-Data-Parallel-Rank: %v", v)
	}

	res, text := f.post(completions, body, "x-worker-instance-id", "w7")
	wantError(t, res, text, 400, "worker_not_found")
	res, text = f.post(completions, body, "x-worker-instance-id", "w3")
	if wantError(t, res, text, 400, "worker_not_found"); !strings.Contains(text, "w3 does not serve this model") {
		t.Error(text)
	}
	res, text = f.post(completions, body, "x-dp-rank", "first")
	wantError(t, res, text, 400, "invalid_request")
	res, text = f.post(completions, body, "x-worker-instance-id", "w1", "x-dp-rank", "2")
	wantError(t, res, text, 400, "rank_not_found")
	res, text = f.post(completions, body, "x-dp-rank", "9")
	wantError(t, res, text, 400, "rank_not_found")
	res, text = f.post(completions, body, "x-allowed-worker-ids", "w7, w8")
	wantError(t, res, text, 503, "no_workers")
	if !strings.Contains(text, "none of the allowed workers is known") {
		t.Error(text)
	}
	res, text = f.post(completions, body, "x-allowed-worker-ids", " , ")
	wantError(t, res, text, 400, "invalid_request") // nobody is not all
	res, text = f.post(completions, body, "x-worker-instance-id", "w1", "x-allowed-worker-ids", "w2")
	wantError(t, res, text, 400, "worker_not_found")
	res, _ = f.post(completions, body, "x-allowed-worker-ids", "w7, w2 ,")
	if res.StatusCode != 200 || res.Header.Get("x-worker-instance-id") != "w2" {
		t.Errorf("status %d, headers %v", res.StatusCode, res.Header)
	}
	f.wantIdle()
}

func TestUpstreamURLWithPath(t *testing.T) {
	body, _ := prompt(16)
	e := newEngine(t, "w1")
	var paths []string
	var mu sync.Mutex
	outer := http.NewServeMux()
	outer.Handle("/base/", http.StripPrefix("/base", http.HandlerFunc(e.handle)))
	e.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		paths = append(paths, r.URL.RequestURI())
		mu.Unlock()
		outer.ServeHTTP(w, r)
	})
	u, _ := url.JoinPath(e.URL, "base")
	f := start(t, Options{Workers: []Worker{{ID: "w1", URL: u}}})
	if res, _ := f.post(completions+"?a=b", body); res.StatusCode != 200 {
		t.Errorf("status %d, paths %v", res.StatusCode, paths)
	}
	if got := paths[len(paths)-1]; got != "/base/v1/completions?a=b" {
		t.Errorf("path %s", got)
	}
}

// Who pins a request to a worker that gets no new ones is told its name and why.
func TestPinnedWorkerThatDrainsIsNamed(t *testing.T) {
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	f := start(t, Options{Workers: []Worker{e1.worker(), e2.worker()}, PollInterval: 10 * time.Millisecond})
	state := func(id string) fleet.State {
		return f.fleet.Snapshot().Node(fleet.KeyOf(kvcache.DefaultTenant, id)).State
	}
	e1.drains.Store(true)
	f.eventually("w1 drains", func() bool { return state("w1") == fleet.Draining })
	e2.vanished.Store(true)
	f.eventually("w2 is away", func() bool { return state("w2") == fleet.Unhealthy })
	body, _ := prompt(64)
	for id, says := range map[string]string{"w1": "the pinned worker w1 is draining", "w2": "the pinned worker w2 is not answering"} {
		res, text := f.post(completions, body, "x-worker-instance-id", id)
		wantError(t, res, text, 503, "no_workers")
		if !strings.Contains(text, says) {
			t.Errorf("%s, want %q", text, says)
		}
	}
}
