package frontend

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Every route there is, and who may use it.
var access = map[string][]string{
	"open":   {"GET /", "GET /health", "GET /ready", "GET /metrics", "GET /openapi.yaml", "GET /ui", "GET /ui/assets/:file"},
	"client": {"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings", "POST /v1/responses"},
	"both":   {"GET /v1/models", "POST /tokenize", "POST /detokenize"},
	"query": {
		"POST /query", "POST /query_by_hash", "POST /select", "POST /select_and_reserve", "POST /reservations/:id/prefill_complete",
		"POST /reservations/:id/output_block", "DELETE /reservations/:id", "GET /loads", "POST /potential_loads", "GET /workers", "GET /dump",
		"GET /ui/events", "GET /ui/state", "POST /ui/explore",
	},
}

func TestEveryRouteAsksForItsToken(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Workers: []Worker{e.worker()}, Tokens: tokens(t, "old-client client", "query", "admin")})
	pass := map[string]map[string]int{ // 0: it passes
		"open":   {"": 0, "stranger": 0, "client": 0, "query": 0, "admin": 0},
		"client": {"": 401, "stranger": 401, "client": 0, "old-client": 0, "query": 403, "admin": 403},
		"both":   {"": 401, "stranger": 401, "client": 0, "old-client": 0, "query": 0, "admin": 0},
		"query":  {"": 401, "stranger": 401, "client": 403, "old-client": 403, "query": 0, "admin": 0},
	}
	parameter := regexp.MustCompile(`:\w+`)
	known := 0
	for _, route := range f.routes().(*gin.Engine).Routes() {
		kind := ""
		for k, list := range access {
			if slices.Contains(list, route.Method+" "+route.Path) {
				kind = k
				known++
			}
		}
		if kind == "" {
			t.Errorf("%s %s: who may use it?", route.Method, route.Path)
			continue
		}
		for token, want := range pass[kind] {
			ctx, cancel := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, route.Method, f.url+parameter.ReplaceAllString(route.Path, "x"), strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			if token != "" {
				req.Header.Set("Authorization", "Bearer "+token)
			}
			res, err := noRedirect.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			challenge := res.Header.Get("WWW-Authenticate")
			if got := res.StatusCode; want != 0 && got != want || want == 0 && (got == 401 || got == 403) {
				t.Errorf("%s %s with %q: %d, want %d", route.Method, route.Path, token, got, want)
			}
			if (want != 0) != strings.HasPrefix(challenge, guard.Realm) {
				t.Errorf("%s %s with %q: WWW-Authenticate %q", route.Method, route.Path, token, challenge)
			}
			if want != 0 {
				b, _ := io.ReadAll(res.Body)
				wantError(t, res, string(b), want, map[int]string{401: "invalid_api_key", 403: "insufficient_scope"}[want])
				if token != "" && token != "client" && token != "query" && token != "admin" && strings.Contains(string(b), token) {
					t.Errorf("the answer has the token: %s", b)
				}
			}
			cancel() // a feed has no end
			_ = res.Body.Close()
		}
	}
	if want := len(access["open"]) + len(access["client"]) + len(access["both"]) + len(access["query"]); known != want {
		t.Errorf("%d of %d routes of the table are there", known, want)
	}
	for _, r := range e.requests {
		if a := r.Header.Get("Authorization"); a != "" {
			t.Errorf("the worker got %q", a)
		}
	}
}

