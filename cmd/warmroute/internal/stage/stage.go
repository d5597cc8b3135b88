package stage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/indexer"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/sim"
	"github.com/warmroute/warmroute/store"
)

// The size of every stage.
const (
	NumEngines   = 4
	NumFrontends = 2
	BlockSize    = 16 // tokens
)

// Options configures a Stage.
type Options struct {
	// Name tells this stage's pool from those of others in the same Redis. Required.
	Name string
	// Redis is the URL of the index. Required.
	Redis string
	// Policy and Fallback are the frontends' ways to choose a worker. Default: theirs.
	Policy, Fallback string
	// LookupBudget bounds the index work of one request. Default: the frontends'.
	LookupBudget time.Duration
	// PoolSize is the connections per Redis node of each process's lookups. Default: the store's.
	PoolSize int
	// Shards is the number of shards of the pool. Default 1.
	Shards int
	// Indexers is how many there are, each following every engine. Default 1.
	Indexers int
	// Engine makes the options of an engine; model, block size, name and logger are added. Default: those of [sim].
	Engine sim.Options
	// WithoutRedis starts the stage although Redis does not answer.
	WithoutRedis bool
	// Cable is the way to Redis of an indexer or a frontend, named "indexer-0" or "frontend-1". Default: straight.
	Cable func(part string) *Cable
	// Logger takes the log of every part, with its name as attribute "part". Required.
	Logger *slog.Logger
}

// Stage is one set of fresh engines, with indexers and frontends, and the index in Redis that
// belongs to them.
type Stage struct {
	Pool      kvcache.PoolID
	Store     *store.Store // the stage's own way to Redis, without a cable
	Engines   []*sim.Engine
	Frontends []string // base URLs
	Indexes   []*TimedIndex
	Metrics   []*prometheus.Registry // one for each frontend and its store

	o       Options
	http    *http.Client
	group   *errgroup.Group
	cancel  context.CancelFunc
	closers []func() error
}

// WorkerID is the name of an engine.
func WorkerID(engine int) string { return fmt.Sprintf("engine-%d", engine) }

// New starts everything and waits until every frontend can serve.
func New(ctx context.Context, o Options) (s *Stage, err error) {
	running, cancel := context.WithCancel(ctx)
	group, running := errgroup.WithContext(running)
	s = &Stage{
		Pool: kvcache.PoolID{Tenant: kvcache.DefaultTenant, Model: "warmroute-demo-" + o.Name},
		o:    o, http: NewHTTPClient(), group: group, cancel: cancel,
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.Store, err = s.newStore("", nil); err != nil {
		return s, err
	}
	if _, err := s.Store.Pools(ctx); err != nil && !o.WithoutRedis { // the parts would start without, but there would be little to see
		return s, err
	}
	followed, served, err := s.startEngines(running)
	if err != nil {
		return s, err
	}
	for i := range max(o.Indexers, 1) {
		if err := s.start(running, fmt.Sprintf("indexer-%d", i), func(part string) (runner, error) {
			index, err := s.newStore(part, nil)
			if err != nil {
				return nil, err
			}
			return indexer.New(indexer.Options{Store: index, Workers: followed, Listen: "127.0.0.1:0", Logger: s.logger(part)})
		}); err != nil {
			return s, err
		}
	}
	for i := range NumFrontends {
		if err := s.start(running, fmt.Sprintf("frontend-%d", i), func(part string) (runner, error) { return s.newFrontend(part, served) }); err != nil {
			return s, err
		}
	}
	return s, s.ready(running)
}

// runner is a part of the stage.
type runner interface{ Run(context.Context) error }

// start makes a part and runs it. Its goroutines, and those that they start, carry its name as a profiler label.
func (s *Stage) start(ctx context.Context, part string, make func(part string) (runner, error)) (err error) {
	pprof.Do(ctx, pprof.Labels("part", part), func(ctx context.Context) {
		var r runner
		if r, err = make(part); err == nil {
			s.group.Go(func() error { return r.Run(ctx) })
		}
	})
	return err
}

func (s *Stage) startEngines(running context.Context) (followed []indexer.Worker, served []frontend.Worker, err error) {
	for i := range NumEngines {
		id, o := WorkerID(i), s.o.Engine
		o.Model, o.BlockSize, o.Fingerprint, o.Logger = s.Pool.Model, BlockSize, id, s.logger(id)
		e, err := sim.New(o)
		if err != nil {
			return nil, nil, err
		}
		s.Engines = append(s.Engines, e)
		s.group.Go(func() error { return e.Run(running) })
		followed = append(followed, indexer.Worker{
			ID: id, Model: s.Pool.Model, URL: e.URL(), Endpoint: e.EventEndpoint(0), ReplayEndpoint: e.ReplayEndpoint(0), BlockSize: BlockSize,
		})
		served = append(served, frontend.Worker{ID: id, URL: e.URL()})
	}
	return followed, served, nil
}

func (s *Stage) newFrontend(part string, served []frontend.Worker) (*frontend.Frontend, error) {
	metrics := prometheus.NewRegistry()
	index, err := s.newStore(part, metrics)
	if err != nil {
		return nil, err
	}
	timed := &TimedIndex{Index: index}
	f, err := frontend.New(frontend.Options{
		Index: timed, Workers: served, Policy: s.o.Policy, Fallback: s.o.Fallback, LookupBudget: s.o.LookupBudget,
		Registerer: metrics, Gatherer: metrics,
		PollInterval: 250 * time.Millisecond, DrainLimit: 5 * time.Second, Logger: s.logger(part),
	})
	if err != nil {
		return nil, err
	}
	s.Indexes, s.Metrics, s.Frontends = append(s.Indexes, timed), append(s.Metrics, metrics), append(s.Frontends, "http://"+f.Addr())
	return f, nil
}

func (s *Stage) logger(part string) *slog.Logger { return s.o.Logger.With("part", part) }

// newStore makes a part's store, or with an empty part the stage's own.
func (s *Stage) newStore(part string, metrics prometheus.Registerer) (*store.Store, error) {
	so := store.Options{
		URL: s.o.Redis, Shards: s.o.Shards, LookupBudget: s.o.LookupBudget, PoolSize: s.o.PoolSize, Registerer: metrics,
	}
	if part != "" {
		so.Logger = s.logger(part)
		if s.o.Cable != nil {
			so.Dialer = s.o.Cable(part).Dial
		}
	}
	st, err := store.New(so)
	if err == nil {
		s.closers = append(s.closers, st.Close)
	}
	return st, err
}

// ready waits until every frontend knows that every engine serves the model.
func (s *Stage) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return Poll(ctx, "the frontends to find the engines", func() (bool, error) {
		for _, f := range s.Frontends {
			var got struct{ Workers int }
			err := getJSON(ctx, s.http, f+"/ready", &got)
			if err != nil || got.Workers < NumEngines {
				return false, err
			}
		}
		return true, nil
	})
}

