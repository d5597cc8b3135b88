package frontend

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/gin-gonic/gin"

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
