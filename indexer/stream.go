package indexer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/store"
)

// timing is the waits that tests shorten.
type timing struct {
	joinDelay     time.Duration // from the handshake until the publisher surely has the subscription
	redial        time.Duration // first wait before connecting again
	retry         time.Duration // first wait before asking Redis again
	replaySilence time.Duration // without a batch or END
	replayPause   time.Duration // before the same is asked for again, doubled each time
	claim         time.Duration // for which live messages may stay below what the stream is said to have reached
	replayHold    time.Duration // a publisher that gave no complete answer is not asked again before, unless it connects anew
}

var defaultTiming = timing{
	joinDelay: 100 * time.Millisecond, redial: 100 * time.Millisecond, retry: 50 * time.Millisecond,
	replaySilence: 2 * time.Second, replayPause: 200 * time.Millisecond, replayHold: 30 * time.Second, claim: 10 * time.Second,
}

// stream follows one publisher: a source goroutine fills the inbox, the worker goroutine empties it.
type stream struct {
	publisher
	ix  *Indexer
	log *slog.Logger

	followed time.Time // when the stream was made
	cancel   context.CancelFunc
	done     chan struct{}
	calls    chan func(context.Context) // run by the worker between two messages
	nudged   chan struct{}              // Redis may have lost something

	mu     sync.Mutex
	status Status
	signs  signs
	clears siblingClear
	worked int    // looks in a row at which it had filled blocks and published nothing
	in     *inbox // of the present attempt; nil before the first

	// The rest is the worker's alone.
	st             store.Stream // as last seen in Redis; Generation 0 = not registered
	tr             *translator
	cur            cursor
	conn           *connection // that the last message came from
	batch          store.Batch // translated and not yet applied
	pending        pending
	impatient      bool    // serve an HTTP request: no retries
	current        content // message being worked on, for the case of a panic
	broken         bool    // the last attempt failed in a way that leaves its effects unknown
	refilling      bool    // consuming a replay
	retrying       bool    // Redis did not answer the last time
	misranked      bool    // said once
	sized          bool    // the engine's block size was compared with the pool's
	lastClear      float64 // the engine's time of this rank's own last clear; 0 = none
	owed           bool    // a nudge was taken for a try
	known          bool    // it was registered, here or elsewhere, before
	lease          lease
	claim          claim
	arrived        time.Time // when the live message being worked on came
	newest         int64     // generation of those that Redis has shown
	noReplayBefore time.Time
}

// pending is what is known of the batch that waits.
type pending struct {
	since time.Time
	tally [4]int  // events by [wire.Kind]
	ts    float64 // the engine's time of the newest message; 0 = unknown
	when  time.Time
}

// Status is a stream's state as GET /workers shows it.
type Status struct {
	Worker     string    `json:"worker"`
	Rank       int       `json:"dp_rank"`
	Model      string    `json:"model"`
	Tenant     string    `json:"tenant"`
	URL        string    `json:"url,omitempty"`
	Endpoint   string    `json:"endpoint,omitempty"`
	Engine     string    `json:"type,omitempty"`
	BlockSize  int       `json:"block_size"` // 0 while unknown
	Connected  bool      `json:"connected"`
	Registered bool      `json:"registered"` // known to the index
	Trusted    bool      `json:"trusted"`    // blocks were stored since they last left the index
	Generation int64     `json:"generation"`
	shard      int       // that the generation is of
	Watermark  int64     `json:"watermark"`   // newest sequence number applied; -1 = none
	LagSeconds float64   `json:"lag_seconds"` // of the newest batch applied, by the engine's clock
	Waiting    int       `json:"waiting"`     // messages in the buffer
	Dropped    int       `json:"dropped"`     // messages that the buffer had no room for
	Overflow   bool      `json:"overflow"`    // the buffer has overflowed since the stream was last in step
	Gaps       int       `json:"gaps"`
	Resets     int       `json:"resets"`
	LastEvent  time.Time `json:"last_event,omitzero"`
	Silent     bool      `json:"silent,omitempty"` // it serves requests and has never published
	Lease      string    `json:"lease"`            // alive, failing, held or expired
	Error      string    `json:"error,omitempty"`  // why it is not connected or not registered
}

func newStream(ix *Indexer, p publisher) *stream {
	s := &stream{
		publisher: p, ix: ix, known: p.discovered, followed: time.Now(), done: make(chan struct{}), calls: make(chan func(context.Context)),
		nudged: make(chan struct{}, 1),
		log:    ix.opts.Logger.With("worker", p.id.WorkerRank.String(), "pool", p.id.Pool.String()),
		status: Status{
			Worker: p.id.Worker, Rank: p.id.Rank, Model: p.id.Pool.Model, Tenant: p.id.Pool.Tenant, URL: p.reg.URL,
			Endpoint: p.reg.Endpoint, Engine: p.reg.Engine, BlockSize: p.reg.BlockSize, Watermark: -1, Lease: leaseAlive,
		},
	}
	s.begin()
	return s
}

// begin forgets what an attempt knew.
func (s *stream) begin() {
	s.tr = newTranslator(s.publisher, s.ix.opts, s.ix.metrics)
	s.cur, s.conn, s.st = newCursor(), nil, store.Stream{StreamID: s.id, Seq: -1}
	s.claim = claim{seq: -1}
	s.batch.Set = s.reg.Set
	s.drop()
	in := newInbox(s.ix.opts.BufferMessages, s.ix.opts.BufferBytes)
	s.mu.Lock()
	s.in, s.status.Generation = in, 0
	s.mu.Unlock()
}

