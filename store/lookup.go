package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// LookupOptions says what beside the overlaps a lookup brings.
type LookupOptions struct {
	TreeSizes bool // fill OverlapScores.TreeSizes, for one more round trip
	// Frequencies counts this lookup as a use of the blocks of the longest overlap, and fills OverlapScores.Frequencies, for one more
	// round trip per 1,000 blocks. Nothing happens without [Options.FrequencyWindow].
	Frequencies bool
}

// The chunks in which a prompt's blocks are asked for: small first, because most prompts that
// nobody holds show it in their first blocks, then larger, because each chunk costs a round trip. Where most prompts
// are held beyond that, the first is as large as they have lately been held ([reach]).
const (
	firstChunk  = 64
	chunkGrowth = 8
	maxPerCall  = 2048 // fields of one HMGET: bounds how long Redis is busy with it
)

// reach is how far somebody has held the prompts of a shard's last lookups. It only saves time, so that lookups at the
// same time may lose each other's part of it.
type reach struct {
	share atomic.Int32 // of prompts beyond the first chunk, in 256ths
	depth atomic.Int32 // of those prompts, in blocks
}

// chunk is how many blocks to ask for first.
func (r *reach) chunk() int {
	if r.share.Load() <= 128 {
		return firstChunk
	}
	return min(max(int(r.depth.Load())*5/4, firstChunk), maxPerCall)
}

// learn takes in a lookup of more than the first chunk. Somebody holds the first of the blocks, up to depth.
func (r *reach) learn(depth int) {
	share := r.share.Load()
	if depth < firstChunk {
		r.share.Store(share - (share+15)/16)
		return
	}
	r.share.Store(share + (256-share)/16)
	was := int(r.depth.Load())
	r.depth.Store(int32(was + (depth-was)/4))
}

// Lookup finds how far each worker rank holds the prompt whose block hashes are given. It returns
// within the lookup budget, or by ctx's deadline where that is earlier, whatever Redis does. The state is Exact with a nil error; Partial or
// Degraded with the error that says why (see [Reason]), and scores that hold what is known. A pool
// that does not exist has empty scores, Exact.
func (s *Store) Lookup(ctx context.Context, id kvcache.PoolID, blocks []kvcache.BlockHash, o LookupOptions) (kvcache.OverlapScores, kvcache.IndexState, error) {
	start := time.Now()
	bounded, cancel, budget := s.budgeted(ctx)
	defer cancel()

	scores := kvcache.OverlapScores{Scores: map[kvcache.WorkerRank]kvcache.Overlap{}}
	p := s.pool(id)
	k, err := p.find(ctx, bounded)
	if err != nil {
		return scores, kvcache.Degraded, err
	}
	if k == nil {
		return scores, kvcache.Exact, nil
	}

	fields := hexFields(blocks)
	var errs []error
	if len(k.shards) == 1 {
		a := s.lookupShard(ctx, bounded, budget, p, k.shards[0], fields, o)
		errs = a.merge(&scores, errs)
	} else {
		answers := make(chan shardAnswer, len(k.shards))
		for _, sh := range k.shards {
			go func() { answers <- s.lookupShard(ctx, bounded, budget, p, sh, fields, o) }()
		}
		for range k.shards {
			a := <-answers
			errs = a.merge(&scores, errs)
		}
	}
	if o.Frequencies {
		deepest := 0
		for _, x := range scores.Scores {
			deepest = max(deepest, x.Any)
		}
		scores.Frequencies = s.frequencies(bounded, k, fields, deepest)
	}
	s.metrics.lookupSeconds.Observe(time.Since(start).Seconds())
	s.metrics.lookupBlocks.Observe(float64(len(blocks)))
	switch len(errs) {
	case 0:
		return scores, kvcache.Exact, nil
	case len(k.shards):
		return scores, kvcache.Degraded, errors.Join(errs...)
	}
	return scores, kvcache.Partial, errors.Join(errs...)
}

// shardAnswer is one shard's part of a lookup.
type shardAnswer struct {
	depths []depth
	slots  *slotMap
	sizes  map[kvcache.WorkerRank]int
	err    error
}

