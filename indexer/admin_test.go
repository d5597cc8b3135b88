package indexer

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// wantError checks a refusal: status, OpenAI's shape, code, and a word of the message.
func wantError(t *testing.T, ix *Indexer, path, body string, status int, code, word string) {
	t.Helper()
	got, v := request(t, ix, "POST", path, body)
	e, _ := v["error"].(map[string]any)
	message, _ := e["message"].(string)
	if got != status || e["code"] != code || e["type"] == nil || !strings.Contains(message, word) {
		t.Errorf("POST %s %.80s: %d %v, want %d %s %q", path, body, got, v, status, code, word)
	}
}

func TestRegisterBadInput(t *testing.T) {
	ix := newIndexer(t, Options{Store: newStore(t)})
	start(t, ix)
	if code, v := request(t, ix, "POST", "/register", `{"instance_id":"w","model_name":"m","block_size":16,"unknown":{"field":[1]}}`); code != 201 {
		t.Fatalf("register: %d %v", code, v)
	}
	for _, tc := range []struct {
		body   string
		status int
		code   string
		word   string
	}{
		{``, 400, "bad_json", "JSON object"},
		{`[]`, 400, "bad_json", "JSON object"},
		{`"x"`, 400, "bad_json", "JSON object"},
		{`{`, 400, "bad_json", ""},
		{`{"instance_id":"w"}`, 400, "missing_field", "model_name"},
		{`{"model_name":"m"}`, 400, "missing_field", "instance_id"},
		{`{"instance_id":{},"model_name":"m"}`, 400, "bad_json", ""},
		{`{"instance_id":"w","model_name":7}`, 400, "bad_json", "model_name"},
		{`{"instance_id":"w","model_name":"m","modelname":"n"}`, 400, "invalid", "differ"},
		{`{"instance_id":"a/b","model_name":"m"}`, 400, "invalid", "a/b"},
		{`{"instance_id":"w","model_name":"a b\u0000"}`, 400, "invalid", ""},
		{`{"instance_id":"w","model_name":"m","dp_rank":-1}`, 400, "invalid", "rank"},
		{`{"instance_id":"w","model_name":"m","dp_rank":70000}`, 400, "invalid", "rank"},
		{`{"instance_id":"w","model_name":"m","block_size":-4}`, 400, "invalid", "block size"},
		{`{"instance_id":"w","model_name":"m","block_size":"16"}`, 400, "bad_json", "block_size"},
		{`{"instance_id":"w","model_name":"m","endpoint":"tcp://*:5557"}`, 400, "invalid", "wildcard"},
		{`{"instance_id":"w","model_name":"m","endpoint":"http://x:1"}`, 400, "invalid", "tcp"},
		{`{"instance_id":"w","model_name":"m","replay_endpoint":"tcp://x:1"}`, 400, "invalid", "replay"},
		{`{"instance_id":"w","model_name":"m","type":"Llama"}`, 400, "invalid", "vLLM"},
		{`{"instance_id":"w","model_name":"m","mode":"all"}`, 400, "invalid", "count or set"},
		{`{"instance_id":"w","model_name":"m","url":"ftp://x"}`, 400, "invalid", "http://host:port"},
		{`{"instance_id":"w","model_name":"m","url":"http://:6379"}`, 400, "invalid", "http://host:port"},
		{`{"instance_id":"w","model_name":"m","url":"http://u:p@x:1"}`, 400, "invalid", "--worker-token"},
		{`{"instance_id":"w","model_name":"m","url":"127.0.0.1:8000"}`, 400, "invalid", "http://host:port"},
		{`{"instance_id":"w2","model_name":"m","block_size":32}`, 409, "block_size_conflict", "16"},
		{`{"instance_id":"w","model_name":"m","block_size":32}`, 409, "block_size_conflict", "32"},
		{`{"instance_id":"w","model_name":"m","x":"` + strings.Repeat("y", maxBody) + `"}`, 413, "too_large", ""},
	} {
		wantError(t, ix, "/register", tc.body, tc.status, tc.code, tc.word)
	}
	wantError(t, ix, "/unregister", `{"instance_id":"nobody","model_name":"m"}`, 404, "unknown_worker", "nobody")
	wantError(t, ix, "/unregister", `{"instance_id":"w","model_name":"other"}`, 404, "unknown_worker", "other")
	wantError(t, ix, "/nowhere", `{}`, 404, "not_found", "/nowhere")
	if code, v := request(t, ix, "GET", "/register", ""); code != 405 || v["error"] == nil {
		t.Errorf("GET /register: %d %v", code, v)
	}
}

