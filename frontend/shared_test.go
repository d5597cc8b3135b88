package frontend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// cheapest answers like select.lua over idle workers, and keeps the questions.
type cheapest struct {
	mu   sync.Mutex
	asks []store.Ask
}

func (s *cheapest) choose(_ context.Context, a store.Ask) (store.Choice, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks = append(s.asks, a)
	list := make([]choose.Candidate, len(a.Candidates))
	for i, c := range a.Candidates {
		list[i].Credit = c.Credit
	}
	c := choose.Choose(choose.Ask{
		Request: choose.Request{BlockSize: a.BlockSize, Tokens: a.PromptTokens}, Weights: choose.Weights(a.Weights), Home: -1,
	}, list)
	return store.Choice{WorkerRank: a.Candidates[c.Index].WorkerRank, Index: c.Index, Held: a.ID != "", Loads: make([]store.Load, len(list))}, nil
}

// One call to Redis chooses and reserves; what happens then is told in the background, in order.
func TestRequestIsReservedAndReleased(t *testing.T) {
	body, ids := prompt(640)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	x := holding(16, ids, map[string]int{"w2": 30})
	s := &cheapest{}
	x.choose = s.choose
	f := start(t, Options{Index: x, Workers: []Worker{e1.worker(), e2.worker()}, Busy: Load{Requests: 100}})
	res, _ := f.post(completions, body, "x-session-id", "s1")
	if res.Header.Get(headerWorker) != "w2" || res.Header.Get(headerOverlap) != "30" {
		t.Fatalf("headers %v", res.Header)
	}
	a := s.asks[0]
	if len(s.asks) != 1 || a.ID == "" || a.Lease != 15*time.Second || a.BlockSize != 16 || a.PromptTokens != 640 || a.DecodeBlocks != 40 ||
		a.Session != "s1" || a.SessionTTL != 10*time.Minute || a.SessionSlack != 4*8192/16 || a.Busy.Requests != 100 ||
		a.Weights != store.Weights(choose.Default) || len(a.Candidates) != 2 || a.Candidates[0].Credit != 0 || a.Candidates[1].Credit != 30 {
		t.Errorf("asked %d times, first %+v", len(s.asks), a)
	}
	told := func() []string {
		x.mu.Lock()
		defer x.mu.Unlock()
		return slices.Clone(x.told)
	}
	f.eventually("the reservation is released", func() bool { return slices.Contains(told(), "release "+a.ID) })
	if got := told(); !slices.Equal(got, []string{"release " + a.ID}) && !slices.Equal(got, []string{"prefilled " + a.ID, "release " + a.ID}) {
		t.Errorf("told %q", got)
	}
	if n := f.metric("warmroute_selected_total", "policy", PolicyKV, "reason", reasonOverlap); n != 1 {
		t.Errorf("%v choices by overlap", n)
	}
	f.wantIdle()

	// A second attempt reserves anew and gives the first back.
	f.swap("w2", refusing(t))
	res, _ = f.post(completions, body)
	if res.StatusCode != 200 || res.Header.Get(headerWorker) != "w1" || len(s.asks) != 3 || s.asks[1].ID == s.asks[2].ID {
		t.Errorf("%d to %s with %d questions", res.StatusCode, res.Header.Get(headerWorker), len(s.asks))
	}
	f.eventually("both are released", func() bool {
		return slices.Contains(told(), "release "+s.asks[1].ID) && slices.Contains(told(), "release "+s.asks[2].ID)
	})
	if n := f.metric("warmroute_reservations"); n != 0 {
		t.Errorf("%v reservations kept", n)
	}

	// What is not to be routed by the index is not counted there either.
	before := len(s.asks)
	f.post(completions, body, "x-kv-routing", "off")
	f.post("/tokenize", `{"model":"llama","prompt":"proxied"}`)
	if len(s.asks) != before {
		t.Error("a request that bypasses the index asked for its loads")
	}
}

