// Package frontend is the HTTP face of warmroute: a stateless proxy that sends each OpenAI
// request to the worker that holds the longest part of its prompt at the least load, and
// answers what the index knows to those who choose themselves.
//
// # Guarantees
//
// No request fails, or waits longer than the lookup budget, because of the index. A request body reaches the
// worker byte for byte, an answer reaches the client chunk by chunk. An answer that breaks off
// breaks off for the client too. A request is tried on a second worker only where the first
// cannot have accepted it. Counts of what is in flight are exact again when the requests are over,
// however they ended.
//
// # When Redis is away
//
// Overlaps become unknown, which is not the same as zero: the fallback policy chooses, the answer says
// "x-kv-index-state: degraded", index_fallbacks_total counts the reason, /ready stays 200 and
// names the links that are down. Workers learnt from the index stay known, and a frontend that starts
// meanwhile has those of its configuration, of DNS and of its last snapshot.
package frontend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warmroute/warmroute/frontend/breaker"
	"github.com/warmroute/warmroute/frontend/feedback"
	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/inflight"
	"github.com/warmroute/warmroute/frontend/predict"
	"github.com/warmroute/warmroute/frontend/reserve"
	"github.com/warmroute/warmroute/frontend/ui"
	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/kvcache"
)

// Frontend serves.
type Frontend struct {
	o         Options
	listener  net.Listener
	server    *http.Server
	fleet     *fleet.Fleet
	metrics   *metrics
	inFlight  *inflight.Counts
	attempts  attempts
	breakers  *breaker.Set[fleet.Key]
	keeper    *reserve.Keeper   // nil without an index
	recorder  *predict.Recorder // likewise
	judge     *feedback.Judge
	tokenizer *tokenizer
	page      *ui.Page
	transport *http.Transport
	reverse   *httputil.ReverseProxy

	instance   string // begins the ids of this frontend's reservations
	requests   atomic.Uint64
	roundRobin roundRobin
	underWay   quota // requests
	buffered   quota // bytes of request bodies
	draining   atomic.Bool
	punctual   bool // the index is
}

// headerTimeout bounds the time that a request's header takes.
const headerTimeout = 10 * time.Second

// New makes a Frontend and binds its address. Nothing else is contacted: Redis and the
// workers may be down.
func New(o Options) (*Frontend, error) {
	if err := o.complete(); err != nil {
		return nil, fmt.Errorf("frontend: %w", err)
	}
	f := &Frontend{
		o: o, metrics: newMetrics(o.Registerer), transport: newTransport(o),
		underWay: quota{limit: int64(o.MaxInFlight)}, buffered: quota{limit: o.MaxBuffered},
	}
	f.tokenizer = &tokenizer{
		client: f.transport, timeout: o.TokenizeTimeout, token: o.WorkerToken, limit: o.MaxPromptTokens,
		count: f.countTokenize,
		cache: newTokenCache(o.TokenizeCacheBytes), paused: map[string]time.Time{},
	}
	f.inFlight = inflight.New(f.metrics.inFlight, func(id string) bool { return f.fleet.Snapshot().HasID(id) })
	f.breakers = breaker.New(breaker.Options[fleet.Key]{
		Failures: o.BreakerFailures, Pause: o.BreakerPause, Changed: f.breakerChanged,
		Known: func(k fleet.Key) bool { return f.fleet.Snapshot().Node(k) != nil },
	})
	if o.Index != nil {
		f.keeper = reserve.New(reserve.Options{
			Leases: o.Index, Lease: o.LoadLease, Registerer: o.Registerer,
			Pools: func() []kvcache.PoolID { return f.fleet.Snapshot().Pools() },
		})
		f.recorder = predict.New(predict.Options{Index: o.Index, Registerer: o.Registerer})
	}
	f.judge = feedback.New(feedback.Options{Changed: f.judged, Registerer: o.Registerer})
	f.instance = newName()
	f.attempts.at, f.attempts.alive = map[fleet.Key]map[*attempt]struct{}{}, stillAlive
	f.reverse = f.newProxy()
	var err error
	fo := fleet.Options{
		Workers: o.Workers, Names: o.WorkerDNS, NamesInterval: o.WorkerDNSInterval, File: o.SnapshotFile, Interval: o.PollInterval, Timeout: o.PollTimeout, Transport: f.transport,
		Token: o.WorkerToken, Logger: o.Logger,
		Gone: f.workerGone, Lost: f.attempts.lost,
	}
	if o.Index != nil {
		fo.Catalog = o.Index
		p, ok := o.Index.(punctual)
		f.punctual = ok && p.Punctual()
	}
	if f.fleet, err = fleet.New(fo); err != nil {
		return nil, fmt.Errorf("frontend: %w", err)
	}
	f.page = ui.New(ui.Options{Source: pageSource{f}})
	f.server = &http.Server{
		Handler:           f.routes(),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       headerTimeout + o.BodyTimeout, // also of a body that no handler reads
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(o.Logger.Handler(), slog.LevelDebug),
	}
	if err := countWorkers(o.Registerer, f.workersIn); err != nil {
		return nil, fmt.Errorf("frontend: %w", err)
	}
	if f.listener, err = net.Listen("tcp", o.Listen); err != nil {
		return nil, fmt.Errorf("frontend: %w", err)
	}
	f.listener = guard.Guard(f.server, f.listener, guard.ConnOptions{
		Surface: "frontend", Max: o.MaxConnections, SendTimeout: o.SendTimeout, Registerer: o.Registerer,
	})
	return f, nil
}

// Addr is the address that the frontend listens on.
func (f *Frontend) Addr() string { return f.listener.Addr().String() }

// Run serves until ctx ends, then drains: /ready turns to 503, the listener stays open for the
// drain delay, and requests in flight may finish until the drain limit. What is left then is
// aborted. It returns nil after a drain, complete or not.
func (f *Frontend) Run(ctx context.Context) error {
	// Requests outlive ctx, by the drain.
	requests, abort := context.WithCancel(context.WithoutCancel(ctx))
	defer abort()
	f.server.BaseContext = func(net.Listener) context.Context { return requests }
	defer f.transport.CloseIdleConnections()

	var background sync.WaitGroup
	defer background.Wait()
	defer abort()
	background.Go(func() { f.fleet.Run(requests) })
	if f.keeper != nil {
		background.Go(func() { f.keeper.Run(requests) })
		background.Go(func() { f.recorder.Run(requests) })
	}
	background.Go(func() { f.page.Run(ctx) }) // feeds end when the drain begins
	f.warnOfExposure()
	f.warnOfFiles(openFiles())

	served := make(chan error, 1)
	go func() { served <- f.server.Serve(f.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("frontend: %w", err)
	case <-ctx.Done():
	}
	f.draining.Store(true)
	f.server.SetKeepAlivesEnabled(false)
	f.o.Logger.Info("draining", "delay", f.o.DrainDelay, "limit", f.o.DrainLimit)
	select {
	case err := <-served:
		return fmt.Errorf("frontend: %w", err)
	case <-time.After(f.o.DrainDelay):
	}
	limit, cancel := context.WithTimeout(requests, f.o.DrainLimit)
	defer cancel()
	err := f.server.Shutdown(limit)
	if errors.Is(err, context.DeadlineExceeded) {
		f.o.Logger.Warn("drain limit reached, requests are aborted", "requests", f.underWay.used.Load())
		err = f.server.Close()
	}
	if err != nil {
		return fmt.Errorf("frontend: %w", err)
	}
	return nil
}
