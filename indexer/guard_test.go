package indexer

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gin-gonic/gin"

	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Every route there is, and who may use it.
var access = map[string][]string{
	"open":  {"GET /health", "GET /ready", "GET /metrics", "GET /openapi.yaml"},
	"query": {"GET /workers", "GET /dump"},
	"admin": {"POST /register", "POST /unregister", "POST /events"},
}

func TestEveryRouteAsksForItsToken(t *testing.T) {
	for name, setup := range map[string]struct {
		tokens *guard.Tokens
		want   map[string]map[string]int // by route and token; 0: it passes
	}{
		"no tokens": {nil, map[string]map[string]int{
			"open": {"": 0, "x": 0}, "query": {"": 0, "x": 0}, "admin": {"": 0, "x": 0},
		}},
		"an administrator's": {tokens(t, "", "admin"), map[string]map[string]int{
			"open": {"": 0, "x": 0, "admin": 0}, "query": {"": 0, "x": 0, "admin": 0}, "admin": {"": 401, "x": 401, "admin": 0},
		}},
		"both": {tokens(t, "query", "old admin"), map[string]map[string]int{
			"open":  {"": 0, "x": 0, "query": 0, "admin": 0},
			"query": {"": 401, "x": 401, "query": 0, "admin": 0, "old": 0},
			"admin": {"": 401, "x": 401, "query": 403, "admin": 0, "old": 0},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			ix := newIndexer(t, Options{Store: newStore(t), Tokens: setup.tokens})
			start(t, ix)
			known := 0
			for _, route := range ix.handler().(*gin.Engine).Routes() {
				kind := ""
				for k, list := range access {
					if slices.Contains(list, route.Method+" "+route.Path) {
						kind = k
						known++
					}
				}
				if kind == "" {
					t.Errorf("%s %s: who may use it?", route.Method, route.Path)
				}
				for token, want := range setup.want[kind] {
					header := ""
					if token != "" {
						header = "Bearer " + token
					}
					code, v := request(t, ix, route.Method, route.Path, "{}", "Authorization", header)
					if want != 0 && code != want || want == 0 && (code == 401 || code == 403) {
						t.Errorf("%s %s with %q: %d, want %d: %v", route.Method, route.Path, token, code, want, v)
					}
					if e, ok := v["error"].(map[string]any); want != 0 && (!ok || e["type"] != "invalid_request_error") || want == 401 && (!ok || e["code"] != "invalid_api_key") || want == 403 && (!ok || e["code"] != "insufficient_scope") {
						t.Errorf("%s %s with %q: %v", route.Method, route.Path, token, v)
					}
				}
			}
			if want := len(access["open"]) + len(access["query"]) + len(access["admin"]); known != want {
				t.Errorf("%d of %d routes of the table are there", known, want)
			}
		})
	}
}

// A page of another site, which somebody on this machine looks at, registers nothing; programs send no such header.
func TestPagesOfOtherSitesChangeNothing(t *testing.T) {
	ix := newIndexer(t, Options{Store: newStore(t)})
	start(t, ix)
	body := `{"instance_id":"w","model_name":"m","block_size":4,"url":"http://203.0.113.1:1"}`
	for name, header := range map[string][]string{
		"a fetch": {"Sec-Fetch-Site", "cross-site"}, "an old browser": {"Origin", "https://evil.example.com"}, "a form": {"Origin", "null", "Content-Type", "text/plain"},
	} {
		if code, v := request(t, ix, "POST", "/register", body, header...); code != 403 {
			t.Errorf("%s: %d %v", name, code, v)
		}
	}
	if code, v := request(t, ix, "POST", "/register", body); code != 201 {
		t.Errorf("a program: %d %v", code, v)
	}
}