// With the loads away this frontend's own decide, by the same weights; the request is served, marked exact, and counted.
func TestLoadsAway(t *testing.T) {
	body, ids := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	for name, test := range map[string]struct {
		choose func(context.Context, store.Ask) (store.Choice, error)
		reason string
	}{
		"refused": {func(context.Context, store.Ask) (store.Choice, error) { return store.Choice{}, store.ErrUnavailable }, store.ReasonConnection},
		"panics": {func(_ context.Context, a store.Ask) (store.Choice, error) {
			if len(a.Candidates) > 1 {
				panic("!")
			}
			return store.Choice{}, nil
		}, store.ReasonTimeout},
		"strange": {func(context.Context, store.Ask) (store.Choice, error) { return store.Choice{}, errors.New("?") }, store.ReasonCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			x := holding(16, ids, map[string]int{"w1": 4})
			x.choose = test.choose
			f := start(t, Options{Index: x, Workers: []Worker{e1.worker(), e2.worker()}})
			res, _ := f.post(completions, body)
			if res.StatusCode != 200 || res.Header.Get(headerWorker) != "w1" || res.Header.Get(headerState) != "exact" {
				t.Errorf("%d, headers %v", res.StatusCode, res.Header)
			}
			if n := f.metric("warmroute_load_fallbacks_total"); n != 1 {
				t.Errorf("counted %v times", n)
			}
			f.wantIdle()
		})
	}
}

