// Package ui is the web page of a frontend, and the feed of server-sent events that it and `warmroute top` live on.
//
// # What it costs
//
// A choice of a worker costs a request one [Page.Record]: a few atomic additions and one pointer stored in a ring, without a
// lock. Once a second the page looks at the frontend's own state, to keep five minutes of the time plots. All that costs more
// happens only while somebody watches, once for all watchers: explanations are worked out, the state is written as JSON, and every
// other second Redis is asked for sizes, streams and loads. A watcher that does not keep up misses what it did not read.
//
// # When Redis is away
//
// Everything but the blocks, streams and shared loads goes on, and those stay as they were last read, with the
// time of that reading.
//
// Nothing here ever holds a part of a prompt.
package ui

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Source is what a page shows.
type Source interface {
	// State is what the frontend knows by itself. It must not wait for anybody.
	State() State
	// Inspect asks Redis. With an error, the part that could be read.
	Inspect(ctx context.Context) ([]Pool, error)
}

// Options configures a Page.
type Options struct {
	// Source is required.
	Source Source
	// Interval is the time between two messages to a watcher, and two points of the plots. Default 1 s.
	Interval time.Duration
	// MaxWatchers bounds the feeds at one time. Default 32.
	MaxWatchers int
}

const (
	keptSamples   = 300 // points of a plot
	keptDecisions = 64
	inspectEvery  = 2 // intervals
	// inspectLimit bounds one reading of Redis.
	inspectLimit = 2 * time.Second
)

// Page is the page's share of a frontend.
type Page struct {
	o Options

	recorder

	watchers atomic.Int32
	mu       sync.Mutex
	feeds    map[*feed]struct{}
	samples  []Sample // the last ones, ascending
	sent     uint64   // the newest decision that feeds were told
	closed   bool

	inspected  atomic.Pointer[inspection]
	inspecting atomic.Bool // who sets it alone uses ends
	ends       map[streamKey]*ends
	wake       chan struct{} // the first watcher is there
}

// New makes a Page.
func New(o Options) *Page {
	if o.Interval <= 0 {
		o.Interval = time.Second
	}
	if o.MaxWatchers <= 0 {
		o.MaxWatchers = 32
	}
	return &Page{o: o, feeds: map[*feed]struct{}{}, ends: map[streamKey]*ends{}, wake: make(chan struct{}, 1)}
}

// Run keeps the plots and feeds the watchers until ctx ends; then it ends their feeds, so that a drain does not wait for
// them.
func (p *Page) Run(ctx context.Context) {
	var asking sync.WaitGroup
	defer asking.Wait()
	defer p.close()
	tick := time.NewTicker(p.o.Interval)
	defer tick.Stop()
	for n := 0; ; {
		if p.watchers.Load() > 0 && n%inspectEvery == 0 && p.inspecting.CompareAndSwap(false, true) {
			asking.Go(func() {
				defer p.inspecting.Store(false)
				p.inspect(ctx)
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
			n = 0
		case now := <-tick.C:
			n++
			p.tick(now)
		}
	}
}

// inspection is what Redis said last.
type inspection struct {
	at    time.Time // when all of it was read; zero: never
	tried time.Time
	err   string
	pools []Pool
}

func (p *Page) inspect(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, inspectLimit)
	defer cancel()
	before, now := p.inspected.Load(), time.Now()
	pools, err := p.o.Source.Inspect(ctx)
	p.countEnds(pools, err == nil)
	next := &inspection{at: now, tried: now, pools: pools}
	if err != nil {
		next.err, next.at = err.Error(), time.Time{}
		if before != nil {
			next.at = before.at
			next.pools = mergePools(before.pools, pools)
		}
	}
	p.inspected.Store(next)
}

type streamKey struct {
	rankKey
	model string
}

// ends are generations of a stream that have ended.
type ends struct {
	generation, epoch int64
	restarts, breaks  int
	seen              bool
}

// countEnds fills in Restarts and Breaks; streams that a complete reading lacks are forgotten.
func (p *Page) countEnds(pools []Pool, complete bool) {
	for i := range pools {
		for j := range pools[i].Ranks {
			r := &pools[i].Ranks[j]
			if !r.Followed {
				continue
			}
			k := streamKey{rankKey{pools[i].Tenant, r.Worker, r.Rank}, pools[i].Model}
			e := p.ends[k]
			switch {
			case e == nil:
				e = &ends{}
				p.ends[k] = e
			case e.generation == r.Stream.Generation:
			case e.epoch != r.Stream.Epoch:
				e.restarts++
			default:
				e.breaks++
			}
			e.generation, e.epoch, e.seen = r.Stream.Generation, r.Stream.Epoch, true
			r.Stream.Restarts, r.Stream.Breaks = e.restarts, e.breaks
		}
	}
	for k, e := range p.ends {
		if complete && !e.seen {
			delete(p.ends, k)
		}
		e.seen = false
	}
}

// mergePools takes over what was read now; what was not stays as it was.
func mergePools(before, now []Pool) []Pool {
	out := append([]Pool(nil), now...)
old:
	for _, b := range before {
		for i := range out {
			if out[i].Tenant == b.Tenant && out[i].Model == b.Model {
				have := map[rankKey]bool{}
				for _, r := range out[i].Ranks {
					have[r.key()] = true
				}
				for _, r := range b.Ranks {
					if !have[r.key()] {
						out[i].Ranks = append(out[i].Ranks, r)
					}
				}
				continue old
			}
		}
		out = append(out, b)
	}
	return out
}

// tick takes a point of the plots, and tells the watchers.
func (p *Page) tick(now time.Time) {
	state := p.o.Source.State()
	sample := p.recorder.sample(now, &state)
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.samples) == keptSamples {
		p.samples = append(p.samples[:0], p.samples[1:]...)
	}
	p.samples = append(p.samples, sample)
	if len(p.feeds) == 0 {
		return
	}
	m := p.message(now, &state)
	m.Samples = []Sample{sample}
	m.Decisions, p.sent = p.recorder.since(p.sent)
	text := m.encode()
	for f := range p.feeds {
		select {
		case f.messages <- text:
		default: // it does not keep up
		}
	}
}
