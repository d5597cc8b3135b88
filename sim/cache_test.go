package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
)

func testPool(t *testing.T, o Options) (*blockPool, func(outLen int, prompt ...uint32) *sequence) {
	t.Helper()
	o, err := o.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	return newBlockPool(&o), func(outLen int, prompt ...uint32) *sequence {
		s := newSequence(&o, 7, prompt, 0, adapter{}, "")
		s.outLen = outLen
		return s
	}
}

func numbers(from, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(from + i)
	}
	return out
}

// serve runs a sequence to its end and returns its events, one list per step.
func serve(t *testing.T, p *blockPool, s *sequence) (steps [][]event) {
	t.Helper()
	if !p.admit(s) {
		t.Fatal("not admitted")
	}
	steps = append(steps, p.advance(s, s.promptLen-s.computed))
	for i := range s.outLen {
		if i > 0 {
			steps = append(steps, p.advance(s, 1))
		}
		s.append(s.answer.token(i))
	}
	p.release(s)
	return steps
}

func TestHitsAndStores(t *testing.T) {
	p, seq := testPool(t, Options{BlockSize: 4, Blocks: 100})
	s := seq(1, numbers(0, 10)...)
	steps := serve(t, p, s)
	if s.hit != 0 || len(steps[0]) != 1 || len(steps[0][0].hashes) != 2 || steps[0][0].parent != nil {
		t.Fatalf("first prompt: hit %d, events %+v", s.hit, steps[0])
	}
	for _, c := range []struct{ prompt, out, hit int }{
		{3, 1, 0}, {4, 1, 0}, {5, 1, 4}, {8, 1, 4}, {9, 1, 8}, {10, 1, 8}, {12, 1, 8}, {13, 1, 12}, {40, 1, 12},
	} {
		s := seq(c.out, numbers(0, c.prompt)...)
		if serve(t, p, s); s.hit != c.hit {
			t.Errorf("prompt of %d tokens: hit %d, want %d", c.prompt, s.hit, c.hit)
		}
	}
}

func TestAnswerIsCachedExceptItsLastToken(t *testing.T) {
	for out := 1; out <= 9; out++ {
		p, seq := testPool(t, Options{BlockSize: 4, Blocks: 100})
		s := seq(out, numbers(0, 6)...)
		serve(t, p, s)
		if got, want := len(p.cached), (6+out-1)/4; got != want {
			t.Errorf("answer of %d tokens: %d blocks cached, want %d", out, got, want)
		}
		next := seq(1, append(slices.Clone(s.tokens), 1, 2, 3)...)
		if serve(t, p, next); next.hit != (6+out-1)/4*4 {
			t.Errorf("answer of %d tokens: the next turn hits %d", out, next.hit)
		}
	}
}

func TestParentsAndRuns(t *testing.T) {
	p, seq := testPool(t, Options{BlockSize: 2, Blocks: 100})
	s := seq(3, 1, 2, 3, 4, 5)
	steps := serve(t, p, s) // computes 5, then 6, then 7 tokens
	if len(steps) != 3 || len(steps[1]) != 1 || *steps[1][0].parent != s.engine[1] || steps[1][0].hashes[0] != s.engine[2] {
		t.Fatalf("the decode step must store block 2 under block 1: %+v", steps)
	}
	if got := steps[1][0].tokens; !slices.Equal(got, s.tokens[4:6]) {
		t.Fatalf("tokens %v, want %v", got, s.tokens[4:6])
	}
}

