package indexer

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store/storetest"
)

// worker is a configured worker that follows a libzmq publisher.
func worker(id string, e *zmtptest.Engine) Worker {
	return Worker{ID: id, Model: "m", Endpoint: e.Endpoint, ReplayEndpoint: e.ReplayEndpoint, BlockSize: 4}
}

// A libzmq publisher is killed and comes back with another cache, numbered from 0 again.
func TestPublisherRestarts(t *testing.T) {
	for _, replay := range []string{"", "*"} {
		t.Run("replay="+replay, func(t *testing.T) {
			st := newStore(t)
			e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: replay})
			ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("w", e)}})
			start(t, ix)
			e.Subscribed()
			if replay != "" {
				e.Asked()
			}
			e.Publish("kv", 0, payload(stored(nil, 1, 2)))
			e.Publish("kv", 1, payload(stored(below(2), 3), removed(1)))
			wantHeld(t, st, testPool, gpu("w/0", 2, 3)...)

			e.Kill()
			eventually(t, func() string {
				if workerStatus(t, ix, "w", 0).Connected {
					return "still connected"
				}
				return ""
			})
			wantHeld(t, st, testPool, gpu("w/0", 2, 3)...) // a publisher that is away may only be unreachable
			again := zmtptest.Start(t, zmtptest.Config{XPUB: true, Pub: e.Endpoint, Router: e.ReplayEndpoint})
			again.Subscribed()
			if replay != "" {
				again.Asked()
			}
			again.Publish("kv", 0, payload(stored(nil, 7)))
			again.Publish("kv", 1, payload(stored(below(7), 8)))
			wantHeld(t, st, testPool, gpu("w/0", 7, 8)...)
			wantStatus(t, ix, "w", func(v Status) bool { return v.Resets == 1 && v.Gaps == 0 && v.Trusted && v.Watermark == 1 })
			wantClean(t, st, testPool)
		})
	}
}

// While nobody listened the engine restarted and has already passed the old watermark.
func TestHiddenRestart(t *testing.T) {
	for _, layout := range []string{"v1", "v2"} {
		t.Run(layout, func(t *testing.T) {
			st := newStore(t)
			e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*", Layout: layout})
			ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("w", e)}})
			start(t, ix)
			e.Subscribed()
			e.Asked()
			e.Publish("kv", 0, payload(stored(nil, 1)))
			e.Publish("kv", 1, payload(stored(nil, 2)))
			wantHeld(t, st, testPool, gpu("w/0", 1, 2)...)
			e.Kill()
			// The new process has published 0 to 3 before the indexer comes back.
			port := e.Endpoint
			again := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: e.ReplayEndpoint, Layout: layout})
			for i := range int64(4) {
				again.Publish("kv", i, payload(stored(nil, kvcache.EngineHash(10+i))))
			}
			again.Rebind(port)
			wantHeld(t, st, testPool, gpu("w/0", 10, 11, 12, 13)...)
			wantStatus(t, ix, "w", func(v Status) bool { return v.Resets == 1 && v.Gaps == 0 })
		})
	}
}

// The events published before anybody listened come by replay, and those that the live socket loses too.
func TestReplayFillsGaps(t *testing.T) {
	for _, layout := range []string{"v1", "v2"} {
		t.Run(layout, func(t *testing.T) {
			st := newStore(t)
			e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*", Layout: layout})
			e.Publish("kv", 0, payload(stored(nil, 1, 2)))
			e.Publish("kv", 1, payload(removed(2)))
			ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("w", e)}})
			start(t, ix)
			wantHeld(t, st, testPool, gpu("w/0", 1)...)
			if from := e.Asked(); from != 0 {
				t.Errorf("the first replay began at %d", from)
			}
			e.Lose("kv", 2, payload(stored(below(1), 3)))
			e.Lose("kv", 3, payload(removed(1)))
			e.Publish("kv", 4, payload(stored(below(3), 4)))
			wantHeld(t, st, testPool, gpu("w/0", 3, 4)...)
			if from := e.Asked(); from != 2 {
				t.Errorf("the gap's replay began at %d, want 2", from)
			}
			wantStatus(t, ix, "w", func(v Status) bool { return v.Gaps == 1 && v.Resets == 0 })
			wantClean(t, st, testPool)
		})
	}
}

