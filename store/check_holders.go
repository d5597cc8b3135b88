package store

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// bit is one place in the nibble strings.
type bit struct {
	slot int
	tier kvcache.Tier
}

// verifyStep is how many blocks one atomic comparison takes.
const verifyStep = 500

// checkPart is about how many blocks of a shard are compared at a time; each takes some 100 bytes of memory, the garbage of comparing included.
const checkPart = 1 << 19

// size is about how many different blocks the shard has.
func (x *shardCheck) size(ctx context.Context, sets map[bit]string) (blocks int64, err error) {
	blocks, err = x.s.write.HLen(ctx, x.shard.keys.holders()).Result()
	if err != nil {
		return 0, err
	}
	pipe := x.s.write.Pipeline()
	var counts []*redis.IntCmd
	for _, key := range sets {
		if !x.broken[key] {
			counts = append(counts, pipe.ZCard(ctx, key))
		}
	}
	if len(counts) == 0 {
		return blocks, nil
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return 0, err
	}
	var most, sum int64
	for _, c := range counts {
		most, sum = max(most, c.Val()), sum+c.Val()
	}
	if blocks < most { // holders was lost
		blocks = sum
	}
	return blocks, nil
}

// bits lists the places that have a sorted set, with its key, at one version.
func (x *shardCheck) bits(ctx context.Context) (sets map[bit]string, live map[int]kvcache.WorkerRank, version string, err error) {
	m, err := readSlots(ctx, x.s.write, x.shard.keys)
	if errors.Is(err, ErrCorrupt) && !x.repair {
		return nil, nil, "", nil // reported already
	} else if err != nil {
		return nil, nil, "", err
	}
	idle, err := x.s.write.ZRangeByScore(ctx, x.shard.keys.idle(), &redis.ZRangeBy{Min: "0", Max: "0"}).Result() // the others have no blocks
	if err != nil {
		return nil, nil, "", err
	}
	sets, live = map[bit]string{}, map[int]kvcache.WorkerRank{}
	for _, name := range idle {
		if slot, err := strconv.Atoi(name); err == nil {
			for t := range kvcache.Tier(kvcache.NumTiers) {
				sets[bit{slot, t}] = x.shard.keys.retired(slot, t)
			}
		}
	}
	for slot, w := range m.owners {
		if w.Worker != "" {
			live[slot] = w
			for t := range kvcache.Tier(kvcache.NumTiers) {
				sets[bit{slot, t}] = x.shard.keys.blocks(w, t)
			}
		}
	}
	return sets, live, m.version, nil
}

// holders compares holders with the sorted sets, first as far as one reading after the other can tell, then atomically.
func (x *shardCheck) holders(ctx context.Context) error {
	for x.part, x.parts = 0, 1; x.part < x.parts; x.part++ {
		sets, live, version, err := x.bits(ctx)
		if err != nil || sets == nil {
			return err
		}
		if x.part == 0 {
			blocks, err := x.size(ctx, sets)
			if err != nil {
				return err
			}
			x.parts += uint64(blocks / x.most)
		}
		if err := x.comparePart(ctx, sets, live, version); err != nil {
			return err
		}
	}
	return x.restarts(ctx)
}

// comparePart compares the blocks of one part.
func (x *shardCheck) comparePart(ctx context.Context, sets map[bit]string, live map[int]kvcache.WorkerRank, version string) error {
	x.missing, x.suspect = map[kvcache.BlockHash]string{}, map[bit]map[string]bool{}
	for at, key := range sets {
		_, alive := live[at.slot]
		if err := x.readSet(ctx, at, key, alive); err != nil {
			return err
		}
	}
	if err := x.readHolders(ctx); err != nil {
		return err
	}
	for b, nibbles := range x.missing {
		if nibbles != compared {
			x.differ(b.String(), nibbles, "")
		}
	}
	wrong := map[string]bool{}
	for at, blocks := range x.suspect {
		for step := range slices.Chunk(slices.Sorted(maps.Keys(blocks)), verifyStep) {
			found, err := x.verify(ctx, sets, version, at, step)
			for tries := 0; errors.Is(err, errMoved) && tries < moves; tries++ {
				// The comparison is whole in itself: only the list of sorted sets is out of date.
				if sets, _, version, err = x.bits(ctx); err == nil {
					found, err = x.verify(ctx, sets, version, at, step)
				}
			}
			if err != nil {
				return err
			}
			for _, b := range found {
				wrong[b] = true
			}
			if len(found) >= lostSet {
				if err := x.lost(ctx, at, live); err != nil {
					return err
				}
			}
		}
	}
	for _, b := range sortedKeys(wrong) {
		x.r.problem(x.repair, "holders of block %q differ from the sorted sets", b)
	}
	return nil
}