func TestRegisterIsIdempotent(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	ix := newIndexer(t, Options{Store: st})
	start(t, ix)
	body := fmt.Sprintf(`{"instance_id":7,"model_name":"m","endpoint":%q,"block_size":4,"url":"http://h:8000","type":"SGLang"}`, e.Endpoint)
	code, first := request(t, ix, "POST", "/register", body)
	if code != 201 || first["instance_id"] != "7" || first["tenant_id"] != "default" || first["registered"] != true {
		t.Fatalf("register: %d %v", code, first)
	}
	e.Subscribed()
	e.Publish("", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("7/0", 1)...)
	followed := ix.all()[0]
	if code, v := request(t, ix, "POST", "/register", body); code != 201 || v["generation"] != first["generation"] {
		t.Errorf("again: %d %v", code, v)
	}
	if ix.all()[0] != followed {
		t.Error("the stream was started anew for an equal registration")
	}
	// The engine has moved.
	e2 := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	if code, v := request(t, ix, "POST", "/register", strings.Replace(body, e.Endpoint, e2.Endpoint, 1)); code != 201 {
		t.Errorf("moved: %d %v", code, v)
	}
	e2.Subscribed()
	e2.Publish("", 0, payload(stored(nil, 2)))
	wantHeld(t, st, testPool, gpu("7/0", 2)...)
	if code, v := request(t, ix, "POST", "/unregister", `{"instance_id":7,"modelname":"m"}`); code != 200 || v["removed"] != 1.0 {
		t.Errorf("unregister: %d %v", code, v)
	}
	wantHeld(t, st, testPool)
	if len(ix.all()) != 0 {
		t.Error("still followed")
	}
	if code, _ := request(t, ix, "POST", "/unregister", `{"instance_id":7,"modelname":"m"}`); code != 404 {
		t.Errorf("unregister again: %d", code)
	}
}

// Without a block size anywhere, or without Redis, a registration is accepted and completed later.
func TestRegisterLater(t *testing.T) {
	m, url := storetest.Miniredis(t)
	st := openStore(t, url)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	ix := newIndexer(t, Options{Store: st})
	start(t, ix)
	m.SetError("LOADING")
	code, v := request(t, ix, "POST", "/register", fmt.Sprintf(`{"instance_id":"w","model_name":"m","endpoint":%q,"block_size":4}`, e.Endpoint))
	if code != 202 || v["registered"] != false {
		t.Fatalf("register: %d %v", code, v)
	}
	e.Subscribed()
	e.Publish("", 0, payload(stored(nil, 1)))
	if code, v := request(t, ix, "POST", "/unregister", `{"instance_id":"w","model_name":"m"}`); code != 503 || v["error"] == nil {
		t.Errorf("unregister without Redis: %d %v", code, v)
	}
	m.SetError("")
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	e2 := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	other := kvcache.PoolID{Tenant: "t", Model: "new"}
	code, v = request(t, ix, "POST", "/register", fmt.Sprintf(`{"instance_id":"x","model_name":"new","tenant_id":"t","endpoint":%q}`, e2.Endpoint))
	if code != 202 || v["block_size"] != 0.0 {
		t.Fatalf("register without a block size: %d %v", code, v)
	}
	e2.Subscribed()
	e2.Publish("", 0, payload(stored(nil, 1)))
	wantHeld(t, st, other, gpu("x/0", 1)...)
}

