package indexer

import (
	"context"

	"github.com/warmroute/warmroute/store"
)

// sameClear is how far apart, in seconds by their common clock, the ranks of one engine say that one request has cleared them.
const sameClear = 2

// siblingClear is the news that another rank's engine was cleared, until this rank's worker has dealt with it. It outlives an
// attempt: a clear that is missed is harmful. [stream.mu] protects it.
type siblingClear struct {
	pending bool
	ts      float64 // of the newest such clear; 0 = not known
}

// cleared notes that message seq clears this rank, and tells the worker's other ranks.
func (s *stream) cleared(seq int64, ts float64) {
	s.lastClear = ts
	// The first message of a process says that its cache begins empty, which is no news of other processes.
	if s.ix.opts.ClearedScope != ClearedWorker || seq == 0 {
		return
	}
	for _, o := range s.ix.all() {
		if o == s || o.id.Pool != s.id.Pool || o.id.Worker != s.id.Worker {
			continue
		}
		o.mu.Lock()
		if ts == 0 || o.clears.pending && o.clears.ts == 0 {
			o.clears = siblingClear{pending: true}
		} else {
			o.clears = siblingClear{true, max(ts, o.clears.ts)}
		}
		in := o.in
		o.mu.Unlock()
		in.wake()
	}
}

// clearedByOther clears this rank because the engine of another one said so, unless this rank has said so itself: then what it
// has stored since must stay.
func (s *stream) clearedByOther(ctx context.Context) error {
	s.mu.Lock()
	c := s.clears
	if s.st.Generation != 0 {
		s.clears = siblingClear{}
	}
	s.mu.Unlock()
	if !c.pending || s.st.Generation == 0 || c.ts > 0 && s.lastClear > 0 && c.ts-s.lastClear < sameClear {
		return nil
	}
	err := s.flush(ctx)
	if err == nil {
		s.tr.orphans.clear()
		s.reset(resetClear)
		err = s.retire(ctx, contentOf(s.st), func(_ store.Stream, renewed bool) bool { return renewed })
	}
	if err != nil {
		s.mu.Lock()
		s.clears = c
		s.mu.Unlock()
	}
	return err
}
