package frontend

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/breaker"
	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/inflight"
	"github.com/warmroute/warmroute/kvcache"
)

// What counts against a worker, and what does not. H20: client errors evict nobody.
func TestOnlyOurFailuresOpenABreaker(t *testing.T) {
	status := func(code int) func(http.ResponseWriter, *http.Request, []byte) {
		return func(w http.ResponseWriter, _ *http.Request, _ []byte) { w.WriteHeader(code) }
	}
	for name, test := range map[string]struct {
		serve func(w http.ResponseWriter, r *http.Request, body []byte)
		leave bool // the client
		open  bool
	}{
		"400":          {status(400), false, false},
		"404":          {status(404), false, false},
		"429":          {status(429), false, false},
		"500":          {status(500), false, false},
		"502":          {status(502), false, true},
		"503":          {status(503), false, true},
		"504":          {status(504), false, true},
		"broken":       {func(w http.ResponseWriter, _ *http.Request, _ []byte) { abort(w) }, false, true},
		"client hangs": {func(_ http.ResponseWriter, r *http.Request, _ []byte) { <-r.Context().Done() }, true, false},
		"broken off": {func(w http.ResponseWriter, _ *http.Request, _ []byte) {
			_, _ = io.WriteString(w, "data: 1\n\n")
			w.(http.Flusher).Flush()
			abort(w)
		}, false, false}, // each began well
	} {
		t.Run(name, func(t *testing.T) {
			e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
			e1.serve = test.serve
			f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e1.worker(), e2.worker()}})
			for range 8 {
				ctx, cancel := context.WithCancel(t.Context())
				if test.leave {
					time.AfterFunc(20*time.Millisecond, cancel)
				}
				if res, err := client.Do(f.request(ctx, completions, streamBody, "x-worker-instance-id", "w1")); err == nil {
					_, _ = io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
				cancel()
			}
			f.wantIdle()
			k := fleet.KeyOf("", "w1")
			if f.breakers.Open(k) != test.open {
				t.Errorf("open: %v", f.breakers.Open(k))
			}
			want := map[string]float64{workersHealthy: 2, workersOpen: 0}
			if test.open {
				want = map[string]float64{workersHealthy: 1, workersOpen: 1}
			}
			for state, n := range want {
				if got := f.metric("warmroute_workers", "state", state); got != n {
					t.Errorf("%v workers %s, want %v", got, state, n)
				}
			}
		})
	}
}

// A worker that refuses connections between two polls costs five requests a retry, and then none; the trial brings it back.
func TestBreakerSparesTheRetries(t *testing.T) {
	body, ids := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	f := start(t, Options{
		Index: holding(16, ids, map[string]int{"w1": 4}), Workers: []Worker{e1.worker(), e2.worker()},
		BreakerPause: time.Hour,
	})
	home := strings.TrimPrefix(e1.URL, "http://")
	f.swap("w1", refusing(t))
	for range 20 {
		if res, text := f.post(completions, body); res.StatusCode != 200 || res.Header.Get(headerWorker) != "w2" {
			t.Fatalf("%d %s", res.StatusCode, text)
		}
	}
	if n := f.metric("warmroute_upstream_retries_total", "reason", failDial); n != 5 {
		t.Errorf("%v retries, want one for each failure that opens the breaker", n)
	}
	if n := f.metric("warmroute_worker_requests_total", "worker", "w1"); n != 5 {
		t.Errorf("w1 was tried %v times", n)
	}
	_, text := f.get("/workers")
	if v := decode(t, text)["workers"].([]any)[0].(map[string]any); v["state"] != workersOpen {
		t.Errorf("%s", text)
	}
	if _, text := f.get("/ready"); !strings.Contains(text, `"status":"open"`) {
		t.Errorf("%s", text)
	}
	f.swap("w1", "http://"+home)
	f.breakers.Report(fleet.KeyOf("", "w1"), breaker.Success)
	if res, _ := f.post(completions, body); res.Header.Get(headerWorker) != "w1" {
		t.Errorf("to %s after the breaker closed", res.Header.Get(headerWorker))
	}
	f.wantIdle()
}

// The last worker is tried whatever its breaker says, and a pinned one.
func TestBreakerLeavesSomebody(t *testing.T) {
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e1.worker(), e2.worker()}, BreakerPause: time.Hour})
	for range 5 {
		f.breakers.Report(fleet.KeyOf("", "w1"), breaker.Failure)
		f.breakers.Report(fleet.KeyOf("", "w2"), breaker.Failure)
	}
	for _, pin := range []string{"w1", "w2"} {
		f.breakers.Report(fleet.KeyOf("", pin), breaker.Failure)
		res, text := f.post(completions, streamBody, "x-worker-instance-id", pin)
		if res.StatusCode != 200 {
			t.Errorf("pinned to %s: %d %s", pin, res.StatusCode, text)
		}
		for range 5 {
			f.breakers.Report(fleet.KeyOf("", pin), breaker.Failure)
		}
	}
	if res, text := f.post(completions, streamBody); res.StatusCode != 200 {
		t.Errorf("%d %s", res.StatusCode, text)
	}
}

