package indexer

import (
	"context"
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
		streams := map[kvcache.PoolID][]*stream{}
		for _, s := range ix.all() {
			streams[s.id.Pool] = append(streams[s.id.Pool], s)
		}
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
			if away[pool] || fell(seen[pool], now) {
				for _, s := range of {
					s.nudge()
				}
			}
			seen[pool], away[pool] = now, false
		}
		if reached && time.Since(looked) > settingsInterval {
			looked = time.Now()
			ix.lookAtSettings(ctx)
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
	if err := s.reread(ctx); err != nil {
		return err
	}
	if s.st.Seq < s.cur.done {
		s.log.Warn("Redis went back to an older state, joining the stream again", "watermark", s.st.Seq, "applied", s.cur.done)
		return errAgain
	}
	return nil
}
