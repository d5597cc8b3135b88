package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// Report is what [Store.Check] found in a pool.
type Report struct {
	Streams  int      `json:"streams"`  // live streams
	Blocks   int      `json:"blocks"`   // members of all live sorted sets, predictions included
	Retired  int      `json:"retired"`  // members that wait for the sweep
	Holders  int      `json:"holders"`  // blocks in the holders hash
	Problems []string `json:"problems"` // one line each, at most 100
	Found    int      `json:"found"`    // problems in all
	Repaired int      `json:"repaired"` // of these, put right
}

func (r *Report) problem(repaired bool, format string, args ...any) {
	r.Found++
	if repaired {
		r.Repaired++
	}
	if len(r.Problems) < 100 {
		r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
	}
}

// Check proves, shard by shard and while the index is in use, that the sorted sets, holders, the slot map and the streams agree, and
// the sums of what is under way with its leases. What a
// first, non-atomic reading shows is looked at again atomically, so that traffic is not taken for damage; no call keeps
// Redis busy for long. With repair, the sorted sets are believed: holders is made from them where it differs, the slot
// map from the streams; what belongs to nobody goes; a stream that has lost what cannot be derived begins a new
// generation, which the indexer fills again. Memory is that for [checkPart] blocks at most: a larger shard is read several times.
func (s *Store) Check(ctx context.Context, id kvcache.PoolID, repair bool) (Report, error) {
	return s.checkBy(ctx, id, repair, checkPart)
}

// checkBy compares about most blocks at a time.
func (s *Store) checkBy(ctx context.Context, id kvcache.PoolID, repair bool, most int64) (Report, error) {
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
	p := s.pool(id)
	c := &check{s: s, p: p, repair: repair, most: most, r: &r}
	placed, err := s.write.HGetAll(ctx, placementKey(p.id)).Result() // before the streams: a worker is placed first
	if err == nil {
		c.keys, err = c.scan(ctx)
	}
	if err != nil {
		return r, classify(ctx, fmt.Errorf("check pool %s: %w", id, err))
	}
	if err := c.listed(ctx); err != nil {
		return r, classify(ctx, fmt.Errorf("check list of pools: %w", err))
	}
	for n, sh := range k.shards {
		if err := c.shard(ctx, n, sh); err != nil {
			return r, classify(ctx, fmt.Errorf("check shard %s: %w", sh.name, err))
		}
	}
	if err := c.placement(ctx, k, placed); err != nil {
		return r, classify(ctx, fmt.Errorf("check placement of pool %s: %w", id, err))
	}
	if err := c.leases(ctx); err != nil {
		return r, classify(ctx, fmt.Errorf("check what is under way in pool %s: %w", id, err))
	}
	return r, nil
}

// CheckTurn says whether it is time to check a pool that is to be checked once in an interval, by the first of all callers that asks.
func (s *Store) CheckTurn(ctx context.Context, id kvcache.PoolID, interval time.Duration) (bool, error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	err := s.write.SetArgs(bounded, checkedKey(s.pool(id).id), "1", redis.SetArgs{Mode: "NX", TTL: max(interval, time.Millisecond)}).Err()
	if err == redis.Nil {
		return false, nil
	}
	return err == nil, classify(ctx, err)
}

// check is one run over a pool.
type check struct {
	s      *Store
	p      *pool
	repair bool
	most   int64 // blocks to compare at a time
	r      *Report
	keys   map[string]string // every key of the pool's shards as the run began -> its type

	unreadable bool // a shard is, so that nobody knows where the workers are
}

// errMoved says that the slots changed during a comparison: it has to begin again.
var errMoved = errors.New("the slot map kept changing during the check")

// moves is how often a comparison begins again before that is an error.
const moves = 50

// scan lists the keys of the pool's shards with their types, without blocking Redis: on every master of a cluster.
func (c *check) scan(ctx context.Context) (map[string]string, error) {
	pattern := globEscaper.Replace(strings.TrimSuffix(string(newShardKeys(c.p.id, 0)), "0}")) + "*"
	found := map[string]string{}
	var mu sync.Mutex
	one := func(ctx context.Context, node redis.Cmdable) error {
		var keys []string
		iter := node.Scan(ctx, 0, pattern, 1000).Iterator()
		for iter.Next(ctx) {
			keys = append(keys, iter.Val())
		}
		if err := iter.Err(); err != nil {
			return err
		}
		for len(keys) > 0 {
			step := keys[:min(len(keys), 500)]
			keys = keys[len(step):]
			pipe := node.Pipeline()
			types := make([]*redis.StatusCmd, len(step))
			for i, k := range step {
				types[i] = pipe.Type(ctx, k)
			}
			if _, err := pipe.Exec(ctx); err != nil {
				return err
			}
			mu.Lock()
			for i, k := range step {
				if types[i].Val() != "none" {
					found[k] = types[i].Val()
				}
			}
			mu.Unlock()
		}
		return nil
	}
	if cluster, ok := c.s.write.(*redis.ClusterClient); ok {
		return found, cluster.ForEachMaster(ctx, func(ctx context.Context, n *redis.Client) error { return one(ctx, n) })
	}
	return found, one(ctx, c.s.write)
}

