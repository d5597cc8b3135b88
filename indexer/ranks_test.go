package indexer

import (
	"fmt"
	"testing"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
)

// Ranks are workers of their own: each holds its blocks, one leaves without the other, and all leave with the worker. What comes under
// another rank's number, as where two ranks bind one port, counts for nobody and shows.
func TestRanksComeAndGo(t *testing.T) {
	st := newStore(t)
	ix := newIndexer(t, Options{Store: st})
	start(t, ix)
	engines := make([]*zmtptest.Engine, 3)
	batch := func(rank int, events ...wire.Event) []byte {
		return wire.Encode(nil, wire.Batch{Rank: &rank, Events: events}, wire.FormMap)
	}
	for rank := range engines {
		engines[rank] = zmtptest.Start(t, zmtptest.Config{XPUB: true})
		if code, v := request(t, ix, "POST", "/register", fmt.Sprintf(
			`{"instance_id":"w","dp_rank":%d,"model_name":"m","endpoint":%q,"block_size":4}`, rank, engines[rank].Endpoint)); code != 201 {
			t.Fatalf("register: %d %v", code, v)
		}
		engines[rank].Subscribed()
		engines[rank].Publish("", 0, batch(rank, stored(nil, kvcache.EngineHash(rank+1))))
	}
	wantHeld(t, st, testPool, append(append(gpu("w/0", 1), gpu("w/1", 2)...), gpu("w/2", 3)...)...)
	engines[0].Publish("", 1, batch(7, stored(nil, 8)))
	engines[0].Publish("", 2, batch(0, stored(nil, 9)))
	wantHeld(t, st, testPool, append(append(gpu("w/0", 1, 9), gpu("w/1", 2)...), gpu("w/2", 3)...)...)
	if n := counter(ix.metrics.errors, "dp_rank"); n != 1 {
		t.Errorf("%v events of a strange rank counted, want 1", n)
	}
	if code, v := request(t, ix, "POST", "/unregister", `{"instance_id":"w","dp_rank":1,"model_name":"m"}`); code != 200 || v["removed"] != 1.0 {
		t.Fatalf("unregister a rank: %d %v", code, v)
	}
	wantHeld(t, st, testPool, append(gpu("w/0", 1, 9), gpu("w/2", 3)...)...)
	if code, v := request(t, ix, "POST", "/unregister", `{"instance_id":"w","model_name":"m"}`); code != 200 || v["removed"] != 2.0 {
		t.Fatalf("unregister the worker: %d %v", code, v)
	}
	wantHeld(t, st, testPool)
	wantClean(t, st, testPool)
}