// lostSet is how many bits without a member of their sorted set say, where there is no such set, that it was lost: a few may be damage
// to holders.
const lostSet = 10

// lost has a stream begin anew that has lost a whole sorted set: its engine holds the blocks still, and they come back by replay.
func (x *shardCheck) lost(ctx context.Context, at bit, live map[int]kvcache.WorkerRank) error {
	w, ok := live[at.slot]
	if !ok || at.tier == kvcache.Predicted || x.restart[w] {
		return nil
	}
	n, err := x.s.write.Exists(ctx, x.shard.keys.blocks(w, at.tier)).Result()
	x.restart[w] = n == 0
	return err
}

// readSet adds the members of a sorted set to what holders should be.
func (x *shardCheck) readSet(ctx context.Context, at bit, key string, live bool) error {
	if x.broken[key] {
		return nil
	}
	return x.s.eachMember(ctx, key, func(member string, score float64) error {
		b, ok := canonical(member)
		if !x.mine(b, ok) {
			return nil
		}
		fits := at.tier == kvcache.Predicted || score >= 0 && score < 1<<53 && score == math.Trunc(score)
		if !ok || !fits {
			if x.repair {
				if err := x.s.write.ZRem(ctx, key, member).Err(); err != nil {
					return err
				}
			}
			x.r.problem(x.repair, "%s has the member %q with score %v, which is no block", key, member, score)
			if ok && !x.repair {
				x.missing[b] = withBit(x.missing[b], at)
			}
			return nil
		}
		x.missing[b] = withBit(x.missing[b], at)
		if live {
			x.r.Blocks++
		} else {
			x.r.Retired++
		}
		return nil
	})
}

// mine says whether a block is of the present part; what is no block is of the first.
func (x *shardCheck) mine(b kvcache.BlockHash, ok bool) bool {
	if !ok {
		return x.part == 0
	}
	return uint64(b)%x.parts == x.part
}

// canonical is a block hash in the form that the index writes.
func canonical(text string) (kvcache.BlockHash, bool) {
	b, err := kvcache.ParseBlockHash(text)
	return b, err == nil && b.String() == text
}

// readHolders marks what holders has of what is missing, and notes where it differs.
func (x *shardCheck) readHolders(ctx context.Context) error {
	iter := x.s.write.HScan(ctx, x.shard.keys.holders(), 0, "", dumpStep).Iterator()
	for iter.Next(ctx) {
		field := iter.Val()
		if !iter.Next(ctx) {
			break
		}
		b, ok := canonical(field)
		if !x.mine(b, ok) {
			continue
		}
		want, known := "", false
		if ok {
			want, known = x.missing[b]
		}
		if known && want == compared { // a scan may bring a field twice
			continue
		}
		if known {
			x.missing[b] = compared
		}
		x.r.Holders++
		x.differ(field, want, iter.Val())
	}
	return iter.Err()
}

// compared is what a block that holders has is no longer missing: no nibble string of a sorted set is empty.
const compared = ""

// differ notes the bits that tell two nibble strings apart.
func (x *shardCheck) differ(block, want, have string) {
	if have == want && have != "" {
		return
	}
	differs := false
	for i := range max(len(want), len(have)) {
		d := byteAt(want, i) ^ byteAt(have, i)
		for k := 0; d != 0; k, d = k+1, d>>1 {
			if d&1 != 0 {
				x.doubt(bit{2*i + k/4, kvcache.Tier(k % 4)}, block)
				differs = true
			}
		}
	}
	if !differs { // zeros at the end, or nothing at all
		x.doubt(bit{0, kvcache.Device}, block)
	}
}

func (x *shardCheck) doubt(at bit, block string) {
	if x.suspect[at] == nil {
		x.suspect[at] = map[string]bool{}
	}
	x.suspect[at][block] = true
}

// verify compares one bit of some blocks atomically.
func (x *shardCheck) verify(ctx context.Context, sets map[bit]string, version string, at bit, blocks []string) ([]string, error) {
	key, ok := sets[at]
	if !ok {
		key = x.shard.keys.retired(at.slot, at.tier) // which is not there: nobody has that slot
	}
	if x.broken[key] {
		return nil, nil
	}
	args := []any{version, boolArg(x.repair), at.slot, int(at.tier)}
	for _, b := range blocks {
		args = append(args, b)
	}
	v, err := scripts.verify.run(ctx, x.s.write, []string{x.shard.keys.holders(), x.shard.keys.version(), key}, args...)
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
func withBit(s string, at bit) string {
	b := []byte(s)
	for len(b) <= at.slot/2 {
		b = append(b, 0)
	}
	b[at.slot/2] |= 1 << at.tier << (at.slot % 2 * 4)
	return string(b)
}

func byteAt(s string, i int) byte {
	if i < len(s) {
		return s[i]
	}
	return 0
}

func boolArg(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
