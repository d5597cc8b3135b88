package indexer

import (
	"context"
	"slices"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// settingsInterval is the time between two looks at Redis's settings.
const settingsInterval = 5 * time.Minute

// watch notices that Redis is back after it was away, was emptied, or went back to older data, and has every stream
// concerned compare itself with it: a stream whose engine is idle would not notice before its next event.
func (ix *Indexer) watch(ctx context.Context) {
	tick := time.NewTicker(ix.opts.WatchInterval)
	defer tick.Stop()
	seen := map[kvcache.PoolID][]int64{}
	away := map[kvcache.PoolID]bool{}
	var looked time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		streams := ix.byPool()
		for pool := range seen {
			if streams[pool] == nil {
				delete(seen, pool)
				delete(away, pool)
			}
		}
		reached := false
		for pool, of := range streams {
			now, err := ix.opts.Store.Versions(ctx, pool)
			if err != nil {
				away[pool] = true
				continue
			}
			reached = true
			switch {
			case away[pool] || fell(seen[pool], now) || older(of, now):
				for _, s := range of {
					s.nudge()
				}
			case seen[pool] != nil && !slices.Equal(seen[pool], now):
				// Emptied, perhaps, and one of the streams has registered again before this look.
				applied := watermarks(of)
				list, err := ix.opts.Store.Streams(ctx, pool)
				if err != nil {
					away[pool] = true
					continue
				}
				nudgeBehind(applied, list)
			}
			seen[pool], away[pool] = now, false
		}
		if reached && time.Since(looked) > settingsInterval {
			looked = time.Now()
			ix.lookAtSettings(ctx)
		}
	}
}

// byPool lists the streams that are followed.
func (ix *Indexer) byPool() map[kvcache.PoolID][]*stream {
	streams := map[kvcache.PoolID][]*stream{}
	for _, s := range ix.all() {
		streams[s.id.Pool] = append(streams[s.id.Pool], s)
	}
	return streams
}

// older says whether a stream has seen a generation that is newer than its shard's version, which is impossible unless Redis
// went back since the last look.
func older(of []*stream, versions []int64) bool {
	for _, s := range of {
		newer := false
		s.update(func(v *Status) { newer = v.shard < len(versions) && v.Generation > versions[v.shard] })
		if newer {
			return true
		}
	}
	return false
}

// watermarks are what some streams have applied, by their own account.
func watermarks(of []*stream) map[*stream]int64 {
	applied := make(map[*stream]int64, len(of))
	for _, s := range of {
		s.update(func(v *Status) { applied[s] = v.Watermark })
	}
	return applied
}

// nudgeBehind nudges the streams of which Redis, as listed afterwards, knows nothing or less than they had applied.
func nudgeBehind(applied map[*stream]int64, list []store.Stream) {
	known := make(map[kvcache.WorkerRank]int64, len(list))
	for _, st := range list {
		known[st.WorkerRank] = st.Seq
	}
	for s, seq := range applied {
		if now, ok := known[s.id.WorkerRank]; !ok || now < seq {
			s.nudge()
		}
	}
}

// fell says whether any shard's version is lower than before, or the pool is not what it was.
func fell(before, now []int64) bool {
	if len(now) < len(before) {
		return true
	}
	for i := range before {
		if now[i] < before[i] {
			return true
		}
	}
	return false
}

// lookAtSettings complains about settings of Redis that would harm the index.
func (ix *Indexer) lookAtSettings(ctx context.Context) {
	problems, err := ix.opts.Store.Settings(ctx)
	if err != nil {
		ix.opts.Logger.Debug("settings of Redis not read", "reason", store.Reason(err), "error", err)
		return
	}
	ix.metrics.settings.Set(float64(len(problems)))
	for _, p := range problems {
		ix.opts.Logger.Error("Redis is set up to lose the index", "problem", p)
	}
}

// nudge has the stream's worker compare itself with Redis soon.
func (s *stream) nudge() {
	select {
	case s.nudged <- struct{}{}:
	default: // it will anyway
	}
}

// compare begins the stream anew where Redis knows less of it than has been applied.
func (s *stream) compare(ctx context.Context) error {
	if s.st.Generation == 0 {
		return s.register(ctx)
	}
	alive, _ := s.alive(time.Now())
	if alive && s.lease.expired {
		return s.revive()
	}
	if err := s.reread(ctx); err != nil {
		return err
	}
	if s.st.Seq < s.cur.done {
		if !alive { // another indexer has ended the lease; nothing is to be had from the engine
			s.expire(s.st)
			return nil
		}
		s.log.Warn("Redis went back to an older state, joining the stream again", "watermark", s.st.Seq, "applied", s.cur.done)
		return errAgain
	}
	return nil
}
