package indexer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Indexer follows engines and serves the admin surface.
type Indexer struct {
	opts        Options
	metrics     *metrics
	timing      timing
	health      healthCheck
	work        workCheck
	suspicion   atomic.Int32  // a [suspicion]
	replaySlots chan struct{} // one token per replay in progress
	initial     []publisher
	listener    net.Listener
	server      *http.Server

	mu       sync.Mutex
	ctx      context.Context // of Run; nil before and after
	streams  map[store.StreamID]*stream
	draining bool
}

// New makes an Indexer and binds its admin address. It does not need Redis to be there.
func New(o Options) (*Indexer, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	initial, err := o.publishers()
	if err != nil {
		return nil, err
	}
	client := newWorkerClient(o.Networks, o.places())
	ix := &Indexer{
		opts: o, metrics: newMetrics(o.Registerer), timing: defaultTiming, health: newHealthCheck(client), work: newWorkCheck(client), initial: initial,
		replaySlots: make(chan struct{}, o.Replays), streams: map[store.StreamID]*stream{},
	}
	if err := newStreamMetrics(o.Registerer, ix.all); err != nil {
		return nil, fmt.Errorf("indexer: metrics: %w", err)
	}
	if ix.listener, err = net.Listen("tcp", o.Listen); err != nil {
		return nil, fmt.Errorf("indexer: %w", err)
	}
	ix.server = &http.Server{
		Handler: ix.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: time.Minute, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 64 << 10, ErrorLog: slog.NewLogLogger(o.Logger.Handler(), slog.LevelDebug),
	}
	ix.listener = guard.Guard(ix.server, ix.listener, guard.ConnOptions{Surface: "indexer", Max: maxConnections, SendTimeout: time.Minute, Registerer: o.Registerer})
	return ix, nil
}

// maxConnections bounds those of the admin surface: engines that register or send events, and people.
const maxConnections = 4096

func init() { gin.SetMode(gin.ReleaseMode) } // before any engine: it is a global, and debug mode prints

// Addr is the address of the admin surface.
func (ix *Indexer) Addr() net.Addr { return ix.listener.Addr() }

// Close releases the admin address of an Indexer that is not running.
func (ix *Indexer) Close() error {
	err := ix.listener.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Run follows the workers and serves until ctx ends, then drains: requests in progress are answered and every stream has
// ended when it returns. It can be called once.
func (ix *Indexer) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ix.mu.Lock()
	ix.ctx = ctx
	ix.mu.Unlock()
	for _, p := range ix.initial {
		ix.follow(p)
	}
	var background sync.WaitGroup
	background.Go(func() { ix.rediscover(ctx) })
	background.Go(func() { ix.sweep(ctx) })
	background.Go(func() { ix.watch(ctx) })
	background.Go(func() { ix.checkUp(ctx) })
	background.Go(func() { ix.checkHealth(ctx) })
	served := make(chan error, 1)
	background.Go(func() { served <- ix.server.Serve(ix.listener) })
	ix.warnOfExposure()
	ix.opts.Logger.Info("indexer is serving", "address", ix.Addr().String(), "streams", len(ix.initial))

	var err error
	select {
	case <-ctx.Done():
		ix.mu.Lock()
		ix.draining = true
		ix.mu.Unlock()
		grace, stop := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer stop()
		if ix.server.Shutdown(grace) != nil {
			_ = ix.server.Close()
		}
	case err = <-served:
		err = fmt.Errorf("indexer: admin surface: %w", err)
		cancel()
	}
	ix.mu.Lock()
	ix.ctx = nil
	streams := ix.streams
	ix.streams = map[store.StreamID]*stream{}
	ix.mu.Unlock()
	for _, s := range streams {
		s.stop()
	}
	background.Wait()
	return err
}

// follow starts a stream unless it is followed already in the same way. One whose registration has changed starts anew.
func (ix *Indexer) follow(p publisher) {
	for {
		ix.mu.Lock()
		if ix.ctx == nil {
			ix.mu.Unlock()
			return
		}
		old := ix.streams[p.id]
		if old == nil {
			s := newStream(ix, p)
			var ctx context.Context
			ctx, s.cancel = context.WithCancel(ix.ctx)
			ix.streams[p.id] = s
			ix.mu.Unlock()
			go s.run(ctx)
			return
		}
		same := old.reg == p.reg
		if !same {
			delete(ix.streams, p.id)
		}
		ix.mu.Unlock()
		if same {
			return
		}
		old.stop()
	}
}

// forget drops a stream that has ended by itself.
func (ix *Indexer) forget(s *stream) {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	if ix.streams[s.id] == s {
		delete(ix.streams, s.id)
	}
}

