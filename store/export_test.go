package store

import (
	"context"

	"github.com/warmroute/warmroute/kvcache"
)

// CheckInParts is Check of a shard that is larger than a part.
func (s *Store) CheckInParts(ctx context.Context, id kvcache.PoolID, repair bool, blocks int64) (Report, error) {
	return s.checkBy(ctx, id, repair, blocks)
}
