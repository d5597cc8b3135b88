package frontend

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/ui"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

func (x *fakeIndex) Sizes(context.Context, kvcache.PoolID) (map[kvcache.WorkerRank][kvcache.NumTiers]int, error) {
	out := map[kvcache.WorkerRank][kvcache.NumTiers]int{}
	for w, blocks := range x.hold {
		out[w] = [kvcache.NumTiers]int{len(blocks)}
	}
	return out, x.err
}

func (x *fakeIndex) Holders(_ context.Context, _ kvcache.PoolID, blocks []kvcache.BlockHash) (map[kvcache.WorkerRank][]byte, error) {
	out := map[kvcache.WorkerRank][]byte{}
	for w, held := range x.hold {
		for i, b := range blocks {
			for _, h := range held {
				if h == b {
					if out[w] == nil {
						out[w] = make([]byte, len(blocks))
					}
					out[w][i] = 1
				}
			}
		}
	}
	return out, x.err
}

// pageState is the part of GET /ui/state that these tests look at.
type pageState struct {
	Index     ui.Index
	Workers   []ui.Worker
	Decisions []struct {
		Worker      string `json:"worker_id"`
		State       string `json:"index_state"`
		Cause       string
		Known       bool `json:"overlap_known"`
		Overlap     int  `json:"overlap_blocks"`
		Blocks      int  `json:"prompt_blocks"`
		Explanation explanation
	}
}

func (r *running) page(header ...string) (s pageState) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, r.url+"/ui/state", nil)
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, body := r.do(req)
	if err := json.Unmarshal([]byte(body), &s); err != nil || res.StatusCode != http.StatusOK {
		r.t.Fatalf("status %d, %v: %.200s", res.StatusCode, err, body)
	}
	return s
}

func TestPageShowsDecisions(t *testing.T) {
	a, b := newEngine(t, "a"), newEngine(t, "b")
	body, tokens := prompt(64)
	index := holding(16, tokens, map[string]int{"a": 3})
	index.streams = []store.Stream{{StreamID: store.StreamID{Pool: llama, WorkerRank: kvcache.WorkerRank{Worker: "a"}}, Generation: 9, Seq: 4}}
	r := start(t, Options{Workers: []Worker{a.worker(), b.worker()}, Index: index})
	r.post("/v1/completions", body)
	r.post("/v1/completions", body, headerWorker, "b")
	r.post("/tokenize", `{"model":"llama","prompt":"secret"}`) // is no decision
	s := r.page()
	if len(s.Decisions) != 2 {
		t.Fatalf("decisions %+v", s.Decisions)
	}
	d := s.Decisions[0]
	if d.Worker != "a" || d.State != "exact" || !d.Known || d.Overlap != 3 || d.Blocks != 4 || d.Explanation.Reason != reasonOverlap ||
		len(d.Explanation.Candidates) != 2 || d.Explanation.Candidates[0].Cost == nil || d.Explanation.Candidates[0].Overlap.Device != 3 {
		t.Errorf("decision %+v", d)
	}
	if d := s.Decisions[1]; d.Worker != "b" || d.Explanation.Reason != reasonPinned {
		t.Errorf("a pinned one: %+v", d)
	}
	if st := s.Workers[0].Ranks[0].Streams; len(st) != 1 || st[0].Blocks.Device != 3 || st[0].Watermark != 4 {
		t.Errorf("streams %+v", st)
	}
}

func TestPageOfManyCandidates(t *testing.T) {
	p := placed{index: 199}
	for i := range 200 {
		p.list = append(p.list, candidate{WorkerRank: kvcache.WorkerRank{Worker: strconv.Itoa(i)}})
		p.loads = append(p.loads, choose.Load{Requests: i})
	}
	kept, omitted := p.firstOf(128)
	if len(kept.list) != 128 || len(kept.loads) != 128 || omitted != 72 || kept.chosen().Worker != "199" || kept.loads[0].Requests != 199 || kept.list[127].Worker != "126" {
		t.Errorf("%d kept, %d omitted, chosen %+v", len(kept.list), omitted, kept.chosen())
	}
	if few, omitted := p.firstOf(200); len(few.list) != 200 || few.index != 199 || omitted != 0 {
		t.Error("a list that fits is not left alone")
	}
}

func TestPageWithoutIndex(t *testing.T) {
	a := newEngine(t, "a")
	r := start(t, Options{Workers: []Worker{a.worker()}})
	body, _ := prompt(64)
	r.post("/v1/completions", body)
	s := r.page()
	if s.Index.State != "bypassed" || s.Index.Reason != reasonDisabled || len(s.Decisions) != 1 || s.Decisions[0].Known {
		t.Errorf("%+v", s)
	}
	res, text := r.post("/ui/explore", `{"model":"llama","token_ids":[1,2,3]}`)
	if res.StatusCode != http.StatusOK || !strings.Contains(text, `"cause":"disabled"`) {
		t.Errorf("explore: %d %s", res.StatusCode, text)
	}
}

