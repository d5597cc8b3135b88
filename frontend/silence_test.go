package frontend

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// journal is a log that may be read while it is written.
type journal struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.b.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.b.String()
}

// misbehave are ways of an engine to answer, each with as much of the prompt as it can repeat.
var misbehave = map[string]func(w http.ResponseWriter, r *http.Request, body []byte){
	"echo": func(w http.ResponseWriter, _ *http.Request, body []byte) { _, _ = w.Write(body) },
	"400": func(w http.ResponseWriter, _ *http.Request, body []byte) {
		http.Error(w, string(body), http.StatusBadRequest)
	},
	"500": func(w http.ResponseWriter, _ *http.Request, body []byte) {
		http.Error(w, string(body), http.StatusInternalServerError)
	},
	"503": func(w http.ResponseWriter, _ *http.Request, body []byte) {
		http.Error(w, string(body), http.StatusServiceUnavailable)
	},
	"redirect": func(w http.ResponseWriter, r *http.Request, _ []byte) {
		http.Redirect(w, r, "http://127.0.0.1:1/"+secretWord, http.StatusFound)
	},
	"stream that breaks off": func(w http.ResponseWriter, _ *http.Request, body []byte) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = fmt.Fprintf(w, "data: %s\n\n", body)
		_ = http.NewResponseController(w).Flush()
		abort(w)
	},
	"no HTTP": func(w http.ResponseWriter, _ *http.Request, body []byte) { say(w, string(body)+"\r\n") },
	"a wrong status": func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		say(w, "HTTP/1.1 "+secretWord+"\r\n\r\n")
	},
	"a wrong header": func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		say(w, "HTTP/1.1 200 OK\r\n"+secretWord+" "+secretWord+"\r\n\r\n")
	},
	"a wrong chunk": func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		say(w, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+secretWord+"\r\n")
	},
	"a wrong length": func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		say(w, "HTTP/1.1 200 OK\r\nContent-Length: "+secretWord+"\r\n\r\n")
	},
	"a hang-up": func(w http.ResponseWriter, _ *http.Request, _ []byte) { abort(w) },
}

const (
	secretWord  = "xyzzyplugh"
	secretToken = 4242424242 // a token id
)

// say writes what is no answer, and hangs up.
func say(w http.ResponseWriter, s string) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	_, _ = io.WriteString(conn, s)
	_ = conn.Close()
}

