package frontend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// tiered is an index of one prompt with blocks in several tiers, on ranks of two workers.
type tiered struct {
	fakeIndex
	scores kvcache.OverlapScores
}

func (x *tiered) lookupScores() kvcache.OverlapScores {
	return kvcache.OverlapScores{
		Scores: map[kvcache.WorkerRank]kvcache.Overlap{
			{Worker: "w1", Rank: 0}: {Device: 8, Host: 8, Disk: 8, Any: 8},
			{Worker: "w1", Rank: 1}: {Device: 4, Host: 16, Disk: 16, Any: 16},
			{Worker: "w2", Rank: 0}: {Device: 0, Host: 0, Disk: 1, Any: 2},
		},
		TreeSizes: map[kvcache.WorkerRank]int{{Worker: "w1", Rank: 0}: 100, {Worker: "w1", Rank: 1}: 200, {Worker: "w2", Rank: 0}: 3},
	}
}

func decode(t *testing.T, text string) map[string]any {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return v
}

func sameJSON(t *testing.T, got, want string) {
	t.Helper()
	if !reflect.DeepEqual(decode(t, got), decode(t, want)) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestQuery(t *testing.T) {
	x := &tiered{fakeIndex: fakeIndex{blockSize: 16}}
	x.scores = x.lookupScores()
	f := start(t, Options{Index: x})
	_, ids := prompt(260)
	tokens, _ := json.Marshal(ids)
	res, text := f.post("/query", fmt.Sprintf(`{"model_name":"llama","token_ids":%s,"block_size":16}`, tokens))
	if res.StatusCode != 200 {
		t.Fatalf("%d %s", res.StatusCode, text)
	}
	sameJSON(t, text, `{"default":{
		"w1":{"longest_matched":256,"GPU":128,"DP":{"0":128,"1":256},"CPU":256,"DISK":256},
		"w2":{"longest_matched":32,"GPU":0,"DP":{"0":32},"CPU":0,"DISK":16}},
		"scores":{"w1":{"0":128,"1":256},"w2":{"0":32}},"frequencies":[],
		"tree_sizes":{"w1":{"0":100,"1":200},"w2":{"0":3}},"index_state":"exact"}`)

	_, text = f.post("/query", fmt.Sprintf(`{"model":"llama","token_ids":%s,"instance_id":"w2"}`, tokens))
	sameJSON(t, text, `{"default":{"w2":{"longest_matched":32,"GPU":0,"DP":{"0":32},"CPU":0,"DISK":16}},
		"scores":{"w2":{"0":32}},"frequencies":[],"tree_sizes":{"w2":{"0":3}},"index_state":"exact"}`)

	res, text = f.post("/query", fmt.Sprintf(`{"model":"llama","token_ids":%s,"block_size":32}`, tokens))
	wantError(t, res, text, 400, "block_size_conflict")
	if !strings.Contains(text, "16") || !strings.Contains(text, "32") {
		t.Errorf("the conflict does not name both sizes: %s", text)
	}
	res, text = f.post("/query", `{"model":"unheard of","token_ids":[1]}`)
	wantError(t, res, text, 404, "model_not_found")
	res, text = f.post("/query", `{"model":"llama","tenant_id":"a:b","token_ids":[1]}`)
	wantError(t, res, text, 400, "invalid_request")
	res, text = f.post("/query_by_hash", `{"model":"llama","token_ids":[1]}`)
	wantError(t, res, text, 400, "invalid_request")
}

func TestQueryByHash(t *testing.T) {
	x := &fakeIndex{blockSize: 4}
	f := start(t, Options{Index: x})
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	spec := kvcache.HashSpec{BlockSize: 4}
	want := kvcache.HashTokens(spec, tokens)
	locals := []kvcache.LocalHash{kvcache.HashBlock(spec, tokens[:4], nil), kvcache.HashBlock(spec, tokens[4:8], nil), kvcache.HashBlock(spec, tokens[8:], nil)}
	for name, body := range map[string]string{
		"seq_hashes, unsigned": fmt.Sprintf(`"seq_hashes":[%d,%d,%d]`, want[0], want[1], want[2]),
		"seq_hashes, signed":   fmt.Sprintf(`"seq_hashes":[%d,%d,%d]`, int64(want[0]), int64(want[1]), int64(want[2])),
		"seq_hashes, hex":      fmt.Sprintf(`"seq_hashes":["%s","%s","%s"]`, want[0], want[1], want[2]),
		"block_hash":           fmt.Sprintf(`"block_hash":[%d,"%s",%d]`, want[0], want[1], want[2]),
		"block_hashes, local":  fmt.Sprintf(`"block_hashes":[%d,%d,"%s"]`, locals[0], int64(locals[1]), locals[2]),
	} {
		x.asked = nil
		res, text := f.post("/query_by_hash", `{"model":"llama",`+body+`}`)
		if res.StatusCode != 200 || len(x.asked) != 1 || !reflect.DeepEqual(x.asked[0], want) {
			t.Errorf("%s: %d %s, looked up %v, want %v", name, res.StatusCode, text, x.asked, want)
		}
	}
	for _, bad := range []string{`"seq_hashes":[1.5]`, `"seq_hashes":[1e3]`, `"seq_hashes":["xyz"]`, `"seq_hashes":[18446744073709551616]`, `"block_hashes":7`} {
		res, text := f.post("/query_by_hash", `{"model":"llama",`+bad+`}`)
		wantError(t, res, text, 400, "invalid_request")
	}
}

func (x *tiered) Lookup(ctx context.Context, p kvcache.PoolID, b []kvcache.BlockHash, o store.LookupOptions) (kvcache.OverlapScores, kvcache.IndexState, error) {
	if _, state, err := x.fakeIndex.Lookup(ctx, p, b, o); err != nil {
		return kvcache.OverlapScores{}, state, err
	}
	return x.scores, kvcache.Exact, nil
}

func TestQueryWithTheIndexAway(t *testing.T) {
	e := newEngine(t, "w1")
	for name, x := range map[string]*fakeIndex{
		"lookup fails":        {blockSize: 16, err: store.ErrUnavailable},
		"configuration fails": {noPool: true, err: store.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, Options{Index: x, Workers: []Worker{e.worker()}})
			for _, body := range []string{`{"model":"llama","token_ids":[1,2,3]}`, `{"model":"llama","seq_hashes":[1]}`} {
				path := "/query"
				if strings.Contains(body, "seq") {
					path = "/query_by_hash"
				}
				res, text := f.post(path, body)
				if res.StatusCode != 200 {
					t.Fatalf("%d %s", res.StatusCode, text)
				}
				sameJSON(t, text, `{"default":{},"scores":{},"frequencies":[],"tree_sizes":{},"index_state":"degraded"}`)
			}
			if n := f.metric("warmroute_index_fallbacks_total", "reason", "connection"); n != 2 {
				t.Errorf("%v fallbacks", n)
			}
		})
	}
}