var noRedirect = &http.Client{
	Transport:     &http.Transport{DisableCompression: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// A worker gets what the client shows it, but never a token that is ours.
func TestWorkersSeeNoTokenOfOurs(t *testing.T) {
	e := newEngine(t, "w1")
	seen := make(chan string, 2)
	e.tokens = func(w http.ResponseWriter, r *http.Request, body []byte) {
		seen <- r.Header.Get("Authorization")
		answerTokens(w, body)
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, Tokens: tokens(t, "", "query", "admin")})
	for i, test := range []struct{ shown, want string }{
		{"", ""}, {"Bearer sk-of-the-engine", "Bearer sk-of-the-engine"}, {"Bearer query", ""}, {"bearer  admin", ""}, {"Basic dTpw", "Basic dTpw"},
	} {
		header := []string{}
		if test.shown != "" {
			header = []string{"Authorization", test.shown}
		}
		res, text := f.post(completions, `{"model":"llama","prompt":"`+strings.Repeat("x", i+1)+`"}`, header...)
		if res.StatusCode != 200 {
			t.Fatalf("%q: %d %s", test.shown, res.StatusCode, text)
		}
		if got := e.requests[i].Header.Get("Authorization"); got != test.want {
			t.Errorf("%q: the worker got %q", test.shown, got)
		}
		if got := <-seen; got != test.want {
			t.Errorf("%q: its tokenizer got %q", test.shown, got)
		}
	}
}

// A worker gets no header that nobody has looked at: a second one of a name, or one that follows the body.
func TestHeadersThatHide(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, Tokens: tokens(t, "", "query", "admin")})
	const body = `{"model":"llama","prompt":[1,2]}`
	begin := "POST " + completions + " HTTP/1.1\r\nHost: x\r\n"
	for _, say := range []string{
		begin + "Authorization: Basic x\r\nAuthorization: Bearer query\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body,
		begin + "Trailer: Authorization, X-Data-Parallel-Rank\r\nTransfer-Encoding: chunked\r\n\r\n" + strconv.FormatInt(int64(len(body)), 16) + "\r\n" + body +
			"\r\n0\r\nAuthorization: Bearer query\r\nX-Data-Parallel-Rank: 7\r\n\r\n",
	} {
		if s := f.raw(t, say).status(); s != 200 {
			t.Fatalf("status %d of %q", s, say)
		}
	}
	// Nor may a client take the request's id away, by the header that names others for the next hop alone, or bring a second one.
	c := f.raw(t, begin+"Connection: X-Request-Id\r\nX-Request-Id: one\r\nX-Request-Id: two\r\nContent-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body)
	res, err := http.ReadResponse(c.in, nil)
	if err != nil {
		t.Fatal(err)
	}
	if id := res.Header.Values("X-Request-Id"); !slices.Equal(id, []string{"one"}) {
		t.Errorf("the answer has the ids %q", id)
	}
	if id := e.requests[2].Header.Values("X-Request-Id"); !slices.Equal(id, []string{"one"}) {
		t.Errorf("the worker got the ids %q", id)
	}
	for i, r := range e.requests {
		if a := r.Header.Values("Authorization"); a != nil {
			t.Errorf("request %d: the worker got %q", i, a)
		}
		if len(r.Trailer) > 0 || r.ContentLength != int64(len(body)) || string(e.bodies[i]) != body {
			t.Errorf("request %d: trailers %v, length %d, body %q", i, r.Trailer, r.ContentLength, e.bodies[i])
		}
	}
}

// Lengths that contradict each other, or are none, end the connection, and no worker hears of them.
func TestBodiesWithoutAClearEnd(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Workers: []Worker{e.worker()}})
	const next = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n" // which nobody may take for a request
	for header, want := range map[string]int{
		"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}":                           400,
		"Content-Length: -1\r\n\r\n{}":                                               400,
		"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n":                               501,
		"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n": 501,
		"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n":                    400,
		"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n":                    400,
		"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n":                     400,
		"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{":                   400,
		"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n":                               400,
	} {
		c := f.raw(t, "POST "+completions+" HTTP/1.1\r\nHost: x\r\n"+header+next)
		if s := c.status(); s != want {
			t.Errorf("%q: status %d, want %d", header, s, want)
		}
		if s := c.status(); s != 0 {
			t.Errorf("%q: what follows is answered with %d", header, s)
		}
	}
	if len(e.requests) != 0 {
		t.Errorf("the worker got %d requests", len(e.requests))
	}
	f.wantIdle()
}

// streamOf is a worker as the index lists it.
func streamOf(id, url string) store.Stream {
	return store.Stream{StreamID: store.StreamID{Pool: llama, WorkerRank: kvcache.WorkerRank{Worker: id}}, Generation: 1, Registration: store.Registration{URL: url, BlockSize: 16}}
}

// What somebody registered is not asked where workers may not be, by whatever name; what the configuration has is.
func TestWorkersElsewhereAreNotDialled(t *testing.T) {
	var asked atomic.Int32
	victim := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		_, _ = io.WriteString(w, oneModel)
	}))
	defer victim.Close()
	_, port, _ := net.SplitHostPort(victim.Listener.Addr().String())
	e := newEngine(t, "own")
	networks, err := guard.NewNetworks(guard.NetworkOptions{Allow: []string{"10.0.0.0/8", "engine.invalid"}})
	if err != nil {
		t.Fatal(err)
	}
	x := &fakeIndex{blockSize: 16, streams: []store.Stream{
		streamOf("by-address", victim.URL), streamOf("by-name", "http://localhost:"+port), streamOf("mapped", "http://[::ffff:127.0.0.1]:"+port),
		streamOf("metadata", "http://169.254.169.254/latest"), streamOf("anything", "http://0.0.0.0:"+port),
	}}
	f := start(t, Options{Index: x, Workers: []Worker{e.worker()}, Networks: networks})
	var list string
	f.eventually("all were tried", func() bool {
		_, list = f.get("/workers")
		return strings.Count(list, `"unhealthy"`) == len(x.streams) && !strings.Contains(list, "not polled yet")
	})
	for _, want := range []string{"is in none of the networks of workers (--worker-network)", "169.254.169.254 is link-local", "0.0.0.0 is unspecified"} {
		if !strings.Contains(list, want) {
			t.Errorf("nobody says %q: %s", want, list)
		}
	}
	res, text := f.post(completions, streamBody)
	if res.StatusCode != 200 || res.Header.Get("X-Worker-Instance-Id") != "own" {
		t.Errorf("%d %s", res.StatusCode, text)
	}
	if res, _ := f.post(completions, streamBody, "X-Worker-Instance-Id", "by-address"); res.StatusCode/100 == 2 {
		t.Errorf("one that is pinned to the place is sent there: %d", res.StatusCode)
	}
	if n := asked.Load(); n != 0 {
		t.Errorf("the place was asked %d times", n)
	}
}