// Overlaps and loads share one budget: an index that hangs in both costs it once.
func TestOneBudgetForOverlapsAndLoads(t *testing.T) {
	body, ids := prompt(64)
	e := newEngine(t, "w1")
	x := holding(16, ids, map[string]int{"w1": 4})
	x.lookup = func(ctx context.Context) error { // two thirds of the budget
		select {
		case <-time.After(200 * time.Millisecond):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	var left atomic.Int64
	x.choose = func(ctx context.Context, a store.Ask) (store.Choice, error) {
		if len(a.Candidates) == 1 { // in the background
			return store.Choice{}, nil
		}
		end, ok := ctx.Deadline()
		if left.Store(int64(time.Until(end))); !ok {
			t.Error("no deadline")
		}
		<-ctx.Done()
		return store.Choice{}, ctx.Err()
	}
	f := start(t, Options{Index: x, Workers: []Worker{e.worker(), newEngine(t, "w2").worker()}, LookupBudget: 300 * time.Millisecond})
	res, _ := f.post(completions, body)
	if res.StatusCode != 200 {
		t.Errorf("%d", res.StatusCode)
	}
	if n := time.Duration(left.Load()); n == 0 || n > 105*time.Millisecond {
		t.Errorf("%v were left for the loads", n)
	}
}

// Where all workers are at the threshold the request is refused, and says so.
func TestAllBusy(t *testing.T) {
	body, _ := prompt(64)
	for _, test := range []struct {
		policy string
		status int
		shared bool
	}{{PolicyKV, 503, true}, {PolicyKV, 429, false}, {PolicyRoundRobin, 429, false}, {PolicyLeastLoaded, 0, true}} {
		e := newEngine(t, "w1")
		release := make(chan struct{})
		e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
			w.WriteHeader(200)
			w.(http.Flusher).Flush()
			<-release
		}
		x := &fakeIndex{blockSize: 16}
		if test.shared {
			n := 0
			x.choose = func(_ context.Context, a store.Ask) (store.Choice, error) {
				if n++; n > 2 {
					return store.Choice{AllBusy: true, Loads: make([]store.Load, 1)}, nil
				}
				return store.Choice{WorkerRank: a.Candidates[0].WorkerRank, Held: true, Loads: make([]store.Load, 1)}, nil
			}
		}
		f := start(t, Options{Index: x, Workers: []Worker{e.worker()}, Policy: test.policy, Busy: Load{Requests: 2}, BusyStatus: test.status})
		for range 2 {
			res, err := client.Do(f.request(t.Context(), completions, body))
			if err != nil || res.StatusCode != 200 {
				t.Fatal(res, err)
			}
			defer res.Body.Close()
		}
		want := test.status
		if want == 0 {
			want = 503
		}
		res, text := f.post(completions, body)
		wantError(t, res, text, want, "overloaded")
		if res.Header.Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
		close(release)
	}
}

// The choice explains itself, in a header of bounded size and without a word of the prompt.
func TestExplain(t *testing.T) {
	const secret = 777777777
	body := fmt.Sprintf(`{"model":"llama","prompt":[%d%s]}`, secret, strings.Repeat(",7", 63))
	tokens := make([]uint32, 64)
	for i := range tokens {
		tokens[i] = 7
	}
	tokens[0] = secret
	var workers []Worker
	e := newEngine(t, "")
	for i := range 200 {
		workers = append(workers, Worker{ID: fmt.Sprintf("worker-number-%03d", i), URL: e.URL})
	}
	x := holding(16, tokens, map[string]int{"worker-number-150": 4, "worker-number-007": 2})
	x.choose = (&cheapest{}).choose
	f := start(t, Options{Index: x, Workers: workers})
	res, _ := f.post(completions, body)
	if v, ok := res.Header[headerExplain]; ok {
		t.Errorf("explained unasked: %s", v)
	}
	res, _ = f.post(completions, body, "x-kv-explain", "1")
	head := res.Header.Get(headerExplain)
	if len(head) > maxExplainHeader || strings.Contains(head, fmt.Sprint(secret)) {
		t.Errorf("%d bytes: %s", len(head), head)
	}
	var got explanation
	if err := json.Unmarshal([]byte(head), &got); err != nil {
		t.Fatalf("%v: %s", err, head)
	}
	first, second := got.Candidates[0], got.Candidates[1]
	if got.Policy != PolicyKV || got.Reason != reasonOverlap || !got.Shared || got.Tokens != 64 || got.Omitted+len(got.Candidates) != 200 || got.Omitted == 0 ||
		got.Weights.Miss != choose.Default.Miss || first.Worker != "worker-number-150" || first.Overlap.Device != 4 || *first.Cost != 0 || second.Worker != "worker-number-007" || *second.Cost != 2*choose.Default.PrefillScale*choose.Default.Miss {
		t.Errorf("%s", head)
	}
	res, _ = f.post(completions, body, "x-kv-explain", "1", headerAllowed, "worker-number-150,worker-number-007")
	if err := json.Unmarshal([]byte(res.Header.Get(headerExplain)), &got); err != nil || got.Reason != reasonPinned {
		t.Errorf("restricted: %v: %s", err, res.Header.Get(headerExplain))
	}
	ids, _ := json.Marshal(tokens)
	_, text := f.post("/select?explain=1", fmt.Sprintf(`{"model":"llama","token_ids":%s}`, ids))
	var s selection
	if err := json.Unmarshal([]byte(text), &s); err != nil || s.WorkerID != "worker-number-150" || len(s.Explain.Candidates) != 200 || s.Explain.Omitted != 0 {
		t.Errorf("%v: %.300s", err, text)
	}
	if _, ok := e.requests[0].Header[headerExplain]; ok {
		t.Error("the header reached the worker")
	}
	_, text = f.post("/select?explain=1", fmt.Sprintf(`{"model":"llama","token_ids":%s,"router_config_override":{"router_temperature":0.5,"overlap_score_credit":2}}`, ids))
	if err := json.Unmarshal([]byte(text), &s); err != nil || s.Explain.Weights.Temperature != 0.5 || s.Explain.Weights.Miss != 2 {
		t.Errorf("override: %.300s", text)
	}
	for _, bad := range []string{`{"router_temperature":-1}`, `{"overlap_score_credit":1e300}`, `{"host_cache_hit_weight":2}`, `{"router_temperature":"hot"}`, `7`} {
		res, text := f.post("/select", fmt.Sprintf(`{"model":"llama","token_ids":%s,"router_config_override":%s}`, ids, bad))
		wantError(t, res, text, 400, "invalid_request")
	}
}

// What each policy asks Redis, and what it says of its choice.
func TestPoliciesAndSharedLoads(t *testing.T) {
	body, ids := prompt(640)
	for policy, want := range map[string]struct {
		weights store.Weights
		among   int
		asks    int
		reason  string
	}{
		PolicyKV:               {store.Weights(choose.Default), 4, 1, reasonOverlap},
		PolicyLeastLoaded:      {store.Weights(choose.LeastRequests), 4, 1, reasonPolicy},
		PolicyPowerOfTwo:       {store.Weights(choose.LeastRequests), 2, 1, reasonPolicy},
		PolicyRoundRobin:       {store.Weights{}, 1, 1, reasonPolicy}, // reserved in the background
		PolicyRandom:           {store.Weights{}, 1, 1, reasonPolicy},
		PolicyPrefixHash:       {store.Weights{}, 1, 1, reasonPrompt},
		PolicyConversationHash: {store.Weights{}, 1, 1, reasonPrompt},
	} {
		t.Run(policy, func(t *testing.T) {
			x := holding(16, ids, map[string]int{"w1": 30})
			s := &cheapest{}
			x.choose = s.choose
			var workers []Worker
			for i := range 4 {
				workers = append(workers, newEngine(t, fmt.Sprint("w", i)).worker())
			}
			f := start(t, Options{Index: x, Workers: workers, Policy: policy, Busy: Load{Requests: 100}})
			res, _ := f.post(completions, body)
			if res.StatusCode != 200 || f.metric("warmroute_selected_total", "policy", policy, "reason", want.reason) != 1 {
				t.Errorf("%d", res.StatusCode)
			}
			f.eventually("the load is reserved or released", func() bool {
				x.mu.Lock()
				defer x.mu.Unlock()
				s.mu.Lock()
				defer s.mu.Unlock()
				return len(s.asks) >= want.asks || len(x.told) > 0 || f.metric("warmroute_reservations") == 0
			})
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, a := range s.asks {
				made := len(a.Candidates) == 1 // and no threshold keeps it from being counted
				if a.Weights != want.weights || len(a.Candidates) != want.among || a.ID == "" || made != (a.Busy == store.Load{}) {
					t.Errorf("asked %+v", a)
				}
			}
		})
	}
}

// A session's slack is in tokens of queue under kv, and in requests where they are what counts.
func TestSessionSlack(t *testing.T) {
	f := bare(t, 2, PolicyKV)
	w := want{session: "s", k: &knowledge{blockSize: 64}}
	for _, test := range []struct {
		tokens  int
		weights choose.Weights
		want    float64
	}{
		{8192, choose.Default, 4 * 8192 / 64},
		{1024, choose.Weights{PrefillScale: 1, Miss: 1}, 16},
		{8192, choose.LeastRequests, 4},
		{0, choose.Default, 0},
		{0, choose.LeastRequests, 0},
	} {
		f.o.SessionTTL, f.o.SessionSlack = time.Minute, test.tokens
		if a := f.ask(&w, nil, test.weights); a.Session != "s" || a.SessionTTL != time.Minute || a.SessionSlack != test.want {
			t.Errorf("%d tokens, %+v: %+v", test.tokens, test.weights, a)
		}
	}
	f.o.SessionTTL = -1
	if a := f.ask(&w, nil, choose.Default); a.Session != "" {
		t.Errorf("sessions do not decide, and yet %+v", a)
	}
}

// Requests that begin alike meet under prefix-hash, whatever their session and however they go on.
func TestPrefixHash(t *testing.T) {
	f := bare(t, 8, PolicyPrefixHash)
	place := func(session, system, user string) string {
		x := &exchange{tenant: "default", session: session, knowledge: knowledge{blockSize: 16}}
		x.parsed = mustParse(t, fmt.Sprintf(`{"model":"llama","messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`, system, user))
		if err := f.choose(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		x.finish()
		return x.chosen.Worker
	}
	long := strings.Repeat("be kind ", 1000)
	home := place("", long, "a")
	for i := range 20 {
		if got := place(fmt.Sprint(i), long, fmt.Sprint("question ", i)); got != home {
			t.Errorf("%s, want %s", got, home)
		}
	}
	seen := map[string]bool{}
	for i := range 100 {
		seen[place("", fmt.Sprint(i, long), "a")] = true
	}
	if len(seen) != 8 {
		t.Errorf("100 beginnings are at %d of 8 workers", len(seen))
	}
}

// The select API with the real store: two frontends see one another's reservations, and they end.
func TestSelectAPI(t *testing.T) {
	m, url := storetest.Miniredis(t)
	_, ids := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	var fs []*running
	for range 2 {
		fs = append(fs, start(t, Options{Index: openIndex(t, url, time.Minute), Workers: []Worker{e1.worker(), e2.worker()}}))
	}
	hold(t, fs[0].o.Index.(*store.Store), e1, ids)
	hold(t, fs[0].o.Index.(*store.Store), e2, nil)
	tokens, _ := json.Marshal(ids)
	reserve := func(f *running, more string) selection {
		t.Helper()
		res, text := f.post("/select_and_reserve", fmt.Sprintf(`{"model_name":"llama","token_ids":%s,"expected_output_tokens":20%s}`, tokens, more))
		var s selection
		if err := json.Unmarshal([]byte(text), &s); err != nil || res.StatusCode != 200 || s.SelectionID == nil {
			t.Fatalf("%d %v: %s", res.StatusCode, err, text)
		}
		return s
	}
	loads := func(f *running) string {
		t.Helper()
		res, text := f.get("/loads")
		var list []activeLoad
		if err := json.Unmarshal([]byte(text), &list); err != nil || res.StatusCode != 200 {
			t.Fatalf("%d %v: %s", res.StatusCode, err, text)
		}
		out := ""
		for _, l := range list {
			out += fmt.Sprintf("%s/%d: %d %d %d; ", l.Worker, l.Rank, l.Requests, l.Prefill, l.Decode)
		}
		return out
	}
	change := func(f *running, method, id, what string) int {
		t.Helper()
		req, _ := http.NewRequestWithContext(t.Context(), method, f.url+"/reservations/"+id+what, nil)
		res, text := f.do(req)
		if res.StatusCode >= 400 {
			wantError(t, res, text, res.StatusCode, "reservation_not_found")
		}
		return res.StatusCode
	}
	a := reserve(fs[0], `,"selection_id":"mine"`)
	if a.WorkerID != "w1" || *a.SelectionID != "mine" || a.Prefill != 0 || a.Decode != 6 {
		t.Errorf("%+v", a)
	}
	if again := reserve(fs[1], `,"selection_id":"mine"`); again.WorkerID != "w1" {
		t.Errorf("the same id again: %+v", again)
	}
	b := reserve(fs[1], `,"pinned_worker":"w2"`)
	if strings.HasPrefix(*b.SelectionID, fs[1].instance) || len(*b.SelectionID) < 16 {
		t.Errorf("the id %q tells those of other requests", *b.SelectionID)
	}
	for _, f := range fs {
		if got := loads(f); got != "w1/0: 1 0 6; w2/0: 1 64 6; " {
			t.Errorf("loads %s", got)
		}
	}
	_, text := fs[1].post("/potential_loads", fmt.Sprintf(`{"model_name":"llama","token_ids":%s}`, tokens))
	sameList(t, text, `[{"worker_id":"w1","dp_rank":0,"potential_prefill_tokens":0,"potential_decode_blocks":10},
		{"worker_id":"w2","dp_rank":0,"potential_prefill_tokens":128,"potential_decode_blocks":10}]`)
	if n := change(fs[0], "POST", *b.SelectionID, "/prefill_complete"); n != 204 { // made by the other one
		t.Errorf("prefill_complete: %d", n)
	}
	if n := change(fs[0], "POST", *b.SelectionID, "/output_block"); n != 204 {
		t.Errorf("output_block: %d", n)
	}
	if got := loads(fs[1]); got != "w1/0: 1 0 6; w2/0: 1 0 7; " {
		t.Errorf("loads %s", got)
	}
	if n := change(fs[1], "DELETE", "mine", "?model_name=llama"); n != 204 {
		t.Errorf("DELETE: %d", n)
	}
	for what, n := range map[string]int{
		"again":         change(fs[1], "DELETE", "mine", ""),
		"unknown":       change(fs[1], "POST", "unknown", "/output_block"),
		"unprintable":   change(fs[1], "POST", "a%20b", "/prefill_complete"),
		"another model": change(fs[1], "DELETE", *b.SelectionID, "?tenant_id=acme"),
	} {
		if n != 404 {
			t.Errorf("%s: %d", what, n)
		}
	}
	if got := loads(fs[0]); got != "w1/0: 0 0 0; w2/0: 1 0 7; " {
		t.Errorf("loads %s", got)
	}
	change(fs[0], "DELETE", *b.SelectionID, "")
	res, text := fs[0].post("/select_and_reserve", fmt.Sprintf(`{"model_name":"llama","token_ids":%s,"selection_id":"a b"}`, tokens))
	wantError(t, res, text, 400, "invalid_request")

	// A proxied request counts as long as it lasts, in both.
	waiting, end := make(chan struct{}), make(chan struct{})
	e1.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		close(waiting)
		<-end
	}
	body, _ := prompt(64)
	done := make(chan struct{})
	go func() { defer close(done); fs[0].post(completions, body) }()
	<-waiting
	if got := loads(fs[1]); got != "w1/0: 1 0 4; w2/0: 0 0 0; " {
		t.Errorf("a request under way: loads %s", got)
	}
	close(end)
	<-done
	fs[1].eventually("the load is given back", func() bool { return loads(fs[1]) == "w1/0: 0 0 0; w2/0: 0 0 0; " })

	m.Close() // Redis is away: chosen all the same, and not reserved
	res, text = fs[0].post("/select_and_reserve", fmt.Sprintf(`{"model_name":"llama","token_ids":%s}`, tokens))
	if v := decode(t, text); res.StatusCode != 200 || v["selection_id"] != nil || v["worker_id"] == "" || v["index_state"] != "degraded" {
		t.Errorf("%d %s", res.StatusCode, text)
	}
	for _, path := range []string{"/loads"} {
		res, text = fs[0].get(path)
		wantError(t, res, text, 503, "index_unavailable")
	}
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodDelete, fs[0].url+"/reservations/x", nil)
	res, text = fs[0].do(req)
	wantError(t, res, text, 503, "index_unavailable")
}

