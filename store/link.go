package store

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// link is the state of the way to one shard. It goes down with the first ErrUnavailable, and
// while it is down nobody asks Redis but its one prober, which tries the real lookup, with
// exponential backoff and full jitter, until an answer comes.
type link struct {
	shard   string
	probe   func(context.Context) error
	timeout time.Duration // of one probe
	log     *slog.Logger
	metrics *metrics
	stop    <-chan struct{} // closed with the store
	probers *sync.WaitGroup

	up   atomic.Bool
	good atomic.Int64 // when the last answer came, in ns since 1970

	mu     sync.Mutex
	since  time.Time
	cause  error // why it is down
	pause  *backoff.ExponentialBackOff
	closed bool
}

// A link that fails again within this time goes on with the pauses where it left off, so that
// flapping does not turn into hammering.
const stableAfter = 10 * time.Second

func newLink(s *Store, shard string, probe func(context.Context) error) *link {
	l := &link{
		shard: shard, probe: probe, timeout: max(s.opts.LookupBudget, 100*time.Millisecond),
		log: s.log, metrics: s.metrics, stop: s.stop, probers: &s.background, since: time.Now(),
		pause: backoff.NewExponentialBackOff(
			backoff.WithInitialInterval(25*time.Millisecond),
			backoff.WithMaxInterval(300*time.Millisecond),
			backoff.WithMultiplier(2),
			backoff.WithRandomizationFactor(1), // full jitter: 0 to twice the interval
			backoff.WithMaxElapsedTime(0),      // never gives up
		),
	}
	l.up.Store(true)
	l.metrics.linkUp.WithLabelValues(shard).Set(1)
	return l
}

// check is nil while the link is up, else the error that a caller gets without waiting.
func (l *link) check() error {
	if l.up.Load() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause == nil {
		return nil // came up in between
	}
	return l.cause
}

// report tells the link how a call ended and passes the error on.
func (l *link) report(ctx context.Context, err error) error {
	if err == nil || !errors.Is(err, ErrUnavailable) || !l.up.Load() {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.up.Load() || l.closed {
		return err
	}
	now := time.Now()
	if now.Sub(l.since) > stableAfter {
		l.pause.Reset()
	}
	l.cause, l.since = err, now
	l.up.Store(false)
	l.metrics.linkUp.WithLabelValues(l.shard).Set(0)
	l.metrics.linkTransitions.WithLabelValues(l.shard, "down").Inc()
	l.log.Warn("index link down", "shard", l.shard, "reason", Reason(err), "error", err)
	l.probers.Add(1)
	go l.restore(context.WithoutCancel(ctx))
	return err
}

// answered notes that a call was answered.
func (l *link) answered() { l.good.Store(time.Now().UnixNano()) }

// starved says whether a call that ran into its deadline tells more of this process than of Redis: it notices that much
// later, because there is no processor for it, and others have had their answers a moment ago.
func (l *link) starved(ctx context.Context, budget time.Duration) bool {
	deadline, ok := ctx.Deadline()
	return ok && time.Since(deadline) > budget/4 && time.Since(time.Unix(0, l.good.Load())) < 10*budget
}

// restore probes until the shard answers.
func (l *link) restore(ctx context.Context) {
	defer l.probers.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	timer := time.NewTimer(l.nextPause())
	defer timer.Stop()
	for {
		select {
		case <-l.stop:
			l.mu.Lock()
			l.closed = true
			l.mu.Unlock()
			return
		case <-timer.C:
		}
		err := l.probeOnce(ctx)
		if err == nil || !errors.Is(err, ErrUnavailable) && Reason(err) != ReasonPoolExhausted {
			// An index that answers, if only with nonsense, is a link that works.
			l.metrics.probes.WithLabelValues(l.shard, "ok").Inc()
			l.restored()
			return
		}
		l.metrics.probes.WithLabelValues(l.shard, "failed").Inc()
		l.mu.Lock()
		l.cause = err // refused at first, loading by now: the newest reason counts
		l.mu.Unlock()
		timer.Reset(l.nextPause())
	}
}

func (l *link) probeOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	return l.probe(ctx)
}

func (l *link) restored() {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.metrics.linkUp.WithLabelValues(l.shard).Set(1)
	l.metrics.linkTransitions.WithLabelValues(l.shard, "up").Inc()
	l.log.Info("index link up", "shard", l.shard, "reason", Reason(l.cause), "down_for", now.Sub(l.since).Round(time.Millisecond))
	l.cause, l.since = nil, now
	l.up.Store(true)
}

func (l *link) nextPause() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := l.pause.NextBackOff()
	if d == backoff.Stop { // MaxElapsedTime is 0, so this cannot be; a negative pause would be a hot loop
		d = l.pause.MaxInterval
	}
	return d
}

// LinkStatus is the state of the way to one shard.
type LinkStatus struct {
	Shard  string    // "<pool>#<number>"; "<pool> leases" for what is under way there; "pools" for the configuration of pools that are not known yet
	Up     bool      //
	Since  time.Time // of the last change
	Reason string    // why it is down, a value of [Reason]; "" while up
	Error  string    // the error that took it down; "" while up
}

func (l *link) status() LinkStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := LinkStatus{Shard: l.shard, Up: l.up.Load(), Since: l.since}
	if l.cause != nil {
		st.Reason, st.Error = Reason(l.cause), l.cause.Error()
	}
	return st
}
