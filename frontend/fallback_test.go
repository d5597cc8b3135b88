package frontend

import (
	"fmt"
	"slices"
	"testing"

	"github.com/warmroute/warmroute/frontend/openai"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

func ranks(workers, perWorker int) []kvcache.WorkerRank {
	var out []kvcache.WorkerRank
	for w := range workers {
		for r := range perWorker {
			out = append(out, kvcache.WorkerRank{Worker: fmt.Sprintf("10.0.%d.%d:8000", w/7, w), Rank: r})
		}
	}
	return out
}

// homes are the ranks that n conversations have while nothing is in flight.
func homes(t *testing.T, list []kvcache.WorkerRank, n int) []kvcache.WorkerRank {
	t.Helper()
	out := make([]kvcache.WorkerRank, n)
	for i := range out {
		x := &exchange{session: fmt.Sprint("conversation ", i)}
		j, reason := hashed(x.conversation())(list, make([]int, len(list)))
		if reason != reasonSession {
			t.Fatalf("reason %s", reason)
		}
		out[i] = list[j]
	}
	return out
}

func TestConversationsAreSpreadEvenlyOverRanks(t *testing.T) {
	const requests = 10_000
	for _, shape := range []struct{ workers, ranks int }{{4, 1}, {1, 8}, {5, 2}, {3, 16}} {
		counts := map[kvcache.WorkerRank]int{}
		for _, home := range homes(t, ranks(shape.workers, shape.ranks), requests) {
			counts[home]++
		}
		mean := requests / (shape.workers * shape.ranks)
		for _, c := range ranks(shape.workers, shape.ranks) {
			if n := counts[c]; n < mean*75/100 || n > mean*125/100 { // at least 3.5 standard deviations
				t.Errorf("%d workers of %d ranks: %v has %d conversations, the mean is %d", shape.workers, shape.ranks, c, n, mean)
			}
		}
	}
}

// Two frontends that list the workers in another order send a conversation to the same one.
func TestFrontendsAgreeOnAConversation(t *testing.T) {
	a, b := ranks(6, 2), ranks(6, 2)
	slices.Reverse(b)
	if !slices.Equal(homes(t, a, 2000), homes(t, b, 2000)) {
		t.Error("the order of the workers decides")
	}
}

// T01: idle workers, different conversations, each request over before the next: 25 % ± 2.
func TestDegradedRequestsAreUniform(t *testing.T) {
	const workers, requests = 4, 10_000
	f := bare(t, workers, PolicyKV)
	counts := map[string]int{}
	for i := range requests {
		x := &exchange{tenant: "default", knowledge: knowledge{blockSize: 16}, session: fmt.Sprint(i)}
		x.parsed.Model = "llama"
		x.state, x.tokens, x.blocks, x.blockSize = kvcache.Degraded, 64, 4, 16
		if err := f.choose(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		counts[x.chosen.Worker]++
		x.finish()
	}
	for w, n := range counts {
		if n < requests*23/100 || n > requests*27/100 {
			t.Errorf("%s got %d of %d, want 25 %% ± 2", w, n, requests)
		}
	}
	if len(counts) != workers {
		t.Errorf("%d workers used", len(counts))
	}
}

// A worker that comes or goes moves its share and nothing else, wherever it stands in the list.
func TestOnlyTheShareOfAWorkerMoves(t *testing.T) {
	const n = 4000
	for _, changed := range []int{0, 3, 7} {
		all := ranks(8, 1)
		gone := all[changed]
		before := homes(t, all, n)
		after := homes(t, append(all[:changed:changed], all[changed+1:]...), n)
		moved := 0
		for i := range before {
			if before[i] != after[i] {
				moved++
				if before[i] != gone {
					t.Fatalf("conversation %d moved from %v to %v though only %v left", i, before[i], after[i], gone)
				}
			}
		}
		if moved < n/8*80/100 || moved > n/8*120/100 {
			t.Errorf("%d of %d moved with one worker of 8", moved, n)
		}
	}
}

// A burst of one conversation goes to one rank up to its share and then on in a fixed order; what comes
// after the burst is at home again.
func TestBurstOfOneConversationSpillsInAFixedOrder(t *testing.T) {
	const workers, burst = 4, 64
	order := func() (order []string, most int) {
		f := bare(t, workers, PolicyKV)
		var all []*exchange
		counts := map[string]int{}
		for range burst {
			x := &exchange{tenant: "default", knowledge: knowledge{blockSize: 16}, session: "one"}
			x.parsed.Model = "llama"
			x.state = kvcache.Degraded
			if err := f.choose(t.Context(), x); err != nil {
				t.Fatal(err)
			}
			all = append(all, x)
			order = append(order, x.chosen.Worker)
			counts[x.chosen.Worker]++
			mean := float64(len(all)) / workers
			if n := counts[x.chosen.Worker]; n > noLoad && float64(n) >= 1.25*mean+1 {
				t.Fatalf("%d of %d requests at %s", n, len(all), x.chosen.Worker)
			}
		}
		for _, n := range counts {
			most = max(most, n)
		}
		for _, x := range all {
			x.finish()
		}
		last := &exchange{tenant: "default", knowledge: knowledge{blockSize: 16}, session: "one"}
		last.parsed.Model = "llama"
		last.state = kvcache.Degraded
		if err := f.choose(t.Context(), last); err != nil || last.chosen.Worker != order[0] {
			t.Errorf("after the burst at %s, before at %s: %v", last.chosen.Worker, order[0], err)
		}
		return order, most
	}
	first, most := order()
	again, _ := order()
	if fmt.Sprint(first) != fmt.Sprint(again) {
		t.Errorf("two frontends spill in different orders:\n%v\n%v", first, again)
	}
	if most != 20 { // 1.25 × 64 / 4
		t.Errorf("the busiest worker has %d of %d", most, burst)
	}
}

// What names a conversation stays the same from turn to turn, and differs where the cache does.
func TestConversationName(t *testing.T) {
	name := func(e openai.Endpoint, body string) conversation {
		t.Helper()
		x := &exchange{}
		var err error
		if x.parsed, err = openai.Parse([]byte(body), e, 1<<20); err != nil {
			t.Fatal(err)
		}
		x.target.Pool = llama
		return x.conversation()
	}
	first := name(openai.Chat, `{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}]}`)
	if first.by != reasonConversation {
		t.Errorf("named by %s", first.by)
	}
	for what, body := range map[string]string{
		"a later turn":    `{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"u"},{"role":"assistant","content":"a"},{"role":"user","content":"v"}]}`,
		"another spacing": `{"messages": [ {"content": "s", "role":"system"}, {"role":"user", "content":"u", "name":"x"} ], "model":"m", "stream":true}`,
	} {
		if got := name(openai.Chat, body); got != first {
			t.Errorf("%s has another name", what)
		}
	}
	for what, body := range map[string]string{
		"another question":      `{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"w"}]}`,
		"another system prompt": `{"model":"m","messages":[{"role":"system","content":"t"},{"role":"user","content":"u"}]}`,
		"another border":        `{"model":"m","messages":[{"role":"system","content":"su"},{"role":"user","content":""}]}`,
		"another salt":          `{"model":"m","cache_salt":"x","messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}]}`,
	} {
		if got := name(openai.Chat, body); got == first {
			t.Errorf("%s has the same name", what)
		}
	}
	x := &exchange{session: "s"}
	y := &exchange{session: "s"}
	y.parsed.Model = "other"
	if x.conversation() != y.conversation() || x.conversation().by != reasonSession {
		t.Error("a session is not named by its header alone")
	}
	y = &exchange{session: "s"}
	y.target.Pool = llama
	if x.conversation() == y.conversation() {
		t.Error("two pools share a session's name")
	}
	if got := name(openai.Plain, `{"model":"m","prompt":"p"}`); got.by != reasonUnnamed {
		t.Errorf("/tokenize is named by %s", got.by)
	}

	// The same tokens have the same name in a completion and in a question.
	_, ids := prompt(40)
	q := &question{pool: llama, tokens: ids}
	body, _ := prompt(40)
	if got := name(openai.Completions, body); got != q.conversation() || got.by != reasonPrompt {
		t.Errorf("a proxied prompt is %v, a question with its tokens %v", got, q.conversation())
	}
	if (&question{pool: llama}).conversation().by != reasonUnnamed {
		t.Error("a question without a prompt is named")
	}
	hashes := kvcache.HashTokens(kvcache.HashSpec{BlockSize: 4}, ids)
	if a, b := (&question{pool: llama, SeqHashes: hashes[:8]}).conversation(), (&question{pool: llama, SeqHashes: hashes}).conversation(); a != b || a.by != reasonPrompt {
		t.Errorf("8 blocks are %v, the 10 that they grow to %v", a, b)
	}
}

func TestFallbackPolicies(t *testing.T) {
	for fallback, want := range map[string]string{
		"": PolicyConversationHash, PolicyConversationHash: PolicyConversationHash,
		PolicyLeastLoaded: PolicyLeastLoaded, PolicyRoundRobin: PolicyRoundRobin, PolicyRandom: PolicyRandom,
	} {
		e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
		f := start(t, Options{Fallback: fallback, Workers: []Worker{e1.worker(), e2.worker()}, Index: &fakeIndex{blockSize: 16, err: store.ErrUnavailable}})
		for range 8 {
			f.post(completions, streamBody)
		}
		if n := f.metric("warmroute_selected_total", "policy", want); n != 8 {
			t.Errorf("fallback %q: %v choices by %s", fallback, n, want)
		}
		a, b := e1.served(), e2.served()
		switch want {
		case PolicyConversationHash:
			if a != 8 && b != 8 {
				t.Errorf("one conversation went to two workers: %d and %d", a, b)
			}
		case PolicyRoundRobin:
			if a != 4 || b != 4 {
				t.Errorf("round robin: %d and %d", a, b)
			}
		}
	}
	if _, err := New(Options{Fallback: PolicyKV, Workers: []Worker{{ID: "w", URL: "http://x"}}}); err == nil {
		t.Error("kv is no fallback for itself")
	}
}

// With the index away a conversation stays where it is, turn by turn and through either of two frontends; how it is
// named is a label.
func TestConversationStaysWithTheIndexAway(t *testing.T) {
	engines := []*engine{newEngine(t, "w1"), newEngine(t, "w2"), newEngine(t, "w3"), newEngine(t, "w4")}
	var workers []Worker
	for _, e := range engines {
		workers = append(workers, e.worker())
	}
	x := &fakeIndex{blockSize: 16, err: store.ErrUnavailable}
	frontends := []*running{
		start(t, Options{Index: x, Workers: workers}),
		start(t, Options{Index: x, Workers: []Worker{workers[2], workers[0], workers[3], workers[1]}}),
	}
	used := map[string]bool{}
	for c := range 16 {
		home := ""
		messages := fmt.Sprintf(`{"role":"system","content":"be kind"},{"role":"user","content":"question %d"}`, c)
		for turn := range 4 {
			res, _ := frontends[turn%2].post("/v1/chat/completions", `{"model":"llama","messages":[`+messages+`]}`)
			got := res.Header.Get("x-worker-instance-id")
			if res.StatusCode != 200 || got == "" || res.Header.Get("x-kv-index-state") != "degraded" || res.Header.Get("x-kv-overlap-blocks") != "" {
				t.Fatalf("%d %v", res.StatusCode, res.Header)
			}
			if home == "" {
				home = got
			}
			if got != home {
				t.Errorf("turn %d of conversation %d went from %s to %s", turn, c, home, got)
			}
			messages += fmt.Sprintf(`,{"role":"assistant","content":"answer %d"},{"role":"user","content":"and %d?"}`, turn, turn)
		}
		used[home] = true
	}
	if len(used) < 3 {
		t.Errorf("16 conversations on %d of 4 workers", len(used))
	}
	f := frontends[0]
	f.post(completions, `{"model":"llama","prompt":[1,2,3]}`, "x-session-id", "s1")
	f.post(completions, `{"model":"llama","prompt":"some text"}`)
	for reason, want := range map[string]float64{reasonConversation: 32, reasonSession: 1, reasonPrompt: 1} {
		if got := f.metric("warmroute_selected_total", "reason", reason); got != want {
			t.Errorf("selected_total{reason=%q} %v, want %v", reason, got, want)
		}
	}
	if got := f.metric("warmroute_index_fallbacks_total"); got != 34 {
		t.Errorf("%v fallbacks of 34 requests", got)
	}
	f.wantIdle()
}