func TestToken(t *testing.T) {
	if _, err := New(Options{Store: newStore(t), Listen: "0.0.0.0:0"}); err == nil || !strings.Contains(err.Error(), "token") {
		t.Errorf("open to the world without a token: %v", err)
	}
	for _, o := range []Options{{Listen: "0.0.0.0:0", AllowInsecure: true}, {Listen: "0.0.0.0:0", Tokens: tokens(t, "", "x")}, {Listen: "[::1]:0"}, {Listen: "localhost:0"}} {
		o.Store = newStore(t)
		ix, err := New(o)
		if err != nil && !strings.Contains(err.Error(), "cannot assign") {
			t.Errorf("%+v: %v", o.Listen, err)
		}
		if err == nil {
			_ = ix.Close()
		}
	}
	ix := newIndexer(t, Options{Store: newStore(t), Tokens: tokens(t, "", "s3cret")})
	start(t, ix)
	register := `{"instance_id":"w","model_name":"m","block_size":4}`
	for _, tc := range []struct {
		header string
		want   int
	}{{"", 401}, {"Bearer", 401}, {"Bearer ", 401}, {"Bearer wrong", 401}, {"Basic s3cret", 401}, {"s3cret", 401}, {"Bearer s3cret", 201}, {"bearer s3cret", 201}} {
		if code, v := request(t, ix, "POST", "/register", register, "Authorization", tc.header); code != tc.want {
			t.Errorf("%q: %d %v, want %d", tc.header, code, v, tc.want)
		}
	}
	for _, path := range []string{"/unregister", "/events"} {
		if code, _ := request(t, ix, "POST", path, `{}`); code != 401 {
			t.Errorf("%s without a token: %d", path, code)
		}
	}
	for _, path := range []string{"/workers", "/dump", "/health", "/ready", "/metrics"} {
		if code, v := request(t, ix, "GET", path, ""); code != 200 {
			t.Errorf("GET %s: %d %v", path, code, v)
		}
	}
}

// local is the local hash of a block that holds a token four times, as Dynamo's clients send it.
func local(token uint32) kvcache.LocalHash {
	return kvcache.HashBlock(kvcache.HashSpec{BlockSize: 4}, repeat4(token), nil)
}

func storedJSON(id int, parent string, blocks ...int) string {
	var b []string
	for _, x := range blocks {
		b = append(b, fmt.Sprintf(`{"block_hash":%d,"tokens_hash":%d}`, x, uint64(local(uint32(x)))))
	}
	return fmt.Sprintf(`{"event":{"event_id":%d,"data":{"stored":{"parent_hash":%s,"blocks":[%s]}}}}`, id, parent, strings.Join(b, ","))
}

func TestEventsOverHTTP(t *testing.T) {
	_, url := storetest.Miniredis(t)
	st := openStore(t, url)
	ix := newIndexer(t, Options{Store: openStore(t, url)})
	stop := start(t, ix)
	if code, v := request(t, ix, "POST", "/register", `{"instance_id":"w","model_name":"m","block_size":4}`); code != 201 {
		t.Fatalf("register: %d %v", code, v)
	}
	post := func(ix *Indexer, events ...string) (int, map[string]any) {
		return request(t, ix, "POST", "/events", `{"worker":"w","events":[`+strings.Join(events, ",")+`]}`)
	}
	accepted := func(want []string, events ...string) {
		t.Helper()
		if code, v := post(ix, events...); code != 202 {
			t.Fatalf("events: %d %v", code, v)
		}
		// 202 means that it is there, not that it will be.
		if got := held(t, st, testPool); !slices.Equal(got, want) {
			t.Fatalf("the index holds %q, want %q", got, want)
		}
	}
	removedJSON := func(id int, blocks string) string {
		return fmt.Sprintf(`{"event":{"event_id":%d,"data":{"removed":{"block_hashes":[%s]}}}}`, id, blocks)
	}
	first := storedJSON(0, "null", 1, 2)
	accepted(gpu("w/0", 1, 2), first)
	accepted(gpu("w/0", 1, 2), first) // the answer was lost
	accepted(gpu("w/0", 1, 2, 3), storedJSON(1, "2", 3))
	accepted(gpu("w/0", 1, 3), storedJSON(1, "2", 3), removedJSON(2, "2, 99"))
	accepted(gpu("w/0", 1, 3), `{"storage_tier":"moon","event":{"event_id":3,"data":{"stored":{"blocks":[{"block_hash":9,"tokens_hash":9}]}}}}`)
	accepted(gpu("w/0", 1, 3), storedJSON(4, "77", 5)) // an orphan
	accepted(gpu("w/0", 1, 3, 5, 77), storedJSON(5, "3", 77))
	accepted(gpu("w/0", 6), storedJSON(9, "null", 6)) // 6 to 8 are lost
	accepted(gpu("w/0", 7), `{"event":{"event_id":10,"data":"cleared"}}`, storedJSON(11, "null", 7))

	// What is stored is what a frontend looks up.
	blocks := blocksOf(kvcache.HashSpec{}, repeat4(7)...)
	found := false
	if err := st.Dump(t.Context(), testPool, func(e kvcache.RouterEvent) error {
		found = found || e.Event.Data.Stored.Blocks[0].BlockHash == blocks[0]
		return nil
	}); err != nil || !found {
		t.Errorf("block hash %s is not there: %v", blocks[0], err)
	}

	accepted(gpu("w/0", 8), storedJSON(0, "null", 8)) // the engine has begun again
	accepted(gpu("w/0", 8, 9), storedJSON(1, "8", 9))
	stop()

	// The next indexer knows the stream and its number.
	ix = newIndexer(t, Options{Store: openStore(t, url)})
	start(t, ix)
	eventually(t, func() string {
		if len(ix.all()) == 0 {
			return "the stream is not followed"
		}
		return ""
	})
	accepted(gpu("w/0", 8, 9, 10), storedJSON(1, "8", 9), storedJSON(2, "9", 10))
	wantClean(t, st, testPool)
}

