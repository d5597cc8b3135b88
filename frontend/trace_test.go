package frontend

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/warmroute/warmroute/frontend/tracing"
	"github.com/warmroute/warmroute/frontend/tracing/tracingtest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// tracer makes spans that arrive at the receiver, all that there are.
func tracer(t testing.TB, r *tracingtest.Receiver) trace.Tracer {
	t.Helper()
	all := 1.0
	p, err := tracing.New(t.Context(), tracing.Options{Endpoint: r.URL, Ratio: &all, Interval: 5 * time.Millisecond, Queue: 1 << 16})
	if err != nil || p == nil {
		t.Fatalf("%v, %v: is OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER set?", p, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return p.Tracer()
}

// caller is a client's place in a trace of its own.
type caller struct{ trace, span string }

var callers int

func newCaller() caller {
	callers++
	return caller{fmt.Sprintf("%032x", 0xa0000+callers), fmt.Sprintf("%016x", 0xb0000+callers)}
}

// parent is a traceparent; sampled tells whether the client records the trace.
func (c caller) parent(sampled bool) string {
	flags := "00"
	if sampled {
		flags = "01"
	}
	return "00-" + c.trace + "-" + c.span + "-" + flags
}

const completionSpan = "POST /v1/completions"

// wantAttrs checks attributes given as name, value, name, value; "" means absent.
func wantAttrs(t testing.TB, s tracingtest.Span, pairs ...string) {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if got := s.Attr(pairs[i]); got != pairs[i+1] {
			t.Errorf("span %q: %s is %q, want %q", s.Name, pairs[i], got, pairs[i+1])
		}
	}
}

// A request that was tried twice, from the client's span to the worker's.
func TestTraceOfARequestWithARetry(t *testing.T) {
	body, ids := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	r := tracingtest.HTTP(t)
	f := start(t, Options{Index: holding(16, ids, map[string]int{"w1": 4, "w2": 1}), Workers: []Worker{e1.worker(), e2.worker()}, Tracer: tracer(t, r)})
	f.swap("w1", refusing(t))
	me := newCaller()
	if res, text := f.post(completions, body, "traceparent", me.parent(true), "tracestate", "vendor=1"); res.StatusCode != 200 {
		t.Fatal(res.StatusCode, text)
	}
	got := r.Trace(t, me.trace, map[string]int{completionSpan: 1, spanHash: 1, spanSelect: 2, spanUpstream: 2})
	request := got[completionSpan][0]
	if request.Parent() != me.span || request.Failed() || request.Kind.String() != "SPAN_KIND_SERVER" {
		t.Errorf("request: %v", request)
	}
	wantAttrs(t, request, "http.request.method", "POST", "http.route", "/v1/completions", "http.response.status_code", "200",
		"warmroute.pool", "default:llama", "warmroute.worker", "w2", "warmroute.rank", "0", "warmroute.index_state", "exact",
		"warmroute.tokens", "64", "warmroute.blocks", "4", "warmroute.overlap_blocks", "1", "warmroute.retries", "1", "warmroute.fallback_reason", "")
	for _, name := range []string{spanHash, spanSelect, spanUpstream} {
		for _, s := range got[name] {
			if s.Parent() != request.ID() {
				t.Errorf("%s is not a part of the request", name)
			}
		}
	}
	if len(got[spanTokenize]) != 0 {
		t.Error("token ids that were given were searched for")
	}
	wantAttrs(t, got[spanHash][0], "warmroute.tokens", "64", "warmroute.blocks", "4")
	for i, worker := range []string{"w1", "w2"} {
		overlap, retries := []string{"4", "1"}[i], fmt.Sprint(i)
		wantAttrs(t, got[spanSelect][i], "warmroute.worker", worker, "warmroute.overlap_blocks", overlap, "warmroute.retries", retries,
			"warmroute.policy", "kv", "warmroute.reason", "overlap", "warmroute.candidates", fmt.Sprint(2-i), "warmroute.shared_loads", "false")
		wantAttrs(t, got[spanUpstream][i], "warmroute.worker", worker, "warmroute.overlap_blocks", overlap, "warmroute.retries", retries)
	}
	first, second := got[spanUpstream][0], got[spanUpstream][1]
	wantAttrs(t, first, "warmroute.reason", failDial, "http.response.status_code", "")
	wantAttrs(t, second, "warmroute.reason", "", "http.response.status_code", "200")
	if !first.Failed() || second.Failed() || len(second.Events) != 1 || second.Events[0].Name != "first byte" {
		t.Errorf("attempts: %v, %v", first, second)
	}
	h := e2.requests[0].Header
	if want := "00-" + me.trace + "-" + second.ID() + "-01"; h.Get("traceparent") != want || h.Get("tracestate") != "vendor=1" {
		t.Errorf("the worker got traceparent %q, tracestate %q, want %q and the client's", h.Get("traceparent"), h.Get("tracestate"), want)
	}
}

// What a client sends goes on as it is where nothing is traced, and joined where it is.
func TestTraceContextGoesToTheWorker(t *testing.T) {
	body, _ := prompt(16)
	me := newCaller()
	for _, c := range []struct {
		name          string
		traced        bool
		parent, state string
		want          string // prefix of what the worker gets
		same          bool   // and the client's own span id
		wantState     string
	}{
		{"off", false, me.parent(true), "vendor=1", "00-" + me.trace + "-", true, "vendor=1"},
		{"off, nonsense", false, "nonsense", "vendor=1", "nonsense", false, "vendor=1"},
		{"not recorded", true, me.parent(false), "vendor=1", "00-" + me.trace + "-", false, "vendor=1"},
		{"nonsense", true, "nonsense", "vendor=1", "00-", false, ""},
		{"nonsense in the state", true, me.parent(true), "\x7f", "00-" + me.trace + "-", false, ""},
		{"none", true, "", "", "00-", false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(t, "w1")
			o := Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}}
			r := tracingtest.HTTP(t)
			if c.traced {
				o.Tracer = tracer(t, r)
			}
			f := start(t, o)
			req := f.request(t.Context(), completions, body)
			if c.parent != "" {
				req.Header["Traceparent"] = []string{c.parent}
			}
			if c.state != "" && c.state != "\x7f" {
				req.Header["Tracestate"] = []string{c.state}
			} else if c.state != "" {
				req.Header["Tracestate"] = []string{"=,="}
			}
			if res, text := f.do(req); res.StatusCode != 200 {
				t.Fatal(res.StatusCode, text)
			}
			h := e.requests[0].Header
			got := h.Get("traceparent")
			if !strings.HasPrefix(got, c.want) || strings.Contains(got, me.span) != c.same || h.Get("tracestate") != c.wantState {
				t.Errorf("the worker got %q, %q", got, h.Get("tracestate"))
			}
			if c.traced && c.parent != me.parent(true) && c.parent != me.parent(false) && (len(got) != 55 || strings.Contains(got, me.trace)) {
				t.Errorf("%q is no trace of its own", got)
			}
			if c.name == "not recorded" && !strings.HasSuffix(got, "-00") {
				t.Errorf("%q: the client's decision is lost", got)
			}
		})
	}
}

