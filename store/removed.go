package store

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// Removed tells whether a stream was ended on purpose, by [Store.Remove], and not registered since. The mark
// lasts a day.
func (s *Store) Removed(ctx context.Context, id StreamID) (bool, error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	k, n, err := s.locate(bounded, id)
	if err != nil || k == nil {
		return false, classify(ctx, err)
	}
	mark, err := s.write.HGet(bounded, k.shards[n].keys.stream(id.WorkerRank), "removed_ms").Result()
	if err != nil && err != redis.Nil {
		return false, classify(ctx, fmt.Errorf("read the mark of a removal: %w", err))
	}
	return mark != "", nil
}
