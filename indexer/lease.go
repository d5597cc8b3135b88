package indexer

import (
	"context"
	"time"

	"github.com/warmroute/warmroute/store"
)

// A stream's lease is its updated_ms in Redis. Whoever sees the worker alive renews it: every indexer that follows it, by a
// write or by a touch. One that sees no life watches whether others do, by their renewals alone, since clocks differ; where
// nobody has renewed for the grace, it ends the generation. The stream goes on, empty, and the first sign of life joins it
// again.

const (
	quietFactor = 10 // graces without POST /events or /register, where that is the only sign of life there can be
	holdFactor  = 20 // graces until blocks go though the fault may be this indexer's
)

// Lease states, the closed list of [Status.Lease].
const (
	leaseAlive   = "alive"
	leaseFailing = "failing" // no sign of life, for less than the grace
	leaseHeld    = "held"    // for longer, but the fault may be this indexer's own
	leaseExpired = "expired" // the blocks have left the index
)

// signs are what shows that the worker lives; [stream.mu] protects them.
type signs struct {
	health   health
	cause    error
	everWell bool // GET /health has succeeded once, so its failure means something
	refused  bool // the publisher's host refuses the connection

	registered time.Time // when somebody asked to follow it, here
}

// lease is what the stream's worker knows of its lease while it sees no sign of life itself.
type lease struct {
	since   time.Time // when nobody else was seen to renew it for the first time; zero while the worker lives
	updated time.Time // as it was then
	expired bool      // the generation was ended
}

// checked notes the outcome of a health check.
func (s *stream) checked(h health, cause error) {
	s.mu.Lock()
	s.signs.health, s.signs.cause = h, cause
	s.signs.everWell = s.signs.everWell || h == healthOK
	back := h == healthOK && s.status.Lease == leaseExpired
	s.mu.Unlock()
	if back {
		s.nudge() // not only when its turn comes
	}
}

// alive says whether there was a sign of life since the last look, and if not, whether somebody said so.
func (s *stream) alive(now time.Time) (alive, certain bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := &s.status
	byEventsOnly := v.URL == "" && v.Endpoint == ""
	patience := s.ix.opts.LeaseInterval
	last := v.LastEvent
	if byEventsOnly {
		patience = quietFactor * s.ix.opts.LeaseGrace
		for _, t := range []time.Time{s.followed, s.signs.registered} {
			if t.After(last) {
				last = t
			}
		}
	}
	switch {
	case !last.IsZero() && now.Sub(last) < patience, s.signs.health == healthOK:
		return true, false
	case v.Connected:
		// An engine whose HTTP server was never well is judged by its connection: the URL may not be for this indexer.
		return v.URL == "" || !s.signs.everWell, s.signs.health == healthBad
	}
	return false, byEventsOnly || s.signs.health == healthBad || v.URL == "" && s.signs.refused
}

// renew keeps the lease of a stream whose worker lives; one that is applied to is renewed by that.
func (s *stream) renew(ctx context.Context) error {
	if s.st.Generation == 0 {
		return s.register(ctx)
	}
	now := time.Now()
	alive, certain := s.alive(now)
	if !alive {
		return s.lapse(ctx, now, certain)
	}
	if s.lease.expired {
		return s.revive()
	}
	s.lease = lease{}
	s.setLease(leaseAlive)
	switch o, err := s.ix.opts.Store.Touch(ctx, s.st); {
	case err != nil && ctx.Err() == nil:
		s.log.Debug("lease not renewed", "error", err)
	case err == nil && o == store.Stale:
		// An idle stream notices here that Redis was emptied, or that another indexer has seen a restart.
		if err := s.reread(ctx); err != nil {
			return err
		}
		if s.st.Seq < s.cur.done {
			return errAgain
		}
	}
	return nil
}

