package frontend

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/sim"
	"github.com/warmroute/warmroute/store"
)

// The frontend with the real store and simulated engines; the test takes the indexer's part.
func TestConversationStaysWarmAndSurvivesAnOutage(t *testing.T) {
	redis := miniredis.RunT(t)
	pool := kvcache.PoolID{Tenant: "default", Model: "llama"}
	index, err := store.New(store.Options{URL: "redis://" + redis.Addr(), LookupBudget: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { index.Close() })

	streams := map[string]store.Stream{}
	for _, id := range []string{"w1", "w2", "w3"} {
		e, err := sim.New(sim.Options{Model: "llama"})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { ended <- e.Run(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			e.Close()
		})
		name := store.StreamID{Pool: pool, WorkerRank: kvcache.WorkerRank{Worker: id}}
		st, _, err := index.Register(t.Context(), name, store.Registration{BlockSize: 16, URL: e.URL(), Engine: "vLLM"})
		if err != nil {
			t.Fatal(err)
		}
		streams[id] = st
	}
	f := start(t, Options{Index: index, PollInterval: 5 * time.Millisecond, LookupBudget: 2 * time.Second})
	f.waitWorkers(3)

	seqs := map[string]int64{}
	learn := func(worker, messages string) { // what the worker's events would say
		var text string
		var chat struct{ Tokens []uint32 }
		_, text = f.post("/tokenize", `{"model":"llama","messages":`+messages+`}`)
		if err := json.Unmarshal([]byte(text), &chat); err != nil || len(chat.Tokens) == 0 {
			t.Fatalf("/tokenize: %s, %v", text, err)
		}
		var b store.Batch
		b.Message(seqs[worker])
		seqs[worker]++
		for i, h := range kvcache.HashTokens(kvcache.HashSpec{BlockSize: 16}, chat.Tokens) {
			b.Store(kvcache.Device, h, kvcache.EngineHash(uint64(h)^uint64(i)))
		}
		if o, _, err := index.Apply(t.Context(), streams[worker], &b); err != nil || o != store.Applied {
			t.Fatalf("apply: %v, %v", o, err)
		}
	}
	history := `{"role":"system","content":"` + strings.Repeat("be kind and brief. ", 40) + `"}`
	ask := func(turn int) (worker, state string, overlap, cached int) {
		history += fmt.Sprintf(`,{"role":"user","content":"question %d %s"}`, turn, strings.Repeat("why? ", 30))
		res, text := f.post("/v1/chat/completions", `{"model":"llama","max_tokens":4,"messages":[`+history+`]}`)
		var answer struct {
			Choices []struct{ Message struct{ Content string } }
			Usage   struct {
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(text), &answer); err != nil || res.StatusCode != 200 || len(answer.Choices) != 1 {
			t.Fatalf("%d %s", res.StatusCode, text)
		}
		worker, state = res.Header.Get(headerWorker), res.Header.Get(headerState)
		_, _ = fmt.Sscan(res.Header.Get(headerOverlap), &overlap)
		if state == "exact" {
			learn(worker, `[`+history+`]`)
		}
		content, _ := json.Marshal(answer.Choices[0].Message.Content)
		history += `,{"role":"assistant","content":` + string(content) + `}`
		return worker, state, overlap, answer.Usage.Details.Cached
	}

	home, state, overlap, _ := ask(0)
	if state != "exact" || overlap != 0 {
		t.Fatalf("first turn: %s, overlap %d", state, overlap)
	}
	for turn := 1; turn <= 3; turn++ {
		worker, state, overlap, cached := ask(turn)
		if worker != home || state != "exact" || overlap < 10 {
			t.Fatalf("turn %d: %s at %s with overlap %d, want exact at %s", turn, state, worker, overlap, home)
		}
		if cached < overlap*16 {
			t.Errorf("turn %d: the engine had %d tokens cached, the index said %d", turn, cached, overlap*16)
		}
	}

	redis.Close()
	if _, state, _, _ := ask(4); state != "degraded" {
		t.Fatalf("with Redis away: %s", state)
	}
	if res, text := f.get("/ready"); res.StatusCode != 200 || !strings.Contains(text, `"degraded":true`) {
		t.Errorf("/ready: %d %s", res.StatusCode, text)
	}
	if n := f.metric("warmroute_index_fallbacks_total", "reason", "connection"); n != 1 {
		t.Errorf("%v fallbacks", n)
	}

	if err := redis.Restart(); err != nil {
		t.Fatal(err)
	}
	f.eventually("the index is back", func() bool { return index.Links()[0].Up })
	if worker, state, overlap, _ := ask(5); worker != home || state != "exact" || overlap < 10 {
		t.Errorf("after the outage: %s at %s with overlap %d", state, worker, overlap)
	}
}
