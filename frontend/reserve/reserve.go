// Package reserve keeps what a frontend has under way in the loads that all frontends share. Nothing in it is on the
// way of a request: a request says what happened and goes on, and one goroutine tells Redis.
//
// # When Redis is away
//
// What cannot be told is dropped: the leases of requests that ended expire by themselves, and those of requests that live
// are made again with the next renewal. The queue is bounded, and nobody waits for it.
package reserve

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Leases are the reservations of all frontends. *store.Store has them.
type Leases interface {
	Select(ctx context.Context, pool kvcache.PoolID, a store.Ask) (store.Choice, error)
	PrefillDone(ctx context.Context, pool kvcache.PoolID, lease string) (bool, error)
	OutputBlocks(ctx context.Context, pool kvcache.PoolID, lease string, n int) (bool, error)
	Renew(ctx context.Context, pool kvcache.PoolID, leases ...string) (ended []string, err error)
	ReleaseAll(ctx context.Context, pool kvcache.PoolID, leases ...string) error
	Reap(ctx context.Context, pool kvcache.PoolID) error
}

// Options configures a Keeper.
type Options struct {
	// Leases is where reservations are kept.
	Leases Leases
	// Lease is how long a reservation lives without renewal. All are renewed three times as often. Default 15 s.
	Lease time.Duration
	// Pools lists the pools whose ended leases are freed as often as the others are renewed, though no request comes: those of
	// frontends that died would stay. Default: none.
	Pools func() []kvcache.PoolID
	// Queue bounds the reservations that have news for Redis. Default 16,384.
	Queue int
	// Timeout bounds each call. Default 250 ms.
	Timeout time.Duration
	// OutputInterval is the least time between two reports of the blocks that one request has grown by. Default 1 s.
	OutputInterval time.Duration
	// Registerer gets the metrics. Default: they are not registered.
	Registerer prometheus.Registerer
}

// Keeper tells Redis what happens to reservations.
type Keeper struct {
	o     Options
	queue chan *Reservation

	held      prometheus.Gauge
	forgotten prometheus.Counter

	mu   sync.Mutex
	live map[kvcache.PoolID]map[string]*Reservation // by id: those of requests under way
}

// Reservation is one request's load in Redis. Its methods return at once. A nil Reservation is none.
type Reservation struct {
	k    *Keeper
	pool kvcache.PoolID

	mu        sync.Mutex
	ask       store.Ask // that makes it again: one candidate
	held      bool      // it was made, as far as is known
	prefilled bool
	told      bool // that it is prefilled
	blocks    int  // output not yet told
	last      time.Time
	ended     bool
	queued    bool
}

// New makes a Keeper.
func New(o Options) *Keeper {
	if o.Lease <= 0 {
		o.Lease = 15 * time.Second
	}
	if o.Queue <= 0 {
		o.Queue = 16384
	}
	if o.Timeout <= 0 {
		o.Timeout = 250 * time.Millisecond
	}
	if o.OutputInterval <= 0 {
		o.OutputInterval = time.Second
	}
	f := promauto.With(o.Registerer)
	return &Keeper{
		o: o, queue: make(chan *Reservation, o.Queue), live: map[kvcache.PoolID]map[string]*Reservation{},
		held: f.NewGauge(prometheus.GaugeOpts{
			Name: "warmroute_reservations", Help: "Requests of this frontend that count in the loads that all frontends share.",
		}),
		forgotten: f.NewCounter(prometheus.CounterOpts{
			Name: "warmroute_reservation_news_dropped_total", Help: "Changes of reservations that Redis was not told; they end with the lease.",
		}),
	}
}

// Lease is how long a reservation lives without renewal.
func (k *Keeper) Lease() time.Duration { return k.o.Lease }

// Take begins to care for a request's reservation: made tells whether it exists already, else it is made in the
// background. ask has the id, the lease and the worker rank as its only candidate.
func (k *Keeper) Take(pool kvcache.PoolID, ask store.Ask, made bool) *Reservation {
	r := &Reservation{k: k, pool: pool, ask: ask, held: made, last: time.Now()}
	k.mu.Lock()
	if k.live[pool] == nil {
		k.live[pool] = map[string]*Reservation{}
	}
	k.live[pool][ask.ID] = r
	k.mu.Unlock()
	k.held.Inc()
	if !made {
		r.mu.Lock()
		r.tell()
		r.mu.Unlock()
	}
	return r
}

// Prefilled says that the prompt is computed.
func (r *Reservation) Prefilled() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.prefilled && !r.ended {
		r.prefilled = true
		r.tell()
	}
}

// Output says that the request occupies n more blocks.
func (r *Reservation) Output(n int) {
	if r == nil || n < 1 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	r.blocks += n
	if now := time.Now(); now.Sub(r.last) >= r.k.o.OutputInterval {
		r.last = now
		r.tell()
	}
}