// A request that makes engines close their connections does not go through the fleet.
func TestPoisonReachesTwoWorkers(t *testing.T) {
	const poison = `{"model":"llama","prompt":[1,2,3],"poison":true}`
	var workers []Worker
	var engines []*engine
	for i := range 5 {
		e := newEngine(t, fmt.Sprint("w", i))
		e.serve = func(w http.ResponseWriter, _ *http.Request, body []byte) {
			if bytes.Contains(body, []byte("poison")) {
				conn, _, _ := w.(http.Hijacker).Hijack() // a clean close, as of an engine that dies
				conn.Close()
			}
		}
		engines = append(engines, e)
		workers = append(workers, e.worker())
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: workers})
	for i := range workers { // each has a connection that will be used again
		f.post(completions, streamBody, "x-worker-instance-id", fmt.Sprint("w", i))
	}
	res, text := f.post(completions, poison)
	wantError(t, res, text, 502, "upstream_unreachable")
	reached := 0
	for _, e := range engines {
		reached += e.served() - 1
	}
	if reached < 1 || reached > 2 {
		t.Errorf("the request reached %d workers", reached)
	}
	f.wantIdle()
}

// SGLang is told the rank in the body, as the last member; all other bytes stay as they are. Others are told by header alone.
func TestRankIsToldToTheEngine(t *testing.T) {
	const odd = "{ \"model\" :\"llama\",\"prompt\":[1],\"data_parallel_rank\":7 }\n"
	for _, test := range []struct {
		engine string
		ranks  int
		body   string
		header string
	}{
		{"SGLang", 4, "{ \"model\" :\"llama\",\"prompt\":[1],\"data_parallel_rank\":7 ,\"data_parallel_rank\":3}\n", "3"},
		{"sglang", 4, "{ \"model\" :\"llama\",\"prompt\":[1],\"data_parallel_rank\":7 ,\"data_parallel_rank\":3}\n", "3"},
		{"SGLang", 1, odd, ""},
		{"vLLM", 4, odd, "3"},
		{"", 4, odd, "3"},
	} {
		e := newEngine(t, "w1")
		w := e.worker()
		w.Engine, w.Ranks = test.engine, test.ranks
		f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{w}})
		f.post(completions, odd, "x-dp-rank", fmt.Sprint(test.ranks-1))
		got, r := string(e.bodies[0]), e.requests[0]
		if got != test.body || r.Header.Get("X-Data-Parallel-Rank") != test.header || r.ContentLength != int64(len(got)) {
			t.Errorf("%s with %d ranks got %q, header %q, length %d", test.engine, test.ranks, got, r.Header.Get("X-Data-Parallel-Rank"), r.ContentLength)
		}
		if !json.Valid([]byte(got)) {
			t.Errorf("not JSON: %s", got)
		}
		f.post("/tokenize", `{"model":"llama","prompt":"proxied"}`)
		if got := string(e.bodies[1]); got != `{"model":"llama","prompt":"proxied"}` {
			t.Errorf("/tokenize: %s", got)
		}
	}
}