// The search for token ids says how it ended, and the worker that is asked sees the trace.
func TestTraceOfTokenize(t *testing.T) {
	e := newEngine(t, "w1")
	asked := make(chan string, 1)
	e.tokens = func(w http.ResponseWriter, r *http.Request, body []byte) {
		asked <- r.Header.Get("traceparent")
		answerTokens(w, body)
	}
	r := tracingtest.HTTP(t)
	f := start(t, Options{Index: &fakeIndex{blockSize: 4}, Workers: []Worker{e.worker()}, Tracer: tracer(t, r)})
	for _, result := range []string{tokenizeAsked, tokenizeCached} {
		me := newCaller()
		f.post(completions, `{"model":"llama","prompt":"twelve bytes"}`, "traceparent", me.parent(true))
		got := r.Trace(t, me.trace, map[string]int{completionSpan: 1, spanTokenize: 1, spanHash: 1})
		s := got[spanTokenize][0]
		wantAttrs(t, s, "warmroute.tokenize", result, "warmroute.tokens", "12")
		if s.Parent() != got[completionSpan][0].ID() || s.Failed() {
			t.Errorf("%v", s)
		}
		if result == tokenizeAsked {
			if parent := <-asked; parent != "00-"+me.trace+"-"+s.ID()+"-01" {
				t.Errorf("/tokenize got %q", parent)
			}
		}
	}
	e.tokens = func(w http.ResponseWriter, _ *http.Request, _ []byte) { w.WriteHeader(http.StatusInternalServerError) }
	me := newCaller()
	f.post(completions, `{"model":"llama","prompt":"another text"}`, "traceparent", me.parent(true))
	got := r.Trace(t, me.trace, map[string]int{completionSpan: 1, spanTokenize: 1})
	wantAttrs(t, got[spanTokenize][0], "warmroute.tokenize", tokenizeFailed)
	wantAttrs(t, got[completionSpan][0], "warmroute.fallback_reason", reasonTokenize, "warmroute.index_state", "bypassed", "warmroute.overlap_blocks", "")
	if !got[spanTokenize][0].Failed() || got[completionSpan][0].Failed() {
		t.Error("a request without token ids is served all the same, and its span says so")
	}
}

