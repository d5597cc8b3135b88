package indexer

import (
	"testing"
	"time"

	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// load puts a block at worker w as `warmroute load` does.
func load(t *testing.T, st *store.Store) {
	t.Helper()
	r, err := st.Restore(t.Context(), testPool, 4)
	if err != nil {
		t.Fatal(err)
	}
	e := kvcache.RouterEvent{WorkerID: "w", StorageTier: "device"}
	h := kvcache.EngineHash(77)
	e.Event.Data.Stored = &kvcache.StoredData{Blocks: []kvcache.StoredBlock{{BlockHash: 5, EngineHash: &h}}}
	if err := r.Add(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	if err := r.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, st, testPool, gpu("w/0", 77)...)
}

// What was loaded from a dump makes way for what the engine says, from its first message on.
func TestEngineAfterLoad(t *testing.T) {
	for name, c := range map[string]struct {
		router string
		first  []byte
		want   []string
	}{
		"replayed":                         {"*", payload(stored(nil, 1)), gpu("w/0", 1, 2)},
		"replayed, beginning with a clear": {"*", payload(cleared), gpu("w/0", 2)},
		"without replay":                   {"", payload(stored(nil, 1)), gpu("w/0", 2)},
	} {
		t.Run(name, func(t *testing.T) {
			_, url := storetest.Miniredis(t)
			st := openStore(t, url)
			load(t, st)
			e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: c.router})
			e.Publish("", 0, c.first) // before anybody listens
			ix := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("w", e)}})
			start(t, ix)
			e.Subscribed()
			e.Publish("", 1, payload(stored(nil, 2)))
			wantHeld(t, st, testPool, c.want...)
			wantClean(t, st, testPool)
		})
	}
}

// The lease of a worker that is only known from a dump ends like any other, and its blocks leave with it.
func TestLoadedWorkerIsDead(t *testing.T) {
	_, url := storetest.Miniredis(t)
	st := openStore(t, url)
	load(t, st)
	s := offline(t, openStore(t, url), 4)
	s.followed = time.Time{}
	now := time.Now()
	for range 2 {
		if err := s.lapse(t.Context(), now, true); err != nil {
			t.Fatal(err)
		}
		now = now.Add(2 * s.ix.opts.LeaseGrace)
	}
	if v := s.snapshot(); v.Lease != leaseExpired {
		t.Errorf("the lease is %s", v.Lease)
	}
	wantHeld(t, st, testPool)
	wantClean(t, st, testPool)
}