// Whatever happens to a request, and at the lowest level: no part of its prompt is in the log, in a span, in a metric, on the page, or in what
// a frontend says of itself.
func TestNobodyIsToldOfPrompts(t *testing.T) {
	var log journal
	spans := tracetest.NewInMemoryExporter()
	e := newEngine(t, "w1")
	type behaviour = func(w http.ResponseWriter, r *http.Request, body []byte)
	var serve, tokenize atomic.Pointer[behaviour]
	e.serve = func(w http.ResponseWriter, r *http.Request, body []byte) { (*serve.Load())(w, r, body) }
	e.tokens = func(w http.ResponseWriter, r *http.Request, body []byte) { (*tokenize.Load())(w, r, body) }
	tokens := func(w http.ResponseWriter, _ *http.Request, body []byte) { answerTokens(w, body) }
	var fault atomic.Pointer[func() error]
	x := &fakeIndex{blockSize: 2, lookup: func(context.Context) error {
		if f := fault.Load(); f != nil {
			return (*f)()
		}
		return nil
	}}
	f := start(t, Options{
		Index: x, Workers: []Worker{e.worker()}, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Tracer: sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans)).Tracer("test"), BreakerFailures: -1, MaxBody: 4096, MaxBuffered: 1 << 20,
		ResponseHeaderTimeout: time.Minute,
	})
	feed, stop := context.WithCancel(t.Context())
	defer stop()
	var page journal
	req, err := http.NewRequestWithContext(feed, http.MethodGet, f.url+"/ui/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	watched, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer watched.Body.Close()
	done := make(chan struct{})
	go func() { defer close(done); _, _ = io.Copy(&page, watched.Body) }()

	ids := fmt.Sprintf("[%d,%d,%d,%d,%d]", secretToken, secretToken, secretToken, secretToken, secretToken)
	text := fmt.Sprintf(`"%s %s"`, secretWord, secretWord)
	bodies := map[string][]string{
		"/v1/chat/completions": {
			`{"model":"llama","messages":[{"role":"user","content":` + text + `}]}`, `{"model":"llama","messages":[{"role":"user","content":` + text,
			`{"model":"llama","messages":` + text + `}`, `{"model":` + text + `,"messages":[{"role":"user","content":"x"}]}`, secretWord,
			`{"model":"llama","cache_salt":` + text + `,"messages":[{"role":"user","content":` + text + `}]}`,
			`{"model":"llama","messages":[{"role":"user","content":"` + strings.Repeat(secretWord+" ", 1000) + `"}]}`,
		},
		completions: {
			`{"model":"llama","prompt":` + text + `}`, `{"model":"llama","prompt":` + ids + `}`, `{"model":"llama","prompt":[` + text + `]}`,
			`{"model":"llama","prompt":[[` + secretWord + `]]}`, `{"model":"llama","prompt":[1,` + text + `]}`, `{"model":"llama","prompt":{"` + secretWord + `":1}}`,
		},
		"/v1/embeddings":      {`{"model":"llama","input":` + text + `}`},
		"/v1/responses":       {`{"model":"llama","input":` + text + `}`},
		"/tokenize":           {`{"model":"llama","proxied":1,"prompt":` + text + `}`},
		"/detokenize":         {`{"model":"llama","proxied":1,"tokens":` + ids + `}`},
		"/query":              {`{"model":"llama","token_ids":` + ids + `}`, `{"model":"llama","token_ids":` + text + `}`, `{"model":` + text + `,"token_ids":` + ids + `}`},
		"/query_by_hash":      {`{"model":"llama","block_hashes":[` + text + `]}`},
		"/select":             {`{"model_name":"llama","token_ids":` + ids + `}`, `{"model_name":"llama","token_ids":[` + text + `]}`},
		"/select_and_reserve": {`{"model_name":"llama","token_ids":` + ids + `}`},
		"/potential_loads":    {`{"model_name":"llama","token_ids":` + ids + `}`},
		"/ui/explore":         {`{"model":"llama","token_ids":` + ids + `}`, `{"model":"llama","token_ids":` + text + `}`},
		"/" + secretWord:      {"{}"},
	}
	asked := 0
	ask := func(path, body string, header ...string) {
		t.Helper()
		asked++
		res, err := noRedirect.Do(f.request(t.Context(), path, body, header...))
		if err != nil {
			return // an answer that breaks off before it begins
		}
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
	}
	for how, behave := range misbehave {
		serve.Store(&behave)
		tokenize.Store(&tokens)
		if how == "400" || how == "a wrong status" || how == "no HTTP" {
			tokenize.Store(&behave)
		}
		for path, list := range bodies {
			for _, body := range list {
				ask(path, body, "X-Kv-Explain", "1")
			}
		}
	}
	for _, f := range []func() error{func() error { panic("a bug") }, func() error { return io.ErrUnexpectedEOF }} {
		fault.Store(&f)
		ask(completions, bodies[completions][1])
		ask("/query", bodies["/query"][0])
	}
	// Nobody is there.
	e.CloseClientConnections()
	e.vanished.Store(true)
	ask(completions, bodies[completions][1])
	e.Listener.Close()
	e.CloseClientConnections()
	ask(completions, bodies[completions][0])

	f.eventually("the page has shown a decision, and another second", func() bool {
		s := page.String()
		return strings.Contains(s, `"decisions":[{`) && strings.Count(s, "data: ") >= 3
	})
	stop()
	<-done
	said := map[string]string{"the log": log.String(), "the page": page.String(), "a span": fmt.Sprintf("%+v", spans.GetSpans())}
	for _, path := range []string{"/metrics", "/workers", "/ready", "/loads", "/ui/state", "/v1/models"} {
		_, said[path] = f.get(path)
	}
	for where, s := range said {
		if s == "" {
			t.Errorf("%s is empty: the test sees nothing", where)
		}
		for _, secret := range []string{secretWord, fmt.Sprint(uint32(secretToken)), fmt.Sprintf("%x", uint32(secretToken))} {
			if i := strings.Index(s, secret); i >= 0 {
				t.Errorf("%s tells of a prompt: …%s…", where, s[max(0, i-200):min(len(s), i+100)])
			}
		}
	}
	if !strings.Contains(said["the log"], "worker failed a request") || len(spans.GetSpans()) < 100 || asked < 300 {
		t.Errorf("%d requests, %d spans: less than the test is about\n%.2000s", asked, len(spans.GetSpans()), said["the log"])
	}
}
