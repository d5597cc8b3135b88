package store

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// placement compares the workers' shards with where their streams are.
func (c *check) placement(ctx context.Context, k *knownPool, placed map[string]string) error {
	if c.unreadable {
		return nil
	}
	streams, marks := map[string]map[int]bool{}, map[string]bool{}
	note := func(n int, w string) {
		if streams[w] == nil {
			streams[w] = map[int]bool{}
		}
		streams[w][n] = true
	}
	for n, sh := range k.shards {
		m, err := readSlots(ctx, c.s.write, sh.keys)
		if errors.Is(err, ErrCorrupt) && !c.repair {
			return nil // reported already
		} else if err != nil {
			return err
		}
		live, err := c.live(ctx, sh, m.owners)
		if err != nil {
			return err
		}
		for _, w := range live {
			note(n, w.Worker)
		}
		for key, typ := range c.keys {
			if typ != "hash" {
				continue
			}
			if name, ok := strings.CutPrefix(key, string(sh.keys)+":stream:"); ok {
				worker, _, _ := strings.Cut(name, "/")
				marks[worker] = true // live, or removed less than a day ago
			}
		}
	}
	var gone []string
	for _, w := range sortedKeys(placed) {
		n, err := strconv.Atoi(placed[w])
		valid := err == nil && n >= 0 && n < len(k.shards)
		switch at := streams[w]; {
		case valid && at[n] && len(at) == 1:
		case len(at) > 0:
			if err := c.misplaced(ctx, k, w, n, at); err != nil {
				return err
			}
		case !valid || !marks[w]:
			gone = append(gone, w)
		}
		delete(streams, w)
	}
	for _, w := range sortedKeys(streams) {
		now, err := c.s.write.HGet(ctx, placementKey(c.p.id), w).Result()
		if err != nil && err != redis.Nil {
			return err
		}
		if n, err := strconv.Atoi(now); err != nil || !streams[w][n] {
			if err := c.misplaced(ctx, k, w, -1, streams[w]); err != nil {
				return err
			}
		}
	}
	if len(gone) == 0 {
		return nil
	}
	// A registration places the worker before it makes the stream, and may be under way.
	timer := time.NewTimer(min(c.s.opts.WriteTimeout, time.Second))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	now, err := c.scan(ctx)
	if err != nil {
		return err
	}
	for _, w := range gone {
		alive := false
		for key := range now {
			alive = alive || strings.Contains(key, "}:stream:"+w+"/")
		}
		if alive {
			continue
		}
		if c.repair {
			if err := c.s.write.HDel(ctx, placementKey(c.p.id), w).Err(); err != nil {
				return err
			}
		}
		c.r.problem(c.repair, "worker %q is placed on shard %q and has no stream", w, placed[w])
	}
	return nil
}

// listed looks whether the pool is in the list of pools, and whether that has names which nobody can have registered.
func (c *check) listed(ctx context.Context) error {
	names, err := c.s.write.SMembers(ctx, keyPools).Result()
	if err != nil && !redis.HasErrorPrefix(err, "WRONGTYPE") {
		return err
	}
	if err != nil {
		if c.repair {
			if err := c.s.write.Unlink(ctx, keyPools).Err(); err != nil {
				return err
			}
		}
		c.r.problem(c.repair, "key %s is no set", keyPools)
	}
	for _, name := range names {
		if _, err := kvcache.ParsePoolID(name); err == nil {
			continue
		}
		if c.repair {
			if err := c.s.write.SRem(ctx, keyPools, name).Err(); err != nil {
				return err
			}
		}
		c.r.problem(c.repair, "the list of pools has %q, which is none", name)
	}
	if slices.Contains(names, c.p.id.String()) {
		return nil
	}
	if c.repair {
		if err := c.s.write.SAdd(ctx, keyPools, c.p.id.String()).Err(); err != nil {
			return err
		}
	}
	c.r.problem(c.repair, "the pool is missing from the list of pools")
	return nil
}

// live are those of some worker ranks that have a stream.
func (c *check) live(ctx context.Context, sh *shard, owners []kvcache.WorkerRank) ([]kvcache.WorkerRank, error) {
	pipe := c.s.write.Pipeline()
	var asked []kvcache.WorkerRank
	var gens []*redis.StringCmd
	for _, w := range owners {
		if key := sh.keys.stream(w); w.Worker != "" && (c.repair || c.keys[key] == "hash") {
			asked, gens = append(asked, w), append(gens, pipe.HGet(ctx, key, "gen"))
		}
	}
	if len(asked) == 0 {
		return nil, nil
	}
	if _, err := pipe.Exec(ctx); err != nil && err != redis.Nil {
		return nil, err
	}
	var out []kvcache.WorkerRank
	for i, g := range gens {
		if g.Err() == nil {
			out = append(out, asked[i])
		}
	}
	return out, nil
}

// misplaced puts a worker's place right: where it has streams, in one shard only.
func (c *check) misplaced(ctx context.Context, k *knownPool, w string, n int, at map[int]bool) error {
	if !at[n] {
		for n = range k.shards {
			if at[n] {
				break
			}
		}
		if c.repair {
			if err := c.s.write.HSet(ctx, placementKey(c.p.id), w, strconv.Itoa(n)).Err(); err != nil {
				return err
			}
		}
		c.r.problem(c.repair, "worker %s is not placed on shard %d, where it has streams", w, n)
	}
	for other := range k.shards {
		if other == n || !at[other] {
			continue
		}
		streams, err := c.s.shardStreams(ctx, c.p.id, k, other)
		if err != nil {
			return err
		}
		for _, st := range streams {
			if st.Worker != w {
				continue
			}
			if c.repair {
				if _, _, err := c.s.retire(ctx, st, "", "", 0); err != nil {
					return err
				}
			}
			c.r.problem(c.repair, "worker %s is placed on shard %d and has stream %s on shard %d", w, n, st.WorkerRank, other)
		}
	}
	return nil
}