// What the engine no longer has, or never sent, costs the blocks; the stream goes on.
func TestReplayCannotFill(t *testing.T) {
	for name, how := range map[string]zmtptest.Replay{
		"silent":           {},
		"only END":         {End: true},
		"hole without END": {Answer: true, Skip: []int64{3}},
		"burnt number":     {Answer: true, End: true, Skip: []int64{3}},
		"evicted":          {Answer: true, End: true, First: 4},
	} {
		t.Run(name, func(t *testing.T) {
			st := newStore(t)
			e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
			ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("w", e)}})
			ix.timing.replaySilence = 300 * time.Millisecond
			start(t, ix)
			e.Subscribed()
			e.Asked()
			e.Publish("kv", 0, payload(stored(nil, 1)))
			e.Publish("kv", 1, payload(stored(nil, 2)))
			wantHeld(t, st, testPool, gpu("w/0", 1, 2)...)
			e.SetReplay(how)
			e.Lose("kv", 2, payload(stored(nil, 3)))
			e.Lose("kv", 3, payload(removed(1)))
			e.Lose("kv", 4, payload(stored(nil, 5)))
			e.Publish("kv", 5, payload(stored(nil, 6)))
			eventually(t, func() string {
				got := held(t, st, testPool)
				if !slices.Contains(got, "w/0 gpu "+kvcache.EngineHash(6).String()) {
					return fmt.Sprint("the live event is missing: ", got)
				}
				return ""
			})
			got := held(t, st, testPool)
			for _, h := range []kvcache.EngineHash{1, 2} { // the lost message removed one of them
				if slices.Contains(got, "w/0 gpu "+h.String()) {
					t.Errorf("block %s is credited after a gap: %q", h, got)
				}
			}
			wantStatus(t, ix, "w", func(v Status) bool { return v.Resets == 1 })
			wantClean(t, st, testPool)
		})
	}
}

// A publisher whose replay failed is left alone for a while; the process that takes its place is not.
func TestReplayAfterAFailedOneAndARestart(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	e.SetReplay(zmtptest.Replay{})
	ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("w", e)}})
	ix.timing.replaySilence = 100 * time.Millisecond
	start(t, ix)
	e.Subscribed()
	e.Publish("kv", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...) // after the replay, which failed

	e.Kill()
	again := zmtptest.Start(t, zmtptest.Config{XPUB: true, Pub: e.Endpoint, Router: e.ReplayEndpoint})
	again.Lose("kv", 0, payload(stored(nil, 7)))
	again.Subscribed()
	again.Publish("kv", 1, payload(stored(nil, 8)))
	wantHeld(t, st, testPool, gpu("w/0", 7, 8)...)
	wantClean(t, st, testPool)
}

func TestMalformedMessages(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("w", e)}})
	start(t, ix)
	e.Subscribed()
	e.Publish("kv", 0, payload(stored(nil, 1)))
	e.Raw([]byte("kv"), []byte{7}, payload(removed(1)))                                  // a short number
	e.Raw([]byte("kv"), payload(removed(1)))                                             // two frames
	e.Raw([]byte("kv"), []byte("\xff\xff\xff\xff\xff\xff\xff\xff"), payload(removed(1))) // the END number
	e.Raw([]byte("kv"), []byte("\xff\xff\xff\xff\xff\xff\xff\xfe"), payload(removed(1))) // beyond any watermark
	e.Raw([]byte("kv"), []byte("\x00\x20\x00\x00\x00\x00\x00\x01"), payload(removed(1))) // beyond what a double tells apart
	rank := 5
	e.Publish("kv", 1, wire.Encode(nil, wire.Batch{Rank: &rank, Events: []wire.Event{removed(1)}}, wire.FormMap))
	e.Publish("kv", 2, payload(stored(nil, 2)))
	wantHeld(t, st, testPool, gpu("w/0", 1, 2)...)
	// One bad event in a good batch costs itself: a store is no loss, a lost removal is.
	e.Publish("kv", 3, []byte("\x93\xc0\x92\x93\xabBlockStored\x91\xa1x\xc0\x91\xb0AllBlocksCleared\x00"))
	wantHeld(t, st, testPool)
	e.Publish("kv", 4, payload(stored(nil, 3)))
	e.Publish("kv", 5, []byte("\x93\xc0\x91\x92\xacBlockRemoved\x91\xa1x\x00"))
	e.Publish("kv", 6, payload(stored(nil, 4)))
	wantHeld(t, st, testPool, gpu("w/0", 4)...)
	e.Publish("kv", 7, []byte("\x93\xc0\x91\x91\xa8NewEvent\x00")) // an unknown tag is no loss
	e.Publish("kv", 8, payload(stored(nil, 5)))
	wantHeld(t, st, testPool, gpu("w/0", 4, 5)...)
	for code, want := range map[string]int{"frame_count": 1, "seq_length": 3, "end_payload": 1, "dp_rank": 1, "unknown_tag": 1} {
		if n := counter(ix.metrics.errors, code); n != want {
			t.Errorf("%d errors %s, want %d", n, code, want)
		}
	}
	wantClean(t, st, testPool)
}

