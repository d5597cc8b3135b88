package frontend

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/openai"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// One decision without the network: read the body, hash 8,192 token ids, merge the index's
// answer, choose among 64 workers and count.
func BenchmarkDecision(b *testing.B) {
	for _, workers := range []int{8, 64} {
		b.Run(fmt.Sprintf("tokens=8192/workers=%d", workers), func(b *testing.B) {
			body, ids := prompt(8192)
			f := bare(b, workers, PolicyKV)
			hold := map[string]int{}
			for _, n := range f.fleet.Snapshot().Nodes() {
				hold[n.ID] = 60
			}
			hold["w03"] = 400
			f.o.Index = &scored{answer: holding(16, ids, hold)}
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				x := &exchange{tenant: f.o.Tenant, knowledge: knowledge{blockSize: 16}}
				var err error
				if x.parsed, err = openai.Parse([]byte(body), openai.Completions, f.o.MaxPromptTokens); err != nil {
					b.Fatal(err)
				}
				x.target, _ = f.fleet.Snapshot().Target(f.o.Tenant, x.parsed.Model)
				err = f.consult(b.Context(), &x.knowledge, inquiry{pool: x.target.Pool, tokens: x.parsed.Tokens})
				if err != nil {
					b.Fatal(err)
				}
				if err := f.choose(b.Context(), x); err != nil || x.chosen.Worker != "w03" {
					b.Fatal(x.chosen, err)
				}
				x.finish()
			}
		})
	}
}

// scored is a fakeIndex that works its answer out once.
type scored struct {
	answer *fakeIndex
	fakeIndex
	scores *kvcache.OverlapScores
}

func (s *scored) PoolConfig(ctx context.Context, p kvcache.PoolID) (store.PoolConfig, bool, error) {
	return s.answer.PoolConfig(ctx, p)
}

func (s *scored) Lookup(ctx context.Context, p kvcache.PoolID, blocks []kvcache.BlockHash, o store.LookupOptions) (kvcache.OverlapScores, kvcache.IndexState, error) {
	if s.scores == nil {
		scores, state, err := s.answer.Lookup(ctx, p, blocks, o)
		s.scores = &scores
		return scores, state, err
	}
	return *s.scores, kvcache.Exact, nil
}

// One proxied completion of 8,192 token ids through a real Redis: two calls to it on the way, the rest behind.
func BenchmarkRoute(b *testing.B) {
	for _, predict := range []time.Duration{-1, 5 * time.Second} {
		b.Run(fmt.Sprintf("tokens=8192/workers=8/predict=%v", predict > 0), func(b *testing.B) {
			body, ids := prompt(8192)
			redis := storetest.Redis(b)
			index, err := store.New(store.Options{URL: redis.URL, LookupBudget: time.Minute})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = index.Close() })
			var workers []Worker
			for i := range 8 {
				e := newEngine(b, fmt.Sprint("w", i))
				workers = append(workers, e.worker())
				held := ids[:4096]
				if i > 0 {
					held = nil
				}
				hold(b, index, e, held)
			}
			f := start(b, Options{Index: index, Workers: workers, PredictTTL: predict})
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if res, text := f.post(completions, body); res.StatusCode != 200 {
					b.Fatal(res.StatusCode, text)
				}
			}
		})
	}
}