// Each shard's part of a lookup is a span, also of one that is away; a frontend without Redis says why it fell back.
func TestTraceOfLookups(t *testing.T) {
	redis := storetest.Redis(t)
	body, ids := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	r := tracingtest.HTTP(t)
	tr := tracer(t, r)
	index, err := store.New(store.Options{URL: redis.URL, Shards: 2, LookupBudget: time.Minute, Observe: ObserveLookups(tr)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = index.Close() })
	hold(t, index, e1, ids)
	hold(t, index, e2, ids[:16])
	f := start(t, Options{Index: index, Workers: []Worker{e1.worker(), e2.worker()}, Tracer: tr})
	me := newCaller()
	f.post(completions, body, "traceparent", me.parent(true))
	got := r.Trace(t, me.trace, map[string]int{completionSpan: 1, spanLookup: 2, spanSelect: 1, spanUpstream: 1})
	shards := map[string]bool{}
	for _, s := range got[spanLookup] {
		shards[s.Attr("warmroute.shard")] = true
		wantAttrs(t, s, "warmroute.blocks", "4", "warmroute.reason", "")
		if s.Parent() != got[completionSpan][0].ID() || s.Failed() || s.EndTimeUnixNano < s.StartTimeUnixNano {
			t.Errorf("%v", s)
		}
	}
	if len(shards) != 2 || !shards["default:llama#0"] || !shards["default:llama#1"] {
		t.Errorf("shards %v", shards)
	}
	wantAttrs(t, got[spanSelect][0], "warmroute.shared_loads", "true", "warmroute.worker", "w1")

	redis.Stop()
	me = newCaller()
	if res, _ := f.post(completions, body, "traceparent", me.parent(true)); res.StatusCode != 200 || res.Header.Get(headerState) != "degraded" {
		t.Fatal(res.StatusCode, res.Header)
	}
	got = r.Trace(t, me.trace, map[string]int{completionSpan: 1, spanLookup: 2, spanSelect: 1, spanUpstream: 1})
	for _, s := range got[spanLookup] {
		wantAttrs(t, s, "warmroute.reason", store.ReasonConnection)
		if !s.Failed() {
			t.Errorf("%v", s)
		}
	}
	wantAttrs(t, got[completionSpan][0], "warmroute.index_state", "degraded", "warmroute.fallback_reason", store.ReasonConnection, "warmroute.overlap_blocks", "")
	wantAttrs(t, got[spanSelect][0], "warmroute.policy", "conversation-hash", "warmroute.shared_loads", "false")
	if got[completionSpan][0].Failed() {
		t.Error("a request that was served is marked as failed")
	}
}