// The block size may be known to the first event only.
func TestBlockSizeFromEvents(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	w := worker("w", e)
	w.BlockSize = 0
	ix := newIndexer(t, Options{Store: st, Workers: []Worker{w}})
	start(t, ix)
	e.Subscribed()
	e.Publish("kv", 0, payload(removed(9)))
	e.Publish("kv", 1, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	wantStatus(t, ix, "w", func(v Status) bool { return v.BlockSize == 4 && v.Registered && v.Resets == 0 && v.Gaps == 0 })
}

// A clear of one rank clears the worker, and nobody else; or that rank alone where told so.
func TestClearedScope(t *testing.T) {
	for scope, rest := range map[ClearedScope][]string{
		ClearedWorker: gpu("other/0", 3),
		ClearedRank:   append(gpu("other/0", 3), gpu("w/1", 2)...),
	} {
		t.Run(string(scope), func(t *testing.T) {
			st := newStore(t)
			e0 := zmtptest.Start(t, zmtptest.Config{XPUB: true})
			e1 := zmtptest.Start(t, zmtptest.Config{XPUB: true})
			e2 := zmtptest.Start(t, zmtptest.Config{XPUB: true})
			ix := newIndexer(t, Options{Store: st, ClearedScope: scope, Workers: []Worker{worker("w", e0), worker("other", e2)}})
			start(t, ix)
			if code, v := request(t, ix, "POST", "/register", fmt.Sprintf(
				`{"instance_id":"w","dp_rank":1,"model_name":"m","endpoint":%q,"block_size":4}`, e1.Endpoint)); code != 201 {
				t.Fatalf("register: %d %v", code, v)
			}
			for _, e := range []*zmtptest.Engine{e0, e1, e2} {
				e.Subscribed()
			}
			rank1 := 1
			e0.Publish("", 0, payload(stored(nil, 1)))
			e1.Publish("", 0, wire.Encode(nil, wire.Batch{Rank: &rank1, Events: []wire.Event{stored(nil, 2)}}, wire.FormMap))
			e2.Publish("", 0, payload(stored(nil, 3)))
			wantHeld(t, st, testPool, slices.Concat(gpu("w/0", 1), gpu("w/1", 2), gpu("other/0", 3))...)
			e0.Publish("", 1, payload(cleared))
			wantHeld(t, st, testPool, rest...)
			e1.Publish("", 1, payload(stored(nil, 4)))
			wantHeld(t, st, testPool, append(gpu("w/1", 4), rest...)...)
			wantClean(t, st, testPool)
		})
	}
}

// An engine in set mode reports what it holds more than once; one removal removes it, whichever indexer follows it.
func TestSetMode(t *testing.T) {
	_, url := storetest.Miniredis(t)
	st := openStore(t, url)
	set, count := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"}), zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	ix := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("count", count)}})
	stop := start(t, ix)
	if code, v := request(t, ix, "POST", "/register", fmt.Sprintf(
		`{"instance_id":"set","model_name":"m","endpoint":%q,"replay_endpoint":%q,"block_size":4,"mode":"set"}`, set.Endpoint, set.ReplayEndpoint)); code != 201 {
		t.Fatalf("register: %d %v", code, v)
	}
	for _, e := range []*zmtptest.Engine{set, count} {
		e.Subscribed()
		e.Asked()
		e.Publish("", 0, payload(stored(nil, 1, 2), stored(nil, 1, 2)))
		e.Publish("", 1, payload(removed(1)))
	}
	wantHeld(t, st, testPool, slices.Concat(gpu("set/0", 2), gpu("count/0", 1, 2))...)
	stop()
	start(t, newIndexer(t, Options{Store: openStore(t, url)})) // it finds the mode in the index
	for _, e := range []*zmtptest.Engine{set, count} {
		e.Subscribed()
		e.Publish("", 2, payload(stored(nil, 3), stored(nil, 3)))
		e.Publish("", 3, payload(removed(3)))
	}
	wantHeld(t, st, testPool, slices.Concat(gpu("set/0", 2), gpu("count/0", 1, 2, 3))...)
	wantClean(t, st, testPool)
}

// The engine restarts, nobody can replay, and its next number follows on the old ones by chance. That its port was closed in between
// tells.
func TestHiddenRestartWithoutReplay(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("w", e)}})
	start(t, ix)
	e.Subscribed()
	e.Publish("kv", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	e.Kill()
	eventually(t, func() string {
		if s := ix.all()[0]; !strings.Contains(s.snapshot().Error, "refused") {
			return "nobody has tried to connect yet"
		}
		return ""
	})
	again := zmtptest.Start(t, zmtptest.Config{XPUB: true, Pub: e.Endpoint})
	again.Subscribed()
	again.Publish("kv", 1, payload(stored(nil, 2)))
	wantHeld(t, st, testPool, gpu("w/0", 2)...)
	if n := counter(ix.metrics.resets, resetRestart); n != 1 {
		t.Errorf("%d restarts", n)
	}
}

// An engine whose blocks have another size than the pool's is told so by name.
func TestBlockSizeOfEventsDiffers(t *testing.T) {
	st := newStore(t)
	s := offline(t, st, 16)
	s.say(t, 0, payload(removed(9)))
	s.say(t, 1, payload(stored(nil, 1))) // of 4 tokens
	if v := s.snapshot(); !strings.Contains(v.Error, "4 tokens") || !strings.Contains(v.Error, "16") {
		t.Errorf("error %q", v.Error)
	}
	wantHeld(t, st, testPool)
}