func TestPageWhileTheIndexIsAway(t *testing.T) {
	a := newEngine(t, "a")
	since := time.Now().Add(-time.Minute)
	index := &fakeIndex{
		blockSize: 16, err: &store.ConflictError{}, lookup: func(context.Context) error { return context.DeadlineExceeded },
		links: []store.LinkStatus{{Shard: llama.String() + "#0", Since: since, Reason: store.ReasonTimeout}},
	}
	r := start(t, Options{Workers: []Worker{a.worker()}, Index: index})
	s := r.page()
	if s.Index.State != "degraded" || s.Index.Since == nil || !s.Index.Since.Equal(since) || s.Index.Reason != store.ReasonTimeout || s.Index.ReadError == "" || s.Index.Read != nil {
		t.Errorf("%+v", s.Index)
	}
}

func TestExplore(t *testing.T) {
	a, b := newEngine(t, "a"), newEngine(t, "b")
	_, tokens := prompt(70)
	index := holding(16, tokens, map[string]int{"a": 4, "gone": 4})
	index.hold[kvcache.WorkerRank{Worker: "a"}] = index.hold[kvcache.WorkerRank{Worker: "gone"}][:2]
	index.hold[kvcache.WorkerRank{Worker: "b"}] = index.hold[kvcache.WorkerRank{Worker: "gone"}][2:] // no prefix
	r := start(t, Options{Workers: []Worker{a.worker(), b.worker()}, Index: index})
	ids, err := json.Marshal(tokens)
	if err != nil {
		t.Fatal(err)
	}
	before := r.metric("warmroute_selected_total")
	res, body := r.post("/ui/explore", `{"model":"llama","token_ids":`+string(ids)+`}`)
	got := explored{explanation: &explanation{}}
	if err := json.Unmarshal([]byte(body), &got); err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("%d %s: %v", res.StatusCode, body, err)
	}
	if got.Blocks != 4 || got.Shown != 4 || got.State != kvcache.Exact || got.Candidates[0].Worker != "a" || got.Cause != "" ||
		!slices.Equal(got.Holders, []held{{"a", 0, "1100"}, {"b", 0, "0011"}, {"gone", 0, "1111"}}) {
		t.Errorf("%+v, holders %+v", got, got.Holders)
	}
	if after := r.metric("warmroute_selected_total"); after != before || len(r.page().Decisions) != 0 {
		t.Error("looking counts as a choice")
	}
	res, body = r.post("/ui/explore", `{"model":"nonesuch","token_ids":[1]}`)
	wantError(t, res, body, http.StatusNotFound, "model_not_found")
	res, body = r.post("/ui/explore", `{"model":"llama"}`)
	wantError(t, res, body, http.StatusBadRequest, "invalid_request")
}

// The page itself needs no token; what it shows does.
func TestPageAndToken(t *testing.T) {
	a := newEngine(t, "a")
	r := start(t, Options{Workers: []Worker{a.worker()}, Tokens: tokens(t, "s3cret", "", "")})
	for _, path := range []string{"/ui", "/ui/assets/app.js"} {
		if res, _ := r.get(path); res.StatusCode != http.StatusOK || res.Header.Get("Content-Security-Policy") == "" {
			t.Errorf("%s: %d %v", path, res.StatusCode, res.Header)
		}
	}
	for _, path := range []string{"/ui/state", "/ui/events"} {
		res, body := r.get(path)
		wantError(t, res, body, http.StatusUnauthorized, "invalid_api_key")
	}
	res, body := r.post("/ui/explore", `{}`)
	wantError(t, res, body, http.StatusUnauthorized, "invalid_api_key")
	res, body = r.get("/ui/assets/nothing")
	wantError(t, res, body, http.StatusNotFound, "not_found")
	if s := r.page("Authorization", "Bearer s3cret"); len(s.Workers) != 1 {
		t.Errorf("with the token: %+v", s)
	}
}

// BenchmarkDecided is what the page costs each choice of a worker, of 64 candidates.
func BenchmarkDecided(b *testing.B) {
	f := &Frontend{}
	f.page = ui.New(ui.Options{Source: pageSource{f}})
	p := placed{list: make([]candidate, 64), loads: make([]choose.Load, 64), costed: true, policy: PolicyKV}
	w := want{pool: llama, k: &knowledge{blockSize: 16, state: kvcache.Exact, tokens: 1600, blocks: 100, spent: time.Millisecond}, tokens: 1600}
	b.ReportAllocs()
	for b.Loop() {
		f.decided("/v1/completions", &w, &p, 0, time.Time{})
	}
}
