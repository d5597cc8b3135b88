package indexer

import (
	"fmt"
	"testing"
	"time"

	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store/storetest"
)

// Keys that Redis loses one by one, which neither events nor versions tell of, are mended while the engines are idle.
func TestLostKeysAreMended(t *testing.T) {
	redis := storetest.Redis(t) // miniredis lets no time pass
	c, url := redis.Client(), redis.URL
	defer func() { _ = c.Close() }()
	st := openStore(t, url)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	var ixs []*Indexer
	for range 2 {
		ix := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("w", e)}, CheckInterval: 40 * time.Millisecond})
		ixs = append(ixs, ix)
		start(t, ix)
		e.Subscribed()
		e.Asked()
	}
	var all []kvcache.EngineHash
	for h := range kvcache.EngineHash(20) {
		all = append(all, 1+h)
	}
	e.Publish("", 0, payload(stored(nil, all...)))
	wantHeld(t, st, testPool, gpu("w/0", all...)...)
	tag := "wr:1:{" + testPool.String() + "#0}:"
	for _, key := range []string{"holders", "blocks:w/0:device", "slots", "version", "top"} {
		if n, err := c.Del(t.Context(), tag+key).Result(); err != nil || n != 1 {
			t.Fatalf("%s: %d %v", key, n, err)
		}
		eventually(t, func() string {
			if r, err := st.Check(t.Context(), testPool, false); err != nil || r.Found > 0 {
				return fmt.Sprintf("without %s: %q %v", key, r.Problems, err)
			}
			return ""
		})
		wantHeld(t, st, testPool, gpu("w/0", all...)...) // its blocks by replay
	}
	if counter(ixs[0].metrics.checks, checkRepaired)+counter(ixs[1].metrics.checks, checkRepaired) < 3 {
		t.Error("nobody says that the index was damaged")
	}
}

// One indexer of several checks, once in an interval.
func TestOneIndexerChecks(t *testing.T) {
	_, url := storetest.Miniredis(t)
	a, b := openStore(t, url), openStore(t, url)
	for i, want := range []bool{true, false} {
		for j, s := range []Store{a, b} {
			if mine, err := s.CheckTurn(t.Context(), testPool, time.Hour); err != nil || mine != (want && j == 0) {
				t.Errorf("round %d, indexer %d: %v %v", i, j, mine, err)
			}
		}
	}
}

// The list of pools and a pool's configuration are on a node of their own in a cluster. Lost there, they come back while the
// streams are where they were: whoever starts then would find nothing.
func TestLostPoolIsAnnouncedAgain(t *testing.T) {
	m, url := storetest.Miniredis(t)
	st := openStore(t, url)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	ix := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("w", e)}})
	start(t, ix)
	e.Subscribed()
	e.Asked()
	e.Publish("", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	before := workerStatus(t, ix, "w", 0).Generation
	for _, lost := range [][]string{{"wr:1:pools"}, {"wr:1:{" + testPool.String() + "}:config"}, {"wr:1:{" + testPool.String() + "}:workers", "wr:1:pools"}} {
		for _, key := range lost {
			if !m.Del(key) {
				t.Fatalf("no key %s", key)
			}
		}
		if err := ix.discover(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantHeld(t, openStore(t, url), testPool, gpu("w/0", 1)...)
	}
	if now := workerStatus(t, ix, "w", 0).Generation; now != before {
		t.Errorf("generation %d became %d", before, now)
	}
	wantClean(t, st, testPool)
}