// CaughtUp waits until the index has applied everything that the engines have published.
func (s *Stage) CaughtUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return Poll(ctx, "the index to catch up with the engines", func() (bool, error) {
		streams, err := s.Store.Streams(ctx, s.Pool)
		if err != nil {
			return false, err
		}
		behind := len(s.Engines)
		for _, st := range streams {
			for i, e := range s.Engines {
				if st.Worker == WorkerID(i) && st.Seq >= e.LastSeq(0) {
					behind--
				}
			}
		}
		return behind == 0, nil
	})
}

// Close ends everything.
func (s *Stage) Close() error {
	s.cancel()
	err := s.group.Wait()
	s.http.CloseIdleConnections()
	for _, c := range s.closers {
		err = errors.Join(err, c())
	}
	return err
}

// CloseAndClear ends everything and takes what the stage wrote out of Redis.
func (s *Stage) CloseAndClear(ctx context.Context) error {
	s.cancel()
	err := s.group.Wait()
	if len(s.Frontends) > 0 {
		err = errors.Join(err, Clear(ctx, s.Store, s.Pool))
	}
	return errors.Join(err, s.Close())
}

// clearLimit bounds the taking out of one pool.
const clearLimit = 5 * time.Second

// Clear takes a pool's workers, and what they held, out of Redis, also where ctx has ended: whoever wrote them is interrupted, say.
func Clear(ctx context.Context, s *store.Store, pool kvcache.PoolID) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), clearLimit)
	defer cancel()
	streams, err := s.Streams(ctx, pool)
	if err != nil {
		return err
	}
	for _, st := range streams {
		if _, err := s.Remove(ctx, st); err != nil {
			return err
		}
	}
	for more := true; more; {
		if _, more, err = s.Sweep(ctx, pool, 10_000); err != nil {
			return err
		}
	}
	return nil
}

// Poll asks until the answer is yes. The last error, if any, is part of the one that it returns
// when ctx ends first.
func Poll(ctx context.Context, what string, ask func() (bool, error)) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := ask()
		if ok {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, errors.Join(ctx.Err(), err))
		}
	}
}
