package indexer

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

func TestFell(t *testing.T) {
	for _, c := range []struct {
		before, now []int64
		want        bool
	}{
		{nil, nil, false},
		{nil, []int64{5}, false},
		{[]int64{5}, []int64{5}, false},
		{[]int64{5, 7}, []int64{6, 7}, false},
		{[]int64{5, 7}, []int64{6, 0}, true},
		{[]int64{5, 7}, []int64{4, 9}, true},
		{[]int64{5}, nil, true},
	} {
		if got := fell(c.before, c.now); got != c.want {
			t.Errorf("fell(%v, %v) = %v", c.before, c.now, got)
		}
	}
}

// Redis comes back as it was three messages ago, as after a failover that lost writes. The engine is idle: nothing but the
// look at Redis can tell.
func TestRedisOlder(t *testing.T) {
	m, url := storetest.Miniredis(t)
	st := openStore(t, url)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	noticed := make(chan struct{}, 1)
	ix := newIndexer(t, Options{Store: watched{openStore(t, url), noticed}, Workers: []Worker{worker("w", e)}, WatchInterval: 10 * time.Millisecond})
	start(t, ix)
	e.Subscribed()
	e.Asked()
	e.Publish("", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	tag := "wr:1:{" + testPool.String() + "#0}:"
	for i := range kvcache.EngineHash(3) {
		e.Publish("", int64(1+i), payload(stored(below(1+i), 2+i)))
	}
	wantHeld(t, st, testPool, gpu("w/0", 1, 2, 3, 4)...)

	m.SetError("LOADING the data set")
	<-noticed
	blocks := tag + "blocks:w/0:device"
	members, err := m.ZMembers(blocks)
	if err != nil || len(members) != 4 {
		t.Fatalf("%v %v", members, err)
	}
	scores, err := m.SortedSet(blocks)
	if err != nil {
		t.Fatal(err)
	}
	for member, score := range scores {
		if score != float64(kvcache.EngineHash(1).Score()) {
			if _, err := m.ZRem(blocks, member); err != nil {
				t.Fatal(err)
			}
			m.HDel(tag+"holders", member)
		}
	}
	m.HSet(tag+"stream:w/0", "seq", "0")
	m.SetError("")
	wantHeld(t, st, testPool, gpu("w/0", 1, 2, 3, 4)...)
	wantClean(t, st, testPool)
}

// Redis is emptied, and before anybody has looked, a busy stream is registered again: the version has not fallen, and
// the idle stream must come back all the same.
func TestRedisEmptiedUnseen(t *testing.T) {
	m, url := storetest.Miniredis(t)
	st := openStore(t, url)
	busy, idle := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"}), zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	look := make(chan struct{})
	asked := make(chan struct{}, 1)
	ix := newIndexer(t, Options{
		Store: blind{openStore(t, url), look, asked}, Workers: []Worker{worker("busy", busy), worker("idle", idle)},
		WatchInterval: 10 * time.Millisecond, LeaseInterval: time.Hour,
	})
	start(t, ix)
	for _, e := range []*zmtptest.Engine{busy, idle} {
		e.Subscribed()
		e.Asked()
		e.Publish("", 0, payload(stored(nil, 1)))
	}
	wantHeld(t, st, testPool, append(gpu("busy/0", 1), gpu("idle/0", 1)...)...)
	<-asked
	look <- struct{}{} // the version is known
	<-asked            // and the next look waits

	m.FlushAll()
	busy.Publish("", 1, payload(stored(below(1), 2)))
	wantHeld(t, st, testPool, gpu("busy/0", 1, 2)...)
	close(look)
	wantHeld(t, st, testPool, append(gpu("busy/0", 1, 2), gpu("idle/0", 1)...)...)
	wantClean(t, st, testPool)
}

// blind sees versions only when it is let.
type blind struct {
	Store
	look  <-chan struct{}
	asked chan<- struct{}
}

func (b blind) Versions(ctx context.Context, pool kvcache.PoolID) ([]int64, error) {
	select {
	case b.asked <- struct{}{}:
	default:
	}
	select {
	case <-b.look:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return b.Store.Versions(ctx, pool)
}

// watched says when the look at Redis fails.
type watched struct {
	Store
	failed chan<- struct{}
}

func (w watched) Versions(ctx context.Context, pool kvcache.PoolID) ([]int64, error) {
	v, err := w.Store.Versions(ctx, pool)
	if err != nil {
		select {
		case w.failed <- struct{}{}:
		default:
		}
	}
	return v, err
}

// What is unregistered at one indexer stays so: the other one, which follows the worker by its own configuration, finds the
// mark; registered again at one, both follow it.
func TestUnregisteredForAll(t *testing.T) {
	_, url := storetest.Miniredis(t)
	st := openStore(t, url)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
	a := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("w", e)}})
	b := newIndexer(t, Options{Store: openStore(t, url), Workers: []Worker{worker("w", e)}, WatchInterval: 10 * time.Millisecond})
	start(t, a)
	start(t, b)
	for range 2 {
		e.Subscribed()
		e.Asked()
	}
	e.Publish("", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	if code, v := request(t, a, "POST", "/unregister", `{"instance_id":"w","model_name":"`+testPool.Model+`"}`); code != 200 {
		t.Fatalf("%d %v", code, v)
	}
	e.Publish("", 1, payload(stored(below(1), 2)))
	eventually(t, func() string {
		if n := len(b.all()); n > 0 {
			return "the other indexer still follows it"
		}
		return ""
	})
	wantHeld(t, st, testPool)
	if streams, err := st.Streams(t.Context(), testPool); err != nil || len(streams) != 0 {
		t.Fatalf("%+v %v", streams, err)
	}
}

// losing is a store that forgets its stream when told so.
type losing struct {
	agreeable
	lost       atomic.Bool
	registered atomic.Int32
}

func (l *losing) Register(ctx context.Context, id store.StreamID, r store.Registration) (store.Stream, bool, error) {
	l.lost.Store(false)
	l.registered.Add(1)
	return l.agreeable.Register(ctx, id, r)
}

func (l *losing) Follow(ctx context.Context, id store.StreamID, r store.Registration) (store.Stream, bool, error) {
	return l.Register(ctx, id, r)
}

func (l *losing) Stream(ctx context.Context, id store.StreamID) (store.Stream, bool, error) {
	if l.lost.Load() {
		return store.Stream{}, false, nil
	}
	return l.agreeable.Stream(ctx, id)
}

// A Redis that is emptied every few seconds finds the stream as quick the tenth time as the first.
func TestRedisEmptiedAgainAndAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &losing{agreeable: newAgreeable()}
		ix, err := New(Options{Store: st, Listen: "127.0.0.1:0"})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = ix.Close() }()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		s := newStream(ix, publisher{id: store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}}, reg: store.Registration{BlockSize: 4}})
		go s.run(ctx)
		for i := range int32(10) {
			time.Sleep(2 * time.Second)
			st.lost.Store(true)
			s.nudge()
			time.Sleep(2 * ix.timing.retry) // the longest first wait
			synctest.Wait()
			if n := st.registered.Load(); n != i+2 {
				t.Fatalf("emptied %d times, registered %d times", i+1, n)
			}
		}
		cancel()
		<-s.done
	})
}
