package store

import (
	"context"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// Settings looks for settings of Redis that would harm the index and returns one sentence for each, none
// where all is well or Redis does not tell. It needs INFO, which a managed Redis may refuse: that is no error.
func (s *Store) Settings(ctx context.Context) ([]string, error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	var found []string
	look := func(ctx context.Context, c redis.Cmdable) error {
		info, err := c.Info(ctx, "memory").Result()
		if err != nil {
			return err
		}
		if p := infoField(info, "maxmemory_policy"); strings.HasPrefix(p, "allkeys-") {
			found = append(found, fmt.Sprintf("maxmemory-policy is %s: under memory pressure Redis drops whole workers from the index without an error; use noeviction", p))
		}
		return nil
	}
	var err error
	if c, ok := s.write.(*redis.ClusterClient); ok {
		err = c.ForEachMaster(bounded, func(ctx context.Context, n *redis.Client) error { return look(ctx, n) })
	} else {
		err = look(bounded, s.write)
	}
	if err != nil && (strings.HasPrefix(err.Error(), "NOPERM") || strings.Contains(err.Error(), "unknown command")) {
		return nil, nil
	}
	return found, classify(ctx, err)
}

func infoField(info, name string) string {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// Versions reads the version of each shard of a pool: 0 for a shard without an index, none for a pool that
// does not exist. A version that falls means that Redis lost its data or went back to older ones.
func (s *Store) Versions(ctx context.Context, id kvcache.PoolID) ([]int64, error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	k, err := s.pool(id).load(bounded, s.write)
	if err != nil || k == nil {
		return nil, classify(ctx, err)
	}
	out := make([]int64, len(k.shards))
	for i, sh := range k.shards {
		if out[i], err = s.write.Get(bounded, sh.keys.version()).Int64(); err != nil && err != redis.Nil {
			return nil, classify(ctx, fmt.Errorf("read version of shard %s: %w", sh.name, err))
		}
	}
	return out, nil
}
