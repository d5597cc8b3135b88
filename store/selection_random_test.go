package store_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// testRandomLeases runs random calls in any order, late and repeated ones among them, against a map of what lives.
func testRandomLeases(t *testing.T, url string) {
	s := open(t, url)
	r := rand.New(rand.NewPCG(5, 6))
	type lease struct {
		at             kvcache.WorkerRank
		prefill, block int
	}
	oracle := map[string]lease{}
	check := func() {
		t.Helper()
		want := loadMap{}
		for _, l := range oracle {
			w := want[l.at]
			want[l.at] = store.Load{Requests: w.Requests + 1, PrefillTokens: w.PrefillTokens + l.prefill, DecodeBlocks: w.DecodeBlocks + l.block}
		}
		loads(t, s, want)
	}
	for step := range 600 {
		id := fmt.Sprint("id", r.IntN(40))
		l, lives := oracle[id]
		switch r.IntN(8) {
		case 0, 1, 2:
			a := asking(id)
			a.PromptTokens, a.DecodeBlocks = r.IntN(5000), r.IntN(300)
			for i := range 6 {
				if r.IntN(6) > 0 {
					a.Candidates = append(a.Candidates, store.Candidate{WorkerRank: rank("w", i), Credit: float64(r.IntN(1200)) / 4})
				}
			}
			if len(a.Candidates) == 0 {
				continue
			}
			c := selects(t, s, a)
			if again := slices.IndexFunc(a.Candidates, func(c store.Candidate) bool { return c.WorkerRank == l.at }); lives && again >= 0 {
				if c.WorkerRank != l.at {
					t.Fatalf("step %d: %s moves from %v to %v", step, id, l.at, c.WorkerRank)
				}
				continue
			}
			prefill := choose.Request{BlockSize: a.BlockSize, Tokens: a.PromptTokens}.Prefill(a.Candidates[c.Index].Credit)
			oracle[id] = lease{c.WorkerRank, prefill, a.DecodeBlocks}
		case 3, 4:
			ok, err := s.Release(t.Context(), testPool, id)
			if did(t, ok, err) != lives {
				t.Fatalf("step %d: released %v, want %v", step, ok, lives)
			}
			delete(oracle, id)
		case 5:
			ok, err := s.PrefillDone(t.Context(), testPool, id)
			if did(t, ok, err) != lives {
				t.Fatalf("step %d: prefilled %v, want %v", step, ok, lives)
			}
			if l.prefill = 0; lives {
				oracle[id] = l
			}
		case 6:
			ok, err := s.OutputBlock(t.Context(), testPool, id)
			if did(t, ok, err) != lives {
				t.Fatalf("step %d: output %v, want %v", step, ok, lives)
			}
			if l.block++; lives {
				oracle[id] = l
			}
		case 7:
			if ended, err := s.Renew(t.Context(), testPool, id); err != nil || (len(ended) == 0) != lives {
				t.Fatalf("step %d: renewed but for %v, %v, want %v", step, ended, err, lives)
			}
		}
		if step%50 == 0 {
			check()
		}
	}
	check()
	for id := range oracle {
		if _, err := s.Release(t.Context(), testPool, id); err != nil {
			t.Fatal(err)
		}
	}
	oracle = nil
	check()
}
