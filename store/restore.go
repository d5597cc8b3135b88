package store

import (
	"context"
	"fmt"

	"github.com/warmroute/warmroute/kvcache"
)

// Restorer makes an index from a dump, or adds one to an index. Worker ranks that have no stream get one, without an endpoint; the
// watermarks stay where they are, so that an indexer that follows a worker replays what the dump does not know. Where there is none
// yet, the stream's first message, by [Store.Apply], is a Gap: its engine process need not be the dump's.
type Restorer struct {
	store     *Store
	pool      kvcache.PoolID
	blockSize int
	streams   map[kvcache.WorkerRank]Stream
	at        Stream // whose blocks wait
	batch     Batch
	blocks    int
}

// restoreStep is how many blocks one call writes.
const restoreStep = 512

// Restore begins to load a dump into a pool. blockSize is the tokens per block; 0 takes that of the pool, which has to
// exist then. Memory is proportional to the number of worker ranks.
func (s *Store) Restore(ctx context.Context, id kvcache.PoolID, blockSize int) (*Restorer, error) {
	if err := id.Validate(); err != nil {
		return nil, fmt.Errorf("restore: %w: %w", err, ErrInvalid)
	}
	bounded, cancel := s.bound(ctx)
	defer cancel()
	k, err := s.pool(id).load(bounded, s.write)
	switch {
	case err != nil:
		return nil, classify(ctx, fmt.Errorf("restore: %w", err))
	case k == nil && blockSize == 0:
		return nil, fmt.Errorf("restore: pool %s does not exist yet: its block size is needed: %w", id, ErrInvalid)
	case k != nil && blockSize == 0:
		blockSize = k.BlockSize
	case k != nil && blockSize != k.BlockSize:
		return nil, fmt.Errorf("restore: %w", &ConflictError{Field: "block_size", Have: fmt.Sprint(k.BlockSize), Want: fmt.Sprint(blockSize)})
	}
	r := &Restorer{store: s, pool: id, blockSize: blockSize, streams: map[kvcache.WorkerRank]Stream{}}
	r.batch.restore = true
	return r, nil
}

// Add takes the next event of a dump. What is wrong with it is an [ErrInvalid], and none of it is taken; any other error is of
// writing it or earlier ones, and the same event can be added again.
func (r *Restorer) Add(ctx context.Context, e kvcache.RouterEvent) error {
	w := kvcache.WorkerRank{Worker: string(e.WorkerID), Rank: e.Event.DPRank}
	if err := w.Validate(); err != nil {
		return fmt.Errorf("%w: %w", err, ErrInvalid)
	}
	tier, ok := e.StorageTier.Tier()
	if !ok {
		return fmt.Errorf("storage tier %q is not indexed: %w", e.StorageTier, ErrInvalid)
	}
	stored := e.Event.Data.Stored
	if stored == nil {
		return fmt.Errorf("a dump has stored events only: %w", ErrInvalid)
	}
	for _, b := range stored.Blocks {
		if b.EngineHash == nil || b.TokensHash != nil || stored.ParentHash != nil {
			return fmt.Errorf("a block of a dump has block_hash and engine_hash and no parent: this is no dump: %w", ErrInvalid)
		}
	}
	if w != r.at.WorkerRank || r.batch.Ops() >= restoreStep {
		if err := r.Flush(ctx); err != nil {
			return err
		}
	}
	if w != r.at.WorkerRank {
		st, ok := r.streams[w]
		if !ok {
			var err error
			if st, err = r.stream(ctx, w); err != nil {
				return err
			}
			r.streams[w] = st
		}
		r.at = st
	}
	if r.batch.Messages() == 0 {
		r.batch.Message(0)
	}
	for _, b := range stored.Blocks {
		r.batch.Store(tier, b.BlockHash, *b.EngineHash)
	}
	return nil
}

// stream finds or makes a worker rank's stream.
func (r *Restorer) stream(ctx context.Context, w kvcache.WorkerRank) (Stream, error) {
	id := StreamID{Pool: r.pool, WorkerRank: w}
	st, ok, err := r.store.Stream(ctx, id)
	if err == nil && !ok {
		st, _, err = r.store.Register(ctx, id, Registration{BlockSize: r.blockSize})
	}
	return st, err
}

// Flush writes what waits. The last call of a load.
func (r *Restorer) Flush(ctx context.Context) error {
	if r.batch.Messages() == 0 {
		return nil
	}
	for range 5 {
		o, _, err := r.store.Apply(ctx, r.at, &r.batch)
		if err != nil {
			return err
		}
		if o == Applied {
			r.blocks += r.batch.Ops()
			r.batch.Reset()
			return nil
		}
		// The stream has begun a new generation meanwhile, or ended.
		if r.at, err = r.stream(ctx, r.at.WorkerRank); err != nil {
			return err
		}
		r.streams[r.at.WorkerRank] = r.at
	}
	return fmt.Errorf("restore: stream %s keeps changing: %w", r.at.WorkerRank, errMoved)
}

// Loaded says how many blocks were written, of how many worker ranks.
func (r *Restorer) Loaded() (blocks, streams int) { return r.blocks, len(r.streams) }
