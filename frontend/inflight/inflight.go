// Package inflight counts what one frontend has under way at each worker rank. Its counts are exact: each request
// gives back what it took, once, however it ends.
package inflight

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
)

// Place is a worker rank of a tenant.
type Place struct {
	Tenant string // never ""
	kvcache.WorkerRank
}

// Counts are what is under way. They are safe for concurrent use.
type Counts struct {
	gauge *prometheus.GaugeVec // requests by worker id
	known func(worker string) bool

	mu       sync.Mutex
	places   map[Place]choose.Load // without entries of zero
	requests map[string]int        // by worker id, likewise
}

// New makes Counts that keep a gauge, labelled by worker id. known tells whether a worker is in the fleet; the series of
// others end with their last request.
func New(gauge *prometheus.GaugeVec, known func(worker string) bool) *Counts {
	return &Counts{gauge: gauge, known: known, places: map[Place]choose.Load{}, requests: map[string]int{}}
}

// Lease is one request's part of the counts.
type Lease struct {
	of       *Counts
	at       Place
	load     choose.Load
	released bool
}

// Take lets pick choose one of the places by their loads, and counts the request there, in one step: a burst sees its own
// choices. load is what the request is at a place. Where pick returns a negative index nothing is counted.
func (c *Counts) Take(places []Place, pick func(loads []choose.Load) int, load func(i int) choose.Load) (int, *Lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := pick(c.loads(places))
	if i < 0 {
		return i, nil
	}
	return i, c.add(places[i], load(i))
}

// Add counts a request at a place that was chosen otherwise.
func (c *Counts) Add(at Place, l choose.Load) *Lease {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.add(at, l)
}

// Loads are those of some places, in their order.
func (c *Counts) Loads(places []Place) []choose.Load {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.loads(places)
}

func (c *Counts) loads(places []Place) []choose.Load {
	out := make([]choose.Load, len(places))
	for i, p := range places {
		out[i] = c.places[p]
	}
	return out
}

// Idle tells whether nothing is under way.
func (c *Counts) Idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.places) == 0 && len(c.requests) == 0
}

func (c *Counts) add(at Place, l choose.Load) *Lease {
	c.change(at, l, 1)
	return &Lease{of: c, at: at, load: l}
}

// change adds sign × l; c.mu is held.
func (c *Counts) change(at Place, l choose.Load, sign int) {
	now := c.places[at]
	now.Requests += sign * l.Requests
	now.PrefillTokens += sign * l.PrefillTokens
	now.DecodeBlocks += sign * l.DecodeBlocks
	if now == (choose.Load{}) {
		delete(c.places, at)
	} else {
		c.places[at] = now
	}
	if l.Requests == 0 {
		return
	}
	n := c.requests[at.Worker] + sign*l.Requests
	if n != 0 {
		c.requests[at.Worker] = n
	} else {
		delete(c.requests, at.Worker)
	}
	if n == 0 && !c.known(at.Worker) {
		c.gauge.DeleteLabelValues(at.Worker)
	} else {
		c.gauge.WithLabelValues(at.Worker).Set(float64(n))
	}
}

// Forget drops the gauge of a worker that left the fleet, unless requests are still there.
func (c *Counts) Forget(worker string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.requests[worker] == 0 {
		c.gauge.DeleteLabelValues(worker)
	}
}

// Prefilled says that the prompt is computed.
func (l *Lease) Prefilled() {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	if !l.released {
		l.of.change(l.at, choose.Load{PrefillTokens: l.load.PrefillTokens}, -1)
		l.load.PrefillTokens = 0
	}
}

// Output says that the request occupies n more blocks.
func (l *Lease) Output(n int) {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	if !l.released {
		l.of.change(l.at, choose.Load{DecodeBlocks: n}, 1)
		l.load.DecodeBlocks += n
	}
}

// Release gives back what the request took. It may be called at any time, and twice.
func (l *Lease) Release() {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	if !l.released {
		l.released = true
		l.of.change(l.at, l.load, -1)
	}
}