func TestSelect(t *testing.T) {
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	w1 := e1.worker()
	w1.Ranks = 2
	x := &tiered{fakeIndex: fakeIndex{blockSize: 16}}
	x.scores = x.lookupScores()
	f := start(t, Options{Index: x, Workers: []Worker{w1, e2.worker()}})
	_, ids := prompt(260)
	tokens, _ := json.Marshal(ids)
	ask := func(more string) (*http.Response, string) {
		return f.post("/select", fmt.Sprintf(`{"model_name":"llama","token_ids":%s,"expected_output_tokens":9,"router_config_override":{}%s}`, tokens, more))
	}
	_, text := ask("")
	sameJSON(t, text, fmt.Sprintf(`{"selection_id":null,"worker_id":"w1","dp_rank":1,"endpoint":%q,"block_size":16,
		"overlap":{"longest_matched":256,"gpu":64,"cpu":256,"disk":256},"effective_prefill_tokens":52,"potential_decode_blocks":17,"index_state":"exact"}`, e1.URL))
	for more, want := range map[string]string{
		`,"pinned_worker":"w2"`:                           "w2/0",
		`,"pinned_worker":{"worker_id":"w1","dp_rank":0}`: "w1/0",
		`,"allowed_worker_ids":["w2","w7"]`:               "w2/0",
		`,"pinned_worker":null,"allowed_worker_ids":null`: "w1/1",
	} {
		_, text := ask(more)
		v := decode(t, text)
		if got := fmt.Sprintf("%v/%v", v["worker_id"], v["dp_rank"]); got != want {
			t.Errorf("%s: %s, want %s", more, got, want)
		}
	}
	res, text := ask(`,"allowed_worker_ids":[]`)
	wantError(t, res, text, 503, "no_workers")
	res, text = ask(`,"pinned_worker":"w7"`)
	wantError(t, res, text, 400, "worker_not_found")
	for more, says := range map[string]string{
		`,"pinned_worker":true`:                                  "worker id true: want a string or a whole number",
		`,"pinned_worker":""`:                                    "names neither a worker nor a rank",
		`,"pinned_worker":{}`:                                    "names neither",
		`,"pinned_worker":{"worker_id":"w1","dp_rank":-1}`:       "a rank is a whole number from 0 to 65535",
		`,"allowed_worker_ids":"w1"`:                             `"allowed_worker_ids": a JSON string cannot stand here`,
		`,"selection_id":5`:                                      `"selection_id": a JSON number cannot stand here`,
		`,"router_config_override":{"router_temperature":"hot"}`: `"router_temperature": a JSON string cannot stand here`,
		`,"router_config_override":{"router_temperature":-1}`:    "weights are numbers from 0 to 1e9",
		`,"block_size":-16`:                                      `"block_size" is negative`,
	} {
		res, text := ask(more)
		wantError(t, res, text, 400, "invalid_request")
		if !strings.Contains(decode(t, text)["error"].(map[string]any)["message"].(string), says) {
			t.Errorf("%s: %s, want %q", more, text, says)
		}
	}
	// Of two members of one name the last one counts, as a whole.
	if _, text := ask(`,"pinned_worker":{"worker_id":"w1","dp_rank":1},"pinned_worker":{"worker_id":"w2"}`); decode(t, text)["worker_id"] != "w2" {
		t.Errorf("the last pin does not count: %s", text)
	}
	if res, text := ask(`,"router_config_override":{"router_temperature":-1},"router_config_override":{}`); res.StatusCode != 200 {
		t.Errorf("the last override does not count: %s", text)
	}
	res, text = ask(`,"pinned_worker":"w1","allowed_worker_ids":["w2"]`)
	wantError(t, res, text, 400, "worker_not_found")
	res, text = ask(`,"allowed_worker_ids":["w7",8,""]`)
	if wantError(t, res, text, 503, "no_workers"); !strings.Contains(text, "none of the allowed workers is known") {
		t.Error(text)
	}
	if _, text := ask(`,"allowed_worker_ids":[` + strings.Repeat(`"w2","w9",`, 50_000) + `"w2"]`); decode(t, text)["worker_id"] != "w2" {
		t.Errorf("a long list: %s", text)
	}
	res, text = f.post("/select", `{"model_name":"unheard of","token_ids":[1]}`)
	wantError(t, res, text, 404, "model_not_found")
	f.wantIdle() // nothing is reserved

	hashes := `["` + kvcache.BlockHash(1).String() + `"]`
	_, text = f.post("/select", `{"model_name":"llama","block_hashes":`+hashes+`,"allowed_worker_ids":["w2"]}`)
	if v := decode(t, text); v["worker_id"] != "w2" || v["effective_prefill_tokens"] != 0.0 || v["potential_decode_blocks"] != 1.0 {
		t.Errorf("by hashes: %s", text)
	}
}