func TestEventsBadInput(t *testing.T) {
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	ix := newIndexer(t, Options{Store: newStore(t), Workers: []Worker{
		worker("zmq", e), {ID: "w", Model: "m", BlockSize: 4}, {ID: "two", Model: "m"}, {ID: "two", Model: "n"},
	}})
	start(t, ix)
	eventually(t, func() string {
		if n := len(ix.all()); n != 4 {
			return fmt.Sprint(n, " streams")
		}
		return ""
	})
	ok := storedJSON(0, "null", 1)
	with := func(worker, events string) string {
		return fmt.Sprintf(`{"worker":%q,"events":[%s]}`, worker, events)
	}
	data := func(d string) string { return `{"event":{"event_id":0,"data":` + d + `}}` }
	for _, tc := range []struct {
		body   string
		status int
		code   string
		word   string
	}{
		{`{"events":[]}`, 400, "missing_field", "worker"},
		{`{"worker":"w","events":[]}`, 400, "missing_field", "events"},
		{`{"worker":"w","events":{}}`, 400, "bad_json", "events"},
		{with("nobody", ok), 404, "unknown_worker", "nobody"},
		{with("two", ok), 400, "ambiguous_worker", "model_name"},
		{with("zmq", ok), 409, "followed_by_zmq", "tcp://"},
		{with("w", data(`{}`)), 400, "bad_json", "exactly one"},
		{with("w", data(`{"stored":{"blocks":[]},"cleared":1}`)), 400, "bad_json", "exactly one"},
		{with("w", `{"event":{"event_id":0}}`), 400, "invalid_event", "data"},
		{with("w", data(`{"stored":{"blocks":[{"block_hash":1}]}}`)), 400, "invalid_event", "tokens_hash"},
		{with("w", data(`{"stored":{"blocks":[{"block_hash":1.5,"tokens_hash":1}]}}`)), 400, "bad_json", "hash"},
		{with("w", data(`{"removed":{"block_hashes":["xyz"]}}`)), 400, "bad_json", "hash"},
		{with("w", `{"worker_id":"x","event":{"event_id":0,"data":"cleared"}}`), 400, "invalid_event", "worker_id"},
		{with("w", `{"event":{"event_id":0,"dp_rank":3,"data":"cleared"}}`), 400, "invalid_event", "dp_rank"},
		{with("w", `{"event":{"event_id":18446744073709551615,"data":"cleared"}}`), 400, "invalid_event", "event_id"},
		{with("w", `{"event":{"event_id":9007199254740993,"data":"cleared"}}`), 400, "invalid_event", "event_id"}, // no double
		{with("w", `{"event":{"event_id":-1,"data":"cleared"}}`), 400, "bad_json", "event_id"},
		{with("w", ok+","+data(`{"stored":{"blocks":[{"block_hash":1}]}}`)), 400, "invalid_event", "events[1]"},
	} {
		wantError(t, ix, "/events", tc.body, tc.status, tc.code, tc.word)
	}
	if v := workerStatus(t, ix, "w", 0); v.Watermark != -1 {
		t.Errorf("a refused request took effect: %+v", v)
	}
}