func sameList(t *testing.T, got, want string) {
	t.Helper()
	sameJSON(t, `{"list":`+got+`}`, `{"list":`+want+`}`)
}

// A name of a tenant that would hide a part of an answer of /query is refused, wherever it comes from.
func TestTenantsThatHideAnswers(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	for _, name := range queryMembers {
		res, text := f.post("/query", fmt.Sprintf(`{"model":"llama","token_ids":[1],"tenant_id":%q}`, name))
		wantError(t, res, text, 400, "invalid_request")
		if _, err := New(Options{Workers: []Worker{e.worker()}, Tenant: name}); err == nil {
			t.Errorf("tenant %q is accepted", name)
		}
		if _, err := New(Options{Workers: []Worker{{ID: "w1", URL: e.URL, Tenant: name}}}); err == nil {
			t.Errorf("a worker of tenant %q is accepted", name)
		}
	}
}

// Routed prompts are recorded: for engines without events under the long TTL and with what makes the pool, else
// for a few seconds, where the worker does not hold all of them.
func TestPredictions(t *testing.T) {
	body, ids := prompt(64)
	e := newEngine(t, "w1")
	hashes := kvcache.HashTokens(kvcache.HashSpec{BlockSize: 16}, ids)
	for name, test := range map[string]struct {
		o      Options
		noPool bool
		holds  int
		body   string
		ttl    time.Duration // 0: nothing is recorded
		makes  bool
		from   int // first block recorded
	}{
		"by default":           {Options{}, false, 3, body, 5 * time.Second, false, 3},
		"another time":         {Options{PredictTTL: time.Minute}, false, 0, body, time.Minute, false, 0},
		"off":                  {Options{PredictTTL: -1}, false, 0, body, 0, false, 0},
		"all is there":         {Options{}, false, 4, body, 0, false, 0},
		"no pool":              {Options{}, true, 0, body, 0, false, 0},
		"no events":            {Options{EventsOff: []string{"llama"}}, false, 4, body, 2 * time.Minute, true, 0},
		"no events at all":     {Options{EventsOff: []string{"*"}, EventsOffTTL: time.Second}, true, 0, body, time.Second, true, 0},
		"no events of another": {Options{EventsOff: []string{"qwen"}}, false, 0, body, 5 * time.Second, false, 0},
		"other policy":         {Options{Policy: PolicyRandom}, false, 0, body, 0, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			x := holding(16, ids, map[string]int{"w1": test.holds})
			x.noPool = test.noPool
			test.o.Index, test.o.Workers = x, []Worker{e.worker()}
			f := start(t, test.o)
			f.post(completions, test.body)
			f.post(completions, test.body, "x-kv-routing", "off")
			if test.ttl == 0 {
				f.stop()
				f.exited <- <-f.exited // the recorder has ended
				if n := f.recorder.Pending(); n != 0 || len(x.predicted) != 0 {
					t.Errorf("%d recorded, %d blocks to be", len(x.predicted), n)
				}
				return
			}
			f.eventually("it is recorded", func() bool {
				x.mu.Lock()
				defer x.mu.Unlock()
				return len(x.predicted) > 0
			})
			got := x.predicted[0]
			if len(x.predicted) != 1 || got.Pool != llama || got.At.Worker != "w1" || !slices.Equal(got.Blocks, hashes[test.from:]) || got.TTL != test.ttl || (got.Register != nil) != test.makes {
				t.Errorf("%+v", got)
			}
			if test.makes && (got.Register.BlockSize != 16 || got.Register.URL != e.URL) {
				t.Errorf("registration %+v", got.Register)
			}
		})
	}
}

