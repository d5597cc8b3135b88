package store_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// Model names that clients make up leave no state, no series and no prober behind, with Redis there or away.
func TestUnknownPoolsLeaveNothingBehind(t *testing.T) {
	m, url := storetest.Miniredis(t)
	reg := prometheus.NewRegistry()
	s := open(t, url, func(o *store.Options) { o.Registerer = reg })
	register(t, s, rank("w", 0))
	ask := func() {
		for i := range 200 {
			id := kvcache.PoolID{Model: fmt.Sprint("made up ", i)}
			_, _, _ = s.PoolConfig(t.Context(), id)
			_, _, _ = s.Lookup(t.Context(), id, chain(1, 2), store.LookupOptions{})
		}
	}
	series := func() (n int) {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			n += len(f.Metric)
		}
		return n
	}
	before, links := series(), len(s.Links())
	ask()
	if n := series(); n != before || len(s.Links()) != links {
		t.Errorf("%d series and %d links, were %d and %d", n, len(s.Links()), before, links)
	}
	m.Close()
	ask()
	if n := len(s.Links()); n > links+1 { // one for all that are unknown
		t.Errorf("%d links down or up, each with a prober, want at most %d", n, links+1)
	}
}

// Where the list of idle slots or the slot map was evicted, a new stream must not get a slot that another one has, or had and whose
// bits are there still: its lookups would be credited with the other's blocks.
func TestLostListsOfSlotsShareNoSlot(t *testing.T) {
	for _, lost := range [][]string{{"idle"}, {"slots"}, {"idle", "slots"}} {
		t.Run(strings.Join(lost, " and "), func(t *testing.T) {
			_, url := storetest.Miniredis(t)
			s := open(t, url)
			p := chain(1, 10)
			owner := map[int]string{} // of each slot that has bits
			streams := make([]store.Stream, 4)
			for i := range streams {
				streams[i] = register(t, s, rank(fmt.Sprint("w", i), 0))
				apply(t, s, &streams[i], 0, store.Applied, storeAll(streams[i].Worker, kvcache.Device, p...))
				owner[streams[i].Slot] = streams[i].Worker
			}
			restart := func(st *store.Stream) {
				t.Helper()
				next, o, err := s.Restart(t.Context(), *st, 0, 0)
				if err != nil || o != store.Applied {
					t.Fatal(o, err)
				}
				*st = next
			}
			restart(&streams[0]) // its old slot is idle now, and nobody has swept it
			owner[streams[0].Slot] = "w0"
			c := client(t, url)
			for _, name := range lost {
				if n, err := c.Del(t.Context(), shardTag+name).Result(); err != nil || n != 1 {
					t.Fatal(name, n, err)
				}
			}
			fresh := []store.Stream{register(t, s, rank("new", 0))}
			restart(&streams[2])
			for _, st := range append(fresh, streams[2]) {
				if was := owner[st.Slot]; was != "" {
					t.Errorf("%s got slot %d, where the bits of %s are", st.Worker, st.Slot, was)
				}
				owner[st.Slot] = st.Worker
			}
			scores, _, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
			if err != nil || scores.Scores[rank("new", 0)].Any > 0 || scores.Scores[rank("w2", 0)].Any > 0 {
				t.Errorf("%v %v", scores.Scores, err)
			}
			for _, st := range streams { // the others come back as their leases are renewed
				if o, err := s.Touch(t.Context(), st); err != nil || o != store.Applied {
					t.Fatal(o, err)
				}
			}
			want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("w1", 0): onDevice(10), rank("w3", 0): onDevice(10)})
			if _, err := s.Check(t.Context(), testPool, true); err != nil {
				t.Fatal(err)
			}
			clean(t, s)
		})
	}
}

// A stream that is reset again and again without holding anything, as one whose every batch is undecodable, uses up no slots.
func TestRestartOfAnEmptyStreamKeepsItsSlot(t *testing.T) {
	_, url := storetest.Miniredis(t)
	s := open(t, url)
	st := register(t, s, rank("w", 0))
	for i := range int64(50) {
		next, o, err := s.Restart(t.Context(), st, i, 0)
		if err != nil || o != store.Applied || next.Generation <= st.Generation {
			t.Fatal(next, o, err)
		}
		if next.Slot != st.Slot {
			t.Fatalf("slot %d after %d", next.Slot, st.Slot)
		}
		st = next
	}
	apply(t, s, &st, 50, store.Applied, storeAll("w", kvcache.Device, chain(1, 3)...))
	want(t, s, chain(1, 3), map[kvcache.WorkerRank]kvcache.Overlap{rank("w", 0): onDevice(3)})
	clean(t, s)
}
