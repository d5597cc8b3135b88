package indexer

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// faulty is a store whose Apply a test can disturb.
type faulty struct {
	*store.Store
	before func(st store.Stream, b *store.Batch) error
	after  func(st store.Stream, b *store.Batch) error
}

func (f *faulty) Apply(ctx context.Context, st store.Stream, b *store.Batch) (store.Outcome, int64, error) {
	if f.before != nil {
		if err := f.before(st, b); err != nil {
			return 0, 0, err
		}
	}
	o, seq, err := f.Store.Apply(ctx, st, b)
	if err == nil && f.after != nil {
		err = f.after(st, b)
	}
	return o, seq, err
}

// A panic over one worker's events costs that worker's blocks; it goes on after the message, and nobody else notices.
func TestPanicIsContained(t *testing.T) {
	st := newStore(t)
	e0 := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	e1 := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	var panics atomic.Int32
	f := &faulty{Store: st, before: func(s store.Stream, b *store.Batch) error {
		if s.Worker == "bad" && b.First() <= 2 && b.Last() >= 2 {
			panics.Add(1)
			panic("poison")
		}
		return nil
	}}
	ix := newIndexer(t, Options{Store: f, Workers: []Worker{worker("bad", e0), worker("good", e1)}})
	start(t, ix)
	e0.Subscribed()
	e0.Asked()
	e1.Subscribed()
	e0.Publish("", 0, payload(stored(nil, 1)))
	e0.Publish("", 1, payload(stored(nil, 2)))
	e1.Publish("", 0, payload(stored(nil, 3)))
	wantHeld(t, st, testPool, slices.Concat(gpu("bad/0", 1, 2), gpu("good/0", 3))...)
	e0.Publish("", 2, payload(stored(nil, 4)))
	wantHeld(t, st, testPool, gpu("good/0", 3)...)
	e0.Subscribed() // the rebuilt stream
	e0.Asked()
	e0.Publish("", 3, payload(stored(nil, 5)))
	e1.Publish("", 1, payload(stored(nil, 6)))
	wantHeld(t, st, testPool, slices.Concat(gpu("bad/0", 5), gpu("good/0", 3, 6))...)
	if n := counter(ix.metrics.resets, resetPanic); n != 1 || panics.Load() != 1 {
		t.Errorf("%d resets after %d panics", n, panics.Load())
	}
	wantClean(t, st, testPool)
}

// One worker whose writes hang delays no other.
func TestSlowWorkerDelaysNoOther(t *testing.T) {
	st := newStore(t)
	e0 := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	e1 := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	hold := make(chan struct{})
	f := &faulty{Store: st, before: func(s store.Stream, _ *store.Batch) error {
		if s.Worker == "slow" {
			<-hold
		}
		return nil
	}}
	ix := newIndexer(t, Options{Store: f, Workers: []Worker{worker("slow", e0), worker("fast", e1)}})
	start(t, ix)
	e0.Subscribed()
	e1.Subscribed()
	e0.Publish("", 0, payload(stored(nil, 1)))
	for i := range int64(50) {
		e1.Publish("", i, payload(stored(nil, kvcache.EngineHash(100+i))))
	}
	var want []string
	for i := range kvcache.EngineHash(50) {
		want = append(want, gpu("fast/0", 100+i)...)
	}
	wantHeld(t, st, testPool, want...)
	close(hold)
	wantHeld(t, st, testPool, append(want, gpu("slow/0", 1)...)...)
}

// Messages that arrive while a write is in progress share the next one.
func TestMessagesAreCoalesced(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	hold, held1 := make(chan struct{}), make(chan struct{}, 1000)
	var applies atomic.Int32
	f := &faulty{Store: st, before: func(store.Stream, *store.Batch) error {
		applies.Add(1)
		held1 <- struct{}{}
		<-hold
		return nil
	}}
	ix := newIndexer(t, Options{Store: f, Workers: []Worker{worker("w", e)}, BatchAge: 1 << 40})
	start(t, ix)
	e.Subscribed()
	e.Publish("", 0, payload(stored(nil, 1)))
	<-held1
	var want []string
	for i := range int64(200) {
		e.Publish("", 1+i, payload(stored(nil, kvcache.EngineHash(2+i))))
	}
	for i := range kvcache.EngineHash(201) {
		want = append(want, gpu("w/0", 1+i)...)
	}
	eventually(t, func() string {
		if n := workerStatus(t, ix, "w", 0).Waiting; n < 200 {
			return fmt.Sprint("waiting: ", n)
		}
		return ""
	})
	close(hold)
	wantHeld(t, st, testPool, want...)
	if n := applies.Load(); n != 2 {
		t.Errorf("201 messages took %d writes, want 2", n)
	}
}