// End gives the reservation back. It may be called twice.
func (r *Reservation) End() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	r.ended = true
	k := r.k
	k.mu.Lock()
	delete(k.live[r.pool], r.ask.ID)
	if len(k.live[r.pool]) == 0 {
		delete(k.live, r.pool)
	}
	k.mu.Unlock()
	k.held.Dec()
	r.tell()
}

// tell puts the reservation in the queue, once; r.mu is held.
func (r *Reservation) tell() {
	if r.queued {
		return
	}
	select {
	case r.k.queue <- r:
		r.queued = true
	default:
		r.k.forgotten.Inc()
	}
}

// Run tells Redis until ctx ends, and then, for as long as one call may take, what is still in the queue.
func (k *Keeper) Run(ctx context.Context) {
	tick := time.NewTicker(k.o.Lease / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), k.o.Timeout)
			defer cancel()
			for last.Err() == nil {
				select {
				case r := <-k.queue:
					k.tellAll(last, r)
				default:
					return
				}
			}
			return
		case r := <-k.queue:
			k.tellAll(ctx, r)
		case <-tick.C:
			k.renew(ctx)
		}
	}
}

// atOnce is how many reservations one call ends at most: a fifth of a millisecond of Redis's time.
const atOnce = 32

// tellAll tells the news of a reservation, and of those that wait behind it: what has ended goes in one call for each pool.
func (k *Keeper) tellAll(ctx context.Context, r *Reservation) {
	ended := map[kvcache.PoolID][]string{}
	for n := 1; ; n++ {
		if id, over := k.news(ctx, r); over {
			ended[r.pool] = append(ended[r.pool], id)
		}
		if n < atOnce {
			select {
			case r = <-k.queue:
				continue
			default:
			}
		}
		break
	}
	for pool, ids := range ended {
		bounded, cancel := context.WithTimeout(ctx, k.o.Timeout)
		if k.o.Leases.ReleaseAll(bounded, pool, ids...) != nil {
			k.forgotten.Add(float64(len(ids)))
		}
		cancel()
	}
}

// news tells what has happened to a reservation since the last time. What fails is tried again with the next news, and
// what the next renewal does not find is made again. One that is over is left to the caller to release.
func (k *Keeper) news(ctx context.Context, r *Reservation) (id string, over bool) {
	r.mu.Lock()
	r.queued = false
	id, ended, held := r.ask.ID, r.ended, r.held
	over = ended && held
	prefilled := r.prefilled && !r.told
	r.told = r.prefilled
	blocks := min(r.blocks, 1000)
	r.blocks = 0
	ask := r.ask
	if r.prefilled {
		ask.PromptTokens = 0
		prefilled = prefilled && held // else it is made without
	}
	ask.DecodeBlocks += blocks
	r.ask.DecodeBlocks = ask.DecodeBlocks
	r.held = !ended
	r.mu.Unlock()
	if ended {
		return id, over
	}
	ctx, cancel := context.WithTimeout(ctx, k.o.Timeout)
	defer cancel()
	l := k.o.Leases
	var err error
	switch {
	case !held:
		_, err = l.Select(ctx, r.pool, ask)
	default:
		if prefilled {
			if _, err = l.PrefillDone(ctx, r.pool, id); err != nil { // or it would count as queued for as long as it streams
				r.mu.Lock()
				r.told = false
				r.mu.Unlock()
			}
		}
		if blocks > 0 && err == nil {
			_, err = l.OutputBlocks(ctx, r.pool, id, blocks)
		}
	}
	if err != nil {
		k.forgotten.Inc()
	}
	return id, false
}

// renew lets all reservations live on. Those that Redis does not know any more are made again.
func (k *Keeper) renew(ctx context.Context) {
	k.mu.Lock()
	ids := map[kvcache.PoolID][]string{}
	for pool, of := range k.live {
		for id := range of {
			ids[pool] = append(ids[pool], id)
		}
	}
	k.mu.Unlock()
	if k.o.Pools != nil {
		for _, pool := range k.o.Pools() {
			if ids[pool] == nil {
				bounded, cancel := context.WithTimeout(ctx, k.o.Timeout)
				_ = k.o.Leases.Reap(bounded, pool) // nobody waits for it, and it comes round again
				cancel()
			}
		}
	}
	for pool, list := range ids {
		bounded, cancel := context.WithTimeout(ctx, 4*k.o.Timeout)
		lost, err := k.o.Leases.Renew(bounded, pool, list...)
		cancel()
		if err != nil {
			k.forgotten.Add(float64(len(list)))
			continue
		}
		for _, id := range lost {
			k.mu.Lock()
			r := k.live[pool][id]
			k.mu.Unlock()
			if r == nil {
				continue // ended in between
			}
			r.mu.Lock()
			if !r.ended {
				r.held = false
				r.tell()
			}
			r.mu.Unlock()
		}
	}
}
