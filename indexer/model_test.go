package indexer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
)

// engineModel is what an engine holds: copies per block.
type engineModel map[kvcache.EngineHash]int

func (m engineModel) apply(events []wire.Event) {
	for _, e := range events {
		for _, h := range e.Hashes {
			if e.Kind == wire.Stored {
				m[h]++
			} else if m[h]--; m[h] <= 0 {
				delete(m, h)
			}
		}
		if e.Kind == wire.Cleared {
			clear(m)
		}
	}
}

func (m engineModel) held() []string {
	out := []string{}
	for h := range m {
		out = append(out, gpu("w/0", h)...)
	}
	slices.Sort(out)
	return out
}

// Random events with duplicates, gaps, restarts, rubbish and pauses between writes: whenever the stream is flushed, the
// index holds what the model holds.
func TestModel(t *testing.T) {
	for seed := range uint64(5) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 7))
			st := newStore(t)
			s := offline(t, st, 4)
			s.ix.opts.BatchOps = 1 + rng.IntN(40)
			model := engineModel{}
			// Chains of 5 blocks, so that a hash has the same prefix whenever it is stored.
			chain := func() wire.Event {
				root := kvcache.EngineHash(5 * rng.IntN(8))
				var hashes []kvcache.EngineHash
				for i := range kvcache.EngineHash(1 + rng.IntN(5)) {
					hashes = append(hashes, root+i)
				}
				return stored(nil, hashes...)
			}
			batch := func() []wire.Event {
				var events []wire.Event
				for range rng.IntN(4) {
					switch n := rng.IntN(20); {
					case n < 9:
						events = append(events, chain())
					case n < 19:
						events = append(events, removed(kvcache.EngineHash(rng.IntN(40)), kvcache.EngineHash(40+rng.IntN(5))))
					default:
						events = append(events, cleared)
					}
				}
				return events
			}
			seq, last := int64(-1), []byte(nil)
			live := func(n int64, p []byte) {
				if err := s.live(t.Context(), newMessage(n, p)); err != nil {
					t.Fatal(err)
				}
				if err := s.flushFull(t.Context()); err != nil {
					t.Fatal(err)
				}
				seq, last = n, p
			}
			for range 400 {
				switch n := rng.IntN(100); {
				case n < 85:
					events := batch()
					live(seq+1, payload(events...))
					model.apply(events)
				case n < 88 && seq >= 0:
					live(seq, last) // the same again
				case n < 91 && seq >= 0:
					events := batch()
					clear(model)
					live(seq+2+rng.Int64N(3), payload(events...))
					model.apply(events)
				case n < 93 && seq > 0:
					events := batch()
					clear(model)
					live(0, payload(events...))
					model.apply(events)
				case n < 94:
					live(seq+1, []byte("rubbish"))
					clear(model)
				default:
					if err := s.flush(t.Context()); err != nil {
						t.Fatal(err)
					}
					if got, want := held(t, st, testPool), model.held(); !slices.Equal(got, want) {
						t.Fatalf("after %d: the index holds\n%q, want\n%q", seq, got, want)
					}
				}
			}
			wantClean(t, st, testPool)
		})
	}
}