// Without Redis the caller is told, and repeats the request later.
func TestEventsWithoutRedis(t *testing.T) {
	m, url := storetest.Miniredis(t)
	st := openStore(t, url)
	ix := newIndexer(t, Options{Store: st})
	start(t, ix)
	if code, v := request(t, ix, "POST", "/register", `{"instance_id":"w","model_name":"m","block_size":4}`); code != 201 {
		t.Fatalf("register: %d %v", code, v)
	}
	body := `{"worker":"w","events":[` + storedJSON(0, "null", 1) + `,` + storedJSON(1, "9", 2) + `]}`
	if code, v := request(t, ix, "POST", "/events", body); code != 202 {
		t.Fatalf("events: %d %v", code, v)
	}
	body = `{"worker":"w","events":[` + storedJSON(2, "1", 3) + `]}`
	m.SetError("LOADING")
	wantError(t, ix, "/events", body, 503, "index_unavailable", "")
	m.SetError("")
	if code, v := request(t, ix, "POST", "/events", body); code != 202 {
		t.Fatalf("again: %d %v", code, v)
	}
	wantHeld(t, st, testPool, gpu("w/0", 1, 3)...)
	wantStatus(t, ix, "w", func(v Status) bool { return v.Resets == 0 && v.Gaps == 0 })
}

func TestViews(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	w := worker("w", e)
	w.URL = "http://h:8000"
	ix := newIndexer(t, Options{Store: st, Workers: []Worker{w}})
	start(t, ix)
	e.Subscribed()
	e.Publish("", 0, payload(stored(nil, 1), stored(nil, 2)))
	wantHeld(t, st, testPool, gpu("w/0", 1, 2)...)
	wantStatus(t, ix, "w", func(v Status) bool { return v.Watermark == 0 })

	resp, err := http.Get("http://" + ix.Addr().String() + "/dump?model=m")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if ct := resp.Header.Get("Content-Type"); ct != "application/x-ndjson" {
		t.Errorf("dump is %s", ct)
	}
	if resp.Header.Get("X-Request-Id") == "" {
		t.Error("no request id")
	}
	lines := 0
	for sc := bufio.NewScanner(resp.Body); sc.Scan(); lines++ {
		var e kvcache.RouterEvent
		if err := json.NewDecoder(bytes.NewReader(sc.Bytes())).Decode(&e); err != nil || e.WorkerID != "w" || e.Event.Data.Stored == nil {
			t.Errorf("line %q: %v", sc.Text(), err)
		}
	}
	if lines != 2 {
		t.Errorf("%d lines, want 2", lines)
	}
	if code, v := request(t, ix, "GET", "/dump?model=other", ""); code != 404 {
		t.Errorf("dump of an unknown model: %d %v", code, v)
	}
	code, v := request(t, ix, "GET", "/workers", "")
	workers, _ := v["workers"].([]any)
	if code != 200 || len(workers) != 1 {
		t.Fatalf("workers: %d %v", code, v)
	}
	line := workers[0].(map[string]any)
	for field, want := range map[string]any{
		"worker": "w", "dp_rank": 0.0, "model": "m", "tenant": "default", "url": "http://h:8000", "connected": true, "registered": true,
		"trusted": true, "watermark": 0.0, "gaps": 0.0, "resets": 0.0, "block_size": 4.0,
	} {
		if line[field] != want {
			t.Errorf("workers: %s is %v, want %v", field, line[field], want)
		}
	}
	if line["last_event"] == nil || line["generation"] == 0.0 {
		t.Errorf("workers: %v", line)
	}
	code, v = request(t, ix, "GET", "/ready", "")
	if streams, _ := v["streams"].(map[string]any); code != 200 || v["index"] != "ok" || streams["connected"] != 1.0 || streams["registered"] != 1.0 {
		t.Errorf("ready: %d %v", code, v)
	}
	_, v = request(t, ix, "GET", "/metrics", "")
	text, _ := v["text"].(string)
	for _, want := range []string{
		`warmroute_kv_events_total{result="applied",type="stored"} 2`, `warmroute_kv_stream_gaps_total{reason="live"} 0`,
		`warmroute_kv_stream_resets_total{reason="restart"} 0`, `warmroute_kv_replays_total{reason="join"} 0`, `warmroute_kv_stream_lag_seconds_count 1`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("metrics lack %q", want)
		}
	}
	for id, echoed := range map[string]bool{"abc": true, "a b": false, "a\tb": false, "caf\xc3\xa9": false, strings.Repeat("x", 129): false} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://"+ix.Addr().String()+"/health", nil)
		req.Header.Set("X-Request-Id", id)
		health, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = health.Body.Close()
		if got := health.Header.Get("X-Request-Id"); health.StatusCode != 200 || got == "" || (got == id) != echoed {
			t.Errorf("health: %d, request id %q for %q", health.StatusCode, got, id)
		}
	}
}

