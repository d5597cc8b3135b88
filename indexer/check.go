package indexer

import (
	"context"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// checkUp compares, now and then, everything that the index has of each pool, and repairs it: a key that Redis has lost, be it to
// an eviction or to somebody's DEL, is missed by nothing else. Of all indexers one does it at a time.
func (ix *Indexer) checkUp(ctx context.Context) {
	if ix.opts.CheckInterval < 0 {
		return
	}
	// Whoever looks first does it, so the looks are more frequent than the checks.
	tick := time.NewTicker(max(ix.opts.CheckInterval/8, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		pools, err := ix.opts.Store.Pools(ctx)
		if err != nil {
			continue // watch and sweep say so
		}
		for _, pool := range pools {
			mine, err := ix.opts.Store.CheckTurn(ctx, pool, ix.opts.CheckInterval)
			if err == nil && mine {
				ix.check(ctx, pool)
			}
			if ctx.Err() != nil {
				return
			}
		}
	}
}

// check repairs one pool.
func (ix *Indexer) check(ctx context.Context, pool kvcache.PoolID) {
	log := ix.opts.Logger.With("pool", pool.String())
	r, err := ix.opts.Store.Check(ctx, pool, true)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		ix.metrics.checks.WithLabelValues(checkFailed).Inc()
		log.Warn("check of the index failed", "reason", store.Reason(err), "error", err)
	case r.Found > 0:
		ix.metrics.checks.WithLabelValues(checkRepaired).Inc()
		log.Error("the index was damaged", "problems", r.Found, "repaired", r.Repaired, "first", r.Problems[0])
	default:
		ix.metrics.checks.WithLabelValues(checkSound).Inc()
	}
}
