package frontend

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/breaker"
	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/inflight"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// reservesAs asks for a reservation of one prompt under a name.
func (r *running) reservesAs(name string) (*http.Response, string) {
	r.t.Helper()
	id, _ := json.Marshal(name)
	return r.post("/select_and_reserve", fmt.Sprintf(`{"model_name":"llama","token_ids":[1,2,3],"selection_id":%s}`, id))
}

// Whatever name a reservation gets can be freed by it: names that no path can have are refused.
func TestReservationsCanBeFreedByTheirName(t *testing.T) {
	_, at := storetest.Miniredis(t)
	f := start(t, Options{Index: openIndex(t, at, time.Minute), Workers: []Worker{newEngine(t, "w1").worker()}})
	for name, status := range map[string]int{
		"a?b#c%2F;+&=": 200, `"\`: 200, "...": 200, "%": 200,
		"a/b": 400, "/": 400, ".": 400, "..": 400, "é": 400,
	} {
		res, text := f.reservesAs(name)
		if res.StatusCode != status {
			t.Errorf("%q: %d, want %d: %s", name, res.StatusCode, status, text)
		}
		if res.StatusCode != 200 {
			continue
		}
		for _, step := range []struct{ method, what string }{
			{"POST", "/prefill_complete"}, {"POST", "/output_block"}, {"DELETE", ""},
		} {
			req, err := http.NewRequestWithContext(t.Context(), step.method, f.url+"/reservations/"+url.PathEscape(name)+step.what, nil)
			if err != nil {
				t.Fatal(err)
			}
			if res, text := f.do(req); res.StatusCode != 204 {
				t.Errorf("%s %q%s: %d %s", step.method, name, step.what, res.StatusCode, text)
			}
		}
	}
}

// POST /potential_loads tells the shared load of every candidate, also under a policy that looks at two of them or at none.
func TestPotentialLoadsUnderAnyPolicy(t *testing.T) {
	_, at := storetest.Miniredis(t)
	var workers []Worker
	for i := range 5 {
		workers = append(workers, newEngine(t, fmt.Sprint("w", i)).worker())
	}
	shared := openIndex(t, at, time.Minute)
	a := store.Ask{ID: "other", Lease: time.Minute, BlockSize: 16, PromptTokens: 100, DecodeBlocks: 7, Candidates: []store.Candidate{{WorkerRank: kvcache.WorkerRank{Worker: "w3"}}}}
	if _, err := shared.Select(t.Context(), llama, a); err != nil {
		t.Fatal(err)
	}
	for _, policy := range append(slices.Clone(blindPolicies), PolicyKV) {
		f := start(t, Options{Index: shared, Workers: workers, Policy: policy, Busy: Load{Requests: 1}})
		_, text := f.post("/potential_loads", `{"model_name":"llama","token_ids":[1,2,3]}`)
		want := ""
		for i := range workers {
			prefill, decode := 3, 1
			if i == 3 {
				prefill, decode = 103, 8
			}
			want += fmt.Sprintf(`,{"worker_id":"w%d","dp_rank":0,"potential_prefill_tokens":%d,"potential_decode_blocks":%d}`, i, prefill, decode)
		}
		sameList(t, text, "["+want[1:]+"]")
	}
}

// A policy that is blind to the shared loads adds to them, also at a worker that others have filled to the threshold.
func TestBlindReservationsCountAboveTheThreshold(t *testing.T) {
	_, at := storetest.Miniredis(t)
	f := start(t, Options{
		Index: openIndex(t, at, time.Minute), Workers: []Worker{newEngine(t, "w1").worker()}, Policy: PolicyRoundRobin, Busy: Load{Requests: 2},
	})
	for i := range 4 {
		if res, text := f.reservesAs(fmt.Sprint("r", i)); res.StatusCode != 200 || decode(t, text)["selection_id"] == nil {
			t.Fatalf("reservation %d: %d %s", i, res.StatusCode, text)
		}
	}
	loads, err := f.o.Index.Loads(t.Context(), llama)
	if w1 := (kvcache.WorkerRank{Worker: "w1"}); err != nil || loads[w1].Requests != 4 {
		t.Errorf("%v %v", loads, err)
	}
}

// While one request tries a suspected worker, the others do not wait for its outcome where there is nobody else, and those that
// are pinned to it get it.
func TestTrialKeepsNobodyFromTheLastWorker(t *testing.T) {
	body, _ := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	for name, test := range map[string]struct {
		workers []Worker
		header  []string
	}{
		"alone":  {[]Worker{e1.worker()}, nil},
		"pinned": {[]Worker{e1.worker(), e2.worker()}, []string{headerWorker, "w1"}},
		"listed": {[]Worker{e1.worker(), e2.worker()}, []string{headerAllowed, "w1"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: test.workers, BreakerPause: time.Nanosecond})
			w1 := fleet.KeyOf("", "w1")
			for range 5 {
				f.breakers.Report(w1, breaker.Failure)
			}
			f.eventually("the trial", func() bool { return f.breakers.Begin(w1) && !f.breakers.Begin(w1) })
			res, text := f.post(completions, body, test.header...)
			if res.StatusCode != 200 || res.Header.Get(headerWorker) != "w1" {
				t.Errorf("%d %s, headers %v", res.StatusCode, text, res.Header)
			}
			f.wantIdle()
		})
	}
	// With another one the others spare it.
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e1.worker(), e2.worker()}, BreakerPause: time.Nanosecond})
	for range 5 {
		f.breakers.Report(fleet.KeyOf("", "w1"), breaker.Failure)
	}
	f.eventually("the trial", func() bool {
		return f.breakers.Begin(fleet.KeyOf("", "w1")) && !f.breakers.Begin(fleet.KeyOf("", "w1"))
	})
	for range 20 {
		if res, _ := f.post(completions, body); res.Header.Get(headerWorker) != "w2" {
			t.Fatalf("to %s during the trial", res.Header.Get(headerWorker))
		}
	}
}

// A list that comes in two lines is one list.
func TestAllowListInTwoLines(t *testing.T) {
	h := http.Header{}
	h.Add(headerAllowed, "w1")
	h.Add(headerAllowed, "w2, w3")
	if p, err := headerPin(h); err != nil || !slices.Equal(p.allowed, []string{"w1", "w2", "w3"}) {
		t.Errorf("%+v %v", p, err)
	}
}

// Under power-of-two a request is refused where all are busy, not where the two drawn are.
func TestTwoBusyOnesOfMany(t *testing.T) {
	body, _ := prompt(64)
	for name, shared := range map[string]bool{"by the loads of all": true, "by its own": false} {
		t.Run(name, func(t *testing.T) {
			var workers []Worker
			for i := range 4 {
				workers = append(workers, newEngine(t, fmt.Sprint("w", i)).worker())
			}
			o := Options{Workers: workers, Policy: PolicyPowerOfTwo, Busy: Load{Requests: 1}}
			if shared {
				_, at := storetest.Miniredis(t)
				o.Index = openIndex(t, at, time.Minute)
			}
			f := start(t, o)
			for i := range 3 {
				w := kvcache.WorkerRank{Worker: fmt.Sprint("w", i)}
				if !shared {
					defer f.inFlight.Add(inflight.Place{Tenant: "default", WorkerRank: w}, choose.Load{Requests: 1}).Release()
					continue
				}
				a := store.Ask{ID: w.Worker, Lease: time.Minute, BlockSize: 16, Candidates: []store.Candidate{{WorkerRank: w}}}
				if _, err := o.Index.Select(t.Context(), llama, a); err != nil {
					t.Fatal(err)
				}
			}
			for range 20 {
				res, text := f.post("/select", `{"model_name":"llama","token_ids":[1,2,3]}`)
				if res.StatusCode != 200 || decode(t, text)["worker_id"] != "w3" {
					t.Fatalf("%d %s", res.StatusCode, text)
				}
			}
			res, text := f.post(completions, body)
			if res.StatusCode != 200 || res.Header.Get(headerWorker) != "w3" {
				t.Errorf("%d %s, headers %v", res.StatusCode, text, res.Header)
			}
		})
	}
}

// A session stays where it is under power-of-two as well, and sessions are spread over all workers.
func TestSessionsUnderPowerOfTwo(t *testing.T) {
	_, at := storetest.Miniredis(t)
	var workers []Worker
	for i := range 6 {
		workers = append(workers, newEngine(t, fmt.Sprint("w", i)).worker())
	}
	f := start(t, Options{Index: openIndex(t, at, time.Minute), Workers: workers, Policy: PolicyPowerOfTwo})
	homes := map[string]bool{}
	for session := range 30 {
		home := ""
		for i := range 3 { // within the slack of 4 requests
			res, text := f.post("/select_and_reserve", fmt.Sprintf(`{"model_name":"llama","token_ids":[1,2,3],"session_id":"s%d"}`, session))
			if res.StatusCode != 200 {
				t.Fatal(text)
			}
			w := decode(t, text)["worker_id"].(string)
			if i > 0 && w != home {
				t.Fatalf("session %d moves from %s to %s", session, home, w)
			}
			home = w
		}
		homes[home] = true
	}
	if len(homes) != 6 {
		t.Errorf("30 sessions are at %v", homes)
	}
}

// An explanation shows why a cheaper worker was not chosen: one that is busy comes last and has no cost, and is not left out.
func TestExplanationOfBusyWorkers(t *testing.T) {
	_, at := storetest.Miniredis(t)
	var workers []Worker
	for i := range 3 {
		workers = append(workers, newEngine(t, fmt.Sprint("w", i)).worker())
	}
	f := start(t, Options{Index: openIndex(t, at, time.Minute), Workers: workers, Busy: Load{Requests: 1}})
	for _, name := range []string{"first", "second", "first"} { // the repetition is where it was, though that is busy by now
		_, text := f.post("/select_and_reserve?explain=1", fmt.Sprintf(`{"model_name":"llama","token_ids":[1,2,3],"selection_id":%q}`, name))
		var s selection
		if err := json.Unmarshal([]byte(text), &s); err != nil || len(s.Explain.Candidates) != 3 || s.Explain.Candidates[0].Worker != s.WorkerID {
			t.Fatalf("%s: %v: %s", name, err, text)
		}
		for _, c := range s.Explain.Candidates {
			if busy := c.Requests > 0; busy != (c.Cost == nil) {
				t.Errorf("%s: %+v", name, c)
			}
		}
		if last := s.Explain.Candidates[2]; name != "first" && last.Requests != 1 {
			t.Errorf("%s: the last one is %+v", name, last)
		}
	}
}
