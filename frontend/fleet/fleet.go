// Package fleet knows the workers that a frontend may send requests to: which exist, which
// answer, and which models each serves. Workers come from configuration, from the streams
// that indexers register, from a file with what was registered when a frontend last looked, and
// from DNS; health and models come from the workers themselves, by polling.
//
// Readers take an immutable [Snapshot], so that one request decides on one view. A worker that the
// index alone knows, without a URL, is in no snapshot.
//
// # When Redis is away
//
// The workers last learnt from the index stay, also when it comes back without their pool. Polling
// goes on and waits for nothing; the index is read more and more seldom until it answers. One
// line is logged when it goes and one when it comes back.
package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warmroute/warmroute/guard"
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

// Source is how a worker was found.
type Source string

// The sources. A worker that several know belongs to the first of them.
const (
	SourceConfig Source = "config"
	SourceIndex  Source = "index"
	SourceSaved  Source = "snapshot" // the file; the index has not confirmed it yet
	SourceDNS    Source = "dns"
)

// Catalog lists what indexers have registered. *store.Store is one.
type Catalog interface {
	// Pools lists the known pools.
	Pools(ctx context.Context) ([]kvcache.PoolID, error)
	// Streams lists a pool's publishers; with an error, those that could be read.
	Streams(ctx context.Context, pool kvcache.PoolID) ([]store.Stream, error)
	// Removed tells whether a stream was taken out on purpose, as by /unregister.
	Removed(ctx context.Context, id store.StreamID) (bool, error)
}

// Resolver finds the addresses of a host. *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Options configures a Fleet.
type Options struct {
	// Workers are the configured workers. They win over registered ones of the same name.
	Workers []Worker
	// Catalog finds registered workers; nil means that there are none.
	Catalog Catalog
	// Names are host:port names; every address of the host is a worker "address:port" of the default
	// tenant, unless a worker with that URL is known from elsewhere under its own name.
	Names []string
	// File, if set, keeps what the catalog lists, so that a fleet starts with it where the catalog cannot
	// be read.
	File string
	// Interval is the time between two polls of all workers, and between two readings of the
	// catalog. Default 2 s.
	Interval time.Duration
	// NamesInterval is the time between two look-ups of all names. Default 10 s.
	NamesInterval time.Duration
	// Timeout bounds one poll of one worker, one reading of the catalog and one look-up of a
	// name. Default 3 s.
	Timeout time.Duration
	// Grace is how long a worker that answers stays after it has left the catalog, because an index
	// that was lost is filled again one worker after the other. Negative means not at all. Default 5 ×
	// Interval.
	Grace time.Duration
	// Transport is used for polling. Default: http.DefaultTransport.
	Transport http.RoundTripper
	// Resolver looks up names. Default: net.DefaultResolver.
	Resolver Resolver
	// Token, if set, returns what is sent to the workers as bearer token; "" means none.
	Token func() string
	// Lost, if set, is called when a worker has not answered three polls in a row, or leaves without answering: nobody works
	// on what was sent to it. While all workers are late, twelve polls. It must not call the fleet.
	Lost func(Key)
	// Logger gets one line per worker, catalog or name that comes or goes. Default: discard.
	Logger *slog.Logger
	// Gone, if set, is called with the key of each worker that left.
	Gone func(Key)
}

// Fleet polls workers.
type Fleet struct {
	o    Options
	snap atomic.Pointer[Snapshot]

	configured []*state // in the order of the options

	mu       sync.Mutex
	workers  map[Key]*state // what the sources add up to
	listed   map[Key]*listing
	removed  map[Key]bool           // as of the last complete reading: taken out of the catalog on purpose
	folded   map[Key]Key            // configured workers that count under the name that the catalog has for their place
	pools    map[kvcache.PoolID]int // block size by pool, of the catalog or the file
	resolved map[string]*resolution // by name
	catalog  Status
	updated  time.Time     // newest update of any stream that the catalog lists
	changed  chan struct{} // closed when the next snapshot is there

	strained bool // said that workers that are late take requests

	// The catalog's loop alone uses these.
	saved  string // what the file holds
	saving Status
}

// state is what is known of one worker; guarded by Fleet.mu.
type state struct {
	Worker
	url    *url.URL
	source Source
	ranks  []int // of the streams in the index
	health
	models []Model
	tried  bool // was polled at least once
	polled bool // answered /v1/models at least once
	// unregistered workers were taken out of the index on purpose: they get no new requests.
	unregistered bool

	unanswered int  // polls in a row without any answer
	lost       bool // Options.Lost was told
}

// lostAfter polls in a row without any answer mean that nobody is there any more; where all workers are late, more: time may be short here.
const lostAfter, allLostAfter = 3, 12

