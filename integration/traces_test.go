package integration

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/warmroute/warmroute/frontend/tracing/tracingtest"
)

// watchedEngine is a simulated engine behind a proxy that keeps the traceparents of what passes.
type watchedEngine struct {
	*engine
	mu      sync.Mutex
	parents map[string]string // path → the last one
}

func startWatchedEngine(t *testing.T, id string) *watchedEngine {
	t.Helper()
	w := &watchedEngine{engine: startEngine(t, id), parents: map[string]string{}}
	base, err := url.Parse(w.base)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(base)
	s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.parents[r.URL.Path] = r.Header.Get("traceparent")
		w.mu.Unlock()
		proxy.ServeHTTP(rw, r)
	}))
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	w.base = s.URL
	return w
}

func (w *watchedEngine) parent(path string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.parents[path]
}

const (
	chatPath = "/v1/chat/completions"
	chatSpan = "POST " + chatPath
)

// tracedChat asks for a chat completion as a part of a trace. The span of the client is the trace's id cut in half.
func tracedChat(t *testing.T, url, trace string, messages ...message) http.Header {
	t.Helper()
	body, err := json.Marshal(map[string]any{"model": model, "messages": messages, "max_tokens": 4})
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+chatPath, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("traceparent", "00-"+trace+"-"+trace[16:]+"-01")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d, %v: %.300s", resp.StatusCode, err, answer)
	}
	return resp.Header
}

// traceID makes the id of a trace of a digit.
func traceID(digit string) string { return strings.Repeat(digit, 32) }

func wantAttrs(t *testing.T, s tracingtest.Span, pairs ...string) {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if got := s.Attr(pairs[i]); got != pairs[i+1] {
			t.Errorf("span %q: %s is %q, want %q", s.Name, pairs[i], got, pairs[i+1])
		}
	}
}

