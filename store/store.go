// Package store is everything about Redis: the key layout, the atomic writes of an indexer, the
// pipelined lookups of a frontend, and the state of the way to each shard.
//
// # Guarantees
//
// Writes happen exactly once, with any number of indexers: [Store.Apply] is conditional on the
// stream's generation and watermark, so a repetition after a lost reply, or by a second indexer,
// does nothing. A generation ends in O(1) with [Store.Restart] or [Store.Remove]; from then on
// no lookup credits its blocks.
//
// Lookups use plain commands only. [Store.Lookup] returns within the lookup budget whatever
// Redis does.
//
// # When Redis is away
//
// Every error is classified: it wraps [ErrUnavailable], [ErrCorrupt] or [ErrInvalid], or none of
// them where it says nothing about Redis. The first ErrUnavailable of a lookup takes the shard's
// link down; while it is down lookups return at once without touching Redis, and one prober per
// shard and process tries with exponential backoff and full jitter until an answer comes. Writes
// are not stopped by the link: an indexer retries by itself.
package store

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// Options configures a Store.
type Options struct {
	// URL says where Redis is. Required.
	//
	//	redis://[user:password@]host[:port][/db]
	//	rediss://…                                       the same over TLS
	//	redis+sentinel://[…@]host[:port],…/master[/db]   parameters sentinel_username, sentinel_password
	//	redis+cluster://[…@]host[:port],…
	//	rediss+sentinel://…, rediss+cluster://…          over TLS; parameter tls_skip_verify=true
	URL string
	// Shards is how many shards a pool gets that this process is the first to register a worker
	// in. A pool that exists keeps its number. Default 1.
	Shards int
	// LookupBudget bounds all Redis work of one lookup. Default 20 ms.
	LookupBudget time.Duration
	// WriteTimeout bounds each call of the write side and of the administrative reads. Default 1 s.
	WriteTimeout time.Duration
	// PoolSize is how many connections per Redis node the lookups may use, and as many again the
	// rest. Default 16.
	PoolSize int
	// FrequencyWindow is how far back lookups count the uses of blocks (see [LookupOptions]); it has to be equal in all
	// processes. Counting writes to Redis. Default 0: nothing is counted.
	FrequencyWindow time.Duration
	// SlotRest is how long the slot of an ended generation rests after the sweep before another
	// stream may get it. It must be longer than any lookup. Default 1 minute.
	SlotRest time.Duration
	// Observe, if set, is called when [Store.Lookup] turns to a shard, and when that or [Store.PoolConfig] has to read the pool's
	// configuration first: with the caller's ctx, the link's name (see [LinkStatus]) and the number of blocks that are asked for. What it
	// returns is called at the end, with [Reason] where there was no answer, else "". Neither may block. Default: none.
	Observe func(ctx context.Context, link string, blocks int) (ended func(reason string))
	// Dialer replaces the network dialer. Default: TCP with keep-alive.
	Dialer func(ctx context.Context, network, addr string) (net.Conn, error)
	// Logger gets one line for each change of a link. Default: none.
	Logger *slog.Logger
	// Registerer takes the metrics. Default: they are not registered.
	Registerer prometheus.Registerer
}

// Store is a client of the index in Redis. It is safe for concurrent use.
type Store struct {
	opts       Options
	log        *slog.Logger
	metrics    *metrics
	read       redis.UniversalClient // lookups: every call ends within the lookup budget
	write      redis.UniversalClient // the rest: WriteTimeout
	predicting gate                  // a place for each Predict under way
	punctual   bool
	gate       gate // before the connections of read; nil in a cluster, where each shard has its own

	stop       chan struct{}
	stopOnce   sync.Once
	background sync.WaitGroup // probers

	mu     sync.RWMutex
	pools  map[kvcache.PoolID]*pool // those that Redis knows
	leased map[kvcache.PoolID]*leases

	strangers *link                // to the configuration of the others
	stranger  atomic.Pointer[pool] // the last one of them that was asked for
}

// New makes a Store. It does no I/O: Redis may be down.
func New(o Options) (*Store, error) {
	redisOptions, err := parseURL(o.URL)
	if err != nil {
		return nil, err
	}
	if o.Shards == 0 {
		o.Shards = 1
	}
	if o.Shards < 1 || o.Shards > 1024 {
		return nil, errors.New("store: Shards must be 1 to 1024")
	}
	setDefault(&o.LookupBudget, 20*time.Millisecond)
	setDefault(&o.WriteTimeout, time.Second)
	setDefault(&o.SlotRest, time.Minute)
	if o.PoolSize <= 0 {
		o.PoolSize = 16
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Store{
		opts: o, log: o.Logger, metrics: newMetrics(o.Registerer),
		read:  newClient(*redisOptions, o, o.LookupBudget),
		write: newClient(*redisOptions, o, o.WriteTimeout),
		stop:  make(chan struct{}), pools: map[kvcache.PoolID]*pool{}, leased: map[kvcache.PoolID]*leases{},
	}
	s.punctual = !redisOptions.IsClusterMode && redisOptions.MasterName == "" && len(redisOptions.Addrs) == 1
	s.predicting = make(gate, max(o.PoolSize/2, 1))
	s.metrics.lookupBudget.Set(o.LookupBudget.Seconds())
	if !redisOptions.IsClusterMode {
		s.gate = make(gate, o.PoolSize)
	}
	s.strangers = newStrangers(s)
	quietLibrary.Do(func() { redis.SetLogger(libraryLog{s}) })
	return s, nil
}

func setDefault(d *time.Duration, v time.Duration) {
	if *d <= 0 {
		*d = v
	}
}

// Close stops the probers and closes all connections.
func (s *Store) Close() error {
	s.stopOnce.Do(func() { close(s.stop) })
	s.background.Wait()
	return errors.Join(s.read.Close(), s.write.Close())
}

// Links lists the state of the way to every shard of the pools in use, and to their leases.
func (s *Store) Links() []LinkStatus {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var out []LinkStatus
	if st := s.strangers.status(); !st.Up {
		out = append(out, st)
	}
	for _, p := range s.pools {
		shards, known := p.links()
		if st := p.link.status(); !known || !st.Up {
			out = append(out, st)
		}
		for _, sh := range shards {
			out = append(out, sh.link.status())
		}
	}
	for _, l := range s.leased {
		out = append(out, l.link.status())
	}
	return out
}

// writeFailed classifies and counts the error of a write.
func (s *Store) writeFailed(ctx context.Context, err error) error {
	err = classify(ctx, err)
	if reason := Reason(err); reason != ReasonCanceled && reason != ReasonInvalid {
		s.metrics.writeErrors.WithLabelValues(reason).Inc()
	}
	return err
}

// budgeted limits a call that is on the way of a request: to the lookup budget, or to the caller's deadline where that is
// earlier. It runs on its own time: a client that hangs up must not cost a connection.
func (s *Store) budgeted(ctx context.Context) (bounded context.Context, cancel context.CancelFunc, budget time.Duration) {
	start := time.Now()
	end := start.Add(s.opts.LookupBudget)
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end = d
	}
	bounded, cancel = context.WithDeadline(context.WithoutCancel(ctx), end)
	return bounded, cancel, end.Sub(start)
}

// Punctual tells whether PoolConfig, Lookup and Select end by the lookup budget, or by their context's deadline, without
// being watched: so it is with a single server. The library's ways to a cluster and to Sentinel ask for the topology in between, and that
// has deadlines of its own.
func (s *Store) Punctual() bool { return s.punctual }

// bound limits an administrative or writing call.
func (s *Store) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, s.opts.WriteTimeout)
}