func (a *shardAnswer) merge(into *kvcache.OverlapScores, errs []error) []error {
	if a.err != nil {
		return append(errs, a.err)
	}
	for slot, d := range a.depths {
		if d[kvcache.Predicted] == 0 || slot >= len(a.slots.owners) || a.slots.owners[slot].Worker == "" {
			continue
		}
		into.Scores[a.slots.owners[slot]] = kvcache.Overlap{
			Device: int(d[kvcache.Device]), Host: int(d[kvcache.Host]), Disk: int(d[kvcache.Disk]), Any: int(d[kvcache.Predicted]),
		}
	}
	if a.sizes != nil {
		if into.TreeSizes == nil {
			into.TreeSizes = map[kvcache.WorkerRank]int{}
		}
		for w, n := range a.sizes {
			into.TreeSizes[w] = n
		}
	}
	return errs
}

func (s *Store) lookupShard(caller, ctx context.Context, budget time.Duration, p *pool, sh *shard, fields []string, o LookupOptions) (a shardAnswer) {
	if observe := s.opts.Observe; observe != nil {
		ended := observe(caller, sh.name, len(fields))
		defer func() { ended(outcome(a.err)) }()
	}
	if err := sh.link.check(); err != nil {
		return shardAnswer{err: err}
	}
	waited, err := sh.gate.enter(ctx, budget)
	if err != nil {
		return shardAnswer{err: err}
	}
	defer sh.gate.leave()
	if waited > 0 {
		if err := sh.link.check(); err != nil { // it went down while this one stood in line
			return shardAnswer{err: err}
		}
	}
	a, err = sh.lookup(ctx, s.read, fields)
	if err == nil && o.TreeSizes {
		err = a.readSizes(ctx, s.read, sh.keys)
	}
	if err == nil && a.slots.version == "" {
		p.doubt() // no index there: if it comes back, it may have another configuration
	}
	if err == nil {
		sh.link.answered()
	} else {
		// The deadline is our own, so it counts; a caller that has gone in the meantime does not excuse Redis.
		err = classify(context.WithoutCancel(caller), fmt.Errorf("look up overlaps: %w", err))
		if Reason(err) == ReasonTimeout && (waited > s.opts.LookupBudget/4 || budget < s.opts.LookupBudget/2 || sh.link.starved(ctx, s.opts.LookupBudget)) {
			err = overload(err) // this process's own queue, what came before, or its lack of processors, has eaten the time
		}
		a.err = sh.link.report(caller, err)
	}
	return a
}

// outcome is [Reason], "" of no error.
func outcome(err error) string {
	if err == nil {
		return ""
	}
	return Reason(err)
}

// gate is the line before the connections of the lookups. It keeps a rush in this process from looking
// like a slow Redis: who waits here knows that it was here.
type gate chan struct{}

// enter waits for a place, at most three quarters of the budget, and says how long it did.
func (g gate) enter(ctx context.Context, budget time.Duration) (waited time.Duration, err error) {
	select {
	case g <- struct{}{}:
		return 0, nil
	default:
	}
	start := time.Now()
	timer := time.NewTimer(budget * 3 / 4)
	defer timer.Stop()
	select {
	case g <- struct{}{}:
		return time.Since(start), nil
	case <-timer.C:
	case <-ctx.Done():
	}
	return 0, overload(errors.New("all connections of this process are in use"))
}

func (g gate) leave() { <-g }

// lookup asks one shard, chunk by chunk until nobody holds the prefix any more. The version is
// read after the blocks, so that a change of the slots in between shows.
func (sh *shard) lookup(ctx context.Context, c redis.UniversalClient, fields []string) (shardAnswer, error) {
	var p prefixes
	version := ""
	for from, size := 0, sh.reach.chunk(); ; size *= chunkGrowth {
		to := min(from+size, len(fields))
		pipe := c.Pipeline()
		var replies []*redis.StringSliceCmd
		for a := from; a < to; a += maxPerCall {
			b := min(a+maxPerCall, to)
			args := make([]any, 0, 2+b-a)
			args = append(args, "hmget", sh.keys.holders())
			for i := a; i < b; i++ {
				args = append(args, &fields[i])
			}
			cmd := redis.NewStringSliceCmd(ctx, args...)
			_ = pipe.Process(ctx, cmd)
			replies = append(replies, cmd)
		}
		versionCmd := pipe.Get(ctx, sh.keys.version())
		if _, err := pipe.Exec(ctx); err != nil && err != redis.Nil {
			return shardAnswer{}, err
		}
		warm := len(fields) > 0
		for _, r := range replies {
			nibbles, err := r.Result()
			if err != nil {
				return shardAnswer{}, err
			}
			for _, n := range nibbles {
				if warm = p.add(n); !warm {
					break
				}
			}
			if !warm {
				break
			}
		}
		var err error
		if version, err = versionCmd.Result(); err != nil && err != redis.Nil {
			return shardAnswer{}, err
		}
		if from = to; !warm || from == len(fields) {
			break
		}
	}
	if len(fields) > firstChunk {
		sh.reach.learn(p.n - 1)
	}
	a := shardAnswer{depths: p.finish(), slots: sh.slots.Load()}
	if version == "" {
		a.slots = noSlots
		sh.slots.Store(noSlots)
	} else if a.slots.version != version {
		var err error
		if a.slots, err = readSlots(ctx, c, sh.keys); err != nil {
			return shardAnswer{}, err
		}
		sh.slots.Store(a.slots)
	}
	return a, nil
}