// An engine that sends elsewhere is not followed, on no route; the client sees what it said.
func TestRedirectsOfWorkersAreNotFollowed(t *testing.T) {
	var asked atomic.Int32
	victim := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		_, _ = io.WriteString(w, oneModel)
	}))
	defer victim.Close()
	var turned atomic.Bool
	e := newEngine(t, "w1")
	e.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if turned.Load() {
			http.Redirect(w, r, victim.URL+r.URL.Path, http.StatusTemporaryRedirect)
			return
		}
		e.handle(w, r)
	})
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	turned.Store(true)
	for _, path := range []string{completions, "/v1/chat/completions", "/tokenize"} {
		body := `{"model":"llama","prompt":"x","messages":[{"role":"user","content":"x"}]}`
		res, err := noRedirect.Do(f.request(t.Context(), path, body))
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != http.StatusTemporaryRedirect || !strings.HasPrefix(res.Header.Get("Location"), victim.URL) {
			t.Errorf("%s: %d %v", path, res.StatusCode, res.Header)
		}
	}
	f.fleet.Refresh(t.Context()) // a poll
	if n := asked.Load(); n != 0 {
		t.Errorf("the other place was asked %d times", n)
	}
	if f.fleet.Snapshot().Healthy() != 0 {
		t.Error("a worker that redirects its health check is well")
	}
}

// raw is a client on a real socket.
type raw struct {
	t *testing.T
	net.Conn
	in *bufio.Reader
}

func (f *running) raw(t *testing.T, say string) *raw {
	t.Helper()
	c, err := net.Dial("tcp", f.Addr())
	if err != nil {
		t.Error(err)
		c, _ = net.Pipe() // which nobody answers
		_ = c.Close()
	}
	t.Cleanup(func() { _ = c.Close() })
	r := &raw{t, c, bufio.NewReader(c)}
	r.say(say)
	return r
}

func (r *raw) say(s string) {
	r.t.Helper()
	if _, err := io.WriteString(r, s); err != nil {
		r.t.Error(err)
	}
}

// status is that of the next answer; 0 where the connection ends.
func (r *raw) status() int {
	res, err := http.ReadResponse(r.in, nil)
	if err != nil {
		return 0
	}
	_, _ = io.Copy(io.Discard, res.Body)
	return res.StatusCode
}

// impatient is a frontend whose server has limits that a test sees the end of.
func impatient(t *testing.T, o Options, limits func(*http.Server)) *running {
	t.Helper()
	reg := prometheus.NewRegistry()
	o.Registerer, o.Gatherer = reg, reg
	frontend, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	limits(frontend.server)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- frontend.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	f := &running{Frontend: frontend, t: t, url: "http://" + frontend.Addr(), reg: reg}
	f.waitWorkers(len(o.Workers))
	return f
}

const short = 50 * time.Millisecond

func TestSlowHeader(t *testing.T) {
	f := impatient(t, Options{Workers: []Worker{newEngine(t, "w1").worker()}}, func(s *http.Server) { s.ReadHeaderTimeout = short })
	for _, begun := range []string{"", "POST " + completions, "POST " + completions + " HTTP/1.1\r\nHost: x\r\nX-Slow: "} {
		c := f.raw(t, begun)
		if s := c.status(); s == 200 {
			t.Errorf("after %q: status %d", begun, s)
		}
		if s := c.status(); s != 0 {
			t.Errorf("after %q: the connection is still there", begun)
		}
	}
}

