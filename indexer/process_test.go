package indexer

import (
	"testing"

	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store/storetest"
)

// Redis dies and comes back as it was when another process of the engine, which had come further, was alive. The indexer that has
// lived through it knows a newer generation; one that has just begun compares the last message applied with the engine's.
func TestRedisFromBeforeTheRestart(t *testing.T) {
	for name, c := range map[string]struct {
		begunAnew bool // the indexer that has to notice
		messages  int  // of the new process; the old one had 6
	}{
		"the new process is behind":           {false, 3},
		"the new process is ahead":            {false, 9},
		"a new indexer, the process behind":   {true, 3},
		"a new indexer, the process is ahead": {true, 9},
	} {
		t.Run(name, func(t *testing.T) {
			redis := storetest.Redis(t)
			st := openStore(t, redis.URL)
			e := zmtptest.Start(t, zmtptest.Config{Router: "*"})
			options := Options{Store: openStore(t, redis.URL), Workers: []Worker{worker("w", e)}}
			stop := start(t, newIndexer(t, options))
			for i := range int64(6) {
				e.Publish("", i, payload(stored(nil, 100+kvcache.EngineHash(i))))
			}
			wantHeld(t, st, testPool, gpu("w/0", 100, 101, 102, 103, 104, 105)...)
			c2 := redis.Client()
			defer func() { _ = c2.Close() }()
			if err := c2.Save(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}

			e.Kill()
			e = zmtptest.Start(t, zmtptest.Config{Pub: e.Endpoint, Router: e.ReplayEndpoint})
			var want []string
			for i := range int64(c.messages) {
				e.Publish("", i, payload(stored(nil, 200+kvcache.EngineHash(i))))
				want = append(want, gpu("w/0", 200+kvcache.EngineHash(i))...)
			}
			wantHeld(t, st, testPool, want...)
			if c.begunAnew {
				stop()
			}
			redis.Stop()
			redis.Start()
			if c.begunAnew {
				start(t, newIndexer(t, options))
			}
			wantHeld(t, st, testPool, want...)
			wantClean(t, st, testPool)
		})
	}
}
