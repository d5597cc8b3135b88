package store_test

import (
	"fmt"
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

// Where the list of idle slots was evicted, a new stream must not get the slot of a live one: its lookups would be
// credited to the other.
func TestLostIdleSharesNoSlot(t *testing.T) {
	_, url := storetest.Miniredis(t)
	s := open(t, url)
	var streams []store.Stream
	for i := range 4 {
		st := register(t, s, rank(fmt.Sprint("w", i), 0))
		apply(t, s, &st, 0, store.Applied, storeAll(st.Worker, kvcache.Device, chain(uint32(i), 1)...))
		streams = append(streams, st)
	}
	for i := range 2 { // slots 0 and 1 are idle now, 2 to 5 are in use
		next, o, err := s.Restart(t.Context(), streams[i], 0)
		if err != nil || o != store.Applied {
			t.Fatal(o, err)
		}
		streams[i] = next
	}
	c := client(t, url)
	keys, err := c.Keys(t.Context(), "*:idle").Result()
	if err != nil || len(keys) != 1 {
		t.Fatal(keys, err)
	}
	c.Del(t.Context(), keys...)
	streams = append(streams, register(t, s, rank("new", 0)))
	again, o, err := s.Restart(t.Context(), streams[2], 0)
	if err != nil || o != store.Applied {
		t.Fatal(o, err)
	}
	streams[2] = again
	owner := map[int]string{}
	for _, st := range streams {
		if other := owner[st.Slot]; other != "" {
			t.Errorf("%s and %s share slot %d", other, st.Worker, st.Slot)
		}
		owner[st.Slot] = st.Worker
	}
}

// A stream that is reset again and again without holding anything, as one whose every batch is undecodable, uses up no slots.
func TestRestartOfAnEmptyStreamKeepsItsSlot(t *testing.T) {
	_, url := storetest.Miniredis(t)
	s := open(t, url)
	st := register(t, s, rank("w", 0))
	for i := range int64(50) {
		next, o, err := s.Restart(t.Context(), st, i)
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