// lapse watches a lease that this indexer cannot renew, and ends the generation when nobody else does.
func (s *stream) lapse(ctx context.Context, now time.Time, certain bool) error {
	st, ok, err := s.ix.opts.Store.Stream(ctx, s.id)
	if err != nil {
		s.lease.since = time.Time{} // others may have renewed it unseen: a full grace from the day Redis is back
		return nil
	}
	if !ok {
		return errGone
	}
	if st.Generation != s.st.Generation && st.Seq < s.cur.done {
		s.expire(st) // by another indexer
		return nil
	}
	if s.lease.expired && st.Seq == -1 {
		return s.leave(ctx, st, now)
	}
	if s.lease.since.IsZero() || !st.Updated.Equal(s.lease.updated) {
		s.lease = lease{since: now, updated: st.Updated}
		s.setLease(leaseFailing)
		return nil
	}
	lapsed := now.Sub(s.lease.since)
	switch {
	case lapsed < s.ix.opts.LeaseGrace:
		s.setLease(leaseFailing)
		return nil
	case lapsed < holdFactor*s.ix.opts.LeaseGrace && suspicion(s.ix.suspicion.Load()).covers(certain):
		s.setLease(leaseHeld)
		return nil
	}
	if alive, _ := s.alive(time.Now()); alive { // since the caller looked, which may be what ended the suspicion
		s.lease.since = time.Time{}
		return nil
	}
	s.saw(st)
	after, o, err := s.ix.opts.Store.Restart(ctx, st, -1, 0)
	switch {
	case err != nil:
		s.log.Debug("lease not ended", "error", err)
	case o == store.Applied:
		if after.Slot != st.Slot { // there were blocks
			s.reset(resetLease)
		}
		s.expire(after)
	default: // somebody has written meanwhile, so the worker lives
		s.lease.since = time.Time{}
	}
	return nil
}

// expire notes that the stream's generation was ended for want of life.
func (s *stream) expire(st store.Stream) {
	s.mu.Lock()
	cause := s.signs.cause
	s.mu.Unlock()
	s.log.Warn("no sign of life from the worker, its blocks have left the index", "grace", s.ix.opts.LeaseGrace, "error", cause)
	s.drop()
	s.tr.forget()
	s.cur = newCursor()
	s.saw(st)
	s.lease = lease{expired: true}
	s.setLease(leaseExpired)
	s.update(func(v *Status) { v.Trusted = false })
}

// revive goes on with a stream whose lease had expired: by joining it, if there is a publisher to join.
func (s *stream) revive() error {
	s.lease = lease{}
	s.setLease(leaseAlive)
	s.log.Info("the worker is back")
	if s.reg.ReplayEndpoint == "" {
		return nil // it begins with the next message
	}
	return errAgain
}

// leave gives a worker up for good that nobody has seen for very long by this indexer's clock, unless it is in its configuration.
func (s *stream) leave(ctx context.Context, st store.Stream, now time.Time) error {
	if s.lease.since.IsZero() || !st.Updated.Equal(s.lease.updated) { // others may see it alive
		s.lease.since, s.lease.updated = now, st.Updated
	}
	away := now.Sub(s.lease.since)
	if s.configured || away < s.ix.opts.LeaseForget {
		return nil
	}
	if o, err := s.ix.opts.Store.Remove(ctx, st); err != nil {
		s.log.Debug("worker not forgotten", "error", err)
		return nil
	} else if o != store.Applied {
		return nil
	}
	s.log.Warn("the worker was away for too long and is forgotten: it has to be registered again", "for", away)
	return store.ErrRemoved
}

func (s *stream) setLease(state string) { s.update(func(v *Status) { v.Lease = state }) }

// suspicion is what so many workers without a sign of life at once say of this indexer's own network.
type suspicion int32

const (
	suspectNone suspicion = iota
	suspectMost           // more than half are silent, and nobody on the way says why
	suspectAll            // there are several, and not one lives
)

// covers says whether a lease is held; certain where the worker's host itself said that it is not well.
func (u suspicion) covers(certain bool) bool { return u == suspectAll || u == suspectMost && !certain }

// judge compares the signs of life of all workers.
func (ix *Indexer) judge(now time.Time) {
	type verdict struct{ alive, certain bool }
	workers := map[string]verdict{}
	for _, s := range ix.all() {
		if s.reg.URL == "" && s.reg.Endpoint == "" {
			continue // its silence says nothing about the network
		}
		alive, certain := s.alive(now)
		v := workers[s.id.Worker]
		workers[s.id.Worker] = verdict{v.alive || alive, v.certain || certain}
	}
	alive, silent := 0, 0
	for _, v := range workers {
		switch {
		case v.alive:
			alive++
		case !v.certain:
			silent++
		}
	}
	u := suspectNone
	switch {
	case alive == 0 && len(workers) > 1:
		u = suspectAll
	case silent > len(workers)-silent:
		u = suspectMost
	}
	before := suspicion(ix.suspicion.Swap(int32(u)))
	switch {
	case u != suspectNone && before == suspectNone:
		ix.opts.Logger.Warn("most workers show no sign of life at once: the fault may be in this indexer's network, their blocks stay in the index for now",
			"workers", len(workers), "alive", alive, "silent", silent)
	case u == suspectNone && before != suspectNone:
		ix.opts.Logger.Info("workers show signs of life again, leases end as usual", "workers", len(workers), "alive", alive)
	}
}
