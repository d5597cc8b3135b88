// Package fleet knows the workers that a frontend may send requests to: which exist, which
// answer, and which models each serves. Workers come from configuration and from the streams
// that indexers register; health and models come from the workers themselves, by polling.
//
// Readers take an immutable [Snapshot], so that one request decides on one view. With the
// index away the workers last learnt from it stay. A worker that the index alone knows, without a URL,
// is in no snapshot.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Worker is one engine instance.
type Worker struct {
	// ID is the worker's stable name, the same that its KV events are registered under.
	ID string
	// URL is the base of its HTTP API, http or https, without /v1.
	URL string
	// Ranks is how many data-parallel ranks share the URL. 0 means those that the index knows,
	// or else one.
	Ranks int
	// Engine is "vLLM", "SGLang" or "TRTLLM"; for display.
	Engine string
	// Tenant is whose pools the worker belongs to; "" means [kvcache.DefaultTenant].
	Tenant string
}

// Catalog lists what indexers have registered. *store.Store is one.
type Catalog interface {
	// Pools lists the known pools.
	Pools(ctx context.Context) ([]kvcache.PoolID, error)
	// Streams lists a pool's publishers; with an error, those that could be read.
	Streams(ctx context.Context, pool kvcache.PoolID) ([]store.Stream, error)
}

// Options configures a Fleet.
type Options struct {
	// Workers are the configured workers. They win over registered ones of the same name.
	Workers []Worker
	// Catalog finds registered workers; nil means that only configured ones exist.
	Catalog Catalog
	// Interval is the time between two polls of all workers. Default 2 s.
	Interval time.Duration
	// Timeout bounds one poll of one worker, and one reading of the catalog. Default 3 s.
	Timeout time.Duration
	// Transport is used for polling. Default: http.DefaultTransport.
	Transport http.RoundTripper
	// Token is sent to the workers as bearer token; "" means none.
	Token string
	// Logger gets one line per worker that comes or goes. Default: discard.
	Logger *slog.Logger
	// Gone, if set, is called with the id of each worker that left.
	Gone func(id string)
}

// Fleet polls workers.
type Fleet struct {
	o    Options
	snap atomic.Pointer[Snapshot]

	mu      sync.Mutex
	workers map[string]*state
	changed chan struct{} // closed when the next snapshot is there
}

// state is what is known of one worker; guarded by Fleet.mu.
type state struct {
	Worker
	url        *url.URL
	configured bool
	ranks      []int // of the streams in the index
	healthy    bool
	cause      string
	since      time.Time // of the last change of healthy
	models     []Model
	polled     bool // answered /v1/models at least once
}

// New makes a Fleet. It does no I/O.
func New(o Options) (*Fleet, error) {
	if o.Interval <= 0 {
		o.Interval = 2 * time.Second
	}
	if o.Timeout <= 0 {
		o.Timeout = 3 * time.Second
	}
	if o.Transport == nil {
		o.Transport = http.DefaultTransport
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	f := &Fleet{o: o, workers: map[string]*state{}, changed: make(chan struct{})}
	for _, w := range o.Workers {
		s, err := newState(w)
		if err != nil {
			return nil, err
		}
		if f.workers[w.ID] != nil {
			return nil, fmt.Errorf("worker %q is configured twice", w.ID)
		}
		s.configured = true
		f.workers[w.ID] = s
	}
	f.publish()
	return f, nil
}

func newState(w Worker) (*state, error) {
	if err := (kvcache.WorkerRank{Worker: w.ID}).Validate(); err != nil {
		return nil, err
	}
	u, err := url.Parse(w.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("worker %q: url %q: want http://host:port or https://host:port", w.ID, w.URL)
	}
	if w.Ranks < 0 || w.Ranks > kvcache.MaxRank+1 {
		return nil, fmt.Errorf("worker %q: %d ranks: want 0 to %d", w.ID, w.Ranks, kvcache.MaxRank+1)
	}
	u.Path = strings.TrimRight(u.Path, "/")
	u.RawQuery, u.Fragment = "", ""
	return &state{Worker: w, url: u, cause: "not polled yet", since: time.Now()}, nil
}

// Snapshot is the view as of now.
func (f *Fleet) Snapshot() *Snapshot { return f.snap.Load() }

// Run polls until ctx ends.
func (f *Fleet) Run(ctx context.Context) {
	tick := time.NewTicker(f.o.Interval)
	defer tick.Stop()
	for {
		f.Refresh(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Refresh reads the catalog and polls every worker once. Each worker's answer shows in the
// snapshot as soon as it is there.
func (f *Fleet) Refresh(ctx context.Context) {
	f.discover(ctx)
	f.mu.Lock()
	ids := slices.Collect(maps.Keys(f.workers))
	f.mu.Unlock()
	var polls errgroup.Group
	polls.SetLimit(64)
	for _, id := range ids {
		polls.Go(func() error { f.poll(ctx, id); return nil })
	}
	_ = polls.Wait() // polls report no errors
}

// discover merges what the catalog lists. Only a complete listing takes workers away.
func (f *Fleet) discover(ctx context.Context) {
	if f.o.Catalog == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, f.o.Timeout)
	defer cancel()
	streams, err := f.streams(ctx)
	found := map[string]*state{}
	for _, st := range streams {
		s := found[st.Worker]
		if s == nil {
			var bad error
			s, bad = newState(Worker{ID: st.Worker, URL: st.URL, Engine: st.Engine, Tenant: st.Pool.Tenant})
			if bad != nil {
				s = &state{Worker: Worker{ID: st.Worker}} // its ranks may still be of use
			}
			found[st.Worker] = s
		}
		s.ranks = append(s.ranks, st.Rank)
	}
	for _, s := range found {
		slices.Sort(s.ranks)
		s.ranks = slices.Compact(s.ranks)
	}
	f.merge(found, err == nil)
}

func (f *Fleet) streams(ctx context.Context) ([]store.Stream, error) {
	pools, err := f.o.Catalog.Pools(ctx)
	if err != nil {
		return nil, err
	}
	var all []store.Stream
	var errs []error
	for _, p := range pools {
		streams, err := f.o.Catalog.Streams(ctx, p)
		all = append(all, streams...)
		errs = append(errs, err)
	}
	return all, errors.Join(errs...)
}

func (f *Fleet) merge(found map[string]*state, complete bool) {
	f.mu.Lock()
	var gone []string
	dirty := false
	for id, s := range f.workers {
		if n := found[id]; n != nil {
			dirty = dirty || !slices.Equal(s.ranks, n.ranks)
			s.ranks = n.ranks
			if !s.configured && n.url != nil && *n.url != *s.url {
				f.workers[id] = n // a new incarnation elsewhere: to be polled first
				dirty = true
			}
		} else if complete && !s.configured {
			delete(f.workers, id)
			gone = append(gone, id)
		}
	}
	var added []string
	for id, n := range found {
		if f.workers[id] == nil && n.url != nil {
			f.workers[id] = n
			added = append(added, id)
		}
	}
	if dirty || len(added) > 0 || len(gone) > 0 {
		f.publish()
	}
	f.mu.Unlock()
	for _, id := range added {
		f.o.Logger.Info("worker discovered", "worker", id)
	}
	for _, id := range gone {
		f.o.Logger.Info("worker unregistered", "worker", id)
		if f.o.Gone != nil {
			f.o.Gone(id)
		}
	}
}

// publish makes a new snapshot; f.mu is held, or nobody knows f yet.
func (f *Fleet) publish() {
	next := make(chan struct{})
	f.snap.Store(newSnapshot(f.workers, next))
	close(f.changed)
	f.changed = next
}
