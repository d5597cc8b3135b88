// Package breaker keeps requests away from workers that fail them one after the other. It sees nothing but
// the outcomes of requests: there is no traffic of its own, and no view shared with other frontends.
//
// A breaker opens with a number of consecutive failures. When its pause is over, one request may try the
// worker: it closes the breaker, or starts a pause of twice the length. At most half of the workers that a
// request could go to are barred, because where more than that fail, the fault is likely to be elsewhere, and a
// worker that is suspected is better than none.
package breaker

import (
	"sync"
	"sync/atomic"
	"time"
)

// Options configures a Set.
type Options[K comparable] struct {
	// Failures is how many in a row open a breaker. Default 5; negative means that none ever opens.
	Failures int
	// Pause is how long a breaker is open before the first trial. It doubles with each trial that fails,
	// up to MaxPause. Defaults 5 s and 1 min.
	Pause, MaxPause time.Duration
	// Known, if set, tells whether a worker is still there. What is reported of others, by requests that outlive them, is not kept.
	Known func(k K) bool
	// Changed, if set, is called when a breaker opens and when it closes.
	Changed func(k K, open bool)
}

// Outcome is how a request to a worker ended.
type Outcome int

// The outcomes.
const (
	Neutral Outcome = iota // says nothing about the worker: the client left, or the request itself was at fault
	Success
	Failure
)

// Set is the breakers of many workers. It is safe for concurrent use.
type Set[K comparable] struct {
	o      Options[K]
	opened atomic.Int64 // how many are open

	mu    sync.Mutex
	state map[K]*state // of those that have failures
}

type state struct {
	failures int // in a row
	open     bool
	pause    time.Duration
	since    time.Time // when it opened
	until    time.Time // when the pause is over
	trial    time.Time // when the trial under way began; zero means none
}

// New makes a Set.
func New[K comparable](o Options[K]) *Set[K] {
	if o.Failures == 0 {
		o.Failures = 5
	}
	if o.Pause <= 0 {
		o.Pause = 5 * time.Second
	}
	if o.MaxPause <= 0 {
		o.MaxPause = time.Minute
	}
	if o.Known == nil {
		o.Known = func(K) bool { return true }
	}
	if o.Changed == nil {
		o.Changed = func(K, bool) {}
	}
	return &Set[K]{o: o, state: map[K]*state{}}
}

// Barred are those of keys that must not get a request: nil nearly always. It bars at most half of them, those first
// that have been open for longest.
func (s *Set[K]) Barred(keys []K) map[K]bool {
	if s.opened.Load() == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	barred := map[K]bool{}
	for _, k := range keys {
		if b := s.state[k]; b != nil && b.open && !s.due(b, now) {
			barred[k] = true
		}
	}
	for len(barred) > len(keys)/2 {
		var newest K
		var since time.Time
		for k := range barred {
			if b := s.state[k]; since.IsZero() || b.since.After(since) {
				newest, since = k, b.since
			}
		}
		delete(barred, newest)
	}
	return barred
}

// due tells whether an open breaker wants a trial. One that never reported back counts as over after the longest
// pause.
func (s *Set[K]) due(b *state, now time.Time) bool {
	return !now.Before(b.until) && (b.trial.IsZero() || now.Sub(b.trial) > s.o.MaxPause)
}

// Begin tells that a request goes to k, which [Set.Barred] had not barred. False means that another request has
// begun the only trial in between. What follows is a Report.
func (s *Set[K]) Begin(k K) bool {
	if s.opened.Load() == 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.state[k]
	now := time.Now()
	switch {
	case b == nil || !b.open || now.Before(b.until):
		return true
	case s.due(b, now):
		b.trial = now
		return true
	}
	return false
}

// Report tells how a request to k ended. A stream may report twice: when it begins, and when it breaks.
func (s *Set[K]) Report(k K, o Outcome) {
	if s.o.Failures < 0 {
		return
	}
	s.mu.Lock()
	b := s.state[k]
	if b == nil {
		if o != Failure || !s.o.Known(k) {
			s.mu.Unlock()
			return
		}
		b = &state{}
		s.state[k] = b
	}
	changed := false
	switch o {
	case Success:
		if changed = b.open; changed {
			s.opened.Add(-1)
		}
		delete(s.state, k)
	case Failure:
		b.failures++
		now := time.Now()
		switch {
		case !b.open && b.failures >= s.o.Failures:
			b.open, b.since, b.pause = true, now, s.o.Pause
			b.until = now.Add(b.pause)
			s.opened.Add(1)
			changed = true
		case b.open && !b.trial.IsZero():
			b.pause = min(2*b.pause, s.o.MaxPause)
			b.until = now.Add(b.pause)
		}
		b.trial = time.Time{}
	default:
		b.trial = time.Time{}
	}
	s.mu.Unlock()
	if changed {
		s.o.Changed(k, o == Failure)
	}
}

// Open tells whether k's breaker is open.
func (s *Set[K]) Open(k K) bool {
	if s.opened.Load() == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.state[k]
	return b != nil && b.open
}

// Forget drops what is known of a worker that left.
func (s *Set[K]) Forget(k K) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.state[k]; b != nil && b.open {
		s.opened.Add(-1)
	}
	delete(s.state, k)
}
