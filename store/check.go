package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// Report is what [Store.Check] found in a pool.
type Report struct {
	Streams  int      `json:"streams"`  // live streams
	Blocks   int      `json:"blocks"`   // members of all live sorted sets
	Retired  int      `json:"retired"`  // members that wait for the sweep
	Holders  int      `json:"holders"`  // blocks in the holders hash
	Problems []string `json:"problems"` // one line each, at most 100
	Found    int      `json:"found"`    // problems in all
	Repaired int      `json:"repaired"` // of these, put right
}

func (r *Report) problem(format string, args ...any) {
	r.Found++
	if len(r.Problems) < 100 {
		r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
	}
}

// verifyStep is how many suspicious blocks one atomic comparison takes.
const verifyStep = 16

// Check compares, shard by shard, the sorted sets with holders and the slot map with the streams,
// while the index is in use. Differences that the first, non-atomic reading shows are looked at again
// atomically, so that traffic is not taken for damage. With repair, holders is rebuilt from the sorted
// sets where it differs, and leftovers of the slot map are removed. Memory is proportional to the shard.
func (s *Store) Check(ctx context.Context, id kvcache.PoolID, repair bool) (Report, error) {
	var r Report
	bounded, cancel := s.bound(ctx)
	k, err := s.pool(id).load(bounded, s.write)
	cancel()
	if err != nil {
		return r, classify(ctx, err)
	}
	if k == nil {
		return r, fmt.Errorf("check: no pool %s: %w", id, ErrInvalid)
	}
	for _, sh := range k.shards {
		if err := s.checkShard(ctx, sh, repair, &r); err != nil {
			return r, classify(ctx, fmt.Errorf("check shard %s: %w", sh.name, err))
		}
	}
	return r, nil
}

// errMoved says that the slots changed during a comparison: it has to begin again.
var errMoved = errors.New("the slot map kept changing during the check")

func (s *Store) checkShard(ctx context.Context, sh *shard, repair bool, r *Report) error {
	if err := s.checkSlots(ctx, sh, repair, r); err != nil {
		return err
	}
	for range 5 {
		attempt := *r
		err := s.checkHolders(ctx, sh, repair, &attempt)
		if errors.Is(err, errMoved) {
			continue
		}
		*r = attempt
		return err
	}
	return errMoved
}

// checkSlots compares the slot map with the streams that it names.
func (s *Store) checkSlots(ctx context.Context, sh *shard, repair bool, r *Report) error {
	slots, err := s.write.HGetAll(ctx, sh.keys.slots()).Result()
	if err != nil {
		return err
	}
	for slot, owner := range slots {
		w, err := kvcache.ParseWorkerRank(owner)
		if err != nil {
			r.problem("slot %s belongs to %q, which is no worker/rank", slot, owner)
			continue
		}
		has, err := s.write.HMGet(ctx, sh.keys.stream(w), "slot", "gen", "seq").Result()
		if err != nil {
			return err
		}
		now, err := s.write.HGet(ctx, sh.keys.slots(), slot).Result()
		if err != nil && err != redis.Nil {
			return err
		}
		if now != owner {
			continue // changed meanwhile
		}
		switch {
		case has[0] == nil:
			r.problem("slot %s belongs to %s, which has no stream", slot, owner)
			if repair {
				if err := s.dropSlot(ctx, sh, slot); err != nil {
					return err
				}
				r.Repaired++
			}
		case has[0] != slot:
			r.problem("slot %s belongs to %s, whose stream has slot %v", slot, owner, has[0])
			if repair {
				if err := s.dropSlot(ctx, sh, slot); err != nil {
					return err
				}
				r.Repaired++
			}
		case has[1] == nil || has[2] == nil:
			r.problem("stream %s has no generation or watermark", owner)
		}
		r.Streams++
	}
	return nil
}

// dropSlot takes a slot that no stream has out of the map, and leaves it to the sweep.
func (s *Store) dropSlot(ctx context.Context, sh *shard, slot string) error {
	_, err := s.write.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.HDel(ctx, sh.keys.slots(), slot)
		p.ZAdd(ctx, sh.keys.idle(), redis.Z{Score: 0, Member: slot})
		p.Incr(ctx, sh.keys.version())
		return nil
	})
	return err
}

// holderSet is a sorted set and the bit that its members have in holders.
type holderSet struct {
	key  string
	slot int
	tier kvcache.Tier
	live bool
}

