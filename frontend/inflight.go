package frontend

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warmroute/warmroute/kvcache"
)

// inFlight counts what this frontend has under way at each worker rank. Choosing and counting
// are one step, so that a burst sees its own choices.
type inFlight struct {
	gauge *prometheus.GaugeVec // by worker
	known func(worker string) bool

	mu       sync.Mutex
	ranks    map[kvcache.WorkerRank]load // without entries of zero
	requests map[string]int              // by worker, likewise
}

type load struct{ requests, blocks int }

func newInFlight(gauge *prometheus.GaugeVec, known func(string) bool) *inFlight {
	return &inFlight{
		gauge: gauge, known: known,
		ranks: map[kvcache.WorkerRank]load{}, requests: map[string]int{},
	}
}

// lease is one request's part of the counts. It is released once, however often release is called.
type lease struct {
	of       *inFlight
	at       kvcache.WorkerRank
	blocks   int
	released bool
}

// take lets pick choose among the candidates, with their loads filled in, and counts the
// request there. cost is how many blocks of work it is at the candidate chosen.
func (f *inFlight) take(candidates []candidate, pick chooser, cost func(*candidate) int) (i int, reason string, l *lease) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fill(candidates)
	i, reason = pick(candidates)
	l = &lease{of: f, at: candidates[i].WorkerRank, blocks: max(cost(&candidates[i]), 1)}
	f.add(l.at, 1, l.blocks)
	return i, reason, l
}

// peek is take without counting.
func (f *inFlight) peek(candidates []candidate, pick chooser) (i int, reason string) {
	f.mu.Lock()
	f.fill(candidates)
	f.mu.Unlock()
	return pick(candidates)
}

func (f *inFlight) fill(candidates []candidate) {
	for i := range candidates {
		c := &candidates[i]
		l := f.ranks[c.WorkerRank]
		c.blocks, c.requests = l.blocks, l.requests
	}
}

// add changes the counts; f.mu is held.
func (f *inFlight) add(at kvcache.WorkerRank, requests, blocks int) {
	l := f.ranks[at]
	l.requests += requests
	l.blocks += blocks
	if l == (load{}) {
		delete(f.ranks, at)
	} else {
		f.ranks[at] = l
	}
	n := f.requests[at.Worker] + requests
	if n != 0 {
		f.requests[at.Worker] = n
	} else {
		delete(f.requests, at.Worker)
	}
	if n == 0 && !f.known(at.Worker) {
		f.gauge.DeleteLabelValues(at.Worker)
	} else if requests != 0 {
		f.gauge.WithLabelValues(at.Worker).Set(float64(n))
	}
}

// forget drops the gauge of a worker that left the fleet, unless requests are still there.
func (f *inFlight) forget(worker string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.requests[worker] == 0 {
		f.gauge.DeleteLabelValues(worker)
	}
}

// at is what is in flight at one worker rank.
func (f *inFlight) at(w kvcache.WorkerRank) load {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ranks[w]
}

// prefilled says that the worker has read the prompt: from here on the request weighs one
// block.
func (l *lease) prefilled() {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	if !l.released {
		l.of.add(l.at, 0, 1-l.blocks)
		l.blocks = 1
	}
}

func (l *lease) release() {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	if !l.released {
		l.released = true
		l.of.add(l.at, -1, -l.blocks)
	}
}