// What an engine says it had cached is compared with the prediction, in streams as in plain answers; an engine that keeps
// saying something else is reported once.
func TestCachedTokensAreCompared(t *testing.T) {
	body, ids := prompt(640)
	e := newEngine(t, "w1")
	var log bytes.Buffer
	cached := 624
	e.serve = func(w http.ResponseWriter, _ *http.Request, body []byte) {
		usage := fmt.Sprintf(`"usage":{"prompt_tokens":640,"prompt_tokens_details":{"cached_tokens":%d}}`, cached)
		if !bytes.Contains(body, []byte(`"stream":true`)) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprintf(w, `{"choices":[{"text":"x"}],%s}`, usage)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range 40 {
			_, _ = io.WriteString(w, "data: {\"choices\":[{\"text\":\"x\"}]}\n\n")
			w.(http.Flusher).Flush()
		}
		_, _ = fmt.Fprintf(w, "data: {\"choices\":[],%s}\n\ndata: [DONE]\n\n", usage)
	}
	f := start(t, Options{
		Index: holding(16, ids, map[string]int{"w1": 40}), Workers: []Worker{e.worker()},
		Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	stream := strings.TrimSuffix(body, "}") + `,"stream":true}`
	for range 20 {
		f.post(completions, body)
		if _, text := f.post(completions, stream); !strings.HasSuffix(text, "[DONE]\n\n") || strings.Count(text, "data:") != 42 {
			t.Fatalf("the stream is changed: %q", text)
		}
	}
	if n := f.metric("warmroute_prediction_error_ratio", "worker", "w1"); n != 40 {
		t.Errorf("%v answers compared", n)
	}
	if n := f.metric("warmroute_worker_disagrees", "worker", "w1"); n != 0 {
		t.Error("a worker that agrees is reported")
	}
	f.wantIdle()
	cached = 0
	for range 40 {
		f.post(completions, body)
	}
	if n := f.metric("warmroute_worker_disagrees", "worker", "w1"); n != 1 {
		t.Error("a worker that disagrees is not reported")
	}
	f.stop()
	f.exited <- <-f.exited // the log is complete
	if n := strings.Count(log.String(), "cache differs from the index"); n != 1 {
		t.Errorf("%d lines: %s", n, log.String())
	}
}

// A frontend that others can reach without a token says so; one on loopback or with a token does not.
func TestExposureIsWarnedOf(t *testing.T) {
	for _, test := range []struct {
		listen, token string
		warns         bool
	}{{"127.0.0.1:0", "", false}, {"0.0.0.0:0", "", true}, {"[::]:0", "", true}, {"0.0.0.0:0", "secret", false}} {
		var log bytes.Buffer
		f, err := New(Options{
			Listen: test.listen, Tokens: tokens(t, test.token, "", ""), Workers: []Worker{{ID: "w", URL: refusing(t)}}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := f.Run(ctx); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(log.String(), "asks for no token"); got != test.warns {
			t.Errorf("%s, token %q: warned %v", test.listen, test.token, got)
		}
	}
}

// The list of components is a list also where there is nothing to list.
func TestReadyWithoutWorkers(t *testing.T) {
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}})
	res, text := f.get("/ready")
	if res.StatusCode != 503 || !strings.Contains(text, `"components":[`) {
		t.Errorf("%d %s", res.StatusCode, text)
	}
}

// A stream grows by a block with as many tokens as a block has, in the loads too.
func TestStreamOccupiesMoreBlocks(t *testing.T) {
	body, _ := prompt(16)
	e := newEngine(t, "w1")
	next := make(chan struct{})
	e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 40 {
			_, _ = io.WriteString(w, "data: x\n\n")
		}
		w.(http.Flusher).Flush()
		<-next
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	res, err := client.Do(f.request(t.Context(), completions, body))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	for range 80 {
		lines.Scan()
	}
	_, text := f.get("/workers")
	if !strings.Contains(text, `{"dp_rank":0,"requests":1,"prefill_tokens":0,"decode_blocks":3}`) {
		t.Errorf("one block of prompt and two of output: %s", text)
	}
	close(next)
	_, _ = io.Copy(io.Discard, res.Body)
	f.wantIdle()
}

// H08: a worker that vanishes without a word holds nobody for long. What waits for its answer goes to another, a stream
// that stands still is broken off; one that goes on, from a worker that is only too busy for polls, stays.
func TestLostWorkerHoldsNobody(t *testing.T) {
	const waits, streams, goesOn = `{"model":"llama","prompt":[1]}`, `{"model":"llama","prompt":[1],"stream":true}`, `{"model":"llama","prompt":[1],"stream":true,"x":1}`
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	chunks := make(chan string)
	e1.serve = func(w http.ResponseWriter, r *http.Request, body []byte) {
		switch string(body) {
		case goesOn:
			for c := range chunks {
				_, _ = io.WriteString(w, c)
				w.(http.Flusher).Flush()
			}
			return
		case streams:
			_, _ = io.WriteString(w, "data: 1\n\n")
			w.(http.Flusher).Flush()
		}
		<-r.Context().Done()
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e1.worker(), e2.worker()}, PollInterval: 10 * time.Millisecond})
	go func() { chunks <- "data: 0\n\n" }()
	busy, err := client.Do(f.request(t.Context(), completions, goesOn, headerAllowed, "w1"))
	if err == nil {
		_, err = io.ReadFull(busy.Body, make([]byte, 9))
	}
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Body.Close()
	f.attempts.mu.Lock()
	for _, of := range f.attempts.at {
		for a := range of {
			a.heard.Store(time.Now().Add(time.Hour).UnixNano()) // as if it had just sent something
		}
	}
	f.attempts.alive = 0
	f.attempts.mu.Unlock()

	still, err := client.Do(f.request(t.Context(), completions, streams, headerWorker, "w1"))
	if err != nil {
		t.Fatal(err)
	}
	defer still.Body.Close()
	_, _ = io.ReadFull(still.Body, make([]byte, 9))
	moved := make(chan *http.Response)
	for range 4 { // so that w1 is the better one
		f.inFlight.Add(inflight.Place{Tenant: "default", WorkerRank: kvcache.WorkerRank{Worker: "w2"}}, Load{Requests: 1, DecodeBlocks: 100})
	}
	go func() {
		res, _ := f.post(completions, waits)
		moved <- res
	}()
	f.eventually("w1 has all three", func() bool { return e1.served() == 3 })
	e1.vanished.Store(true)
	if _, err := io.ReadAll(still.Body); err == nil {
		t.Error("the stream ends as if it were complete")
	}
	if res := <-moved; res.StatusCode != 200 || res.Header.Get(headerWorker) != "w2" {
		t.Errorf("%d from %s", res.StatusCode, res.Header.Get(headerWorker))
	}
	chunks <- "data: 1\n\n"
	close(chunks)
	if b, err := io.ReadAll(busy.Body); err != nil || string(b) != "data: 1\n\n" {
		t.Errorf("the stream that goes on: %q, %v", b, err)
	}
	for reason, n := range map[string]float64{failLost: 2} {
		if got := f.metric("warmroute_upstream_errors_total", "reason", reason); got != n {
			t.Errorf("%v attempts were %s", got, reason)
		}
	}
	f.eventually("requests end", func() bool { return f.underWay.used.Load() == 0 })
	if len(f.attempts.at) != 0 {
		t.Errorf("attempts left over: %v", f.attempts.at)
	}
}

