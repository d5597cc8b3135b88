package indexer

import (
	"context"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Store is what the indexer needs of a [*store.Store].
type Store interface {
	streamStore
	poolStore
}

// streamStore is what following one stream needs.
type streamStore interface {
	registry
	Apply(ctx context.Context, st store.Stream, b *store.Batch) (store.Outcome, int64, error)
	Resolve(ctx context.Context, st store.Stream, hashes []kvcache.EngineHash) ([]kvcache.BlockHash, []bool, error)
	Restart(ctx context.Context, st store.Stream, seq int64, digest uint64) (store.Stream, store.Outcome, error)
}

// registry is the life of a stream in Redis.
type registry interface {
	Register(ctx context.Context, id store.StreamID, r store.Registration) (st store.Stream, created bool, err error)
	Follow(ctx context.Context, id store.StreamID, r store.Registration) (st store.Stream, created bool, err error)
	Stream(ctx context.Context, id store.StreamID) (st store.Stream, ok bool, err error)
	Touch(ctx context.Context, st store.Stream) (store.Outcome, error)
	Remove(ctx context.Context, st store.Stream) (store.Outcome, error)
}

// poolStore is what concerns whole pools.
type poolStore interface {
	Pools(ctx context.Context) ([]kvcache.PoolID, error)
	PoolConfig(ctx context.Context, pool kvcache.PoolID) (c store.PoolConfig, ok bool, err error)
	Announced(ctx context.Context, pool kvcache.PoolID) (bool, error)
	Streams(ctx context.Context, pool kvcache.PoolID) ([]store.Stream, error)
	Sweep(ctx context.Context, pool kvcache.PoolID, limit int) (swept int, more bool, err error)
	Versions(ctx context.Context, pool kvcache.PoolID) ([]int64, error)
	CheckTurn(ctx context.Context, pool kvcache.PoolID, interval time.Duration) (bool, error)
	Check(ctx context.Context, pool kvcache.PoolID, repair bool) (store.Report, error)
	Settings(ctx context.Context) (problems []string, err error)
	Dump(ctx context.Context, pool kvcache.PoolID, f func(kvcache.RouterEvent) error) error
}
