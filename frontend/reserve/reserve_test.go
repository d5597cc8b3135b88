package reserve

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// leases writes down what it is told.
type leases struct {
	mu    sync.Mutex
	calls []string
	err   error
	hang  bool
	lost  []string // by the next renewal
}

func (l *leases) say(ctx context.Context, format string, args ...any) error {
	l.mu.Lock()
	l.calls = append(l.calls, fmt.Sprintf(format, args...))
	err, hang := l.err, l.hang
	l.mu.Unlock()
	if hang {
		<-ctx.Done()
		return ctx.Err()
	}
	return err
}

func (l *leases) Select(ctx context.Context, _ kvcache.PoolID, a store.Ask) (store.Choice, error) {
	return store.Choice{}, l.say(ctx, "hold %s at %s: %d tokens, %d blocks", a.ID, a.Candidates[0].WorkerRank, a.PromptTokens, a.DecodeBlocks)
}

func (l *leases) PrefillDone(ctx context.Context, _ kvcache.PoolID, id string) (bool, error) {
	return true, l.say(ctx, "prefilled %s", id)
}

func (l *leases) OutputBlocks(ctx context.Context, _ kvcache.PoolID, id string, n int) (bool, error) {
	return true, l.say(ctx, "output %s %d", id, n)
}

func (l *leases) Renew(ctx context.Context, _ kvcache.PoolID, ids ...string) ([]string, error) {
	slices.Sort(ids)
	err := l.say(ctx, "renew %s", strings.Join(ids, " "))
	l.mu.Lock()
	defer l.mu.Unlock()
	lost := l.lost
	l.lost = nil
	return lost, err
}

func (l *leases) ReleaseAll(ctx context.Context, _ kvcache.PoolID, ids ...string) error {
	return l.say(ctx, "release %s", strings.Join(ids, " "))
}

func (l *leases) Reap(ctx context.Context, p kvcache.PoolID) error {
	return l.say(ctx, "reap %s", p.Model)
}

func (l *leases) want(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Equal(l.calls, want) {
		t.Errorf("told %q\nwant %q", l.calls, want)
	}
	l.calls = nil
}

func (l *leases) set(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

var pool = kvcache.PoolID{Tenant: "default", Model: "llama"}

func ask(id string) store.Ask {
	return store.Ask{
		ID: id, Lease: 15 * time.Second, BlockSize: 16, PromptTokens: 160, DecodeBlocks: 10,
		Candidates: []store.Candidate{{WorkerRank: kvcache.WorkerRank{Worker: "w1"}, Credit: 2}},
	}
}

// keeping runs f with a Keeper, in a bubble.
func keeping(t *testing.T, o Options, f func(t *testing.T, k *Keeper, l *leases)) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{}
		o.Leases = l
		k := New(o)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); k.Run(ctx) }()
		f(t, k, l)
		cancel()
		<-done
	})
}

func TestLifeOfAReservation(t *testing.T) {
	keeping(t, Options{}, func(t *testing.T, k *Keeper, l *leases) {
		r := k.Take(pool, ask("a"), true)
		l.want(t)
		r.Prefilled()
		r.Prefilled()
		l.want(t, "prefilled a")
		for range 40 { // four seconds of a stream
			r.Output(1)
			time.Sleep(100 * time.Millisecond)
		}
		l.want(t, "output a 11", "output a 10", "output a 10")
		time.Sleep(2 * time.Second)
		l.want(t, "renew a")
		r.End()
		r.End()
		r.Output(100)
		r.Prefilled()
		l.want(t, "release a")
		time.Sleep(time.Minute)
		l.want(t)
	})
}

// What was chosen without Redis is reserved in the background; what ended before that needs no call.
func TestMadeLater(t *testing.T) {
	keeping(t, Options{}, func(t *testing.T, k *Keeper, l *leases) {
		r := k.Take(pool, ask("a"), false)
		l.want(t, "hold a at w1/0: 160 tokens, 10 blocks")
		r.End()
		l.want(t, "release a")
		r = k.Take(pool, ask("b"), false)
		r.End()
		l.want(t)
		r = k.Take(pool, ask("c"), false)
		r.Prefilled()
		l.want(t, "hold c at w1/0: 0 tokens, 10 blocks")
		r.End()
		l.want(t, "release c")
		var none *Reservation
		none.Prefilled()
		none.Output(1)
		none.End()
	})
}