// H21: a limit of open files that does not suffice is said at the start.
func TestLimitOfFilesIsWarnedOf(t *testing.T) {
	for limit, warns := range map[uint64]bool{0: false, 1024: true, 2200: false, 1 << 40: false} {
		var log bytes.Buffer
		f := &Frontend{o: Options{MaxInFlight: 1000, MaxConnections: 1000, Logger: slog.New(slog.NewTextHandler(&log, nil))}}
		if f.warnOfFiles(limit); strings.Contains(log.String(), "limit of open files") != warns {
			t.Errorf("limit %d: %q", limit, log.String())
		}
	}
}

// T09 and T10: a new worker, and one with a small cache, get what nobody holds, and by load; what is held elsewhere spills
// when its home is busy.
func TestNewWorkerGetsItsShare(t *testing.T) {
	f := bare(t, 5, PolicyKV) // w04 is new
	place := func(warm bool) *exchange {
		x := &exchange{tenant: "default", knowledge: knowledge{blockSize: 16, tokens: 640, blocks: 40, state: kvcache.Exact}}
		x.parsed.Model = "llama"
		if warm {
			x.scores.Scores = map[kvcache.WorkerRank]kvcache.Overlap{}
			for i := range 4 {
				x.scores.Scores[kvcache.WorkerRank{Worker: fmt.Sprintf("w%02d", i)}] = kvcache.Overlap{Device: 38, Host: 38, Disk: 38, Any: 38}
			}
		}
		if err := f.choose(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		return x
	}
	got := func(n int, warm bool) (fresh int) {
		var all []*exchange
		for range n {
			x := place(warm)
			if all = append(all, x); x.chosen.Worker == "w04" {
				fresh++
			}
		}
		for _, x := range all {
			x.finish()
		}
		return fresh
	}
	if n := got(50, false); n != 10 {
		t.Errorf("the new worker got %d of 50 prompts that nobody holds, want its fifth", n)
	}
	if n := got(4, true); n != 0 {
		t.Errorf("the new worker got %d of 4 prompts that idle workers hold", n)
	}
	if n := got(200, true); n == 0 {
		t.Error("the new worker got none of 200 prompts at a time that the others hold")
	}
}

// T11: one hot worker does not keep others from what they hold.
func TestHotWorkerLeavesTheOthersTheirs(t *testing.T) {
	f := bare(t, 3, PolicyKV)
	f.inFlight.Add(inflight.Place{Tenant: "default", WorkerRank: kvcache.WorkerRank{Worker: "w00"}}, Load{Requests: 500, PrefillTokens: 1 << 20, DecodeBlocks: 9000})
	x := &exchange{tenant: "default", knowledge: knowledge{blockSize: 16, tokens: 640, blocks: 40, state: kvcache.Exact}}
	x.parsed.Model = "llama"
	x.scores.Scores = map[kvcache.WorkerRank]kvcache.Overlap{{Worker: "w01"}: {Device: 9, Host: 9, Disk: 9, Any: 9}, {Worker: "w00"}: {Device: 40, Host: 40, Disk: 40, Any: 40}}
	if err := f.choose(t.Context(), x); err != nil || x.chosen.Worker != "w01" {
		t.Errorf("at %v, %v", x.chosen, err)
	}
}
