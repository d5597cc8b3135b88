package indexer

import (
	"cmp"
	"context"
	"errors"
	"time"
)

// join begins a connection: first what the engine still has of the past, then what arrives. A publisher discards
// everything until it has the subscription, so without the replay the messages in between would be missing.
func (s *stream) join(ctx context.Context, c *connection) error {
	if err := s.flush(ctx); err != nil {
		return err
	}
	if err := s.reread(ctx); err != nil {
		return err
	}
	s.catchUp()
	newest := c.base
	if !c.known {
		newest = s.st.Seq
	}
	s.cur.connected(newest)
	s.lease, s.sized = lease{}, false
	s.noReplayBefore = time.Time{} // the replay that failed may have been another process's
	if !s.canReplay() {
		if c.reborn && s.cur.done >= 0 { // its numbers may follow on the old ones by chance
			return s.restarted(ctx, s.cur.done)
		}
		return nil // the first live message tells
	}
	wait := time.NewTimer(time.Until(c.since.Add(s.ix.timing.joinDelay)))
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if s.cur.done >= 0 && s.cur.at(s.cur.done).digest == 0 {
		// Somebody has begun a generation after that message and applied nothing to it yet, and may never come to it: the generation
		// holds nothing, and nobody can tell whether the engine has begun again since.
		s.log.Info("the index holds nothing of the stream, all of it is replayed", "watermark", s.cur.done)
		if err := s.anew(ctx, s.cur.done); err != nil {
			return err
		}
		return s.refill(ctx, replayJoin)
	}
	// From the last message that was applied, not the one after: if it is another one now, or is not there, the engine
	// has restarted, however far it has come since.
	r, err := s.fetch(ctx, s.cur.done, replayJoin)
	if ctx.Err() != nil || errors.Is(err, errAgain) {
		return cmp.Or(context.Cause(ctx), err)
	}
	if s.cur.done >= 0 && (r.complete && len(r.messages) == 0 || len(r.messages) > 0 && !s.cur.same(r.messages[0])) {
		if err := s.restarted(ctx, s.cur.done); err != nil {
			return err
		}
		return s.refill(ctx, replayRestart)
	}
	if err := s.feed(ctx, r.messages); err != nil {
		return err
	}
	if err == nil && r.partial {
		return s.refill(ctx, replayJoin)
	}
	return nil
}

// refill replays what comes after the last message that was translated.
func (s *stream) refill(ctx context.Context, reason string) error {
	for s.canReplay() {
		r, err := s.fetch(ctx, s.cur.done+1, reason)
		if ctx.Err() != nil || errors.Is(err, errAgain) {
			return cmp.Or(context.Cause(ctx), err)
		}
		if err := s.feed(ctx, r.messages); err != nil {
			return err
		}
		if err != nil || !r.partial {
			return nil
		}
	}
	return nil
}

// feed consumes replayed messages.
func (s *stream) feed(ctx context.Context, messages []message) error {
	outer := s.refilling
	s.refilling = true
	defer func() { s.refilling = outer }()
	for _, m := range messages {
		switch s.cur.place(m.seq) {
		case duplicate:
			continue
		case ahead:
			if !s.cold() {
				s.gap(gapLive)
			}
			if err := s.lost(ctx, m.seq); err != nil {
				return err
			}
			if s.cur.place(m.seq) != inOrder {
				continue // another indexer is further
			}
		}
		if err := s.consume(ctx, m); err != nil {
			return err
		}
		if err := s.flushFull(ctx); err != nil {
			return err
		}
	}
	s.claimed(s.cur.done)
	return nil
}