func TestOptions(t *testing.T) {
	st := newStore(t)
	for name, tc := range map[string]struct {
		o    Options
		word string
	}{
		"no store":        {Options{}, "Store"},
		"bad address":     {Options{Store: st, Listen: "nowhere"}, "listen"},
		"bad scope":       {Options{Store: st, ClearedScope: "all"}, "ClearedScope"},
		"bad worker":      {Options{Store: st, Workers: []Worker{{ID: "a b", Model: "m"}}}, "a b"},
		"no model":        {Options{Store: st, Workers: []Worker{{ID: "w"}}}, "w"},
		"bad mode":        {Options{Store: st, Workers: []Worker{{ID: "w", Model: "m", Mode: "all"}}}, "count or set"},
		"open to all":     {Options{Store: st, Listen: ":0"}, "--admin-insecure"},
		"twice":           {Options{Store: st, Workers: []Worker{{ID: "w", Model: "m"}, {ID: "w", Model: "m"}}}, "twice"},
		"ranks of a file": {Options{Store: st, Workers: []Worker{{ID: "w", Model: "m", Ranks: 2, Endpoint: "ipc:///x"}}}, "tcp"},
		"wildcard":        {Options{Store: st, Workers: []Worker{{ID: "w", Model: "m", Endpoint: "tcp://*:1"}}}, "wildcard"},
	} {
		if tc.o.Listen == "" {
			tc.o.Listen = "127.0.0.1:0"
		}
		if ix, err := New(tc.o); err == nil {
			_ = ix.Close()
			t.Errorf("%s: no error", name)
		} else if !strings.Contains(err.Error(), tc.word) {
			t.Errorf("%s: %v", name, err)
		}
	}
	ix := newIndexer(t, Options{Store: st, Workers: []Worker{{ID: "w", Model: "m", Ranks: 3, Endpoint: "tcp://h:5557", ReplayEndpoint: "tcp://h:5657"}}})
	if len(ix.initial) != 3 || ix.initial[2].reg.Endpoint != "tcp://h:5559" || ix.initial[2].reg.ReplayEndpoint != "tcp://h:5659" || ix.initial[2].id.Rank != 2 {
		t.Errorf("ranks: %+v", ix.initial)
	}
}

// The engine has moved, and another indexer was told: this one follows it to its new place, and never writes the old one back.
func TestMovedByAnotherIndexer(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	told, other := newIndexer(t, Options{Store: st}), newIndexer(t, Options{Store: st})
	start(t, told)
	start(t, other)
	body := fmt.Sprintf(`{"instance_id":"w","model_name":"m","endpoint":%q,"block_size":4}`, e.Endpoint)
	if code, v := request(t, told, "POST", "/register", body); code != 201 {
		t.Fatalf("register: %d %v", code, v)
	}
	endpoint := func() string {
		if s := other.stream(store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}}); s != nil {
			return s.reg.Endpoint
		}
		return ""
	}
	follows := func(want string) {
		t.Helper()
		eventually(t, func() string {
			if err := other.discover(t.Context()); err != nil {
				return err.Error()
			}
			if got := endpoint(); got != want {
				return "the other indexer follows " + got
			}
			return ""
		})
	}
	follows(e.Endpoint)
	wantStatus(t, other, "w", func(v Status) bool { return v.Registered })
	e2 := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	if code, v := request(t, told, "POST", "/register", strings.Replace(body, e.Endpoint, e2.Endpoint, 1)); code != 201 {
		t.Fatalf("moved: %d %v", code, v)
	}
	follows(e2.Endpoint)
	wantStatus(t, other, "w", func(v Status) bool { return v.Connected && v.Registered })
	e2.Subscribed()
	e2.Subscribed()
	e2.Publish("", 0, payload(stored(nil, 2)))
	wantHeld(t, st, testPool, gpu("w/0", 2)...)
	if now, _, err := st.Stream(t.Context(), other.all()[0].id); err != nil || now.Endpoint != e2.Endpoint {
		t.Errorf("registered at %q, moved to %s: %v", now.Endpoint, e2.Endpoint, err)
	}
}