// Where no token ids are to be had, engines without events are routed by chunks of text: turns of a conversation meet,
// and hashes of text are not those of tokens.
func TestTextChunks(t *testing.T) {
	_, url := storetest.Miniredis(t)
	var workers []Worker
	for i := range 4 {
		e := newEngine(t, fmt.Sprint("w", i))
		e.tokens = func(w http.ResponseWriter, _ *http.Request, _ []byte) { w.WriteHeader(404) }
		workers = append(workers, e.worker())
	}
	f := start(t, Options{Index: &counted{Store: openIndex(t, url, time.Minute)}, Workers: workers, EventsOff: []string{"llama"}})
	history := `{"role":"system","content":"` + strings.Repeat("be kind and brief. ", 40) + `"}`
	home := ""
	for turn := range 4 {
		history += fmt.Sprintf(`,{"role":"user","content":"question %d %s"}`, turn, strings.Repeat("why? ", 60))
		body := `{"model":"llama","messages":[` + history + `]}`
		recorded := f.recorded()
		res, _ := f.post("/v1/chat/completions", body)
		if res.StatusCode != 200 || res.Header.Get(headerState) != "exact" {
			t.Fatalf("%d, headers %v", res.StatusCode, res.Header)
		}
		var overlap, blocks int
		_, _ = fmt.Sscan(res.Header.Get(headerOverlap), &overlap)
		_, _ = fmt.Sscan(res.Header.Get(headerBlocks), &blocks)
		if turn == 0 {
			home = res.Header.Get(headerWorker)
		}
		if w := res.Header.Get(headerWorker); w != home || turn > 0 && (overlap < 10 || overlap >= blocks) || turn == 0 && overlap != 0 {
			t.Errorf("turn %d: %d of %d blocks at %s, home is %s", turn, overlap, blocks, w, home)
		}
		f.eventually("it is recorded", func() bool { return f.recorded() > recorded })
		history += `,{"role":"assistant","content":"because"}`
	}
	tokens := kvcache.HashTokens(kvcache.HashSpec{BlockSize: 16}, textTokens([]byte(history), 1<<20))
	text := kvcache.HashTokens(kvcache.HashSpec{BlockSize: 16, Salt: textSalt}, textTokens([]byte(history), 1<<20))
	if tokens[0] == text[0] {
		t.Error("text and tokens share a hash")
	}
	if n := f.metric("warmroute_index_fallbacks_total", "reason", reasonTokenize); n != 0 {
		t.Errorf("%v fallbacks", n)
	}
}