// unfollow stops a stream and says whether there was one.
func (ix *Indexer) unfollow(id store.StreamID) bool {
	ix.mu.Lock()
	s := ix.streams[id]
	delete(ix.streams, id)
	ix.mu.Unlock()
	if s != nil {
		s.stop()
	}
	return s != nil
}

// stream is a followed stream, nil where there is none.
func (ix *Indexer) stream(id store.StreamID) *stream {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	return ix.streams[id]
}

// all lists the followed streams.
func (ix *Indexer) all() []*stream {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	out := make([]*stream, 0, len(ix.streams))
	for _, s := range ix.streams {
		out = append(out, s)
	}
	return out
}

// discoverInterval is the time between two looks for streams that registered elsewhere.
const discoverInterval = 5 * time.Second

// rediscover follows the streams that registered in an earlier life of this indexer, or with another one.
func (ix *Indexer) rediscover(ctx context.Context) {
	b := newBackoff(ix.timing.retry, discoverInterval)
	tick := time.NewTicker(discoverInterval)
	defer tick.Stop()
	failing := false
	for {
		err := ix.discover(ctx)
		if ctx.Err() != nil {
			return
		}
		if (err != nil) != failing {
			failing = err != nil
			if failing {
				ix.opts.Logger.Warn("registered streams cannot be listed", "reason", store.Reason(err), "error", err)
			} else {
				ix.opts.Logger.Info("registered streams are known")
			}
		}
		if failing {
			if pause(ctx, b) != nil {
				return
			}
			continue
		}
		b.Reset()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (ix *Indexer) discover(ctx context.Context) error {
	pools, err := ix.opts.Store.Pools(ctx)
	if err != nil {
		return err
	}
	var errs []error
	followed := ix.byPool()
	for pool, streams := range followed {
		errs = append(errs, ix.announce(ctx, pool, streams))
	}
	for _, pool := range pools {
		applied := watermarks(followed[poolID(pool.Tenant, pool.Model)])
		streams, err := ix.opts.Store.Streams(ctx, pool)
		errs = append(errs, err)
		if err == nil {
			nudgeBehind(applied, streams) // of a stream that is idle nothing else would tell that Redis has lost its last writes
		}
		for _, st := range streams {
			p := publisher{id: store.StreamID{Pool: poolID(pool.Tenant, pool.Model), WorkerRank: st.WorkerRank}, reg: st.Registration, discovered: true}
			if err := p.check(); err != nil {
				ix.opts.Logger.Error("registered stream cannot be followed", "worker", st.WorkerRank.String(), "error", err)
				continue
			}
			if old := ix.stream(p.id); old == nil || old.moved(p.reg) {
				ix.follow(p)
			}
		}
	}
	return errors.Join(errs...)
}

// announce puts a pool back whose name or configuration Redis has lost while its streams are there.
func (ix *Indexer) announce(ctx context.Context, pool kvcache.PoolID, streams []*stream) error {
	if ok, err := ix.opts.Store.Announced(ctx, pool); ok || err != nil {
		return err
	}
	for _, s := range streams {
		reg, registered := s.reg, false
		s.update(func(v *Status) { registered, reg.BlockSize = v.Registered, v.BlockSize })
		if !registered || reg.BlockSize == 0 {
			continue // it registers yet
		}
		if _, _, err := ix.opts.Store.Follow(ctx, s.id, reg); err != nil && !errors.Is(err, store.ErrRemoved) {
			return err
		}
		s.nudge()
	}
	return nil
}

// sweepStep is how many blocks of ended generations one step clears in each shard: 0.3 ms of Redis (warmroute bench sweep).
const sweepStep = 100

// sweep clears what ended generations left behind, in small steps, for as long as there is anything.
func (ix *Indexer) sweep(ctx context.Context) {
	tick := time.NewTicker(ix.opts.SweepInterval)
	defer tick.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := ix.sweepPools(ctx)
		if ctx.Err() != nil {
			return
		}
		if (err != nil) != failing {
			failing = err != nil
			if failing {
				ix.opts.Logger.Warn("sweep failed, trying again", "reason", store.Reason(err), "error", err)
			} else {
				ix.opts.Logger.Info("sweep works again")
			}
		}
	}
}

func (ix *Indexer) sweepPools(ctx context.Context) error {
	pools, err := ix.opts.Store.Pools(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, pool := range pools {
		errs = append(errs, ix.sweepPool(ctx, pool))
	}
	return errors.Join(errs...)
}

func (ix *Indexer) sweepPool(ctx context.Context, pool kvcache.PoolID) error {
	for {
		_, more, err := ix.opts.Store.Sweep(ctx, pool, sweepStep)
		if err != nil || !more || ctx.Err() != nil {
			return err
		}
	}
}