// Redis goes away and comes back; a lost reply is no second application.
func TestRedisAway(t *testing.T) {
	m, url := storetest.Miniredis(t)
	st := openStore(t, url)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	var lose atomic.Bool
	f := &faulty{Store: st, after: func(store.Stream, *store.Batch) error {
		if lose.CompareAndSwap(true, false) {
			return store.ErrUnavailable
		}
		return nil
	}}
	ix := newIndexer(t, Options{Store: f, Workers: []Worker{worker("w", e)}})
	start(t, ix)
	e.Subscribed()
	e.Publish("", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	m.SetError("LOADING Redis is loading the dataset in memory")
	e.Publish("", 1, payload(stored(nil, 2), stored(nil, 2)))
	e.Publish("", 2, payload(removed(1)))
	eventually(t, func() string {
		if code, v := request(t, ix, "GET", "/ready", ""); code != 200 || v["index"] != "loading" {
			return fmt.Sprint("ready: ", code, v)
		}
		return ""
	})
	lose.Store(true)
	m.SetError("")
	wantHeld(t, st, testPool, gpu("w/0", 2)...)
	// Stored twice: one removal leaves it, the second takes it away. A double application would leave it.
	e.Publish("", 3, payload(removed(2)))
	e.Publish("", 4, payload(removed(2), stored(nil, 3)))
	wantHeld(t, st, testPool, gpu("w/0", 3)...)
	wantStatus(t, ix, "w", func(v Status) bool { return v.Gaps == 0 && v.Resets == 0 })
	wantClean(t, st, testPool)
}

// The indexer starts without Redis and follows its streams in the meantime; what the buffer cannot hold is a gap.
func TestStartWithoutRedis(t *testing.T) {
	for _, replay := range []string{"", "*"} {
		t.Run("replay="+replay, func(t *testing.T) {
			m, url := storetest.Miniredis(t)
			st := openStore(t, url)
			m.SetError("LOADING")
			e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: replay})
			ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("w", e)}, BufferMessages: 5})
			start(t, ix)
			e.Subscribed()
			for i := range int64(8) {
				e.Publish("", i, payload(stored(nil, kvcache.EngineHash(1+i))))
			}
			eventually(t, func() string {
				if v := workerStatus(t, ix, "w", 0); v.Waiting != 5 || v.Registered {
					return fmt.Sprintf("status %+v", v)
				}
				return ""
			})
			m.SetError("")
			want := gpu("w/0", 4, 5, 6, 7, 8)
			if replay != "" {
				want = gpu("w/0", 1, 2, 3, 4, 5, 6, 7, 8)
			}
			wantHeld(t, st, testPool, want...)
		})
	}
}

// An overflow in mid-stream loses messages: with a replay nothing is missing in the end, without one the blocks go.
func TestBufferOverflow(t *testing.T) {
	for _, replay := range []string{"", "*"} {
		t.Run("replay="+replay, func(t *testing.T) {
			m, url := storetest.Miniredis(t)
			st := openStore(t, url)
			e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: replay})
			ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("w", e)}, BufferMessages: 5})
			start(t, ix)
			e.Subscribed()
			if replay != "" {
				e.Asked()
			}
			e.Publish("", 0, payload(stored(nil, 1, 2)))
			wantHeld(t, st, testPool, gpu("w/0", 1, 2)...)
			m.SetError("LOADING")
			for i := range int64(20) {
				e.Publish("", 1+i, payload(stored(nil, kvcache.EngineHash(100+i)), removed(1)))
			}
			eventually(t, func() string {
				if v := workerStatus(t, ix, "w", 0); v.Dropped == 0 || !v.Overflow || v.Waiting > 5 {
					return fmt.Sprintf("status %+v", v)
				}
				return ""
			})
			m.SetError("")
			e.Publish("", 21, payload(stored(nil, 3)))
			want := append(gpu("w/0", 2, 3), gpu("w/0", 100)...)
			for i := range kvcache.EngineHash(19) {
				want = append(want, gpu("w/0", 101+i)...)
			}
			if replay != "" {
				wantHeld(t, st, testPool, want...)
				return
			}
			eventually(t, func() string {
				got := held(t, st, testPool)
				if !slices.Contains(got, gpu("w/0", 3)[0]) || slices.Contains(got, gpu("w/0", 2)[0]) {
					return fmt.Sprintf("holds %q", got)
				}
				return ""
			})
			wantStatus(t, ix, "w", func(v Status) bool { return v.Gaps > 0 && v.Resets > 0 })
		})
	}
}

