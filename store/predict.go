package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/warmroute/warmroute/kvcache"
)

// PredictOptions says what becomes of predictions.
type PredictOptions struct {
	// TTL is how long a prediction counts after its last use. Default 120 s.
	TTL time.Duration
	// MaxBlocks bounds the predictions of one worker rank: above it the oldest go until 80 % are left. Default 65,536.
	MaxBlocks int
	// Generation is the stream's generation that was routed to. Default: the one that is now.
	Generation int64
	// Register makes the worker rank's stream where there is none, for engines without events; it has no Endpoint,
	// so that no indexer dials it. A worker that was removed on purpose stays removed. Default: a worker rank
	// without a stream gets no predictions.
	Register *Registration
}

// Sizes of one call of the script: half a millisecond of Redis's time each.
const (
	predictStep = 256 // blocks recorded
	forgetStep  = 256 // blocks forgotten
	forgetRanks = 64  // worker ranks looked at
)

// Predict records that a prompt with these blocks was routed to a worker rank: until they expire, or until the engine's own events say
// better, the rank is credited with them in [kvcache.Overlap].Any, and in nothing else. Stale means that the worker
// rank has no such stream, and nothing is recorded. Using blocks again renews them; blocks that the
// rank is known to hold on the device are left out.
//
// It is not meant for the way of a request, but does no harm next to it: while the link is down it returns at once; it waits at
// most WriteTimeout; more than half of PoolSize calls at a time return at once with [ReasonPoolExhausted]. Its failures do not take
// the link down: a Redis that refuses writes can still be read. What a failed call has recorded stays, and expires.
func (s *Store) Predict(ctx context.Context, id kvcache.PoolID, w kvcache.WorkerRank, blocks []kvcache.BlockHash, o PredictOptions) (Outcome, error) {
	if err := errors.Join(id.Validate(), w.Validate()); err != nil {
		return 0, fmt.Errorf("predict: %w: %w", err, ErrInvalid)
	}
	setDefault(&o.TTL, 120*time.Second)
	if o.MaxBlocks <= 0 {
		o.MaxBlocks = 1 << 16
	}
	select {
	case s.predicting <- struct{}{}:
		defer s.predicting.leave()
	default:
		s.metrics.predictions.WithLabelValues("dropped").Inc()
		return 0, overload(errors.New("predict: too many at a time"))
	}
	bounded, cancel := s.bound(ctx)
	defer cancel()
	outcome, err := s.predict(bounded, StreamID{Pool: id, WorkerRank: w}, hexFields(blocks), o)
	switch {
	case err != nil:
		s.metrics.predictions.WithLabelValues("failed").Inc()
		return 0, s.writeFailed(ctx, fmt.Errorf("predict: %w", err))
	case outcome == Stale:
		s.metrics.predictions.WithLabelValues("stale").Inc()
	default:
		s.metrics.predictions.WithLabelValues("recorded").Inc()
	}
	return outcome, nil
}

func (s *Store) predict(ctx context.Context, id StreamID, fields []string, o PredictOptions) (Outcome, error) {
	sh, err := s.shardOf(ctx, id)
	if err != nil {
		return 0, err
	}
	outcome := Stale
	if sh != nil {
		if outcome, err = s.record(ctx, sh, id.WorkerRank, fields, o); err != nil {
			return 0, err
		}
	}
	if outcome == Applied || o.Register == nil || o.Generation != 0 {
		return outcome, nil
	}
	r := *o.Register
	r.Endpoint, r.ReplayEndpoint = "", ""
	st, _, err := s.register(ctx, id, r, "1")
	if errors.Is(err, ErrRemoved) {
		return Stale, nil
	}
	if err == nil {
		sh, err = s.shard(ctx, st)
	}
	if err != nil || sh == nil {
		return Stale, err
	}
	return s.record(ctx, sh, id.WorkerRank, fields, o)
}

// shardOf is a worker's shard, from what this process has read before if possible; nil where it has none.
func (s *Store) shardOf(ctx context.Context, id StreamID) (*shard, error) {
	p := s.pool(id.Pool)
	if err := p.link.check(); err != nil {
		return nil, err
	}
	k, err := p.load(ctx, s.write)
	if err != nil || k == nil {
		return nil, err
	}
	sh := k.shards[0]
	if len(k.shards) > 1 {
		if sh = k.find(id.WorkerRank); sh == nil {
			k, n, err := s.locate(ctx, id)
			if err != nil || k == nil {
				return nil, err
			}
			sh = k.shards[n]
		}
	}
	return sh, sh.link.check()
}

// find is the shard whose slot map, as it was read last, has a worker rank.
func (k *knownPool) find(w kvcache.WorkerRank) *shard {
	for _, sh := range k.shards {
		for _, owner := range sh.slots.Load().owners {
			if owner == w {
				return sh
			}
		}
	}
	return nil
}

// record writes the prompt's blocks step by step, so that Redis is never busy for long, and prunes. It begins with the last
// blocks, because what is written later expires later, and the first ones have to last longest.
func (s *Store) record(ctx context.Context, sh *shard, w kvcache.WorkerRank, fields []string, o PredictOptions) (Outcome, error) {
	gen := ""
	if o.Generation != 0 {
		gen = strconv.FormatInt(o.Generation, 10)
	}
	keys := []string{sh.keys.holders(), sh.keys.stream(w), sh.keys.blocks(w, kvcache.Predicted)}
	limit, target := o.MaxBlocks, max(o.MaxBlocks*4/5, 1)
	for to, more := len(fields), false; to > 0 || more; {
		from := max(to-predictStep, 0)
		args := []any{gen, max(o.TTL.Milliseconds(), 1), limit, target, forgetStep, from}
		for i := from; i < to; i++ {
			args = append(args, &fields[i])
		}
		r, err := s.runPredict(ctx, keys, args)
		if err != nil {
			return 0, err
		}
		if r.code != 0 {
			return Stale, nil
		}
		if to, more = from, r.more; more {
			limit = target // it was too many: go on until the target
		}
	}
	return Applied, nil
}

// predictReply is what predict.lua returns.
type predictReply struct {
	code, forgotten int
	more            bool
}

func (s *Store) runPredict(ctx context.Context, keys []string, args []any) (r predictReply, err error) {
	v, err := scripts.predict.run(ctx, s.write, keys, args...)
	if err != nil {
		return r, err
	}
	if len(v) != 3 {
		return r, errShortReply
	}
	var err1, err2 error
	r.code, err1 = strconv.Atoi(v[0])
	r.forgotten, err2 = strconv.Atoi(v[1])
	r.more = v[2] == "1"
	if err := errors.Join(err1, err2); err != nil {
		return r, fmt.Errorf("reply %q: %w", v, ErrCorrupt)
	}
	return r, nil
}

// forget takes expired predictions of a shard out of the index, a bounded number of them.
func (s *Store) forget(ctx context.Context, sh *shard) (forgotten int, more bool, err error) {
	m, err := readSlots(ctx, s.write, sh.keys)
	if err != nil {
		return 0, false, err
	}
	keys := []string{sh.keys.holders()}
	for i, w := range m.owners {
		if w.Worker != "" {
			keys = append(keys, sh.keys.stream(w), sh.keys.blocks(w, kvcache.Predicted))
		}
		if len(keys) > 1 && (len(keys) > 2*forgetRanks || i == len(m.owners)-1) {
			r, err := s.runPredict(ctx, keys, []any{"", 1, "", "", forgetStep, 0})
			forgotten += r.forgotten
			if err != nil || r.more {
				return forgotten, r.more, err
			}
			keys = keys[:1]
		}
	}
	return forgotten, false, nil
}