var globEscaper = strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`, "]", `\]`)

// shardCheck is one run over a shard.
type shardCheck struct {
	*check
	*shard
	n       int
	retired map[int]bool                     // slots with keys of retired blocks
	owners  map[kvcache.WorkerRank]ownedKeys // worker ranks with any key
	broken  map[string]bool                  // keys of the wrong type, which nothing may touch
	restart map[kvcache.WorkerRank]bool      // streams that have lost blocks or their watermark
	part    uint64                           // that is compared now, of parts
	parts   uint64
	missing map[kvcache.BlockHash]string // nibble strings as the sorted sets say, until holders has them
	suspect map[bit]map[string]bool      // blocks whose bit seems to be wrong
}

type ownedKeys struct {
	stream bool
	blocks []string // and copies
}

func (c *check) shard(ctx context.Context, n int, sh *shard) error {
	x := &shardCheck{check: c, shard: sh, n: n}
	if err := x.sort(ctx); err != nil {
		return err
	}
	for _, whole := range []string{sh.keys.slots(), sh.keys.idle(), sh.keys.version(), sh.keys.top(), sh.keys.holders()} {
		if x.broken[whole] {
			c.unreadable = true
			return nil // nothing else can be said
		}
	}
	if err := x.mend(ctx); err != nil {
		return err
	}
	if err := x.restarts(ctx); err != nil {
		return err
	}
	if err := x.orphans(ctx); err != nil {
		return err
	}
	return x.holders(ctx)
}

// sort takes the shard's keys apart, and drops those of the wrong type.
func (x *shardCheck) sort(ctx context.Context) error {
	x.retired, x.owners = map[int]bool{}, map[kvcache.WorkerRank]ownedKeys{}
	x.broken, x.restart = map[string]bool{}, map[kvcache.WorkerRank]bool{}
	for key, typ := range x.check.keys {
		name, ok := strings.CutPrefix(key, string(x.shard.keys)+":")
		if !ok {
			continue
		}
		kind, rest, _ := strings.Cut(name, ":")
		want := keyTypes[kind]
		if want == "" {
			continue
		}
		var w kvcache.WorkerRank
		var tier string
		var err error
		switch kind {
		case "stream":
			w, err = kvcache.ParseWorkerRank(rest)
		case "blocks", "copies", "retired":
			colon := max(strings.LastIndexByte(rest, ':'), 0)
			tier = strings.TrimPrefix(rest[colon:], ":")
			if kind != "retired" {
				w, err = kvcache.ParseWorkerRank(rest[:colon])
				break
			}
			var slot int
			if slot, err = strconv.Atoi(rest[:colon]); err == nil {
				x.retired[slot] = true
			}
		}
		if err != nil {
			continue // not ours
		}
		if typ != want {
			if x.repair {
				if err := x.s.write.Unlink(ctx, key).Err(); err != nil {
					return err
				}
				if kind == "blocks" && tier != kvcache.Predicted.String() {
					x.restart[w] = true
				}
			} else {
				x.broken[key] = true
			}
			x.r.problem(x.repair, "key %s is a %s instead of a %s", key, typ, want)
			continue
		}
		if w.Worker != "" {
			own := x.owners[w]
			if own.stream = own.stream || kind == "stream"; kind != "stream" {
				own.blocks = append(own.blocks, key)
			}
			x.owners[w] = own
		}
	}
	return nil
}

// keyTypes are the kinds of keys of a shard that a check knows.
var keyTypes = map[string]string{
	"slots": "hash", "idle": "zset", "version": "string", "top": "string", "holders": "hash", "stream": "hash", "blocks": "zset", "copies": "hash", "retired": "zset",
}

// mendKinds are the differences that mend.lua knows, in words.
var mendKinds = map[string]string{
	"gen":          "stream %s has lost its generation%s",
	"seq":          "stream %s has lost its watermark%s",
	"slot":         "stream %s has lost its slot%s",
	"top":          "the number of slots given out is missing or too low%s%s",
	"version":      "the version is missing or older than a stream%s%s",
	"slot_name":    "the slot map has %q, which is no slot%s",
	"slot_nobody":  "slot %s belongs to %s, which has no stream",
	"slot_other":   "slot %s belongs to %s, whose stream has another slot",
	"unmapped":     "stream %s is missing from the slot map%s",
	"shared":       "stream %s has the slot of %s",
	"idle_name":    "the idle slots have %q, which is no slot%s",
	"idle_live":    "slot %s is idle and belongs to %s",
	"retired_live": "slot %s has blocks of an ended generation and belongs to %s",
	"retired_idle": "slot %s has blocks of an ended generation that no sweep would find%s",
	"lost_slots":   "%s slots are neither in the slot map nor idle%s",
}

// mend compares slot map, streams, idle slots and version in one atomic step.
func (x *shardCheck) mend(ctx context.Context) error {
	keys := []string{x.shard.keys.slots(), x.shard.keys.idle(), x.shard.keys.version(), x.shard.keys.top()}
	args := []any{boolArg(x.repair), len(x.retired)}
	for slot := range x.retired {
		args = append(args, slot)
		for t := range kvcache.Tier(kvcache.NumTiers) {
			keys = append(keys, x.shard.keys.retired(slot, t))
		}
	}
	for range moves {
		slots, err := x.s.write.HGetAll(ctx, x.shard.keys.slots()).Result()
		if err != nil {
			return err
		}
		known := map[string]string{} // worker/rank -> key of its stream
		for w, own := range x.owners {
			if own.stream {
				known[w.String()] = x.shard.keys.stream(w)
			}
		}
		for _, owner := range slots {
			w, err := kvcache.ParseWorkerRank(owner)
			if err != nil || x.broken[x.shard.keys.stream(w)] {
				w = kvcache.WorkerRank{} // nobody's
			}
			known[owner] = x.shard.keys.stream(w)
		}
		keys, args := keys[:len(keys):len(keys)], args[:len(args):len(args)]
		for _, owner := range sortedKeys(known) {
			keys, args = append(keys, known[owner]), append(args, owner)
		}
		v, err := scripts.mend.run(ctx, x.s.write, keys, args...)
		if err != nil {
			return err
		}
		if len(v) < 2 || v[0] == "0" && len(v)%3 != 2 {
			return errShortReply
		}
		if v[0] != "0" {
			continue
		}
		streams, err := strconv.Atoi(v[1])
		if err != nil {
			return fmt.Errorf("reply %q: %w", v[1], ErrCorrupt)
		}
		x.r.Streams += streams
		for i := 2; i < len(v); i += 3 {
			x.r.problem(x.repair, mendKinds[v[i]], v[i+1], v[i+2])
			if w, err := kvcache.ParseWorkerRank(v[i+1]); err == nil && v[i] == "seq" {
				x.restart[w] = true
			}
		}
		return nil
	}
	return errMoved
}

// restarts ends the generation of streams that have lost something: what is missing comes back by replay.
func (x *shardCheck) restarts(ctx context.Context) error {
	defer clear(x.restart)
	for w, lost := range x.restart {
		if !x.repair || !lost {
			continue
		}
		h, err := x.s.write.HGetAll(ctx, x.shard.keys.stream(w)).Result()
		if err != nil {
			return err
		}
		st := Stream{StreamID: StreamID{Pool: x.p.id, WorkerRank: w}, Shard: x.n}
		if st.readHash(h, 0) != nil {
			continue // gone meanwhile
		}
		if _, _, err := x.s.retire(ctx, st, "", "-1", 0); err != nil { // stale: somebody else has begun a new generation, as good
			return err
		}
	}
	return nil
}

// orphans looks at the blocks of worker ranks that have no stream.
func (x *shardCheck) orphans(ctx context.Context) error {
	for w, own := range x.owners {
		if len(own.blocks) == 0 || x.broken[x.shard.keys.stream(w)] {
			continue
		}
		v, err := scripts.orphans.run(ctx, x.s.write, append([]string{x.shard.keys.stream(w)}, own.blocks...), boolArg(x.repair))
		if err != nil {
			return err
		}
		if len(v) != 1 {
			return errShortReply
		}
		if v[0] != "0" {
			x.r.problem(x.repair, "%s has blocks and no stream", w)
		}
	}
	return nil
}