// How an answer ends is in the trace: well, broken by the worker, left by the client.
func TestTraceOfAnswersThatBreakOff(t *testing.T) {
	e := newEngine(t, "w1")
	left := make(chan struct{})
	e.serve = func(w http.ResponseWriter, r *http.Request, body []byte) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		if strings.Contains(string(body), "breaks") {
			abort(w)
			return
		}
		<-r.Context().Done()
		close(left)
	}
	r := tracingtest.HTTP(t)
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, Tracer: tracer(t, r)})
	read := func(ctx context.Context, body string, me caller, seen func()) error {
		res, err := client.Do(f.request(ctx, completions, body, "traceparent", me.parent(true)))
		if err != nil {
			return err
		}
		defer res.Body.Close()
		if _, err := res.Body.Read(make([]byte, 1)); err != nil {
			return err
		}
		seen()
		_, err = io.ReadAll(res.Body)
		return err
	}
	me := newCaller()
	if err := read(t.Context(), `{"model":"llama","prompt":[1],"stream":true,"user":"breaks"}`, me, func() {}); err == nil {
		t.Fatal("the answer ended well")
	}
	got := r.Trace(t, me.trace, map[string]int{completionSpan: 1, spanUpstream: 1})
	if !got[completionSpan][0].Failed() || !got[spanUpstream][0].Failed() {
		t.Errorf("an answer that the worker broke off: %v", got)
	}
	wantAttrs(t, got[spanUpstream][0], "warmroute.reason", failAborted, "http.response.status_code", "200")

	me = newCaller()
	ctx, cancel := context.WithCancel(t.Context())
	if err := read(ctx, streamBody, me, cancel); err == nil {
		t.Fatal("the answer ended well")
	}
	<-left
	got = r.Trace(t, me.trace, map[string]int{completionSpan: 1, spanUpstream: 1})
	if got[completionSpan][0].Failed() || got[spanUpstream][0].Failed() {
		t.Errorf("a client that left is no failure: %v", got)
	}
}

// Index queries are traced; of a model that a client made up, the name is in no span, and a stranger makes none.
func TestTraceOfQuestions(t *testing.T) {
	_, ids := prompt(64)
	e := newEngine(t, "w1")
	r := tracingtest.HTTP(t)
	f := start(t, Options{Index: holding(16, ids, map[string]int{"w1": 4}), Workers: []Worker{e.worker()}, Tokens: tokens(t, "right", "", ""), Tracer: tracer(t, r)})
	ask := func(path, body, token string) (int, caller) {
		me := newCaller()
		res, _ := f.post(path, body, "traceparent", me.parent(true), "Authorization", "Bearer "+token)
		return res.StatusCode, me
	}
	const tokens = `"token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}`
	if status, _ := ask("/query", `{"model":"llama",`+tokens, "wrong"); status != 401 {
		t.Fatal(status)
	}
	if status, _ := ask("/query", `{"model":"made-up",`+tokens, "right"); status != 404 {
		t.Fatal(status)
	}
	status, me := ask("/select", `{"model":"llama",`+tokens, "right")
	got := r.Trace(t, me.trace, map[string]int{"POST /select": 1, spanHash: 1, spanSelect: 1})
	wantAttrs(t, got["POST /select"][0], "http.response.status_code", fmt.Sprint(status), "warmroute.pool", "default:llama", "warmroute.index_state", "exact", "warmroute.blocks", "1")
	wantAttrs(t, got[spanSelect][0], "warmroute.worker", "w1", "warmroute.overlap_blocks", "1")
	if status != 200 || strings.Contains(r.Bytes(), "made-up") {
		t.Error("a client's text is in a span")
	}
	for _, s := range r.Spans() {
		if s.Attr("http.response.status_code") == "401" {
			t.Error("a stranger's request has a span")
		}
	}
}

// Nothing of what clients write, and no credential, is in what is sent to the receiver.
func TestTracesHoldNothingOfThePrompt(t *testing.T) {
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	r := tracingtest.HTTP(t)
	f := start(t, Options{
		Index: &fakeIndex{blockSize: 4}, Workers: []Worker{e1.worker(), e2.worker()}, WorkerToken: func() string { return "s3cret-worker" }, Tokens: tokens(t, "s3cret-client", "", ""), Tracer: tracer(t, r),
	})
	f.swap("w1", refusing(t))
	for _, c := range []struct{ path, body string }{
		{completions, `{"model":"llama","prompt":"a s3cret prompt","user":"s3cret","cache_salt":"s3cret"}`},
		{"/v1/chat/completions", `{"model":"llama","messages":[{"role":"user","content":"s3cret"}]}`},
		{completions, `{"model":"s3cret","prompt":"x"}`},
		{completions, `{"s3cret`},
		{"/tokenize", `{"model":"llama","prompt":"s3cret"}`},
		{"/query", `{"model":"s3cret","token_ids":[1,2,3,4]}`},
		{"/select", `{"model":"llama","token_ids":[1,2,3,4],"session_id":"s3cret","pinned_worker":"s3cret"}`},
	} {
		me := newCaller()
		f.post(c.path+"?s3cret=s3cret", c.body, "traceparent", me.parent(true), "Authorization", "Bearer s3cret-client", "x-session-id", "s3cret",
			"x-request-id", "s3cret", "user-agent", "s3cret", "baggage", "k=s3cret", "x-allowed-worker-ids", "s3cret,w1,w2")
		r.Trace(t, me.trace, map[string]int{"POST " + c.path: 1})
	}
	if strings.Contains(r.Bytes(), "s3cret") {
		t.Error("what a client wrote, or a credential, was sent to the receiver of traces")
	}
}

