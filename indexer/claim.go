package indexer

import (
	"context"
	"time"

	"github.com/warmroute/warmroute/store"
)

// claim is a number that the stream is said to have reached, by a replay or by the watermark in Redis, and that its live socket
// has not shown yet. Messages up to it are taken for applied. If it is false, because a publisher has lied, or its answer was
// mangled on the way, the live stream must not wait for it.
type claim struct {
	seq int64
	// doubted is when the first live message arrived that was below it: one that is true is reached soon after.
	doubted time.Time
}

// claimed notes a claim, unless an older one is still open.
func (s *stream) claimed(seq int64) {
	if seq > s.cur.live && s.claim.seq <= s.cur.live {
		s.claim = claim{seq: seq}
	}
}

// contradicted says whether a live message that arrived at that time proves the open claim false.
func (s *stream) contradicted(seq int64, arrived time.Time) bool {
	switch {
	case arrived.IsZero() || seq >= s.claim.seq || s.claim.seq <= s.cur.live:
		return false
	case s.claim.doubted.IsZero():
		s.claim.doubted = arrived
		return false
	}
	return arrived.Sub(s.claim.doubted) > s.ix.timing.claim
}

// believeLive begins a generation just before a live message that a false claim, or a replay of another engine process, had made a
// duplicate.
func (s *stream) believeLive(ctx context.Context, seq int64, why string) error {
	s.log.Warn(why+", its blocks leave the index", "claimed", s.claim.seq, "live", seq)
	s.drop()
	s.cur.forget()
	s.tr.orphans.clear()
	s.reset(resetClaim)
	s.noReplayBefore = time.Now().Add(s.ix.timing.replayHold) // who lied would do it again
	for gen := s.st.Generation; s.st.Generation == gen && gen != 0; {
		var st store.Stream
		err := s.try(ctx, func() (err error) {
			st, _, err = s.ix.opts.Store.Restart(ctx, s.st, seq-1, 0)
			return err
		})
		if err != nil {
			return s.again(err)
		}
		if st.Generation == 0 {
			return s.reread(ctx) // which says that it is gone
		}
		s.saw(st)
	}
	s.cur.reached(contentOf(s.st))
	return nil
}
