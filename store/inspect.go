package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// Sizes counts the blocks that every worker rank of a pool holds, by [kvcache.Tier]. With an error, those of the shards that
// answer.
func (s *Store) Sizes(ctx context.Context, id kvcache.PoolID) (map[kvcache.WorkerRank][kvcache.NumTiers]int, error) {
	out := map[kvcache.WorkerRank][kvcache.NumTiers]int{}
	err := s.inspect(ctx, id, func(ctx context.Context, sh *shard) error {
		slots, err := readSlots(ctx, s.write, sh.keys)
		if err != nil {
			return err
		}
		pipe := s.write.Pipeline()
		counts := map[kvcache.WorkerRank][kvcache.NumTiers]*redis.IntCmd{}
		for _, w := range slots.owners {
			if w.Worker == "" {
				continue
			}
			var c [kvcache.NumTiers]*redis.IntCmd
			for t := range c {
				c[t] = pipe.ZCard(ctx, sh.keys.blocks(w, kvcache.Tier(t)))
			}
			counts[w] = c
		}
		if len(counts) == 0 {
			return nil
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}
		for w, c := range counts {
			var n [kvcache.NumTiers]int
			for t := range c {
				n[t] = int(c[t].Val())
			}
			out[w] = n
		}
		return nil
	})
	return out, err
}

// Holders says of each block who holds it: bit t of byte i of a worker rank's string is set where it holds block i on tier t.
// Unlike [Store.Lookup] it goes on where a chain is broken. Ranks that hold none of the blocks are absent. With an
// error, those of the shards that answer.
func (s *Store) Holders(ctx context.Context, id kvcache.PoolID, blocks []kvcache.BlockHash) (map[kvcache.WorkerRank][]byte, error) {
	out := map[kvcache.WorkerRank][]byte{}
	fields := hexFields(blocks)
	err := s.inspect(ctx, id, func(ctx context.Context, sh *shard) error {
		pipe := s.write.Pipeline()
		var replies []*redis.SliceCmd
		for a := 0; a < len(fields); a += maxPerCall {
			replies = append(replies, pipe.HMGet(ctx, sh.keys.holders(), fields[a:min(a+maxPerCall, len(fields))]...))
		}
		if len(replies) == 0 {
			return nil
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}
		slots, err := readSlots(ctx, s.write, sh.keys) // after the blocks: bits of slots that ended in between belong to nobody
		if err != nil {
			return err
		}
		block := 0
		for _, r := range replies {
			for _, v := range r.Val() {
				nibbles, _ := v.(string) // nil: nobody holds it
				for slot := range min(2*len(nibbles), len(slots.owners)) {
					tiers, w := nibbles[slot/2]>>(slot%2*4)&0xF, slots.owners[slot]
					if tiers == 0 || w.Worker == "" {
						continue
					}
					if out[w] == nil {
						out[w] = make([]byte, len(blocks))
					}
					out[w][block] = tiers
				}
				block++
			}
		}
		return nil
	})
	return out, err
}

// inspect calls f for the shards of a pool, one after the other. It is for people who look: it counts in no metric of lookups, has the
// time of a write, and asks no shard that is known to be away.
func (s *Store) inspect(ctx context.Context, id kvcache.PoolID, f func(context.Context, *shard) error) error {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	k, err := s.pool(id).load(bounded, s.write)
	if err != nil || k == nil {
		return classify(ctx, err)
	}
	var errs []error
	for _, sh := range k.shards {
		err := sh.link.check()
		if err == nil {
			err = classify(ctx, f(bounded, sh))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("inspect shard %s: %w", sh.name, err))
		}
	}
	return errors.Join(errs...)
}
