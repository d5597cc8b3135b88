package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// Sweep clears at most limit blocks of ended generations in each shard of a pool, and some predictions that have expired, and says
// how many it cleared and whether any are left. Any number of processes may sweep at once.
func (s *Store) Sweep(ctx context.Context, id kvcache.PoolID, limit int) (swept int, more bool, err error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	k, err := s.pool(id).load(bounded, s.write)
	if err != nil || k == nil {
		return 0, false, classify(ctx, err)
	}
	limit = min(max(limit, 1), 1000)
	var errs []error
	for _, sh := range k.shards {
		n, m, err := s.sweepShard(bounded, sh, limit)
		swept += n
		more = more || m
		if now := time.Now().UnixMilli(); err == nil && (!m || now-sh.forgot.Load() >= 500) { // a long sweep does not keep predictions alive
			sh.forgot.Store(now)
			n, m, err = s.forget(bounded, sh)
			swept += n
			more = more || m
		}
		if err != nil {
			errs = append(errs, s.writeFailed(ctx, fmt.Errorf("sweep shard %s: %w", sh.name, err)))
		}
	}
	return swept, more, errors.Join(errs...)
}

func (s *Store) sweepShard(ctx context.Context, sh *shard, limit int) (swept int, more bool, err error) {
	slots, err := s.write.ZRangeByScore(ctx, sh.keys.idle(), &redis.ZRangeBy{Min: "0", Max: "0", Count: 2}).Result()
	if err != nil || len(slots) == 0 {
		return 0, false, err
	}
	slot, err := strconv.Atoi(slots[0])
	if err != nil {
		return 0, false, fmt.Errorf("idle slot %q: %w", slots[0], ErrCorrupt)
	}
	keys := []string{sh.keys.holders(), sh.keys.idle()}
	for t := range kvcache.Tier(kvcache.NumTiers) {
		keys = append(keys, sh.keys.retired(slot, t))
	}
	v, err := scripts.sweep.run(ctx, s.write, keys,
		slots[0], strconv.Itoa(limit), strconv.FormatInt(s.opts.SlotRest.Milliseconds(), 10))
	if err != nil {
		return 0, false, err
	}
	if len(v) != 2 {
		return 0, false, errShortReply
	}
	swept, err = strconv.Atoi(v[0])
	s.metrics.sweptBlocks.WithLabelValues(sh.name).Add(float64(swept))
	return swept, v[1] == "1" || len(slots) > 1, err
}
