package frontend

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// inquiry is what the index is asked: by tokens, or by hashes.
type inquiry struct {
	pool      kvcache.PoolID
	tokens    []uint32
	spec      kvcache.HashSpec // of the tokens, without the block size
	hashes    []kvcache.BlockHash
	options   store.LookupOptions
	blockSize int // the one that the caller knows; 0 means any
}

// consult asks the index. One budget covers all of it, and it ends on time even where the index does not:
// then the answer is that overlaps are unknown. Whatever the index says or does, the request goes on; an error is
// a client that left, or its mistake.
func (f *Frontend) consult(ctx context.Context, k *knowledge, q inquiry) error {
	if size := f.fleet.Snapshot().BlockSize(q.pool); size > 0 {
		k.blockSize = size
	}
	before := *k
	got, ok := inTime(f, ctx, k, func(ctx context.Context) knowledge {
		f.inquire(ctx, &before, q)
		return before
	})
	spent := k.spent
	switch {
	case ok:
		*k = got
		k.spent = spent
	case spent < f.o.LookupBudget && ctx.Err() == nil: // it panicked
		k.state, k.reason = kvcache.Degraded, store.ReasonCorrupt
	default:
		k.state, k.reason = kvcache.Degraded, store.ReasonTimeout
	}
	if q.tokens != nil {
		k.tokens, k.blocks = len(q.tokens), len(q.tokens)/k.blockSize
	} else {
		k.tokens, k.blocks = len(q.hashes)*k.blockSize, len(q.hashes)
	}
	switch {
	case ctx.Err() != nil:
		return errClientGone
	case k.reason != "":
		f.fellBack(k, k.reason)
	case q.conflicts(k):
		return refuse(http.StatusBadRequest, "block_size_conflict",
			"the pool has block size "+strconv.Itoa(k.blockSize)+", this request wants "+strconv.Itoa(q.blockSize))
	}
	return nil
}

// budgetSlack is how much longer than the index itself we wait for it.
const budgetSlack = 2 * time.Millisecond

var errBudget = errors.New("the lookup budget is spent")

func (q *inquiry) conflicts(k *knowledge) bool {
	return q.blockSize != 0 && k.found && q.blockSize != k.blockSize
}

// inquire asks the index for the pool's configuration, which decides the hashes, and then for the overlaps.
// The first failure ends it.
func (f *Frontend) inquire(ctx context.Context, k *knowledge, q inquiry) {
	config, ok, err := f.o.Index.PoolConfig(ctx, q.pool)
	switch {
	case err != nil:
		k.state, k.reason = kvcache.Degraded, fallbackReason(ctx, err)
		return
	case !ok:
		k.state = kvcache.Exact                     // nobody holds a block of a pool that does not exist
		if q.tokens != nil && f.eventsOff(q.pool) { // the first prompt makes it
			q.spec.BlockSize = k.blockSize
			k.hashes = f.hash(ctx, q.spec, q.tokens)
		}
		return
	}
	k.found = true
	if config.BlockSize > 0 {
		k.blockSize = config.BlockSize
	}
	if q.conflicts(k) {
		return
	}
	hashes := q.hashes
	if q.tokens != nil {
		q.spec.BlockSize = k.blockSize
		hashes = f.hash(ctx, q.spec, q.tokens)
	}
	k.hashes = hashes
	scores, state, err := f.o.Index.Lookup(ctx, q.pool, hashes, q.options)
	if err != nil && state != kvcache.Partial {
		k.state, k.reason = kvcache.Degraded, fallbackReason(ctx, err)
		return
	}
	k.scores, k.state = scores, state
}

// fellBack is the one place where a request without overlaps is counted.
func (f *Frontend) fellBack(k *knowledge, reason string) {
	k.reason = reason
	k.scores = kvcache.OverlapScores{}
	f.metrics.fallbacks.WithLabelValues(reason).Inc()
}

// linkOfPools is the link to the configuration of the pools whose shards the store does not know yet.
const linkOfPools = "pools"

// linkOfLoads ends the names of the links to what all frontends have under way.
const linkOfLoads = " leases"

// away tells whether all links that lead to a pool are down, and why.
func (f *Frontend) away(pool kvcache.PoolID) (reason string, away bool) {
	shards := pool.String() + "#"
	known := false
	for _, l := range f.o.Index.Links() {
		of := strings.HasPrefix(l.Shard, shards)
		switch {
		case of && l.Up:
			return "", false
		case of && !known:
			known, away, reason = true, true, closedReason(l.Reason)
		case l.Shard == linkOfPools && !known && !l.Up:
			away, reason = true, closedReason(l.Reason)
		}
	}
	return reason, away
}

func fallbackReason(ctx context.Context, err error) string {
	if errors.Is(context.Cause(ctx), errBudget) {
		return store.ReasonTimeout
	}
	return closedReason(store.Reason(err))
}

// closedReason keeps to the list of index_fallbacks_total.
func closedReason(r string) string {
	switch r {
	case store.ReasonConnection, store.ReasonTimeout, store.ReasonLoading, store.ReasonClusterDown,
		store.ReasonPoolExhausted, store.ReasonCorrupt:
		return r
	case store.ReasonCanceled:
		return store.ReasonTimeout // the client is still there, so it was a deadline
	}
	return store.ReasonCorrupt
}