func TestSelectWithTheIndexAway(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16, err: store.ErrUnavailable}, Workers: []Worker{e.worker()}})
	_, text := f.post("/select", `{"model":"llama","token_ids":[1,2,3]}`)
	if v := decode(t, text); v["worker_id"] != "w1" || v["index_state"] != "degraded" {
		t.Errorf("%s", text)
	}
}

func TestReadyShowsTheIndexAndStaysReady(t *testing.T) {
	e := newEngine(t, "w1")
	x := &fakeIndex{blockSize: 16, links: []store.LinkStatus{
		{Shard: "default:llama#0", Up: true, Since: time.Now()},
		{Shard: "default:llama#1", Since: time.Now(), Reason: "timeout", Error: "i/o timeout at a secret place"},
	}}
	f := start(t, Options{Index: x, Workers: []Worker{e.worker(), {ID: "w2", URL: refusing(t)}}[:1]})
	f.eventually("the index has listed the workers", func() bool { return !f.fleet.Snapshot().Catalog().Since.IsZero() })
	res, text := f.get("/ready")
	v := decode(t, text)
	if res.StatusCode != 200 || v["status"] != "ready" || v["degraded"] != true || len(v["components"].([]any)) != 4 {
		t.Errorf("%d %s", res.StatusCode, text)
	}
	if index := v["index"].(map[string]any); index["state"] != "partial" {
		t.Errorf("index: %v", index)
	}
	if !strings.Contains(text, `"timeout"`) || strings.Contains(text, "secret") {
		t.Errorf("detail: %s", text)
	}
}

