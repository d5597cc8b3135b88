package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// dumpStep is how many blocks one step of a dump or a check reads.
const dumpStep = 500

// Dump calls f for every stored block of a pool, predicted ones left out, worker by worker in the order of their names. Every
// event that was acknowledged before the call is in it. It reads in bounded steps: a block that is stored
// throughout the dump is in it once, one that comes or goes meanwhile may be. An error of f ends the dump and is
// returned as it is. A [Restorer] makes an index from it.
func (s *Store) Dump(ctx context.Context, id kvcache.PoolID, f func(kvcache.RouterEvent) error) error {
	streams, err := s.Streams(ctx, id)
	if err != nil {
		return err
	}
	slices.SortFunc(streams, func(a, b Stream) int {
		return cmp.Or(strings.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	eventID := uint64(0)
	for _, st := range streams {
		sh, err := s.shard(ctx, st)
		if err != nil {
			return classify(ctx, err)
		}
		if sh == nil {
			continue
		}
		for t := range kvcache.Predicted {
			err := s.eachBlock(ctx, sh.keys.blocks(st.WorkerRank, t), func(b kvcache.BlockHash, e kvcache.EngineHash) error {
				eventID++
				return f(kvcache.RouterEvent{
					WorkerID: kvcache.WorkerName(st.Worker), StorageTier: kvcache.StorageTierOf(t),
					Event: kvcache.CacheEvent{EventID: eventID, DPRank: st.Rank, Data: kvcache.EventData{
						Stored: &kvcache.StoredData{Blocks: []kvcache.StoredBlock{{BlockHash: b, EngineHash: &e}}},
					}},
				})
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// eachBlock reads the blocks of a tier.
func (s *Store) eachBlock(ctx context.Context, key string, f func(kvcache.BlockHash, kvcache.EngineHash) error) error {
	return s.eachMember(ctx, key, func(member string, score float64) error {
		b, err := kvcache.ParseBlockHash(member)
		if err != nil {
			return fmt.Errorf("block hash %q in %s: %w", member, key, ErrCorrupt)
		}
		return f(b, kvcache.EngineHash(score))
	})
}

// eachMember reads a sorted set in the order of its scores, in steps that go on from the last score.
func (s *Store) eachMember(ctx context.Context, key string, f func(member string, score float64) error) error {
	from := "-inf"
	last := -1.0
	seen := map[string]bool{} // members with the last score: the next step reads them again
	for {
		bounded, cancel := s.bound(ctx)
		page, err := s.write.ZRangeByScoreWithScores(bounded, key, &redis.ZRangeBy{
			Min: from, Max: "+inf", Count: int64(dumpStep + len(seen)),
		}).Result()
		cancel()
		if err != nil {
			return classify(ctx, fmt.Errorf("read blocks: %w", err))
		}
		news := 0
		for _, z := range page {
			member, _ := z.Member.(string)
			if z.Score == last && seen[member] {
				continue
			}
			if z.Score != last {
				clear(seen)
				last = z.Score
			}
			seen[member] = true
			news++
			if err := f(member, z.Score); err != nil {
				return err
			}
		}
		if news == 0 {
			return nil
		}
		from = strconv.FormatFloat(last, 'f', -1, 64)
	}
}