// A burst of one prompt that nobody holds goes to few workers, because the first of it counts there at once.
func TestBurstOfOnePromptMeets(t *testing.T) {
	_, url := storetest.Miniredis(t)
	body, _ := prompt(640)
	var workers []Worker
	var engines []*engine
	release := make(chan struct{})
	for i := range 8 {
		e := newEngine(t, fmt.Sprint("w", i))
		e.serve = func(http.ResponseWriter, *http.Request, []byte) { <-release }
		engines = append(engines, e)
		workers = append(workers, e.worker())
	}
	index := openIndex(t, url, time.Minute)
	f := start(t, Options{Index: &counted{Store: index}, Workers: workers})
	for _, e := range engines {
		hold(t, index, e, nil)
	}
	spread := func() (used int) {
		for _, e := range engines {
			if e.served() > 0 {
				used++
			}
		}
		return used
	}
	var all sync.WaitGroup
	served := func() (n int) {
		for _, e := range engines {
			n += e.served()
		}
		return n
	}
	for i := range 4 {
		all.Go(func() { f.post(completions, body) })
		f.eventually("it is under way", func() bool { return served() == i+1 })
		f.eventually("the first is recorded", func() bool { return f.recorded() > 0 })
	}
	if n := spread(); n > 2 {
		t.Errorf("four requests of one conversation are at %d workers", n)
	}
	close(release)
	all.Wait()
}