// holderSets lists all sorted sets of a shard, at one version.
func (s *Store) holderSets(ctx context.Context, sh *shard) (sets []holderSet, version string, err error) {
	m, err := readSlots(ctx, s.write, sh.keys)
	if err != nil {
		return nil, "", err
	}
	idle, err := s.write.ZRange(ctx, sh.keys.idle(), 0, -1).Result()
	if err != nil {
		return nil, "", err
	}
	for slot, w := range m.owners {
		if w.Worker == "" {
			continue
		}
		for t := range kvcache.Tier(kvcache.NumTiers) {
			sets = append(sets, holderSet{sh.keys.blocks(w, t), slot, t, true})
		}
	}
	for _, number := range idle {
		slot, err := strconv.Atoi(number)
		if err != nil {
			return nil, "", fmt.Errorf("idle slot %q: %w", number, ErrCorrupt)
		}
		for t := range kvcache.Tier(kvcache.NumTiers) {
			sets = append(sets, holderSet{sh.keys.retired(slot, t), slot, t, false})
		}
	}
	return sets, m.version, nil
}

func (s *Store) checkHolders(ctx context.Context, sh *shard, repair bool, r *Report) error {
	sets, version, err := s.holderSets(ctx, sh)
	if err != nil {
		return err
	}
	// What holders should be, as far as one reading after the other can tell.
	want := map[kvcache.BlockHash]string{}
	for _, set := range sets {
		err := s.eachBlock(ctx, set.key, func(b kvcache.BlockHash, _ kvcache.EngineHash) error {
			want[b] = withBit(want[b], set.slot, set.tier)
			if set.live {
				r.Blocks++
			} else {
				r.Retired++
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	suspects := map[string]bool{}
	iter := s.write.HScan(ctx, sh.keys.holders(), 0, "", dumpStep).Iterator()
	seen := map[string]bool{}
	for iter.Next(ctx) {
		field := iter.Val()
		if !iter.Next(ctx) {
			break
		}
		if !seen[field] {
			seen[field] = true
			r.Holders++
		}
		b, err := kvcache.ParseBlockHash(field)
		if err != nil || want[b] != iter.Val() {
			suspects[field] = true
		}
		delete(want, b)
	}
	if err := iter.Err(); err != nil {
		return err
	}
	for b := range want {
		if !seen[b.String()] {
			suspects[b.String()] = true
		}
	}
	for step := range slices.Chunk(slices.Sorted(maps.Keys(suspects)), verifyStep) {
		wrong, err := s.verify(ctx, sh, sets, version, step, repair)
		for tries := 0; errors.Is(err, errMoved) && tries < 50; tries++ {
			// The comparison is whole in itself: only the list of sorted sets is out of date.
			if sets, version, err = s.holderSets(ctx, sh); err == nil {
				wrong, err = s.verify(ctx, sh, sets, version, step, repair)
			}
		}
		if err != nil {
			return err
		}
		for _, b := range wrong {
			r.problem("holders of block %s differ from the sorted sets", b)
			if repair {
				r.Repaired++
			}
		}
	}
	return nil
}

// verify compares some blocks atomically.
func (s *Store) verify(ctx context.Context, sh *shard, sets []holderSet, version string, blocks []string, repair bool) ([]string, error) {
	keys := []string{sh.keys.holders(), sh.keys.version()}
	flag := "0"
	if repair {
		flag = "1"
	}
	args := []any{version, flag, strconv.Itoa(len(blocks))}
	for _, b := range blocks {
		args = append(args, b)
	}
	for _, set := range sets {
		keys = append(keys, set.key)
		args = append(args, strconv.Itoa(set.slot)+":"+strconv.Itoa(int(set.tier)))
	}
	v, err := scripts.verify.run(ctx, s.write, keys, args...)
	if err != nil {
		return nil, err
	}
	if len(v) == 0 {
		return nil, errShortReply
	}
	if v[0] != "0" {
		return nil, errMoved
	}
	return v[1:], nil
}

// withBit is a nibble string with one more bit.
func withBit(s string, slot int, t kvcache.Tier) string {
	b := []byte(s)
	for len(b) <= slot/2 {
		b = append(b, 0)
	}
	b[slot/2] |= 1 << t << (slot % 2 * 4)
	return string(b)
}
