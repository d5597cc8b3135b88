package store_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// observed are the calls that a store has told of.
type observed struct {
	mu    sync.Mutex
	calls []string
}

type callerKey struct{}

func (o *observed) call(ctx context.Context, link string, blocks int) func(string) {
	who := ctx.Value(callerKey{})
	return func(reason string) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.calls = append(o.calls, fmt.Sprintf("%v: %s %d %q", who, link, blocks, reason))
	}
}

// take empties the list, which is in no order where shards are asked at one time.
func (o *observed) take() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	calls := o.calls
	o.calls = nil
	slices.Sort(calls)
	return calls
}

// Whoever observes a store sees each shard of a lookup, whose it is and how it ended; and the reading of the configuration.
func TestLookupsAreObservedPerShard(t *testing.T) {
	r := storetest.Redis(t)
	first := open(t, r.URL, func(o *store.Options) { o.Shards = 2 })
	for _, w := range []string{"a", "b"} {
		st := register(t, first, rank(w, 0))
		apply(t, first, &st, 0, store.Applied, storeAll(w, kvcache.Device, chain(1, 3)...))
	}
	var seen observed
	s := open(t, r.URL, func(o *store.Options) { o.LookupBudget, o.Observe = 30*time.Second, seen.call })
	ctx := context.WithValue(t.Context(), callerKey{}, "me")
	if _, state, err := s.Lookup(ctx, testPool, chain(1, 5), store.LookupOptions{}); state != kvcache.Exact {
		t.Fatal(state, err)
	}
	pool := testPool.String()
	want := []string{`me: ` + pool + `#0 5 ""`, `me: ` + pool + `#1 5 ""`, `me: pools 0 ""`}
	if got := seen.take(); !slices.Equal(got, want) {
		t.Errorf("the first lookup: %q, want %q", got, want)
	}
	if _, _, err := s.PoolConfig(ctx, testPool); err != nil || seen.take() != nil {
		t.Errorf("a configuration that is known is read: %v", err)
	}

	r.Stop()
	want = []string{`me: ` + pool + `#0 5 "connection"`, `me: ` + pool + `#1 5 "connection"`}
	for range 2 { // the second one finds the links down
		if _, state, _ := s.Lookup(ctx, testPool, chain(1, 5), store.LookupOptions{}); state != kvcache.Degraded {
			t.Fatal(state)
		}
		if got := seen.take(); !slices.Equal(got, want) {
			t.Errorf("Redis away: %q, want %q", got, want)
		}
	}
	if _, _, err := s.PoolConfig(ctx, kvcache.PoolID{Model: "made up by a client"}); err == nil {
		t.Error("a pool is read while Redis is away")
	}
	if got := seen.take(); !slices.Equal(got, []string{`me: pools 0 "connection"`}) {
		t.Errorf("a stranger: %q", got)
	}
}
