package frontend

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
)

// padded is a valid completion request of n bytes.
func padded(n int) string {
	const head, tail = `{"model":"llama","prompt":[1],"pad":"`, `"}`
	return head + strings.Repeat("x", n-len(head)-len(tail)) + tail
}

func TestBodyLimit(t *testing.T) {
	const limit = 200_000
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, MaxBody: limit})
	for _, chunked := range []bool{false, true} {
		for _, n := range []int{100, bodyChunk, 2 * bodyChunk, limit - 1, limit, limit + 1, 2 * limit} {
			t.Run(fmt.Sprintf("%d bytes, chunked %v", n, chunked), func(t *testing.T) {
				body := padded(n)
				req := f.request(t.Context(), completions, body)
				if chunked {
					req.Body, req.ContentLength = io.NopCloser(strings.NewReader(body)), -1
				}
				before := e.served()
				res, text := f.do(req)
				if n > limit {
					wantError(t, res, text, 413, "request_too_large")
					if e.served() != before {
						t.Error("the worker got it")
					}
				} else if res.StatusCode != 200 || string(e.bodies[len(e.bodies)-1]) != body {
					t.Errorf("%d %s", res.StatusCode, text)
				}
			})
		}
	}
	f.wantIdle()
}

func TestBuffersAreBoundedInAll(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, MaxBody: 1 << 20, MaxBuffered: 1 << 20})
	// A client that has announced a large body and is slow to send it.
	slow, finish := io.Pipe()
	req := f.request(t.Context(), completions, "")
	req.Body, req.ContentLength = slow, 900_000
	done := make(chan int)
	go func() {
		res, err := client.Do(req)
		if err != nil {
			t.Error(err)
			done <- 0
			return
		}
		res.Body.Close()
		done <- res.StatusCode
	}()
	text := padded(900_000)
	_, _ = finish.Write([]byte(text[:800_000]))
	f.eventually("the body is being read", func() bool { return f.buffered.used.Load() >= 750_000 })
	for _, chunked := range []bool{false, true} {
		body := padded(300_000)
		req := f.request(t.Context(), completions, body)
		if chunked {
			req.Body, req.ContentLength = io.NopCloser(strings.NewReader(body)), -1
		}
		res, text := f.do(req)
		wantError(t, res, text, 503, "overloaded")
	}
	if res, _ := f.post(completions, streamBody); res.StatusCode != 200 {
		t.Errorf("a small body: %d", res.StatusCode)
	}
	_, _ = finish.Write([]byte(text[800_000:]))
	if code := <-done; code != 200 {
		t.Errorf("the large body: %d", code)
	}
	f.wantIdle()
}

func TestInFlightLimit(t *testing.T) {
	e := newEngine(t, "w1")
	entered, leave := make(chan struct{}), make(chan struct{})
	e.serve = func(http.ResponseWriter, *http.Request, []byte) {
		entered <- struct{}{}
		<-leave
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, MaxInFlight: 2})
	done := make(chan int, 2)
	for range 2 {
		go func() {
			res, _ := f.post(completions, streamBody)
			done <- res.StatusCode
		}()
		<-entered
	}
	// Turned away without a look at the body, which never comes.
	never, w := io.Pipe()
	defer w.Close()
	req := f.request(t.Context(), completions, "")
	req.Body, req.ContentLength = never, 1000
	res, text := f.do(req)
	wantError(t, res, text, 503, "overloaded")
	close(leave)
	if a, b := <-done, <-done; a != 200 || b != 200 {
		t.Errorf("the two in flight: %d %d", a, b)
	}
	f.wantIdle()
}

func TestSlowBodyTimesOut(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, BodyTimeout: 50 * time.Millisecond})
	never, w := io.Pipe()
	defer w.Close()
	req := f.request(t.Context(), completions, "")
	req.Body, req.ContentLength = never, 1000
	res, text := f.do(req)
	wantError(t, res, text, 408, "request_timeout")
	f.wantIdle()
}

func TestBadRequestsReachNobody(t *testing.T) {
	e := newEngine(t, "w1")
	e.models = `{"data":[{"id":"llama","max_model_len":50},{"id":"other"}]}`
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, MaxPromptTokens: 1_000_000})
	long, _ := prompt(51)
	for name, test := range map[string]struct {
		path, body string
		status     int
		code       string
	}{
		"empty":                  {"/v1/chat/completions", ``, 400, "invalid_request"},
		"array":                  {"/v1/chat/completions", `[]`, 400, "invalid_request"},
		"cut off":                {"/v1/chat/completions", `{"model":"llama","mess`, 400, "invalid_request"},
		"deep":                   {"/v1/chat/completions", `{"model":"llama","messages":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + `}`, 400, "invalid_request"},
		"no model":               {"/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}]}`, 400, "invalid_request"},
		"wrong type":             {"/v1/chat/completions", `{"model":"llama","messages":{}}`, 400, "invalid_request"},
		"unknown model":          {"/v1/chat/completions", `{"model":"no\nsuch","messages":[{"role":"user","content":"x"}]}`, 404, "model_not_found"},
		"too many ids":           {completions, long, 400, "context_length_exceeded"},
		"too much text":          {completions, `{"model":"llama","prompt":"` + strings.Repeat("x", 51) + `"}`, 400, "context_length_exceeded"},
		"a million ids":          {completions, `{"model":"other","prompt":[0` + strings.Repeat(",1", 1_000_000) + `]}`, 400, "context_length_exceeded"},
		"no model for /tokenize": {"/tokenize", `{"prompt":"x"}`, 400, "invalid_request"},
		"embeddings":             {"/v1/embeddings", `{"model":"llama"}`, 400, "invalid_request"},
		"responses":              {"/v1/responses", `{"model":"llama"}`, 400, "invalid_request"},
		"query":                  {"/query", `{"model":"llama","token_ids":"x"}`, 400, "invalid_request"},
		"query of nothing":       {"/query", `{"model":"llama"}`, 400, "invalid_request"},
		"no such route":          {"/v1/audio", `{}`, 404, "not_found"},
		"wrong method":           {"/health", `{}`, 405, "method_not_allowed"},
	} {
		t.Run(name, func(t *testing.T) {
			res, text := f.post(test.path, test.body)
			wantError(t, res, text, test.status, test.code)
			if res.Header.Get("X-Request-Id") == "" {
				t.Error("no request id")
			}
		})
	}
	res, text := f.post(completions, "\x1f\x8b", "Content-Encoding", "gzip")
	wantError(t, res, text, 415, "unsupported_encoding")
	if e.served() != 0 {
		t.Errorf("%d requests reached the worker", e.served())
	}
	f.wantIdle()
}