func TestEvictionOrder(t *testing.T) {
	p, seq := testPool(t, Options{BlockSize: 2, Blocks: 6, MaxModelLen: 12})
	a, b := seq(1, 1, 2, 3, 4, 5, 6), seq(1, 11, 12, 13, 14, 15, 16)
	serve(t, p, a)
	serve(t, p, b)
	again := seq(1, 1, 2, 3, 4, 5) // uses blocks 0 and 1 of a; they become the newest
	serve(t, p, again)
	if again.hit != 4 {
		t.Fatalf("hit %d, want 4", again.hit)
	}
	c := seq(1, 21, 22, 23, 24, 25, 26, 27, 28)
	events := serve(t, p, c)[0]
	// The third block of a went to the partial block of again, which is free once more and
	// taken first; then b goes, its tail first.
	var order []kvcache.EngineHash
	for i, e := range events {
		switch e.kind {
		case removed:
			if len(e.hashes) != 1 {
				t.Errorf("a removal names %d blocks, want 1", len(e.hashes))
			}
			order = append(order, e.hashes...)
		case stored:
			if i != len(events)-1 || len(e.hashes) != 4 {
				t.Errorf("event %d stores %d blocks; one store of 4 must come last", i, len(e.hashes))
			}
		}
	}
	if want := []kvcache.EngineHash{b.engine[2], b.engine[1], b.engine[0]}; !slices.Equal(order, want) {
		t.Errorf("evicted %v, want b from its tail: %v", order, want)
	}
	if len(p.cached) != 6 {
		t.Errorf("%d blocks cached, want 6", len(p.cached))
	}
}

func TestNoRoomWaits(t *testing.T) {
	p, seq := testPool(t, Options{BlockSize: 2, Blocks: 4, MaxModelLen: 8})
	a, b := seq(3, 1, 2, 3, 4), seq(1, 1, 2, 3, 4, 5, 6)
	if !p.admit(a) {
		t.Fatal("a not admitted")
	}
	p.advance(a, 4)
	if !p.admit(b) { // it shares two blocks and needs one; a has reserved one of the two that are free
		t.Fatal("b not admitted: one block is free and not reserved")
	}
	if c := seq(1, 9); p.admit(c) {
		t.Fatal("c admitted though all free blocks are reserved")
	}
	if p.clear() {
		t.Fatal("cleared while in use")
	}
	p.advance(b, 2)
	p.release(b)
	p.release(a)
	if !p.clear() || len(p.cached) != 0 || p.free.len != 4 {
		t.Fatalf("not cleared: %d cached, %d free", len(p.cached), p.free.len)
	}
}