// A request's way through a frontend, from the client's span to the engine's, with a real Redis, with it away, and without a
// receiver of traces.
func TestTracesOfRequests(t *testing.T) {
	redis := startRedis(t)
	watched := map[string]*watchedEngine{"e0": startWatchedEngine(t, "e0"), "e1": startWatchedEngine(t, "e1")}
	engines := workers(watched["e0"].engine, watched["e1"].engine)
	_, indexer := startIndexer(t, redis.url(), append(engines, "--shards=2")...)
	eventually(t, "both streams are registered", func() bool {
		return strings.Count(get(t, indexer+"/workers"), `"registered":true`) == 2
	})
	r := tracingtest.HTTP(t)
	// Of the traces that begin here none is recorded; those of the client are.
	p, frontend := startFrontend(t, redis.url(), append(engines, "--otlp-endpoint="+r.URL, "--trace-ratio=0", "--lookup-budget=5s", "--tokenize-timeout=10s")...)
	system, question := longPrompt("medlars"), message{"user", "what is it?"}
	first := chat(t, frontend, system, question)
	awaitOverlap(t, frontend, first.worker, first, system, question)
	question.Content += " and why?"

	id := traceID("1")
	h := tracedChat(t, frontend, id, system, question)
	got := r.Trace(t, id, map[string]int{chatSpan: 1, "tokenize": 1, "hash": 1, "lookup": 2, "select": 1, "upstream": 1})
	request := got[chatSpan][0]
	if request.Parent() != id[16:] || request.Failed() || request.Resource["service.name"] != "warmroute-frontend" {
		t.Errorf("the request's span: %v, of %v", request, request.Resource)
	}
	wantAttrs(t, request, "http.response.status_code", "200", "warmroute.pool", "default:"+model, "warmroute.worker", h.Get("X-Worker-Instance-Id"),
		"warmroute.index_state", "exact", "warmroute.blocks", h.Get("X-Kv-Prompt-Blocks"), "warmroute.overlap_blocks", h.Get("X-Kv-Overlap-Blocks"),
		"warmroute.retries", "0", "warmroute.fallback_reason", "")
	shards := map[string]bool{}
	for name, parts := range got {
		for _, s := range parts {
			if name != chatSpan && (s.Parent() != request.ID() || s.StartTimeUnixNano < request.StartTimeUnixNano || s.Failed()) {
				t.Errorf("%q is no good part of the request: %v", name, s)
			}
			if name == "lookup" {
				shards[s.Attr("warmroute.shard")] = true
				wantAttrs(t, s, "warmroute.blocks", h.Get("X-Kv-Prompt-Blocks"), "warmroute.reason", "")
			}
		}
	}
	if len(shards) != 2 || !shards["default:"+model+"#0"] || !shards["default:"+model+"#1"] {
		t.Errorf("lookups of %v", shards)
	}
	wantAttrs(t, got["tokenize"][0], "warmroute.tokenize", "asked")
	wantAttrs(t, got["select"][0], "warmroute.policy", "kv", "warmroute.reason", "overlap", "warmroute.shared_loads", "true", "warmroute.candidates", "2")
	e := watched[h.Get("X-Worker-Instance-Id")]
	if want := "00-" + id + "-" + got["upstream"][0].ID() + "-01"; e.parent(chatPath) != want {
		t.Errorf("the engine got traceparent %q, want %q", e.parent(chatPath), want)
	}
	if n := len(r.Spans()); n != 7 {
		t.Errorf("%d spans, want the 7 of the trace that the client records", n)
	}

	redis.stop()
	id = traceID("2")
	if h := tracedChat(t, frontend, id, system, question); h.Get("X-Kv-Index-State") != "degraded" {
		t.Errorf("Redis away: %v", h)
	}
	got = r.Trace(t, id, map[string]int{chatSpan: 1, "select": 1, "upstream": 1})
	wantAttrs(t, got[chatSpan][0], "http.response.status_code", "200", "warmroute.index_state", "degraded", "warmroute.fallback_reason", "connection")
	wantAttrs(t, got["select"][0], "warmroute.policy", "conversation-hash", "warmroute.shared_loads", "false")
	for _, s := range got["lookup"] { // none where the link was known to be down before
		wantAttrs(t, s, "warmroute.reason", "connection")
	}
	if sent := r.Bytes(); strings.Contains(sent, "medlars") || strings.Contains(sent, "quick brown fox") || strings.Contains(sent, "what is it") {
		t.Error("the prompt is in the trace")
	}

	r.Close()
	for range 20 {
		tracedChat(t, frontend, traceID("3"), system, question)
	}
	p.awaitLine("spans are dropped")
	tracedChat(t, frontend, traceID("3"), system, question)
	eventually(t, "spans that are dropped are counted", func() bool {
		return strings.Contains(get(t, frontend+"/metrics"), `warmroute_trace_spans_dropped_total{reason="send"}`)
	})
	p.terminate()
	if n := strings.Count(strings.Join(p.log(), "\n"), "spans are dropped"); n != 1 {
		t.Errorf("the log says %d times that spans are dropped", n)
	}
}

// The standard variables are enough, over gRPC as well; serve has the spans of its frontend.
func TestTracesByStandardVariables(t *testing.T) {
	e0 := startEngine(t, "e0")
	r := tracingtest.GRPC(t)
	cmd := exec.Command(warmroute, append(workers(e0), "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--poll-interval=100ms",
		"--log-format=json", "--log-level=debug")...)
	cmd.Args = slices.Insert(cmd.Args, 1, "serve")
	cmd.Env = append(os.Environ(), "OTEL_EXPORTER_OTLP_ENDPOINT="+r.URL, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc", "OTEL_SERVICE_NAME=edge")
	p := startCommand(t, "serve", cmd)
	frontend := p.url("frontend")
	awaitReady(t, frontend)
	id := traceID("4")
	tracedChat(t, frontend, id, message{"user", "hello"})
	p.terminate() // sends what is left
	got := r.Trace(t, id, map[string]int{chatSpan: 1, "tokenize": 1, "select": 1, "upstream": 1})
	if s := got[chatSpan][0]; s.Resource["service.name"] != "edge" || s.Resource["service.version"] == "" {
		t.Errorf("resource %v", s.Resource)
	}
}
