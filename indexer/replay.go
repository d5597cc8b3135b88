package indexer

import (
	"context"
	"errors"
	"time"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/indexer/zmtp"
)

const (
	replayTotal    = 2 * time.Minute
	replayAttempts = 3 // in a row without progress
)

// message is one batch of a stream, live or replayed.
type message struct {
	seq     int64
	payload []byte
	digest  uint64 // of the payload
}

func newMessage(seq int64, payload []byte) message { return message{seq, payload, digest(payload)} }

func (m message) content() content { return content{m.seq, m.digest} }

// replayed is the answer to a replay.
type replayed struct {
	messages []message // ascending; a hole in them is permanent
	complete bool      // the publisher has no more
	partial  bool      // there is more, but the memory for one replay is used up
}

// session is one request on a connection of its own: what came, ascending, and whether END did.
type session func(ctx context.Context, start int64) (got []message, end bool, err error)

// assemble asks until there is a contiguous answer from start on. Publishers drop silently in the middle of a replay, so
// a hole is asked for again; one that is there in two complete answers is taken for permanent. A replay from 0 may
// begin later: the publisher keeps only so much.
func assemble(ctx context.Context, ask session, start int64, maxBytes int, pause time.Duration) (r replayed, err error) {
	ctx, cancel := context.WithTimeout(ctx, replayTotal)
	defer cancel()
	next, bytes, fruitless := start, 0, 0
	doubt := [2]int64{-1, -1} // hole of the last complete answer
	for fruitless < replayAttempts {
		if fruitless > 0 { // a publisher that has only just begun may not answer yet
			if err := sleep(ctx, pause<<(fruitless-1)); err != nil {
				return r, err
			}
		}
		got, end, askErr := ask(ctx, next)
		if ctx.Err() != nil {
			return r, context.Cause(ctx)
		}
		fruitless++
		hole := false
		for _, m := range got {
			if m.seq < next {
				continue
			}
			if m.seq > next && !(start == 0 && len(r.messages) == 0) {
				if now := [2]int64{next, m.seq}; !end || now != doubt {
					if end {
						doubt = now
					}
					hole = true
					break
				}
			}
			r.messages = append(r.messages, m)
			next, fruitless = m.seq+1, 0
			if bytes += len(m.payload) + 64; bytes > maxBytes {
				r.partial = true
				return r, nil
			}
		}
		if end && !hole {
			r.complete = true
			return r, nil
		}
		err = askErr
	}
	if err == nil {
		err = errors.New("replay is incomplete")
	}
	return r, err
}

// fetch replays from start on, and says errAgain where the live connection has ended meanwhile. One call per publisher at a time, which the stream's single worker sees to.
func (s *stream) fetch(ctx context.Context, start int64, reason string) (replayed, error) {
	s.ix.metrics.replays.WithLabelValues(reason).Inc()
	select {
	case s.ix.replaySlots <- struct{}{}:
		defer func() { <-s.ix.replaySlots }()
	case <-ctx.Done():
		return replayed{}, context.Cause(ctx)
	}
	r, err := assemble(ctx, s.replaySession, max(start, 0), s.ix.opts.ReplayBytes, s.ix.timing.replayPause)
	if s.conn != nil && s.conn.ended.Load() {
		return replayed{}, errMixed
	}
	if err != nil {
		s.ix.metrics.replays.WithLabelValues(replayFailed).Inc()
		s.log.Warn("replay failed", "from", start, "got", len(r.messages), "error", err)
		s.noReplayBefore = time.Now().Add(s.ix.timing.replayHold)
	}
	return r, err
}

// canReplay says whether there is a point in asking.
func (s *stream) canReplay() bool {
	return s.reg.ReplayEndpoint != "" && !time.Now().Before(s.noReplayBefore)
}

// replaySession drains one answer at full speed, since publishers drop what is not read in time; decoding comes later.
func (s *stream) replaySession(ctx context.Context, start int64) (got []message, end bool, err error) {
	conn, err := zmtp.Dial(ctx, s.reg.ReplayEndpoint, zmtp.SocketDEALER, s.dialling(s.reg.ReplayEndpoint))
	if err != nil {
		return nil, false, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	if err := conn.Send(wire.ReplayRequest(uint64(start))...); err != nil {
		return nil, false, err
	}
	bytes, last := 0, start-1
	// Only what brings the replay on may prolong it: a publisher that repeats itself would hold it for ever.
	prolong := func() error { return conn.SetReadDeadline(time.Now().Add(s.ix.timing.replaySilence)) }
	if err := prolong(); err != nil {
		return nil, false, err
	}
	for bytes <= s.ix.opts.ReplayBytes {
		frames, err := conn.Recv()
		if err != nil {
			return got, false, err
		}
		r, err := wire.ParseReplay(frames)
		if err != nil {
			s.ix.countError(err)
			continue
		}
		if r.Kind == wire.ReplyEnd {
			return got, true, nil
		}
		if r.Seq > maxSeq || int64(r.Seq) <= last {
			continue
		}
		if err := prolong(); err != nil {
			return got, false, err
		}
		last = int64(r.Seq)
		got = append(got, newMessage(last, r.Payload))
		bytes += len(r.Payload) + 64
	}
	return got, false, nil
}
