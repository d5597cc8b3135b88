package indexer

import (
	"context"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

func TestReadWork(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want map[int]work
	}{
		"vLLM, two ranks": {`# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a {b} c"} 1200.0
vllm:prompt_tokens_total{engine="1",model_name="a {b} c"} 7.0
vllm:generation_tokens_total{model_name="m",engine="0"} 1.5e+02
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0
vllm:prompt_tokens_created{engine="0"} 1.7e+09
`, map[int]work{0: {1350, 4}, 1: {7, 0}}},
		"SGLang": {`sglang:prompt_tokens_total{model_name="m"} 64
sglang:num_requests_total{model_name="m"} 2
`, map[int]work{-1: {64, 2}}},
		"underscores, no labels": {"vllm_prompt_tokens_total 5\nsglang_num_requests_total 1\n", map[int]work{-1: {5, 1}}},
		"something else":         {"not_vllm:prompt_tokens_total 5\nvllm:prompt_tokens_total{ 5\nvllm:prompt_tokens_total NaN\n{}\n\x00", map[int]work{}},
	} {
		if got, err := readWork(strings.NewReader(c.text)); err != nil || !maps.Equal(got, c.want) {
			t.Errorf("%s: %v %v, want %v", name, got, err, c.want)
		}
	}
}

func TestNewWorkCheck(t *testing.T) {
	status := http.StatusOK
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		w.WriteHeader(status)
		_, _ = w.Write([]byte("vllm:prompt_tokens_total 5\n"))
	}))
	defer srv.Close()
	check := newWorkCheck(newWorkerClient(nil, nil))
	if got, err := check(t.Context(), srv.URL); err != nil || got[-1].tokens != 5 {
		t.Errorf("%v %v", got, err)
	}
	status = http.StatusNotFound
	if _, err := check(t.Context(), srv.URL); err == nil {
		t.Error("no error without metrics")
	}
}

// Whoever has filled blocks, by its own account, and published nothing at two looks in a row is reported, until it publishes.
func TestSilentWorkerIsReported(t *testing.T) {
	ix := newIndexer(t, Options{Store: newStore(t)})
	done := map[int]work{}
	asked := 0
	ix.health = func(context.Context, string) (health, error) { return healthOK, nil }
	ix.work = func(context.Context, string) (map[int]work, error) { asked++; return maps.Clone(done), nil }
	var ranks [2]*stream
	for r := range ranks {
		id := store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w", Rank: r}}
		ranks[r] = newStream(ix, publisher{id: id, reg: store.Registration{URL: "http://w", Endpoint: "tcp://w:1", BlockSize: 16}})
		ix.streams[id] = ranks[r]
	}
	look := func(want0, want1 bool) {
		t.Helper()
		ix.checkOnce(t.Context())
		if a, b := ranks[0].snapshot().Silent, ranks[1].snapshot().Silent; a != want0 || b != want1 {
			t.Errorf("silent %v and %v with %v, want %v and %v", a, b, done, want0, want1)
		}
	}
	look(false, false)
	done[0] = work{tokens: 160, requests: 20} // short prompts: no block may be full
	look(false, false)
	look(false, false)
	done[0] = work{tokens: 640, requests: 20}
	look(false, false)
	look(true, false)
	done[1] = work{tokens: 20}
	look(true, false)
	look(true, true)
	for _, s := range ranks {
		s.update(func(v *Status) { v.Watermark = 0 })
	}
	look(false, false)
	before := asked
	look(false, false)
	if asked != before {
		t.Error("a worker that has published is still asked")
	}
}