func TestDuplicates(t *testing.T) {
	for _, duplicates := range []bool{false, true} {
		t.Run(fmt.Sprint(duplicates), func(t *testing.T) {
			p, seq := testPool(t, Options{BlockSize: 2, Blocks: 8, Duplicates: duplicates})
			serve(t, p, seq(1, 1, 2, 3, 4))
			s := seq(1, 1, 2, 3, 4) // hits one block and computes the other one again
			steps := serve(t, p, s)
			want := 1
			if duplicates {
				want = 2
			}
			if got := len(p.cached[s.engine[1]]); got != want {
				t.Fatalf("%d copies, want %d", got, want)
			}
			if len(steps[0]) != want-1 {
				t.Fatalf("%d events, want %d", len(steps[0]), want-1)
			}
			for _, r := range p.resident() {
				if wantCopies := 1 + (want-1)*btoi(r.Engine == s.engine[1]); r.Copies != wantCopies {
					t.Errorf("%d copies of %s, want %d", r.Copies, r.Engine, wantCopies)
				}
			}
		})
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Many sequences at once, in random order, on a cache that is too small: the events must
// replay to what the cache holds, hits must be what a plain search finds, and the books
// must balance at every step.
func TestRandomAgainstReference(t *testing.T) {
	for seed := range uint64(20) {
		for _, duplicates := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d/%v", seed, duplicates), func(t *testing.T) { randomRun(t, seed, duplicates) })
		}
	}
}

func randomRun(t *testing.T, seed uint64, duplicates bool) {
	rng := rand.New(rand.NewPCG(seed, 3))
	p, seq := testPool(t, Options{BlockSize: 3, Blocks: 40, Duplicates: duplicates})
	copies := map[kvcache.EngineHash]int{} // the reference: events applied one by one
	apply := func(events []event) {
		storing := false
		for _, e := range events {
			switch e.kind {
			case removed:
				if storing {
					t.Fatal("a removal after a store of the same step")
				}
				for _, h := range e.hashes {
					if copies[h]--; copies[h] < 0 {
						t.Fatalf("%s removed, but it was not stored", h)
					}
				}
			case stored:
				storing = true
				if len(e.tokens) != 3*len(e.hashes) || len(e.extra) != len(e.hashes) {
					t.Fatalf("%d tokens, %d extras for %d blocks", len(e.tokens), len(e.extra), len(e.hashes))
				}
				for _, h := range e.hashes {
					if copies[h]++; copies[h] > 1 && !duplicates {
						t.Fatalf("%s stored twice", h)
					}
				}
			}
		}
	}
	var live []*sequence
	for range 2000 {
		switch {
		case len(live) < 5 && rng.IntN(3) == 0:
			// A few shared beginnings, random lengths: prefixes agree to random depths.
			prompt := append(numbers(1000*rng.IntN(3), 1+rng.IntN(20)), numbers(rng.IntN(3), 1+rng.IntN(10))...)
			s := seq(1+rng.IntN(8), prompt...)
			want := 0
			for want < (len(prompt)-1)/3 && copies[s.engine[want]] > 0 {
				want++
			}
			if p.admit(s) {
				if s.hit != want*3 {
					t.Fatalf("hit %d tokens, the reference says %d", s.hit, want*3)
				}
				live = append(live, s)
			}
		case len(live) > 0:
			i := rng.IntN(len(live))
			s := live[i]
			left := s.promptLen - s.computed
			switch {
			case rng.IntN(10) == 0: // given up
			case left > 0:
				apply(p.advance(s, 1+rng.IntN(left)))
				continue
			case len(s.tokens) == s.promptLen:
				s.append(s.answer.token(0))
				continue
			case s.computed < s.end():
				apply(p.advance(s, 1))
				s.append(s.answer.token(len(s.tokens) - s.promptLen))
				continue
			}
			p.release(s)
			live = slices.Delete(live, i, i+1)
		}
		if p.reserved < 0 || p.reserved > p.free.len {
			t.Fatalf("%d reserved of %d free", p.reserved, p.free.len)
		}
		total := 0
		for h, n := range copies {
			if n != len(p.cached[h]) {
				t.Fatalf("%s: %d copies by the events, %d in the cache", h, n, len(p.cached[h]))
			}
			total += n
		}
		if total > 40 {
			t.Fatalf("%d blocks in a cache of 40", total)
		}
	}
	for _, s := range live {
		p.release(s)
	}
	if p.free.len != 40 || p.reserved != 0 {
		t.Fatalf("%d free, %d reserved at the end", p.free.len, p.reserved)
	}
}

func TestContentAndEngineHashes(t *testing.T) {
	o, err := Options{BlockSize: 4}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	golden := numbers(1, 12)
	base := newSequence(&o, 1, golden, 0, adapter{}, "")
	if got := base.content.Hashes(); uint64(got[0]) != 14643705804678351452 || uint64(got[2]) != 12583592247330656132 {
		t.Errorf("content hashes %v are not the golden ones", got)
	}
	seen := map[kvcache.EngineHash]string{}
	for name, s := range map[string]*sequence{
		"base":       base,
		"other seed": newSequence(&o, 2, golden, 0, adapter{}, ""),
		"adapter":    newSequence(&o, 1, golden, 0, adapter{"x", 1}, ""),
		"salt":       newSequence(&o, 1, golden, 0, adapter{}, "x"),
		"both":       newSequence(&o, 1, golden, 0, adapter{"x", 1}, "y"),
	} {
		for i, h := range s.engine {
			if at, ok := seen[h]; ok {
				t.Errorf("%s block %d has the engine hash of %s", name, i, at)
			}
			seen[h] = fmt.Sprint(name, " block ", i)
		}
	}
	if got := newSequence(&o, 1, golden, 0, adapter{"x", 1}, "y").extraKeys(0); !slices.Equal(got, []string{"x", "y"}) {
		t.Errorf("extra keys of block 0: %q", got)
	}
	if got := newSequence(&o, 1, golden, 0, adapter{}, "y").extraKeys(1); got != nil {
		t.Errorf("extra keys of block 1: %q, want none: the salt is in the first block only", got)
	}
}
