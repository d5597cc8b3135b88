package indexer

import (
	"context"
	"fmt"
	"time"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// arrive handles one message of the live socket.
func (s *stream) arrive(ctx context.Context, a arrival) error {
	if a.conn != s.conn {
		s.conn = a.conn
		if err := s.join(ctx, a.conn); err != nil {
			return err
		}
	}
	if a.frames == nil {
		return nil
	}
	m, err := wire.ParseLive(a.frames)
	if err != nil {
		s.ix.countError(err)
		return nil
	}
	if m.Seq > maxSeq {
		s.ix.countError(&wire.Error{Code: wire.SeqLength})
		return nil
	}
	s.update(func(v *Status) { v.LastEvent = time.Now() })
	if s.lease.expired {
		if err := s.revive(); err != nil {
			return err
		}
	}
	s.arrived = a.at
	return s.live(ctx, newMessage(int64(m.Seq), m.Payload))
}

// live runs the sequence machine on one message.
func (s *stream) live(ctx context.Context, m message) error {
	s.current = m.content()
	before, contradicted := s.cur.live, s.contradicted(m.seq, s.arrived)
	v := s.cur.see(m.seq)
	if v == duplicate && contradicted && m.seq > before {
		if err := s.believeLive(ctx, m.seq, "the stream was said to be far ahead of what its live socket brings"); err != nil {
			return err
		}
		v = s.cur.place(m.seq)
	}
	if v == restarted {
		if err := s.restarted(ctx, max(before, s.cur.base)); err != nil {
			return err
		}
		if err := s.refill(ctx, replayRestart); err != nil {
			return err
		}
		v = s.cur.place(m.seq)
	}
	if v == ahead {
		if err := s.closeGap(ctx, m.seq); err != nil {
			return err
		}
		v = s.cur.place(m.seq)
	}
	if v == duplicate && m.seq != before && !s.cur.same(m) {
		if err := s.believeLive(ctx, m.seq, "the stream's replay is of another engine process than its live socket"); err != nil {
			return err
		}
		v = s.cur.place(m.seq)
	}
	if v == duplicate {
		s.ix.metrics.event(wire.Unknown, resultDuplicate, 1)
		return nil
	}
	return s.consume(ctx, m)
}

// restarted drops what is known of an engine process that is over; old is a number that it had reached.
func (s *stream) restarted(ctx context.Context, old int64) error {
	s.log.Info("the engine has restarted", "last", old)
	s.reset(resetRestart)
	return s.anew(ctx, old)
}

// anew begins before the first message of the engine process that there is now.
func (s *stream) anew(ctx context.Context, old int64) error {
	s.drop()
	s.tr.forget()
	epoch, other := s.st.Epoch, false
	err := s.retire(ctx, nothing, func(st store.Stream, renewed bool) bool {
		other = renewed && st.Epoch != epoch
		return other && (s.reg.ReplayEndpoint != "" || st.Seq < old)
	})
	if err != nil {
		return err
	}
	if other && s.reg.ReplayEndpoint != "" {
		return errReplaced // which may have been for yet another process: joining compares
	}
	s.cur.renewed(s.st.Seq)
	return nil
}

// closeGap deals with the messages missing before seq: another indexer may have applied them, the engine may replay them, else
// what they may have removed leaves the index.
func (s *stream) closeGap(ctx context.Context, seq int64) error {
	if err := s.flush(ctx); err != nil {
		return err
	}
	if s.cold() && !s.canReplay() {
		return s.skipTo(ctx, seq-1) // nothing is known of this engine, so nothing can be wrong
	}
	if err := s.reread(ctx); err != nil {
		return err
	}
	s.catchUp() // another indexer may have seen them
	if s.cur.place(seq) != ahead {
		return nil
	}
	s.gap(gapLive)
	if err := s.refill(ctx, replayGap); err != nil {
		return err
	}
	if s.cur.place(seq) != ahead {
		return nil
	}
	return s.lost(ctx, seq)
}

// lost gives the messages up that are missing before seq.
func (s *stream) lost(ctx context.Context, seq int64) error {
	if s.cold() {
		return s.skipTo(ctx, seq-1)
	}
	s.log.Warn("lost messages, the stream's blocks leave the index", "from", s.cur.done+1, "to", seq-1)
	s.drop()
	s.tr.orphans.clear()
	s.reset(resetGap)
	return s.skipTo(ctx, seq-1)
}

// cold says whether the index holds nothing of this stream.
func (s *stream) cold() bool { return s.cur.done == -1 && s.st.Seq == -1 }

// skipTo goes on after seq in a generation that holds nothing of what came before.
func (s *stream) skipTo(ctx context.Context, seq int64) error {
	if err := s.retire(ctx, s.cur.at(seq), func(st store.Stream, _ bool) bool { return st.Seq >= seq }); err != nil {
		return err
	}
	s.cur.reached(s.cur.at(seq))
	s.catchUp()
	return nil
}

// emptyBefore begins a generation that holds nothing of what came before message seq.
func (s *stream) emptyBefore(ctx context.Context, seq int64) error {
	if seq == 0 && s.st.Seq == -1 {
		return nil // the present one is as fresh as can be
	}
	return s.retire(ctx, s.cur.at(seq-1), func(st store.Stream, _ bool) bool { return st.Seq >= seq })
}

// consume translates the next message in order.
func (s *stream) consume(ctx context.Context, m message) error {
	s.current = m.content()
	b, err := wire.Decode(m.payload)
	if err != nil {
		s.ix.countError(err)
		s.log.Warn("batch cannot be decoded, the stream's blocks leave the index", "seq", m.seq, "error", err)
		s.drop()
		s.tr.orphans.clear()
		s.reset(resetUndecodable)
		if err := s.emptyBefore(ctx, m.seq); err != nil {
			return err
		}
		b = wire.Batch{} // its number and digest are kept all the same
	}
	if b.Rank != nil && *b.Rank != s.id.Rank {
		s.ix.metrics.errors.WithLabelValues("dp_rank").Inc()
		if !s.misranked {
			s.misranked = true
			s.log.Error("events of another rank than the registered one are dropped", "rank", *b.Rank)
		}
		b.Events, b.Skipped = nil, nil
	}
	if err := s.learnSize(ctx, &b); err != nil {
		return err
	}
	if err := s.lookUp(ctx, s.tr.needs(&b)); err != nil {
		return err
	}
	s.checkSize(&b)
	reset := s.tr.message(&b)
	if b.TSValid && !s.refilling { // what is replayed is old, not late
		s.pending.ts, s.pending.when = b.TS, time.Now()
	}
	ts := b.TS
	if !b.TSValid {
		ts = 0
	}
	if err := s.keep(ctx, m, reset, ts); err != nil {
		return err
	}
	s.cur.finish(m)
	return nil
}

// learnSize takes the block size from the first event that names one, where nothing else did.
func (s *stream) learnSize(ctx context.Context, b *wire.Batch) error {
	if s.tr.size > 0 {
		return nil
	}
	if s.tr.size = s.tr.blockSize(b); s.tr.size == 0 {
		return nil
	}
	return s.register(ctx)
}

// checkSize complains once about an engine whose blocks have another size than the pool's: nothing of it can ever be found.
func (s *stream) checkSize(b *wire.Batch) {
	if s.sized {
		return
	}
	size := s.tr.blockSize(b)
	if size == 0 {
		return
	}
	s.sized = true
	if size == s.tr.size {
		return
	}
	s.log.Error("the engine's blocks have another size than the pool's, nothing of it is indexed: register it with its own size, in a pool of its own",
		"engine_tokens", size, "pool_tokens", s.tr.size)
	s.update(func(v *Status) {
		v.Error = fmt.Sprintf("the engine's blocks have %d tokens, the pool's %d", size, s.tr.size)
	})
}

// lookUp asks the index for engine hashes that are not remembered.
func (s *stream) lookUp(ctx context.Context, hashes []kvcache.EngineHash) error {
	if s.st.Generation == 0 {
		return nil
	}
	for len(hashes) > 0 {
		part := hashes[:min(len(hashes), 1000)]
		hashes = hashes[len(part):]
		err := s.try(ctx, func() error {
			blocks, ok, err := s.ix.opts.Store.Resolve(ctx, s.st, part)
			if err != nil {
				return err
			}
			for i, h := range part {
				if ok[i] {
					s.tr.learn(h, blocks[i])
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// keep adds the translated message to the batch; before that, a reset empties the index of what came before. ts is
// the engine's time of the message, 0 where it is not known.
func (s *stream) keep(ctx context.Context, m message, reset string, ts float64) error {
	seq := m.seq
	if reset == resetClear {
		s.cleared(seq, ts)
	}
	if reset != "" {
		s.drop()
		s.reset(reset)
		if err := s.emptyBefore(ctx, seq); err != nil {
			return err
		}
	}
	if s.st.Generation == 0 {
		return nil // nothing to write to, and no event was indexable
	}
	if s.batch.Messages() == 0 {
		s.pending.since = time.Now()
	}
	s.batch.Message(seq)
	s.batch.Sign(m.digest)
	for _, o := range s.tr.ops {
		switch o.kind {
		case opStore:
			s.batch.Store(o.tier, o.block, o.engine)
		case opAdopt:
			s.batch.Adopt(o.tier, o.block, o.engine)
		case opRemove:
			s.batch.Remove(o.tier, o.engine)
		case opRemoveKnown:
			s.batch.RemoveKnown(o.tier, o.block, o.engine)
		}
	}
	for k, n := range s.tr.tally {
		s.pending.tally[k] += n
	}
	return nil
}

// drop forgets the batch that waits.
func (s *stream) drop() {
	s.batch.Reset()
	s.pending = pending{}
}

// countPending counts the events of the batch by what became of them.
func (s *stream) countPending(result string) {
	for k, n := range s.pending.tally {
		s.ix.metrics.event(wire.Kind(k), result, n)
	}
}

// flushFull applies the batch where it is large or old enough.
func (s *stream) flushFull(ctx context.Context) error {
	if s.batch.Ops() < s.ix.opts.BatchOps && (s.batch.Messages() == 0 || time.Since(s.pending.since) < s.ix.opts.BatchAge) {
		return nil
	}
	return s.flush(ctx)
}