// What is reachable from elsewhere without a token is said at the start.
func TestExposureIsWarnedOf(t *testing.T) {
	for _, test := range []struct {
		listen, query, admin string
		want                 []string
	}{
		{"127.0.0.1:0", "", "", nil}, {"0.0.0.0:0", "", "", []string{"--admin-token", "--query-token"}},
		{"0.0.0.0:0", "", "x", []string{"--query-token"}}, {"0.0.0.0:0", "y", "x", nil},
	} {
		var log lockedBuffer
		ix := newIndexer(t, Options{
			Store: newStore(t), Listen: test.listen, Tokens: tokens(t, test.query, test.admin), AllowInsecure: true, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		start(t, ix)()
		if n := strings.Count(log.String(), "reached from other machines"); n != len(test.want) {
			t.Errorf("%+v: %d warnings\n%s", test, n, log.String())
		}
		for _, w := range test.want {
			if !strings.Contains(log.String(), w) {
				t.Errorf("%+v: nobody names %s", test, w)
			}
		}
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// victim is a server that nobody may be led to.
func victim(t *testing.T) (addr string, touched *atomic.Int32) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	touched = &atomic.Int32{}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			touched.Add(1)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String(), touched
}

// A registration that leads elsewhere is refused, whichever of its addresses does, and says why.
func TestRegistrationsElsewhereAreRefused(t *testing.T) {
	networks, err := guard.NewNetworks(guard.NetworkOptions{Allow: []string{"10.0.0.0/8", ".engines.invalid"}})
	if err != nil {
		t.Fatal(err)
	}
	var log lockedBuffer
	ix := newIndexer(t, Options{Store: newStore(t), Networks: networks, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	start(t, ix)
	place, touched := victim(t)
	_, port, _ := net.SplitHostPort(place)
	for field, list := range map[string][]string{
		"url": {"http://" + place, "http://localhost:" + port, "http://169.254.169.254/latest/meta-data", "http://[fe80::1]:80", "http://[::ffff:127.0.0.1]:" + port, "http://0.0.0.0:" + port},
		"endpoint": {
			"tcp://" + place, "tcp://localhost:" + port, "tcp://169.254.169.254:80", "tcp://[::1]:" + port, "ipc:///var/run/docker.sock",
		},
		"replay_endpoint": {"tcp://" + place, "ipc:///var/run/docker.sock"},
	} {
		for _, at := range list {
			all := map[string]string{"url": "http://10.255.255.1:8000", "endpoint": "tcp://10.255.255.1:5557", "replay_endpoint": "tcp://10.255.255.1:5657"}
			all[field] = at
			body := fmt.Sprintf(`{"instance_id":"w","model_name":"m","block_size":4,"url":%q,"endpoint":%q,"replay_endpoint":%q}`, all["url"], all["endpoint"], all["replay_endpoint"])
			code, v := request(t, ix, "POST", "/register", body)
			e, _ := v["error"].(map[string]any)
			if message := fmt.Sprint(e["message"]); code != 400 || e["code"] != "address_refused" || !strings.HasPrefix(message, field+": ") || !strings.Contains(message, "--worker-network") {
				t.Errorf("%s %s: %d %v", field, at, code, v)
			}
		}
	}
	if n := touched.Load(); n != 0 {
		t.Errorf("the place was dialled %d times", n)
	}
	if n := strings.Count(log.String(), "registration refused"); n != 13 {
		t.Errorf("%d lines in the log", n)
	}
	if _, v := request(t, ix, "GET", "/workers", ""); len(v["workers"].([]any)) != 0 {
		t.Errorf("something is followed: %v", v)
	}
	for _, body := range []string{
		`{"instance_id":"a","model_name":"m","block_size":4,"url":"http://10.255.255.1:8000"}`,
		`{"instance_id":"b","model_name":"m","block_size":4,"url":"http://w0.engines.invalid:8000"}`, // which does not resolve here
	} {
		if code, v := request(t, ix, "POST", "/register", body); code != 201 {
			t.Errorf("%s: %d %v", body, code, v)
		}
	}
}

// An engine that is configured may register as well, where it is.
func TestConfiguredEnginesMayRegister(t *testing.T) {
	networks, err := guard.NewNetworks(guard.NetworkOptions{Allow: []string{"10.0.0.0/8"}})
	if err != nil {
		t.Fatal(err)
	}
	place, _ := victim(t)
	ix := newIndexer(t, Options{Store: newStore(t), Networks: networks, Workers: []Worker{{ID: "w", Model: "m", BlockSize: 4, URL: "http://" + place}}})
	start(t, ix)
	eventually(t, func() string {
		if ix.stream(store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}}) == nil {
			return "it is not followed"
		}
		return ""
	})
	for url, want := range map[string]int{"http://" + place: 201, "http://localhost:1": 400} {
		if code, v := request(t, ix, "POST", "/register", fmt.Sprintf(`{"instance_id":"w","model_name":"m","block_size":4,"url":%q}`, url)); code != want {
			t.Errorf("%s: %d %v", url, code, v)
		}
	}
}

// What is found in Redis is judged when it is dialled; what the configuration has may be anywhere.
func TestDiscoveredStreamsElsewhereAreNotDialled(t *testing.T) {
	networks, err := guard.NewNetworks(guard.NetworkOptions{Allow: []string{"10.0.0.0/8"}})
	if err != nil {
		t.Fatal(err)
	}
	place, touched := victim(t)
	st := newStore(t)
	if _, _, err := st.Register(t.Context(), store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}},
		store.Registration{BlockSize: 4, URL: "http://" + place, Endpoint: "tcp://" + place, ReplayEndpoint: "tcp://" + place, Engine: "vLLM"}); err != nil {
		t.Fatal(err)
	}
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	ix := newIndexer(t, Options{
		Store: st, Networks: networks, Workers: []Worker{{ID: "own", Model: "m", BlockSize: 4, Endpoint: e.Endpoint, ReplayEndpoint: e.ReplayEndpoint}},
	})
	start(t, ix)
	wantStatus(t, ix, "w", func(v Status) bool {
		return !v.Connected && strings.Contains(v.Error, "none of the networks of workers (--worker-network)")
	})
	ix.checkOnce(t.Context()) // its health is not asked for either
	e.Subscribed()
	e.Publish("", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("own/0", 1)...)
	s := ix.stream(store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}})
	if _, _, err := s.replaySession(t.Context(), 0); err == nil || !strings.Contains(err.Error(), "--worker-network") {
		t.Errorf("a replay from there: %v", err)
	}
	if n := touched.Load(); n != 0 {
		t.Errorf("the place was dialled %d times", n)
	}
}