// A receiver that hangs, and one that is not there, cost no request.
func TestReceiverAwayCostsNoRequest(t *testing.T) {
	body, _ := prompt(64)
	for _, name := range []string{"hangs", "is not there"} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, "w1")
			r := tracingtest.HTTP(t)
			asked := make(chan struct{}, 1000)
			r.Answer = func(req *http.Request) int {
				asked <- struct{}{}
				<-req.Context().Done()
				return http.StatusServiceUnavailable
			}
			tr := tracer(t, r)
			if name != "hangs" {
				r.Close()
			}
			f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, Tracer: tr})
			for i := range 200 {
				if res, text := f.post(completions, body); res.StatusCode != 200 {
					t.Fatal(i, res.StatusCode, text)
				}
				if i == 0 && name == "hangs" {
					<-asked // the rest is served while a batch is under way
				}
			}
			f.wantIdle()
			r.Close()
		})
	}
}

// docs/operations.md has every span and every attribute, and no others.
func TestTracesAreDocumented(t *testing.T) {
	source, err := os.ReadFile("trace.go")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## Traces\n")
	section, _, _ = strings.Cut(section, "\n## ")
	names := func(expr, text string) []string {
		var out []string
		for _, m := range regexp.MustCompile(expr).FindAllStringSubmatch(text, -1) {
			out = append(out, m[1])
		}
		slices.Sort(out)
		return slices.Compact(out)
	}
	code := names(`attribute\.Key\("(?:warmroute\.)?([\w.]+)"\)`, string(source))
	docs := names("`(?:warmroute)?\\.?((?:http\\.)?[a-z][a-z_.]+)`", strings.Join(regexp.MustCompile("(?m)^\\| `.*$").FindAllString(section, -1), "\n"))
	docs = slices.DeleteFunc(docs, func(s string) bool {
		return slices.Contains([]string{spanTokenize, spanHash, spanLookup, spanSelect, spanUpstream, "warmroute_tokenize_total", "warmroute_selected_total"}, s) && !slices.Contains(code, s)
	})
	if !slices.Equal(code, docs) || len(code) < 10 {
		t.Errorf("attributes of the code: %v\nof docs/operations.md: %v", code, docs)
	}
	for _, s := range names(`span\w+\s+= "(\w+)"`, string(source)) {
		if !strings.Contains(section, "\n| `"+s+"` |") {
			t.Errorf("docs/operations.md lacks the span %s", s)
		}
	}
}

// What every request passes on its way costs no allocation where nothing is traced.
func TestNoTracerAllocatesNothing(t *testing.T) {
	f := bare(t, 2, PolicyKV)
	x := &exchange{knowledge: knowledge{blockSize: 16, tokens: 64, blocks: 4, state: kvcache.Exact}, chosen: &candidate{}}
	q := &question{}
	ctx, header := t.Context(), http.Header{"Traceparent": {newCaller().parent(true)}}
	n := testing.AllocsPerRun(1000, func() {
		f.traced(nil)
		_, s := begin(ctx, f.o.Tracer, spanTokenize, trace.SpanKindInternal)
		s.tokenized(1, nil)
		f.hash(ctx, kvcache.HashSpec{BlockSize: 16}, nil)
		_, part := f.attempted(ctx, x)
		inject(ctx, header)
		part.answered(200)
		part.firstByte()
		part.fail(failDial)
		part.chosen(&x.knowledge, x.chosen)
		part.end()
		f.describe(ctx, x)
		f.learnt(ctx, q, &x.knowledge)
	})
	if n != 0 {
		t.Errorf("%v allocations per request", n)
	}
	if len(header) != 1 || header.Get("traceparent") == "" {
		t.Errorf("header %v", header)
	}
}
