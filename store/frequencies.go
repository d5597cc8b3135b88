package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Frequencies are counted in Redis, in hashes of a quarter of the window each, by Redis's clock: so every frontend gets the same.
const (
	usesRing  = 5       // four quarters, and the next one to be overwritten
	usesStep  = 1000    // blocks of one call
	usesLimit = 1 << 18 // blocks that one quarter counts: bounds the memory at about 100 MB in all
)

// uses is one hash of the ring.
func (k shardKeys) uses(i int) string { return string(k) + ":uses:" + strconv.Itoa(i) }

// countUses counts a use of the blocks, which somebody holds, and returns how often each was used before within the window.
func (s *Store) countUses(ctx context.Context, sh *shard, fields []string) ([]int, error) {
	if err := sh.link.check(); err != nil {
		return nil, err
	}
	keys := make([]string, usesRing)
	for i := range keys {
		keys[i] = sh.keys.uses(i)
	}
	width := max(s.opts.FrequencyWindow/4/time.Millisecond, 1)
	out := make([]int, 0, len(fields))
	for from := 0; from < len(fields); from += usesStep {
		args := []any{int64(width), usesLimit}
		for i := from; i < min(from+usesStep, len(fields)); i++ {
			args = append(args, &fields[i])
		}
		v, err := scripts.uses.run(ctx, s.read, keys, args...)
		if err == nil && len(v) != len(args)-2 {
			err = errShortReply
		}
		if err != nil {
			return nil, err
		}
		for _, text := range v {
			n, err := strconv.Atoi(text)
			if err != nil {
				return nil, fmt.Errorf("uses %q: %w", text, ErrCorrupt)
			}
			out = append(out, n)
		}
	}
	return out, nil
}

// frequencies fills in how often the blocks of the longest overlap were used. They are no reason to fail a lookup, nor to take
// the link down: a Redis that refuses writes can be read.
func (s *Store) frequencies(ctx context.Context, k *knownPool, fields []string, depth int) []int {
	if s.opts.FrequencyWindow <= 0 || depth == 0 {
		return nil
	}
	uses, err := s.countUses(ctx, k.shards[0], fields[:min(depth, len(fields))])
	if err != nil && !errors.Is(err, ErrUnavailable) { // not classified yet, so this is not the link that is down
		_ = s.writeFailed(context.WithoutCancel(ctx), err)
	}
	return uses
}