// health is what the last poll of a worker said.
type health struct {
	state State
	cause string    // why it is not healthy
	since time.Time // of the last change of state
	late  bool      // it is unhealthy for want of an answer in time, and for nothing else
}

// New makes a Fleet. It does no I/O.
func New(o Options) (*Fleet, error) {
	if o.Interval <= 0 {
		o.Interval = 2 * time.Second
	}
	if o.NamesInterval <= 0 {
		o.NamesInterval = 10 * time.Second
	}
	if o.Timeout <= 0 {
		o.Timeout = 3 * time.Second
	}
	if o.Grace == 0 {
		o.Grace = 5 * o.Interval
	}
	if o.Transport == nil {
		o.Transport = http.DefaultTransport
	}
	if o.Resolver == nil {
		o.Resolver = net.DefaultResolver
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	f := &Fleet{
		o: o, workers: map[Key]*state{}, listed: map[Key]*listing{}, folded: map[Key]Key{}, pools: map[kvcache.PoolID]int{},
		resolved: map[string]*resolution{}, changed: make(chan struct{}),
	}
	for _, w := range o.Workers {
		s, err := newState(w, SourceConfig)
		if err != nil {
			return nil, err
		}
		if f.workers[w.Key()] != nil {
			return nil, fmt.Errorf("worker %q is configured twice", w.Key())
		}
		f.workers[w.Key()] = s
		f.configured = append(f.configured, s)
	}
	for _, name := range o.Names {
		r, err := newResolution(name)
		if err != nil {
			return nil, err
		}
		f.resolved[name] = r
	}
	f.publish()
	return f, nil
}

// Status is how it stands with a source that workers are found in.
type Status struct {
	Up    bool
	Since time.Time // of the last change; zero before the first look
	Cause string    // why it is not up
}

// turn notes the outcome of a look and tells whether it differs from the one before. The first look
// differs only if it failed.
func (s *Status) turn(cause string) (changed bool, lasted time.Duration) {
	up := cause == ""
	if !s.Since.IsZero() && s.Up == up {
		return false, 0
	}
	changed = !up || !s.Since.IsZero()
	lasted = time.Since(s.Since)
	*s = Status{up, time.Now(), cause}
	return changed, lasted
}

func newState(w Worker, source Source) (*state, error) {
	if err := (kvcache.WorkerRank{Worker: w.ID}).Validate(); err != nil {
		return nil, err
	}
	u, err := guard.WorkerURL(w.URL)
	if err != nil {
		return nil, fmt.Errorf("worker %q: %w", w.ID, err)
	}
	if w.Ranks < 0 || w.Ranks > kvcache.MaxRank+1 {
		return nil, fmt.Errorf("worker %q: %d ranks: want 0 to %d", w.ID, w.Ranks, kvcache.MaxRank+1)
	}
	u.Path = strings.TrimRight(u.Path, "/")
	u.RawQuery, u.Fragment = "", ""
	return &state{Worker: w, url: u, source: source, health: health{cause: "not polled yet", since: time.Now()}}, nil
}

// place is what two URLs of one tenant's worker have in common.
func (s *state) place() string {
	port := s.url.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[s.url.Scheme]
	}
	return s.Key().Tenant + " " + s.url.Scheme + "://" + net.JoinHostPort(strings.ToLower(s.url.Hostname()), port) + s.url.Path
}

// Snapshot is the view as of now.
func (f *Fleet) Snapshot() *Snapshot { return f.snap.Load() }

// Run reads the file, and then polls the workers, reads the catalog and looks up the names until ctx ends.
// None of the three waits for another.
func (f *Fleet) Run(ctx context.Context) {
	f.load(ctx)
	var loops sync.WaitGroup
	defer loops.Wait()
	if f.o.Catalog != nil {
		loops.Go(func() { f.followCatalog(ctx) })
	}
	if len(f.o.Names) > 0 {
		loops.Go(func() { f.followNames(ctx) })
	}
	tick := time.NewTicker(f.o.Interval)
	defer tick.Stop()
	for {
		f.pollAll(ctx, nil)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Refresh reads the catalog, looks up the names and polls every worker once. Each worker's answer shows
// in the snapshot as soon as it is there.
func (f *Fleet) Refresh(ctx context.Context) {
	_, _ = f.discover(ctx) // errors are logged there
	_, _ = f.resolve(ctx)
	f.pollAll(ctx, nil)
}

// pollAll polls the named workers, or all.
func (f *Fleet) pollAll(ctx context.Context, keys []Key) {
	if keys == nil {
		f.mu.Lock()
		keys = slices.Collect(maps.Keys(f.workers))
		f.mu.Unlock()
	}
	var polls errgroup.Group
	polls.SetLimit(64)
	for _, k := range keys {
		polls.Go(func() error { f.poll(ctx, k); return nil })
	}
	_ = polls.Wait() // polls report no errors
}
