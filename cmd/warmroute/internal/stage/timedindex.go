package stage

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// TimedIndex measures how long the requests of one frontend wait for the index.
type TimedIndex struct {
	frontend.Index

	tap   atomic.Pointer[func([]kvcache.BlockHash)]
	mu    sync.Mutex
	begun map[context.Context]begun // requests between PoolConfig and Lookup
	waits []Wait
}

// Wait is what one request did with the index: look up overlaps, or make its choice there.
type Wait struct {
	At     time.Time
	Took   time.Duration
	Choice bool
	// Down is how many links of this kind were down when it began: nobody needed to find out about those.
	Down int
	// Noticed says that one went down while it lasted.
	Noticed bool
}

type begun struct {
	Wait
	links []store.LinkStatus
}

// Waits are those of all requests so far, in the order of their ends.
func (t *TimedIndex) Waits() []Wait {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.waits[:len(t.waits):len(t.waits)]
}

// Tap calls f at the beginning of every lookup from now on; nil ends that.
func (t *TimedIndex) Tap(f func(blocks []kvcache.BlockHash)) {
	if f == nil {
		t.tap.Store(nil)
		return
	}
	t.tap.Store(&f)
}

// Punctual is the index's.
func (t *TimedIndex) Punctual() bool {
	p, ok := t.Index.(interface{ Punctual() bool })
	return ok && p.Punctual()
}

// PoolConfig is the index's. A request begins with it, and goes on with Lookup under the same context if there is a pool.
func (t *TimedIndex) PoolConfig(ctx context.Context, pool kvcache.PoolID) (store.PoolConfig, bool, error) {
	b := t.begin(false)
	c, ok, err := t.Index.PoolConfig(ctx, pool)
	b.Took = time.Since(b.At)
	if err != nil || !ok {
		t.end(b)
		return c, ok, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.begun == nil {
		t.begun = map[context.Context]begun{}
	}
	t.begun[ctx] = b
	return c, ok, err
}

// Lookup is the index's.
func (t *TimedIndex) Lookup(ctx context.Context, pool kvcache.PoolID, blocks []kvcache.BlockHash, o store.LookupOptions) (kvcache.OverlapScores, kvcache.IndexState, error) {
	if f := t.tap.Load(); f != nil {
		(*f)(blocks)
	}
	t.mu.Lock()
	b, ok := t.begun[ctx]
	delete(t.begun, ctx)
	t.mu.Unlock()
	if !ok {
		b = t.begin(false)
	}
	start := time.Now()
	scores, state, err := t.Index.Lookup(ctx, pool, blocks, o)
	b.Took += time.Since(start)
	t.end(b)
	return scores, state, err
}

// Select is the index's.
func (t *TimedIndex) Select(ctx context.Context, pool kvcache.PoolID, a store.Ask) (store.Choice, error) {
	b := t.begin(true)
	c, err := t.Index.Select(ctx, pool, a)
	b.Took = time.Since(b.At)
	t.end(b)
	return c, err
}

// Links is the index's. While all are down it is the only thing that most requests do.
func (t *TimedIndex) Links() []store.LinkStatus {
	start := time.Now()
	links := t.Index.Links()
	took := time.Since(start)
	if of := linksOf(links, false); len(of) > 0 && down(of) == len(of) {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.waits = append(t.waits, Wait{At: start, Took: took, Down: len(of)})
	}
	return links
}

func (t *TimedIndex) begin(choice bool) begun {
	links := linksOf(t.Index.Links(), choice)
	return begun{Wait{At: time.Now(), Choice: choice, Down: down(links)}, links}
}

func (t *TimedIndex) end(b begun) {
	b.Noticed = newlyDown(b.links, linksOf(t.Index.Links(), b.Choice))
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waits = append(t.waits, b.Wait)
}

// linksOf is the links by which choices are made, or those by which overlaps are looked up.
func linksOf(links []store.LinkStatus, choices bool) (of []store.LinkStatus) {
	for _, l := range links {
		if strings.HasSuffix(l.Shard, " leases") == choices {
			of = append(of, l)
		}
	}
	return of
}

func down(links []store.LinkStatus) (n int) {
	for _, l := range links {
		if !l.Up {
			n++
		}
	}
	return n
}

// newlyDown says whether a link is down now that was not then, or went down anew.
func newlyDown(then, now []store.LinkStatus) bool {
	for _, l := range now {
		if !l.Up && !slices.ContainsFunc(then, func(t store.LinkStatus) bool {
			return t.Shard == l.Shard && !t.Up && t.Since.Equal(l.Since)
		}) {
			return true
		}
	}
	return false
}
