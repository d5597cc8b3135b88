package store

import (
	"context"

	"github.com/warmroute/warmroute/kvcache"
)

// OutputBlocks is [Store.OutputBlock] for n blocks at once, at most 1,000.
func (s *Store) OutputBlocks(ctx context.Context, id kvcache.PoolID, lease string, n int) (ok bool, err error) {
	if n < 1 || !printable(lease, MaxLeaseID) {
		return false, nil
	}
	ids := make([]string, min(n, idsPerCall))
	for i := range ids {
		ids[i] = lease
	}
	found, _, err := s.changeLeases(ctx, id, "output", ids)
	return err == nil && found[0], err
}