// Redis comes back empty: an active stream and an idle one are registered again and refilled from their engines.
func TestRedisEmptied(t *testing.T) {
	m, url := storetest.Miniredis(t)
	st := openStore(t, url)
	e0 := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	e1 := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	ix := newIndexer(t, Options{Store: st, Workers: []Worker{worker("a", e0), worker("idle", e1)}, WatchInterval: 20 * time.Millisecond})
	start(t, ix)
	for i, e := range []*zmtptest.Engine{e0, e1} {
		e.Subscribed()
		e.Asked()
		e.Publish("", 0, payload(stored(nil, kvcache.EngineHash(1+i))))
	}
	wantHeld(t, st, testPool, append(gpu("a/0", 1), gpu("idle/0", 2)...)...)
	m.FlushAll()
	e0.Publish("", 1, payload(stored(below(1), 3)))
	wantHeld(t, st, testPool, append(gpu("a/0", 1, 3), gpu("idle/0", 2)...)...)
	wantClean(t, st, testPool)
}

// Two indexers follow the same worker; the index is what one would make of it, also through clears, restarts and the death
// of one of them.
func TestTwoIndexers(t *testing.T) {
	_, url := storetest.Miniredis(t)
	st := openStore(t, url)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	a := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("w", e)}})
	b := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("w", e)}})
	stopA := start(t, a)
	start(t, b)
	for range 2 {
		e.Subscribed()
		e.Asked()
	}
	seq := int64(0)
	say := func(events ...wire.Event) {
		e.Publish("", seq, payload(events...))
		seq++
	}
	for i := range kvcache.EngineHash(20) {
		say(stored(nil, 100+i), stored(nil, 100+i)) // two copies each: applied twice they would be four
	}
	for i := range kvcache.EngineHash(20) {
		say(removed(100 + i))
	}
	var want []string
	for i := range kvcache.EngineHash(20) {
		want = append(want, gpu("w/0", 100+i)...)
	}
	wantHeld(t, st, testPool, want...)
	for i := range kvcache.EngineHash(20) {
		say(removed(100 + i))
	}
	say(stored(nil, 1))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	say(stored(nil, 2), cleared, stored(nil, 3))
	say(stored(below(3), 4))
	// The second one to see the clear finds it done, and leaves what was stored since.
	eventually(t, func() string {
		for _, ix := range []*Indexer{a, b} {
			if v := workerStatus(t, ix, "w", 0); v.Watermark != seq-1 {
				return fmt.Sprintf("status %+v", v)
			}
		}
		return ""
	})
	wantHeld(t, st, testPool, gpu("w/0", 3, 4)...)

	e.Kill()
	again := zmtptest.Start(t, zmtptest.Config{XPUB: true, Pub: e.Endpoint, Router: e.ReplayEndpoint})
	again.Publish("", 0, payload(stored(nil, 7)))
	for range 2 {
		again.Subscribed()
		again.Asked()
	}
	again.Publish("", 1, payload(stored(below(7), 8)))
	wantHeld(t, st, testPool, gpu("w/0", 7, 8)...)
	stopA()
	again.Publish("", 2, payload(removed(7), stored(nil, 9)))
	wantHeld(t, st, testPool, gpu("w/0", 8, 9)...)
	wantClean(t, st, testPool)
}

// What an indexer has registered by request, its next life follows by itself.
func TestRegistrationOutlivesTheIndexer(t *testing.T) {
	_, url := storetest.Miniredis(t)
	st := openStore(t, url)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	ix := newIndexer(t, Options{Store: openStore(t, url)})
	stop := start(t, ix)
	code, v := request(t, ix, "POST", "/register", fmt.Sprintf(
		`{"instance_id":"w","modelname":"m","endpoint":%q,"replay_endpoint":%q,"block_size":4}`, e.Endpoint, e.ReplayEndpoint))
	if code != 201 {
		t.Fatalf("register: %d %v", code, v)
	}
	e.Subscribed()
	e.Asked()
	e.Publish("", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	stop()
	e.Publish("", 1, payload(stored(below(1), 2))) // nobody listens
	next := newIndexer(t, Options{Store: openStore(t, url)})
	start(t, next)
	e.Subscribed()
	wantHeld(t, st, testPool, gpu("w/0", 1, 2)...)
	e.Publish("", 2, payload(stored(below(2), 3)))
	wantHeld(t, st, testPool, gpu("w/0", 1, 2, 3)...)
	wantStatus(t, next, "w", func(v Status) bool { return v.Resets == 0 })
}