// A body that does not come ends, on routes that read it, on those that do not, and on those that there are not.
func TestSlowBody(t *testing.T) {
	o := Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{newEngine(t, "w1").worker()}, BodyTimeout: short}
	f := impatient(t, o, func(s *http.Server) { s.ReadTimeout = 2 * short })
	var ends sync.WaitGroup
	for _, route := range []string{"POST " + completions, "POST /query", "POST /ui/explore", "GET /workers", "GET /health", "GET /metrics", "GET /nothing", "DELETE /reservations/x"} {
		for _, length := range []string{"Content-Length: 1000\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"} {
			ends.Go(func() {
				c := f.raw(t, route+" HTTP/1.1\r\nHost: x\r\n"+length)
				c.status() // whatever it is
				if s := c.status(); s != 0 {
					t.Errorf("%s: the connection is still good for a status %d", route, s)
				}
			})
		}
	}
	ends.Wait()
	f.wantIdle()
}

func TestIdleConnection(t *testing.T) {
	f := impatient(t, Options{Workers: []Worker{newEngine(t, "w1").worker()}}, func(s *http.Server) { s.IdleTimeout = short })
	c := f.raw(t, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
	if s := c.status(); s != 200 {
		t.Fatalf("status %d", s)
	}
	if s := c.status(); s != 0 {
		t.Errorf("an idle connection: status %d", s)
	}
}

// A client that reads nothing holds no worker.
func TestSlowReader(t *testing.T) {
	e := newEngine(t, "w1")
	left := make(chan struct{})
	e.serve = func(w http.ResponseWriter, r *http.Request, _ []byte) { // an answer without end
		defer close(left)
		w.Header().Set("Content-Type", "text/event-stream")
		for chunk := []byte("data: " + strings.Repeat("x", 30_000) + "\n\n"); ; {
			if _, err := w.Write(chunk); err != nil || r.Context().Err() != nil {
				return
			}
		}
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, SendTimeout: short})
	f.raw(t, "POST "+completions+" HTTP/1.1\r\nHost: x\r\nContent-Length: "+strconv.Itoa(len(streamBody))+"\r\n\r\n"+streamBody)
	<-left
	f.wantIdle()
}

func TestHeaderLimit(t *testing.T) {
	f := start(t, Options{Workers: []Worker{newEngine(t, "w1").worker()}})
	for n, want := range map[int]int{30_000: 200, 60_000: 200, 200_000: 431, 5_000_000: 431} {
		c, err := net.Dial("tcp", f.Addr())
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\nX-Large: "+strings.Repeat("x", n)+"\r\n\r\n")
		}() // it need not take all of it
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || res.StatusCode != want {
			t.Errorf("%d bytes: %v, %v; want %d", n, res, err, want)
		}
		_ = c.Close()
	}
	// What a worker says in its header is bounded too.
	e := newEngine(t, "w2")
	e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("X-Large", strings.Repeat("x", 2<<20))
	}
	g := start(t, Options{Workers: []Worker{e.worker()}})
	res, text := g.post(completions, streamBody)
	wantError(t, res, text, 502, "upstream_error")
}

// Clients that hold all connections keep probes out of nothing, and others are told.
func TestTooManyConnections(t *testing.T) {
	e := newEngine(t, "w1")
	entered, leave := make(chan struct{}), make(chan struct{})
	e.serve = func(http.ResponseWriter, *http.Request, []byte) {
		entered <- struct{}{}
		<-leave
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, MaxConnections: 2})
	say := "POST " + completions + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + strconv.Itoa(len(streamBody)) + "\r\n\r\n" + streamBody
	first, second := f.raw(t, say), f.raw(t, say)
	<-entered
	<-entered
	client.CloseIdleConnections()
	for path, want := range map[string]int{"/health": 200, "/ready": 200, "/metrics": 200, "/workers": 503, "/nothing": 503} {
		res, text := f.get(path)
		if want == 503 {
			wantError(t, res, text, 503, "overloaded")
		} else if res.StatusCode != want {
			t.Errorf("%s: %d", path, res.StatusCode)
		}
	}
	res, text := f.post(completions, streamBody)
	wantError(t, res, text, 503, "overloaded")
	if n := f.metric("warmroute_connections_refused_total", "surface", "frontend", "how", "probes"); n == 0 {
		t.Error("nothing of it is counted")
	}
	close(leave)
	if a, b := first.status(), second.status(); a != 200 || b != 200 {
		t.Errorf("those that were there: %d, %d", a, b)
	}
	f.wantIdle()
}

// Who types the address of a frontend finds its page, also below a path of a proxy.
func TestRootLeadsToThePage(t *testing.T) {
	f := start(t, Options{Workers: []Worker{newEngine(t, "w1").worker()}})
	res, err := noRedirect.Get(f.url + "/")
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusFound || res.Header.Get("Location") != "ui" {
		t.Errorf("%d, Location %q", res.StatusCode, res.Header.Get("Location"))
	}
	if res, text := f.get("/"); res.StatusCode != 200 || !strings.Contains(text, "<title>warmroute</title>") {
		t.Errorf("%d %.100s", res.StatusCode, text)
	}
}