// run follows the publisher until ctx ends. Whatever goes wrong costs this stream's blocks, never the process.
func (s *stream) run(ctx context.Context) {
	defer close(s.done)
	b := newBackoff(s.ix.timing.retry, 10*time.Second)
	for {
		start := time.Now()
		err := s.attempt(ctx)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, store.ErrRemoved) {
			s.log.Info("the worker was unregistered, no longer following it")
			s.ix.forget(s)
			return
		}
		if !errors.Is(err, errAgain) {
			s.broken = true
			s.log.Error("stream failed, rebuilding it", "error", err)
			s.update(func(v *Status) { v.Error = err.Error() })
		}
		if lasted := time.Since(start); lasted > stableAfter || lasted > time.Second && errors.Is(err, errAgain) {
			b.Reset() // a Redis that is emptied again and again is no fault of the stream's
		}
		if pause(ctx, b) != nil {
			return
		}
		s.begin()
	}
}

// attempt runs source and worker until one of them ends.
func (s *stream) attempt(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var sourceDone sync.WaitGroup
	defer sourceDone.Wait()
	defer cancel(nil)
	if in := s.in; s.reg.Endpoint != "" {
		sourceDone.Go(func() {
			cancel(s.contain(func() error { return s.source(ctx, in) }))
		})
	}
	err := s.contain(func() error { return s.work(ctx) })
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// contain turns a panic into an error.
func (s *stream) contain(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.reset(resetPanic)
			s.log.Error("panic in a stream", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return f()
}

// work applies what arrives.
func (s *stream) work(ctx context.Context) error {
	if err := s.register(ctx); err != nil {
		return err
	}
	if s.broken {
		// What the last attempt did to the index is not known. The message it failed on is not tried again.
		after := contentOf(s.st)
		if s.current.seq > after.seq {
			after = s.current
		}
		if err := s.retire(ctx, after, func(st store.Stream, _ bool) bool { return st.Seq >= after.seq }); err != nil {
			return err
		}
		s.broken = false
		s.cur.reached(contentOf(s.st))
	}
	lease := time.NewTicker(s.ix.opts.LeaseInterval)
	defer lease.Stop()
	for {
		for {
			if err := s.clearedByOther(ctx); err != nil {
				return err
			}
			a, ok := s.in.take()
			if !ok {
				break
			}
			if err := s.arrive(ctx, a); err != nil {
				return err
			}
			if err := s.flushFull(ctx); err != nil {
				return err
			}
			if err := s.serve(ctx); err != nil {
				return err
			}
		}
		if err := s.flush(ctx); err != nil {
			return err
		}
		s.update(func(v *Status) { v.Overflow = false })
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.in.ready:
		case f := <-s.calls:
			f(ctx)
		case <-s.nudged:
			if err := s.compare(ctx); err != nil {
				return err
			}
		case <-lease.C:
			if err := s.renew(ctx); err != nil {
				return err
			}
		}
	}
}

// serve runs a call that waits, if any.
func (s *stream) serve(ctx context.Context) error {
	select {
	case f := <-s.calls:
		if err := s.flush(ctx); err != nil {
			return err
		}
		f(ctx)
	default:
	}
	return nil
}

// call has the worker run f and waits for it.
func (s *stream) call(ctx context.Context, f func(context.Context)) error {
	finished := make(chan struct{})
	job := func(ctx context.Context) {
		defer close(finished)
		f(ctx)
	}
	select {
	case s.calls <- job:
		<-finished
		return nil
	case <-s.done:
		return errors.New("the stream has ended")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// try repeats f until Redis has answered, unless the request cannot wait or can never succeed.
func (s *stream) try(ctx context.Context, f func() error) error {
	b := newBackoff(s.ix.timing.retry, time.Second)
	for {
		err := f()
		if err == nil {
			if s.owed { // the comparison that the nudge was for
				s.owed = false
				s.nudge()
			}
			if s.retrying {
				s.retrying = false
				s.log.Info("the index answers again")
			}
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if s.impatient || errors.Is(err, store.ErrInvalid) {
			return err
		}
		if !s.retrying {
			s.retrying = true
			s.log.Warn("the index does not answer, events wait in the buffer", "reason", store.Reason(err), "error", err)
		}
		if err := s.rest(ctx, b); err != nil {
			return err
		}
	}
}

// rest waits between two tries, until Redis is seen to be back at the longest.
func (s *stream) rest(ctx context.Context, b *backoff.ExponentialBackOff) error {
	timer := time.NewTimer(next(b))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-s.nudged:
		s.owed = true
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// update changes the status.
func (s *stream) update(f func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.status)
}

// Status is a copy of the stream's state.
func (s *stream) snapshot() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.status
	v.Waiting, v.Dropped = s.in.size()
	return v
}

// reset counts that the stream's blocks left the index.
func (s *stream) reset(reason string) {
	s.ix.metrics.resets.WithLabelValues(reason).Inc()
	s.update(func(v *Status) { v.Resets++; v.Trusted = false })
}

// gap counts a gap.
func (s *stream) gap(reason string) {
	s.ix.metrics.gaps.WithLabelValues(reason).Inc()
	s.update(func(v *Status) { v.Gaps++ })
}

// stop ends the stream and waits for it.
func (s *stream) stop() {
	s.cancel()
	<-s.done
}

// countError counts what could not be decoded.
func (ix *Indexer) countError(err error) {
	var e *wire.Error
	code := "other"
	if errors.As(err, &e) {
		code = e.Code.String()
	}
	ix.metrics.errors.WithLabelValues(code).Inc()
}