// probe is a lookup of one block that nobody holds, with the slot map read afresh.
func (sh *shard) probe(ctx context.Context, c redis.UniversalClient) error {
	_, err := sh.lookup(ctx, c, []string{"0000000000000000"})
	if err == nil {
		_, err = readSlots(ctx, c, sh.keys)
	}
	return classify(context.WithoutCancel(ctx), err) // the deadline is the probe's own
}

// readSlots reads the slot map. The version comes first: if the map changes in between, the kept
// version is the older one and the next lookup reads again.
func readSlots(ctx context.Context, c redis.UniversalClient, keys shardKeys) (*slotMap, error) {
	pipe := c.Pipeline()
	version := pipe.Get(ctx, keys.version())
	slots := pipe.HGetAll(ctx, keys.slots())
	if _, err := pipe.Exec(ctx); err != nil && err != redis.Nil {
		return nil, err
	}
	if err := slots.Err(); err != nil {
		return nil, err
	}
	m := &slotMap{version: version.Val()}
	for number, owner := range slots.Val() {
		slot, err := strconv.Atoi(number)
		w, err2 := kvcache.ParseWorkerRank(owner)
		if err = errors.Join(err, err2); err != nil || slot < 0 || slot > 1<<20 {
			return nil, fmt.Errorf("slot map: %q = %q: %w", number, owner, ErrCorrupt)
		}
		for len(m.owners) <= slot {
			m.owners = append(m.owners, kvcache.WorkerRank{})
		}
		m.owners[slot] = w
	}
	return m, nil
}

// readSizes counts the blocks of every rank with an overlap.
func (a *shardAnswer) readSizes(ctx context.Context, c redis.UniversalClient, keys shardKeys) error {
	a.sizes = map[kvcache.WorkerRank]int{}
	pipe := c.Pipeline()
	counts := map[kvcache.WorkerRank][]*redis.IntCmd{}
	for slot, d := range a.depths {
		if d[kvcache.Predicted] == 0 || slot >= len(a.slots.owners) || a.slots.owners[slot].Worker == "" {
			continue
		}
		w := a.slots.owners[slot]
		for t := range kvcache.Predicted {
			counts[w] = append(counts[w], pipe.ZCard(ctx, keys.blocks(w, t)))
		}
	}
	if len(counts) == 0 {
		return nil
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return err
	}
	for w, cmds := range counts {
		for _, cmd := range cmds {
			a.sizes[w] += int(cmd.Val())
		}
	}
	return nil
}

// hexPairs are the digits of every byte.
var hexPairs = func() (pairs [256][2]byte) {
	for i := range pairs {
		copy(pairs[i][:], fmt.Sprintf("%02x", i))
	}
	return pairs
}()

// hexFields writes all hashes into one string and returns its parts.
func hexFields(blocks []kvcache.BlockHash) []string {
	text := make([]byte, 16*len(blocks))
	for i, b := range blocks {
		digits := (*[16]byte)(text[16*i:])
		for k := 0; k < 16; k += 2 {
			*(*[2]byte)(digits[k:]) = hexPairs[byte(b>>(56-4*k))]
		}
	}
	all := string(text)
	fields := make([]string, len(blocks))
	for i := range fields {
		fields[i] = all[i*16 : i*16+16]
	}
	return fields
}

func rangeOf(score string) *redis.ZRangeBy {
	return &redis.ZRangeBy{Min: score, Max: score, Count: 1}
}