func TestNoWorker(t *testing.T) {
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}})
	res, text := f.post(completions, streamBody)
	wantError(t, res, text, 503, "no_workers") // nobody has said yet which models there are
	res, text = f.get("/ready")
	if res.StatusCode != 503 || !strings.Contains(text, `"no worker"`) {
		t.Errorf("/ready: %d %s", res.StatusCode, text)
	}
	if res, _ = f.get("/health"); res.StatusCode != 200 {
		t.Errorf("/health: %d", res.StatusCode)
	}
}

func TestToken(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, Tokens: tokens(t, "sesame", "", ""), WorkerToken: func() string { return "inner" }})
	for _, header := range []string{"", "Bearer", "Bearer wrong", "Basic sesame"} {
		for _, path := range []string{completions, "/query", "/select"} {
			res, text := f.post(path, streamBody, "Authorization", header)
			wantError(t, res, text, 401, "invalid_api_key")
		}
	}
	if e.served() != 0 {
		t.Fatal("the worker was reached without the token")
	}
	res, _ := f.post(completions, streamBody, "Authorization", "bearer sesame")
	if res.StatusCode != 200 || e.requests[0].Header.Get("Authorization") != "Bearer inner" {
		t.Errorf("%d, the worker got %q", res.StatusCode, e.requests[0].Header.Get("Authorization"))
	}
	for _, path := range []string{"/health", "/ready", "/metrics"} {
		if res, _ := f.get(path); res.StatusCode != 200 {
			t.Errorf("%s: %d", path, res.StatusCode)
		}
	}
}

// Whatever clients send, the number of series stays what routes, models and workers make it.
func TestLabelsAreBounded(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	series := func() int {
		families, err := f.reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, family := range families {
			n += len(family.GetMetric())
		}
		return n
	}
	random := func(i int) {
		f.get(fmt.Sprintf("/x/%d", i))
		f.post(completions, fmt.Sprintf(`{"model":"m%d","prompt":[1]}`, i))
		f.post("/query", fmt.Sprintf(`{"model":"m%d","tenant_id":"t%d","token_ids":[1]}`, i, i))
		f.post(completions, `{"model":"llama","prompt":[1]}`, "x-worker-instance-id", fmt.Sprintf("x%d", i))
	}
	random(0)
	f.post(completions, streamBody)
	counted := func(n float64) {
		f.eventually("all requests are counted", func() bool { return f.metric("warmroute_requests_total") == n })
	}
	counted(5)
	before := series()
	for i := range 100 {
		random(i + 1)
	}
	counted(405)
	if after := series(); after != before {
		t.Errorf("%d series became %d", before, after)
	}
}

// A bug on the way to the index costs the overlaps, one elsewhere the request; never the process.
func TestPanicIsAnswered(t *testing.T) {
	e := newEngine(t, "w1")
	x := &fakeIndex{
		blockSize: 16, lookup: func(context.Context) error { panic("a bug") },
		dump: func(func(kvcache.RouterEvent) error) error { panic("another bug") },
	}
	f := start(t, Options{Index: x, Workers: []Worker{e.worker()}})
	res, _ := f.post(completions, streamBody)
	if res.StatusCode != 200 || res.Header.Get("X-Kv-Index-State") != "degraded" || res.Header.Get("X-Kv-Overlap-Blocks") != "" {
		t.Errorf("%d %v", res.StatusCode, res.Header)
	}
	f.eventually("the fallback is counted", func() bool { return f.metric("warmroute_index_fallbacks_total", "reason", "corrupt") == 1 })
	dumped, text := f.get("/dump")
	wantError(t, dumped, text, 500, "internal_error")
	f.wantIdle()
	f.eventually("the request is counted", func() bool { return f.metric("warmroute_requests_total", "code", "500") == 1 })
}

func TestBodyReaderLetsGo(t *testing.T) {
	b := &bodyReader{[][]byte{[]byte("a"), {}, []byte("bc")}}
	got, err := io.ReadAll(b)
	if err != nil || !bytes.Equal(got, []byte("abc")) || b.rest != nil {
		t.Errorf("%q, %v, rest %v", got, err, b.rest)
	}
}

// Clients that announce large bodies and send none keep nobody out.
func TestAnnouncedBodiesTakeNoMemory(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, MaxBody: 1 << 20, MaxBuffered: 2 << 20})
	for range 4 {
		c, err := net.Dial("tcp", f.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "POST "+completions+" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{"); err != nil {
			t.Fatal(err)
		}
	}
	f.eventually("all are being read", func() bool { return f.underWay.used.Load() == 4 })
	if res, text := f.post(completions, streamBody); res.StatusCode != 200 {
		t.Errorf("%d %s", res.StatusCode, text)
	}
}
