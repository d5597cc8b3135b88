package indexer

import (
	"testing"
	"time"

	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// A replay that names a number of the far future makes duplicates of all that follows, for every indexer. The live stream shows
// that it was a lie.
func TestReplayFromTheFuture(t *testing.T) {
	_, url := storetest.Miniredis(t)
	st := openStore(t, url)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	a := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("w", e)}})
	b := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("w", e)}})
	for _, ix := range []*Indexer{a, b} {
		ix.timing.claim = 50 * time.Millisecond
		start(t, ix)
		e.Subscribed()
		e.Asked()
	}
	e.Publish("", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	const future = 1_000_000_000
	e.Lose("", future, payload(stored(nil, 99)))
	e.Lose("", 1, payload(stored(nil, 2)))
	e.Publish("", 2, payload(stored(nil, 3)))
	wantStatus(t, a, "w", func(v Status) bool { return v.Watermark == future })

	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(30 * time.Second)
	for seq := int64(3); ; seq++ {
		e.Publish("", seq, payload(stored(nil, 50)))
		v := workerStatus(t, a, "w", 0)
		if w := workerStatus(t, b, "w", 0); v.Watermark >= 3 && v.Watermark < future && w.Watermark >= 3 && w.Watermark < future {
			e.Publish("", seq+1, payload(stored(nil, 51)))
			break
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("after 30 s: %+v", v)
		}
	}
	wantHeld(t, st, testPool, append(gpu("w/0", 50), gpu("w/0", 51)...)...)
	if n := counter(a.metrics.resets, resetClaim) + counter(b.metrics.resets, resetClaim); n < 1 {
		t.Errorf("%d resets", n)
	}
	wantClean(t, st, testPool)
}

// What another indexer is ahead by is no lie, however late the messages come: they come together.
func TestClaims(t *testing.T) {
	st := newStore(t)
	s := offline(t, st, 4)
	s.ix.timing.claim = 10 * time.Second
	now := time.Now()
	live := func(seq int64, after time.Duration) {
		t.Helper()
		now = now.Add(after)
		s.arrived = now
		s.say(t, seq, payload(stored(nil, 1)))
	}
	live(0, 0)
	s.saw(store.Stream{StreamID: s.id, Registration: s.reg, Shard: s.st.Shard, Slot: s.st.Slot, Generation: s.st.Generation, Seq: 5})
	s.cur.done = 5
	live(1, time.Hour)
	live(4, 9*time.Second)
	live(5, time.Second)
	live(6, time.Hour)
	if n := counter(s.ix.metrics.resets, resetClaim); n != 0 {
		t.Errorf("%d resets for a claim that was true", n)
	}
}
