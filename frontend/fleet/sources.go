package fleet

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// listing is a worker of the catalog or the file.
type listing struct {
	worker  *state // nil where there is no usable URL; its ranks may still be of use
	ranks   []int
	pools   []kvcache.PoolID
	missing time.Time // since when the catalog lists its pools without it
}

// pauses grow from one to the other, with jitter, and have no end.
func pauses(from, to time.Duration) *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(from), backoff.WithMaxInterval(max(from, to)), backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(0.5), backoff.WithMaxElapsedTime(0),
	)
}

// follow calls look until ctx ends: every interval, and after failures with growing pauses up to longest.
func follow(ctx context.Context, interval, first, longest time.Duration, look func(context.Context) error) {
	pause := pauses(first, longest)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		next := interval
		if look(ctx) == nil {
			pause.Reset()
		} else if next = pause.NextBackOff(); next < 0 { // [backoff.Stop] would be a hot loop
			next = longest
		}
		timer.Reset(next)
	}
}

func (f *Fleet) followCatalog(ctx context.Context) {
	const longest = 10 * time.Second
	follow(ctx, f.o.Interval, f.o.Interval, max(longest, f.o.Interval), func(ctx context.Context) error {
		added, err := f.discover(ctx)
		if len(added) > 0 {
			f.pollAll(ctx, added)
		}
		if err == nil {
			f.save(ctx)
		}
		return err
	})
}

// discover takes over what the catalog lists and returns the workers that are new. Its error is logged
// already.
func (f *Fleet) discover(ctx context.Context) (added []Key, err error) {
	if f.o.Catalog == nil {
		return nil, nil
	}
	bounded, cancel := context.WithTimeout(ctx, f.o.Timeout)
	defer cancel()
	pools, streams, err := f.read(bounded)
	var removed map[Key]bool
	if err == nil {
		removed = f.findRemoved(bounded, pools, streams)
	}
	if ctx.Err() != nil {
		return nil, ctx.Err() // we are going away, not the catalog
	}
	f.mu.Lock()
	f.list(pools, streams, err == nil)
	if removed != nil {
		f.removed = removed
	}
	for _, s := range streams {
		if s.Updated.After(f.updated) {
			f.updated = s.Updated
		}
	}
	cause := ""
	if err != nil {
		cause = store.Reason(err)
	}
	changed, lasted := f.catalog.turn(cause)
	added, gone := f.reconcile()
	f.mu.Unlock()

	switch {
	case changed && err != nil:
		f.o.Logger.Warn("the index does not list the workers, those known stay", "cause", cause, "error", err)
	case changed:
		f.o.Logger.Info("the index lists the workers again", "away_for", lasted.Round(time.Millisecond))
	}
	f.announce(added, gone)
	return added, err
}

func (f *Fleet) read(ctx context.Context) (pools []kvcache.PoolID, all []store.Stream, err error) {
	pools, err = f.o.Catalog.Pools(ctx)
	if err != nil {
		return nil, nil, err
	}
	var errs []error
	for _, p := range pools {
		streams, err := f.o.Catalog.Streams(ctx, p)
		all = append(all, streams...)
		errs = append(errs, err)
	}
	return pools, all, errors.Join(errs...)
}

// list merges a reading of the catalog. Only a complete one takes workers away, and only where it lists their
// pools: an index without them has lost its data, and the workers serve on. f.mu is held.
func (f *Fleet) list(pools []kvcache.PoolID, streams []store.Stream, complete bool) {
	found := map[Key]*listing{}
	for _, st := range streams {
		k := KeyOf(st.Pool.Tenant, st.Worker)
		l := found[k]
		if l == nil {
			l = &listing{}
			if old := f.listed[k]; old != nil && !complete {
				l.ranks, l.pools = slices.Clone(old.ranks), slices.Clone(old.pools)
			}
			found[k] = l
		}
		if l.worker == nil { // not every stream has a URL: that of a loaded dump has none
			if w, err := newState(Worker{ID: st.Worker, URL: st.URL, Engine: st.Engine, Tenant: st.Pool.Tenant}, SourceIndex); err == nil {
				l.worker = w
			}
		}
		l.ranks = append(l.ranks, st.Rank)
		if !slices.Contains(l.pools, st.Pool) {
			l.pools = append(l.pools, st.Pool)
		}
		if st.BlockSize > 0 {
			f.pools[st.Pool] = st.BlockSize
		}
	}
	for k, l := range found {
		slices.Sort(l.ranks)
		l.ranks = slices.Compact(l.ranks)
		f.listed[k] = l
	}
	if !complete {
		return
	}
	now := time.Now()
	for k, l := range f.listed {
		lost := slices.ContainsFunc(l.pools, func(p kvcache.PoolID) bool { return !slices.Contains(pools, p) })
		if found[k] != nil || lost {
			l.missing = time.Time{}
			continue
		}
		if l.missing.IsZero() {
			l.missing = now
		}
		w := f.workers[k]
		named := f.removed[k] && l.worker != nil && f.isNamed(l.worker.place()) // else it would come back as an address
		if w == nil || w.tried && w.state != Healthy || now.Sub(l.missing) >= f.o.Grace && !named {
			delete(f.listed, k)
		}
	}
	maps.DeleteFunc(f.pools, func(p kvcache.PoolID, _ int) bool {
		if slices.Contains(pools, p) {
			return false
		}
		for _, l := range f.listed {
			if slices.Contains(l.pools, p) {
				return false
			}
		}
		return true
	})
}
