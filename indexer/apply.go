package indexer

import (
	"context"
	"errors"
	"time"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/store"
)

// register makes the stream known to the index, or finds it there. Without a block size, its own or the pool's, that has
// to wait for the first event that names one.
func (s *stream) register(ctx context.Context) error {
	r := s.reg
	r.BlockSize = s.tr.size
	if r.BlockSize == 0 {
		err := s.try(ctx, func() error {
			c, ok, err := s.ix.opts.Store.PoolConfig(ctx, s.id.Pool)
			if ok {
				r.BlockSize = c.BlockSize
			}
			return err
		})
		if err != nil || r.BlockSize == 0 {
			return err
		}
	}
	var st store.Stream
	put := s.ix.opts.Store.Register
	if s.known {
		put = s.ix.opts.Store.Follow // nobody asks for it now: it may have been unregistered meanwhile
	}
	err := s.try(ctx, func() (err error) {
		st, _, err = put(ctx, s.id, r)
		return err
	})
	var conflict *store.ConflictError
	if errors.As(err, &conflict) {
		s.tr.size = r.BlockSize
		known := false
		s.update(func(v *Status) { known, v.Error = v.Error == conflict.Error(), conflict.Error() })
		if !known {
			s.log.Error("not indexed: the pool has another block size", "error", conflict)
		}
		return nil // tried again with each lease
	}
	if err != nil {
		return err
	}
	s.known = true
	s.tr.size = r.BlockSize
	if s.older(st) {
		s.log.Warn("Redis went back to an older generation, the stream's blocks leave the index", "generation", st.Generation, "seen", s.newest)
		s.newest = 0 // once is enough, wherever Redis has its clock
		s.saw(st)
		s.reset(resetOlder)
		if err := s.retire(ctx, nothing, func(_ store.Stream, renewed bool) bool { return renewed }); err != nil {
			return err
		}
		st = s.st
	}
	s.saw(st)
	if s.cur.done == -1 {
		s.cur.reached(contentOf(st))
		s.tr.resumed = st.Seq >= 0
	}
	s.update(func(v *Status) {
		v.Registered, v.BlockSize = true, r.BlockSize
		if v.Connected {
			v.Error = ""
		}
	})
	return nil
}

// moved says whether somebody, by another indexer, has registered the worker anew at another place or with other settings. What
// this indexer was configured with counts more, and so does what it was asked for and has not written yet.
func (s *stream) moved(to store.Registration) bool {
	now := s.reg
	now.BlockSize = to.BlockSize
	registered := false
	s.update(func(v *Status) { registered = v.Registered })
	return !s.configured && registered && to.Endpoint != "" && now != to
}

// saw takes over the stream's state in Redis.
func (s *stream) saw(st store.Stream) {
	s.st, s.newest = st, max(s.newest, st.Generation)
	if st.Seq < s.claim.seq {
		s.claim = claim{seq: -1}
	}
	s.claimed(st.Seq)
	s.update(func(v *Status) { v.Generation, v.Watermark, v.shard = st.Generation, st.Seq, st.Shard })
}

// older says whether a state of Redis is from before one that Redis has shown. Its watermark may be that of an engine
// process that is over, so nothing in it can be compared with what was applied since.
func (s *stream) older(st store.Stream) bool { return st.Generation != 0 && st.Generation < s.newest }

// reread reads the stream's state from Redis.
func (s *stream) reread(ctx context.Context) error {
	if s.st.Generation == 0 {
		return nil
	}
	return s.try(ctx, func() error {
		st, ok, err := s.ix.opts.Store.Stream(ctx, s.id)
		if err != nil {
			return err
		}
		if !ok {
			return errGone // for want of data, or because it was unregistered: registering tells
		}
		if s.older(st) {
			return errGone // registering deals with it
		}
		if s.reg.Endpoint != "" && s.st.Epoch != 0 && st.Epoch != s.st.Epoch {
			return errReplaced
		}
		s.saw(st)
		return nil
	})
}

// catchUp goes on from what another indexer has applied.
func (s *stream) catchUp() {
	if s.st.Seq > s.cur.done {
		s.tr.orphans.clear() // whatever was removed meanwhile
		s.cur.reached(contentOf(s.st))
	} else if s.st.Seq == s.cur.done && s.cur.at(s.st.Seq).digest == 0 {
		s.cur.note(contentOf(s.st)) // given up here, applied by another indexer
	}
}

// errGone: Redis does not know the stream. Beginning again registers it.
var errGone = &rejoin{"the index does not know the stream"}

// errReplaced: another indexer has seen the engine begin again. What this one knows, and what waits in its buffer, may be of
// the process that is over; only a new connection tells.
var errReplaced = &rejoin{"another indexer has seen the engine restart"}

