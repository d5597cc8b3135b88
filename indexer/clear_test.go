package indexer

import (
	"context"
	"slices"
	"testing"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// ranks are two streams of one worker without sockets, that a test feeds by hand.
func ranks(t *testing.T, st Store) [2]*stream {
	t.Helper()
	ix := newIndexer(t, Options{Store: st})
	var out [2]*stream
	for r := range out {
		id := store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w", Rank: r}}
		out[r] = newStream(ix, publisher{id: id, reg: store.Registration{BlockSize: 4}})
		if err := out[r].register(t.Context()); err != nil {
			t.Fatal(err)
		}
		ix.streams[id] = out[r]
	}
	return out
}

// at is a batch with the engine's time.
func at(ts float64, events ...wire.Event) []byte {
	return wire.Encode(nil, wire.Batch{TS: ts, TSValid: true, Events: events}, wire.FormMap)
}

func TestClearOfAnotherRank(t *testing.T) {
	for name, c := range map[string]struct {
		say  func(rank0, rank1 *stream)
		want []string
	}{
		"takes what this rank holds": {func(a, b *stream) {
			b.say(t, 0, at(1, stored(nil, 1)))
			a.say(t, 0, at(1, stored(nil, 9)))
			a.say(t, 1, at(5, cleared))
		}, nil},
		"is no news where it is the first message of a process": {func(a, b *stream) {
			b.say(t, 0, at(1, stored(nil, 1)))
			a.say(t, 0, at(5, cleared))
		}, gpu("w/1", 1)},
		"comes late, and what this rank has stored since its own stays": {func(a, b *stream) {
			b.say(t, 0, at(1, stored(nil, 1)))
			b.say(t, 1, at(5.5, cleared))
			b.say(t, 2, at(6, stored(nil, 2)))
			a.say(t, 1, at(5, cleared))
		}, gpu("w/1", 2)},
		"is another one than this rank's own": {func(a, b *stream) {
			b.say(t, 1, at(5, cleared))
			b.say(t, 2, at(6, stored(nil, 2)))
			a.say(t, 1, at(50, cleared))
		}, nil},
		"has no time": {func(a, b *stream) {
			b.say(t, 1, at(5, cleared))
			b.say(t, 2, at(6, stored(nil, 2)))
			a.say(t, 1, wire.Encode(nil, wire.Batch{Events: []wire.Event{cleared}}, wire.FormMap))
			a.say(t, 2, at(5, cleared))
		}, nil},
		"is not lost with an attempt": {func(a, b *stream) {
			b.say(t, 0, at(1, stored(nil, 1)))
			a.say(t, 1, at(5, cleared))
			b.begin()
			if err := b.clearedByOther(t.Context()); err != nil { // it is not registered yet
				t.Fatal(err)
			}
			if err := b.register(t.Context()); err != nil {
				t.Fatal(err)
			}
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			st := newStore(t)
			r := ranks(t, st)
			c.say(r[0], r[1])
			if err := r[1].clearedByOther(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := held(t, st, testPool); !slices.Equal(got, c.want) && len(got)+len(c.want) > 0 {
				t.Errorf("the index holds %q, want %q", got, c.want)
			}
			wantClean(t, st, testPool)
		})
	}
}

// A clear that Redis could not take is owed.
func TestClearOfAnotherRankIsOwed(t *testing.T) {
	st := &refusing{Store: newStore(t)}
	r := ranks(t, st)
	r[1].say(t, 0, at(1, stored(nil, 1)))
	r[0].say(t, 1, at(5, cleared))
	st.refuse = true
	r[1].impatient = true
	if err := r[1].clearedByOther(t.Context()); err == nil {
		t.Fatal("no error")
	}
	st.refuse = false
	if err := r[1].clearedByOther(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, st, testPool)
}

// refusing is a store that does not end generations while told so.
type refusing struct {
	*store.Store
	refuse bool
}

func (r *refusing) Restart(ctx context.Context, st store.Stream, seq int64, digest uint64) (store.Stream, store.Outcome, error) {
	if r.refuse {
		return store.Stream{}, 0, store.ErrUnavailable
	}
	return r.Store.Restart(ctx, st, seq, digest)
}
