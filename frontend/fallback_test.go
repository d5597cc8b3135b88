package frontend

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/zeebo/xxh3"
)

func fleetOf(n int) []candidate {
	out := make([]candidate, n)
	for i := range out {
		out[i].WorkerRank = kvcache.WorkerRank{Worker: fmt.Sprintf("10.0.0.%d:8000", i/2), Rank: i % 2}
	}
	return out
}

func chat(n int) conversation {
	return conversation{xxh3.HashString(fmt.Sprint(n)), reasonConversation}
}

// Two frontends that list the workers in another order send a conversation to the same one.
func TestFrontendsAgreeOnAConversation(t *testing.T) {
	a, b := fleetOf(12), fleetOf(12)
	rand.Shuffle(len(b), func(i, j int) { b[i], b[j] = b[j], b[i] })
	count := map[kvcache.WorkerRank]int{}
	for n := range 12_000 {
		i, why := conversationHash(chat(n))(a)
		j, _ := conversationHash(chat(n))(b)
		if a[i].WorkerRank != b[j].WorkerRank || why != reasonConversation {
			t.Fatalf("conversation %d: %v and %v, %s", n, a[i].WorkerRank, b[j].WorkerRank, why)
		}
		count[a[i].WorkerRank]++
	}
	for w, n := range count {
		if n < 800 || n > 1200 {
			t.Errorf("%v has %d of 12,000 conversations", w, n)
		}
	}
}

// A rank that goes moves only its own conversations, and they spread over the others.
func TestALeavingWorkerMovesOnlyItsOwn(t *testing.T) {
	all := fleetOf(10)
	less := slices.Delete(slices.Clone(all), 4, 5)
	moved := map[kvcache.WorkerRank]int{}
	for n := range 10_000 {
		i, _ := conversationHash(chat(n))(all)
		j, _ := conversationHash(chat(n))(less)
		switch {
		case i == 4:
			moved[less[j].WorkerRank]++
		case all[i].WorkerRank != less[j].WorkerRank:
			t.Fatalf("conversation %d moved from %v, which is still there", n, all[i].WorkerRank)
		}
	}
	if len(moved) != 9 {
		t.Errorf("the conversations of the one that left went to %d of 9", len(moved))
	}
}

// A burst of one conversation spills in a fixed order, and no rank gets more than its share.
func TestABurstSpills(t *testing.T) {
	place := func() (order []kvcache.WorkerRank) {
		c := fleetOf(8)
		for n := range 200 {
			i, why := conversationHash(chat(7))(c)
			if limit := fairShare(c); c[i].requests >= limit {
				t.Fatalf("%d in flight where %d are allowed", c[i].requests, limit)
			}
			if n == 0 && why != reasonConversation {
				t.Fatalf("the first one: %s", why)
			}
			c[i].requests++
			order = append(order, c[i].WorkerRank)
		}
		for i := range c {
			if c[i].requests > 32 { // 1.25 × 25, rounded up
				t.Errorf("%v has %d of 200", c[i].WorkerRank, c[i].requests)
			}
		}
		return order
	}
	if !slices.Equal(place(), place()) {
		t.Error("the order of spilling is not fixed")
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

func TestFallbackIsAChoice(t *testing.T) {
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	x := &fakeIndex{blockSize: 16, err: store.ErrUnavailable}
	f := start(t, Options{Index: x, Workers: []Worker{e1.worker(), e2.worker()}, Fallback: PolicyRoundRobin})
	for range 10 {
		f.post(completions, `{"model":"llama","prompt":[1,2,3]}`)
	}
	if e1.served() != 5 || e2.served() != 5 {
		t.Errorf("round robin: %d and %d", e1.served(), e2.served())
	}
	for _, o := range []Options{{Fallback: "kv"}, {Fallback: "best"}, {Policy: "best"}} {
		o.Index = x
		if _, err := New(o); err == nil {
			t.Errorf("%+v was taken", o)
		}
	}
}