// errMixed: a replay may be of another engine process than the live messages that wait.
var errMixed = &rejoin{"the engine's connection ended during a replay"}

// errBehind: Redis has less of the stream than was applied.
var errBehind = &rejoin{"Redis is behind what was applied"}

// rejoin is an errAgain that no repetition of the same call puts right.
type rejoin struct{ why string }

func (r *rejoin) Error() string        { return r.why }
func (r *rejoin) Is(target error) bool { return target == errAgain || target == store.ErrInvalid }

// contentOf is the newest message of which Redis has the stream.
func contentOf(st store.Stream) content { return content{st.Seq, st.Digest} }

// retire ends the stream's generation and continues after a message, nothing for a new engine process. Where another indexer was faster, over
// says whether the state now, renewed being that of another generation, is as good.
func (s *stream) retire(ctx context.Context, after content, over func(st store.Stream, renewed bool) bool) error {
	gen := s.st.Generation
	for s.st.Generation != 0 {
		var st store.Stream
		var o store.Outcome
		err := s.try(ctx, func() (err error) {
			st, o, err = s.ix.opts.Store.Restart(ctx, s.st, after.seq, after.digest)
			return err
		})
		if err != nil {
			return s.again(err)
		}
		if st.Generation == 0 || s.older(st) {
			return s.reread(ctx) // which says that it is gone
		}
		s.saw(st)
		if o == store.Applied || over(st, st.Generation > gen) {
			return nil
		}
		if after.seq >= 0 && st.Seq > after.seq {
			after = contentOf(st)
		}
	}
	return nil
}

// again makes of an impossible request, which a Redis that was emptied causes, a new beginning.
func (s *stream) again(err error) error {
	if errors.Is(err, store.ErrInvalid) && !errors.Is(err, errAgain) {
		s.log.Warn("the index refuses the stream, registering it again", "error", err)
		return errGone
	}
	return err
}

// flush applies the batch that waits.
func (s *stream) flush(ctx context.Context) error {
	for s.batch.Messages() > 0 {
		var o store.Outcome
		var seq int64
		err := s.try(ctx, func() (err error) {
			o, seq, err = s.ix.opts.Store.Apply(ctx, s.st, &s.batch)
			return err
		})
		if err != nil {
			return s.again(err)
		}
		switch o {
		case store.Applied:
			s.countPending(resultApplied)
			s.applied(seq)
			s.drop()
		case store.Duplicate:
			s.countPending(resultDuplicate)
			s.applied(seq)
			s.drop()
		case store.Gap:
			s.st.Seq = seq
			if err := s.behind(ctx); err != nil {
				return err
			}
		case store.Stale:
			if err := s.stale(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// applied notes that the index has the stream up to seq.
func (s *stream) applied(seq int64) {
	s.st.Seq = seq
	s.claimed(seq)
	lag := 0.0
	if p := s.pending; p.ts > 0 {
		now := time.Now()
		lag = max(0, float64(now.UnixNano())/1e9-p.ts)
		s.ix.metrics.observeLag(p.ts, now)
	}
	stored := s.pending.tally[wire.Stored] > 0
	s.update(func(v *Status) {
		v.Watermark, v.LagSeconds = seq, lag
		v.Trusted = v.Trusted || stored
	})
}

// behind deals with a watermark in Redis that is below what was applied: Redis has lost writes, or the stream was registered
// late. What is missing comes by replay, for which the stream is joined again; else what came before leaves the index.
func (s *stream) behind(ctx context.Context) error {
	first, have := s.batch.First(), s.st.Seq
	if have >= 0 {
		s.gap(gapStore)
	} else if first == 0 { // nothing is missing: what the index holds, of a dump that was loaded, is from before the first message
		s.log.Info("blocks from before the engine's first message leave the index")
		if err := s.retire(ctx, nothing, func(_ store.Stream, renewed bool) bool { return renewed }); err != nil {
			return err
		}
	}
	if s.reg.ReplayEndpoint != "" {
		return errBehind
	}
	if have >= 0 {
		s.reset(resetGap)
	}
	return s.retire(ctx, s.cur.at(first-1), func(st store.Stream, _ bool) bool { return st.Seq >= first-1 })
}

// stale deals with a generation that somebody else has ended.
func (s *stream) stale(ctx context.Context) error {
	if err := s.reread(ctx); err != nil {
		return err
	}
	switch {
	case s.st.Seq >= s.batch.Last():
		s.countPending(resultStale)
		s.drop()
		s.catchUp()
	case s.st.Seq+1 < s.batch.First():
		// What waits may be of an engine process that is over: the buffer too. Only a new connection can tell.
		s.countPending(resultStale)
		s.drop()
		s.log.Info("another indexer has restarted the stream, joining it again", "watermark", s.st.Seq)
		return errAgain
	}
	return nil
}