func TestModelsAndWorkers(t *testing.T) {
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	e2.models = `{"data":[{"id":"llama"},{"id":"sql","parent":"llama"}]}`
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e1.worker(), e2.worker()}})
	_, text := f.get("/v1/models")
	v := decode(t, text)
	if data := v["data"].([]any); v["object"] != "list" || len(data) != 2 || data[1].(map[string]any)["parent"] != "llama" {
		t.Errorf("%s", text)
	}
	_, text = f.get("/workers")
	workers := decode(t, text)["workers"].([]any)
	if len(workers) != 2 || workers[0].(map[string]any)["healthy"] != true || workers[1].(map[string]any)["id"] != "w2" {
		t.Errorf("%s", text)
	}
}

func TestDump(t *testing.T) {
	event := func(i uint64) kvcache.RouterEvent {
		return kvcache.RouterEvent{WorkerID: "w1", Event: kvcache.CacheEvent{EventID: i, Data: kvcache.EventData{
			Stored: &kvcache.StoredData{Blocks: []kvcache.StoredBlock{{BlockHash: kvcache.BlockHash(i)}}},
		}}}
	}
	const lines = 1000
	breaks := 0
	x := &fakeIndex{blockSize: 16, dump: func(f func(kvcache.RouterEvent) error) error {
		for i := range uint64(lines) {
			if breaks > 0 && i == uint64(breaks) {
				return errors.New("redis is away")
			}
			if err := f(event(i)); err != nil {
				return err
			}
		}
		return nil
	}}
	f := start(t, Options{Index: x})
	res, text := f.get("/dump?model=llama")
	if n := strings.Count(text, "\n"); res.StatusCode != 200 || n != lines {
		t.Fatalf("%d, %d lines", res.StatusCode, n)
	}
	var got kvcache.RouterEvent
	if err := json.Unmarshal([]byte(strings.SplitN(text, "\n", 9)[7]), &got); err != nil || !reflect.DeepEqual(got, event(7)) {
		t.Errorf("line 7: %+v, %v", got, err)
	}
	if _, text := f.get("/dump?model=other"); text != "" {
		t.Errorf("another model: %s", text)
	}

	breaks = 500
	res, err := client.Get(f.url + "/dump")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.ReadAll(res.Body); err == nil {
		t.Error("a dump that broke off ended cleanly")
	}
	x.err = store.ErrUnavailable
	res, text = f.get("/dump")
	wantError(t, res, text, 503, "index_unavailable")
}
