package indexer

import (
	"testing"

	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// A replay that is of another process than the live messages is found out by the first message that both have: what it brought leaves
// the index, the live stream goes on at once, and whoever lied is not asked again for a while.
func TestReplayOfAnotherProcess(t *testing.T) {
	for name, c := range map[string]struct {
		others int64 // messages that the other process has
		live   []int64
		want   []kvcache.EngineHash
	}{
		"closes a gap": {20, []int64{0, 1, 3, 4}, []kvcache.EngineHash{3, 4}},
		"closes a gap, and the live stream is past it":    {5, []int64{0, 1, 3, 4, 5, 6}, []kvcache.EngineHash{3, 4, 5, 6}},
		"has more than the live stream, which catches up": {20, []int64{0, 1, 19, 20}, []kvcache.EngineHash{19, 20}},
	} {
		t.Run(name, func(t *testing.T) {
			st := newStore(t)
			other := zmtptest.Start(t, zmtptest.Config{Router: "*"})
			for seq := range c.others {
				other.Publish("", seq, payload(stored(nil, kvcache.EngineHash(1000+seq))))
			}
			s := offline(t, st, 4)
			s.reg.ReplayEndpoint = other.ReplayEndpoint
			for _, seq := range c.live {
				s.say(t, seq, payload(stored(nil, kvcache.EngineHash(seq))))
			}
			wantHeld(t, st, testPool, gpu("w/0", c.want...)...)
			wantClean(t, st, testPool)
			if n := counter(s.ix.metrics.replays, replayGap); n != 1 {
				t.Errorf("%d replays", n)
			}
		})
	}
}

// An indexer that dies after it has begun a generation, and before it has applied anything to it, leaves a watermark of which nobody
// knows the engine process. If the engine begins again too, all of its messages are missing, not those after the watermark.
func TestWatermarkOfAnUnknownProcess(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{Router: "*"})
	var hashes []kvcache.EngineHash
	for seq := range int64(10) {
		hashes = append(hashes, kvcache.EngineHash(seq))
		e.Publish("", seq, payload(stored(nil, hashes[seq])))
	}
	id := store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}}
	left, _, err := st.Register(t.Context(), id, store.Registration{BlockSize: 4})
	if err == nil {
		_, _, err = st.Restart(t.Context(), left, 5, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	ix := newIndexer(t, Options{Store: st, Workers: []Worker{{
		ID: "w", Model: testPool.Model, BlockSize: 4, Endpoint: e.Endpoint, ReplayEndpoint: e.ReplayEndpoint,
	}}})
	start(t, ix)
	wantHeld(t, st, testPool, gpu("w/0", hashes...)...)
	wantClean(t, st, testPool)
}