// An engine that sends its health check elsewhere is not followed there.
func TestRedirectsOfEnginesAreNotFollowed(t *testing.T) {
	place, touched := victim(t)
	engine := httptest.NewServer(http.RedirectHandler("http://"+place+"/x", http.StatusFound))
	defer engine.Close()
	client := newWorkerClient(nil, nil)
	if h, err := newHealthCheck(client)(t.Context(), engine.URL); h != healthOK || err != nil { // it answers, so it lives
		t.Errorf("%v, %v", h, err)
	}
	if _, err := newWorkCheck(client)(t.Context(), engine.URL); err == nil {
		t.Error("metrics of elsewhere")
	}
	if n := touched.Load(); n != 0 {
		t.Errorf("the other place was dialled %d times", n)
	}
}

// Token ids of prompts pass through here. None of them is in a log, a metric or an answer, whatever an engine sends.
func TestNobodyIsToldOfPrompts(t *testing.T) {
	const secret, word = uint32(4242424242), "xyzzyplugh"
	var log lockedBuffer
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	ix := newIndexer(t, Options{
		Store: st, Workers: []Worker{{ID: "w", Model: "m", BlockSize: 4, Endpoint: e.Endpoint, ReplayEndpoint: e.ReplayEndpoint}},
		Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	start(t, ix)
	e.Subscribed()
	of := func(h kvcache.EngineHash, n int) wire.Event {
		v := wire.Event{Kind: wire.Stored, Hashes: []kvcache.EngineHash{h}, BlockSize: 4, Medium: "GPU"}
		for range n {
			v.Tokens = append(v.Tokens, secret)
		}
		return v
	}
	wrong := of(3, 4)
	wrong.Medium, wrong.LoRAName = word, word
	seq := int64(0)
	publish := func(payload []byte) {
		e.Publish("", seq, payload)
		seq++
	}
	publish(payload(of(1, 4)))
	publish(payload(of(2, 3), wrong))
	publish([]byte(word))
	publish(append(payload(of(4, 4)), word...))
	publish(bytes.ReplaceAll(payload(of(5, 4)), []byte("token_ids"), []byte(word)[:9]))
	e.Raw([]byte(word), []byte(word), []byte(word))
	seq += 3 // lost
	publish(payload(of(6, 4)))
	wantStatus(t, ix, "w", func(v Status) bool { return v.Watermark == seq-1 })
	body := fmt.Sprintf(`{"worker":"w","events":[{"event":{"event_id":0,"data":{"stored":{"blocks":[{"block_hash":1,"token_ids":[%d],"tokens_hash":%q}]}}}}]}`, secret, word)
	for _, b := range []string{body, body[:len(body)-3], `"` + word + `"`, strings.Replace(body, `"`+word+`"`, "1", 1)} {
		if code, _ := request(t, ix, "POST", "/events", b); code < 400 {
			t.Errorf("%s: %d", b, code)
		}
	}
	said := map[string]string{"the log": log.String()}
	for _, path := range []string{"/workers", "/metrics", "/dump", "/ready"} {
		_, v := request(t, ix, "GET", path, "")
		said[path] = fmt.Sprint(v)
	}
	for where, s := range said {
		for _, secret := range []string{fmt.Sprint(secret), fmt.Sprintf("%x", secret), word} {
			if i := strings.Index(s, secret); i >= 0 || s == "" {
				t.Errorf("%s tells of a prompt: …%s…", where, s[max(0, i-200):min(len(s), i+100)])
			}
		}
	}
	if s := said["the log"]; !strings.Contains(s, "cannot be decoded") || !strings.Contains(s, "level=") {
		t.Errorf("nothing happened that could tell:\n%s", s)
	}
}