// After Redis has lost its data, requests that live are reserved again as far as they have got.
func TestLostReservationsAreMadeAgain(t *testing.T) {
	keeping(t, Options{}, func(t *testing.T, k *Keeper, l *leases) {
		a, b := k.Take(pool, ask("a"), true), k.Take(pool, ask("b"), true)
		a.Prefilled()
		l.want(t, "prefilled a")
		l.set(func() { l.lost = []string{"a", "b", "unknown"} })
		time.Sleep(5 * time.Second)
		l.want(t, "renew a b", "hold a at w1/0: 0 tokens, 10 blocks", "hold b at w1/0: 160 tokens, 10 blocks")
		time.Sleep(5 * time.Second)
		l.want(t, "renew a b")
		a.End()
		l.want(t, "release a")
		b.End()
		l.want(t, "release b")
	})
}

// A prompt that was computed while Redis did not listen must not count as queued for as long as it streams.
func TestPrefilledIsToldAgain(t *testing.T) {
	keeping(t, Options{}, func(t *testing.T, k *Keeper, l *leases) {
		r := k.Take(pool, ask("a"), true)
		l.set(func() { l.err = errors.New("away") })
		r.Prefilled()
		l.want(t, "prefilled a")
		l.set(func() { l.err = nil })
		time.Sleep(2 * time.Second)
		r.Output(1)
		l.want(t, "prefilled a", "output a 1")
		r.End()
		l.want(t, "release a")
	})
}

// What ended while Redis was slow is told in few calls, and of each pool by itself.
func TestEndsAreToldTogether(t *testing.T) {
	keeping(t, Options{}, func(t *testing.T, k *Keeper, l *leases) {
		other := kvcache.PoolID{Tenant: "default", Model: "other"}
		slow, elsewhere := k.Take(pool, ask("slow"), true), k.Take(other, ask("elsewhere"), true)
		var all []*Reservation
		var ids []string
		for i := range 2 * atOnce {
			ids = append(ids, fmt.Sprintf("r%02d", i))
			all = append(all, k.Take(pool, ask(ids[i]), true))
		}
		l.set(func() { l.hang = true })
		slow.Prefilled()
		synctest.Wait() // in the call
		elsewhere.End()
		for _, r := range all {
			r.End()
		}
		l.set(func() { l.hang, l.calls = false, nil })
		time.Sleep(time.Second)
		synctest.Wait()
		l.mu.Lock()
		defer l.mu.Unlock()
		var ended []string
		for _, call := range l.calls {
			ended = append(ended, strings.Fields(call)[1:]...)
		}
		slices.Sort(ended)
		want := append([]string{"elsewhere"}, ids...)
		if len(l.calls) != 4 || !slices.Contains(l.calls, "release elsewhere") || !slices.Equal(ended, want) {
			t.Errorf("told %q", l.calls)
		}
		l.calls = nil
	})
}

// With a Redis that hangs nobody waits, the queue stays within its bound, and what ended is forgotten.
func TestNobodyWaits(t *testing.T) {
	keeping(t, Options{Queue: 10}, func(t *testing.T, k *Keeper, l *leases) {
		l.set(func() { l.hang = true })
		start := time.Now()
		var all []*Reservation
		for i := range 1000 {
			r := k.Take(pool, ask(fmt.Sprint(i)), i%2 == 0)
			r.Prefilled()
			all = append(all, r)
		}
		for _, r := range all {
			r.End()
		}
		if d := time.Since(start); d != 0 {
			t.Errorf("waited %v", d)
		}
		if len(k.queue) > 10 || len(k.live) != 0 {
			t.Errorf("%d in the queue, %d pools kept", len(k.queue), len(k.live))
		}
	})
}

// A pool without requests of this frontend may have leases of one that died.
func TestIdlePoolsAreReaped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{}
		idle := kvcache.PoolID{Tenant: "default", Model: "idle"}
		k := New(Options{Leases: l, Pools: func() []kvcache.PoolID { return []kvcache.PoolID{pool, idle} }})
		ctx, cancel := context.WithCancel(t.Context())
		var ended sync.WaitGroup
		ended.Go(func() { k.Run(ctx) })
		k.Take(pool, ask("a"), true)
		time.Sleep(5 * time.Second)
		l.want(t, "reap idle", "renew a")
		l.set(func() { l.err = errors.New("away") })
		time.Sleep(5 * time.Second)
		l.want(t, "reap idle", "renew a")
		cancel()
		ended.Wait()
	})
}
