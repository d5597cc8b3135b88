package demo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/indexer"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/sim"
	"github.com/warmroute/warmroute/store"
)

const (
	numEngines   = 4
	numFrontends = 2
	blockSize    = 16

	// Longer than the default: engines, indexer, frontends, clients and possibly Redis share this
	// process, and a machine that is busy with them is not what the demo is about.
	lookupBudget = 100 * time.Millisecond
)

// engineOptions make an engine whose cache holds about a third of the workload: together the engines can
// hold all of it, each alone cannot.
func engineOptions(model string, logger *slog.Logger) sim.Options {
	return sim.Options{
		Model: model, BlockSize: blockSize, Blocks: 1400, MaxModelLen: 8192, Logger: logger,
		PrefillPerToken: 100 * time.Microsecond, DecodePerToken: 5 * time.Millisecond,
	}
}

// stage is one set of fresh engines, with an indexer and frontends, and the index in Redis that
// belongs to them.
type stage struct {
	pool      kvcache.PoolID
	store     *store.Store // the stage's own way to Redis, never cut
	engines   []*sim.Engine
	frontends []string // base URLs
	indexes   []*timedIndex
	metrics   []*prometheus.Registry // of the frontends, and of the stores of frontends and indexer
	group     *errgroup.Group
	cancel    context.CancelFunc
	closers   []func() error
}

// newStage starts everything and waits until every frontend can serve.
func newStage(ctx context.Context, o Options, name, policy string, way *cable) (s *stage, err error) {
	model := "warmroute-demo-" + name
	running, cancel := context.WithCancel(ctx)
	group, running := errgroup.WithContext(running)
	if o.lookupBudget == 0 {
		o.lookupBudget = lookupBudget
	}
	if o.engine == nil {
		o.engine = engineOptions
	}
	s = &stage{pool: kvcache.PoolID{Tenant: kvcache.DefaultTenant, Model: model}, group: group, cancel: cancel}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close(ctx))
		}
	}()

	if s.store, err = s.newStore(o, nil); err != nil {
		return s, err
	}
	if _, err := s.store.Pools(ctx); err != nil && !o.redisAway { // the parts would start without, but there would be little to see
		return s, err
	}
	var followed []indexer.Worker
	var served []frontend.Worker
	for i := range numEngines {
		e, err := sim.New(o.engine(model, o.Logger))
		if err != nil {
			return s, err
		}
		s.engines = append(s.engines, e)
		group.Go(func() error { return e.Run(running) })
		id := fmt.Sprintf("engine-%d", i)
		followed = append(followed, indexer.Worker{
			ID: id, Model: model, URL: e.URL(), Endpoint: e.EventEndpoint(0), ReplayEndpoint: e.ReplayEndpoint(0), BlockSize: blockSize,
		})
		served = append(served, frontend.Worker{ID: id, URL: e.URL()})
	}

	index, err := s.newStore(o, way)
	if err != nil {
		return s, err
	}
	ix, err := indexer.New(indexer.Options{Store: index, Workers: followed, Listen: "127.0.0.1:0", Logger: o.Logger})
	if err != nil {
		return s, err
	}
	group.Go(func() error { return ix.Run(running) })

	for range numFrontends {
		index, err := s.newStore(o, way)
		if err != nil {
			return s, err
		}
		timed := &timedIndex{Index: index}
		s.indexes = append(s.indexes, timed)
		metrics := prometheus.NewRegistry()
		s.metrics = append(s.metrics, metrics)
		f, err := frontend.New(frontend.Options{
			Index: timed, Workers: served, Policy: policy, Fallback: o.fallback, LookupBudget: o.lookupBudget,
			Registerer: metrics, Gatherer: metrics,
			PollInterval: 250 * time.Millisecond, DrainLimit: 5 * time.Second, Logger: o.Logger,
		})
		if err != nil {
			return s, err
		}
		s.frontends = append(s.frontends, "http://"+f.Addr())
		group.Go(func() error { return f.Run(running) })
	}
	return s, s.ready(running)
}

func (s *stage) newStore(o Options, way *cable) (*store.Store, error) {
	metrics := prometheus.NewRegistry()
	so := store.Options{URL: o.Redis, Shards: o.shards, LookupBudget: o.lookupBudget, Logger: o.Logger, Registerer: metrics}
	if way != nil {
		so.Dialer = way.dial
		s.metrics = append(s.metrics, metrics)
	}
	st, err := store.New(so)
	if err == nil {
		s.closers = append(s.closers, st.Close)
	}
	return st, err
}

// ready waits until every frontend knows that every engine serves the model.
func (s *stage) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return poll(ctx, "the frontends to find the engines", func() (bool, error) {
		for _, f := range s.frontends {
			var got struct{ Workers int }
			err := getJSON(ctx, f+"/ready", &got)
			if err != nil || got.Workers < numEngines {
				return false, err
			}
		}
		return true, nil
	})
}

// caughtUp waits until the index has applied everything that the engines have published.
func (s *stage) caughtUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return poll(ctx, "the index to catch up with the engines", func() (bool, error) {
		streams, err := s.store.Streams(ctx, s.pool)
		if err != nil {
			return false, err
		}
		behind := len(s.engines)
		for _, st := range streams {
			for i, e := range s.engines {
				if st.Worker == fmt.Sprintf("engine-%d", i) && st.Seq >= e.LastSeq(0) {
					behind--
				}
			}
		}
		return behind == 0, nil
	})
}

// close ends everything and takes what the stage wrote out of Redis.
func (s *stage) close(ctx context.Context) error {
	s.cancel()
	err := s.group.Wait()
	if len(s.frontends) > 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, s.clear(ctx))
	}
	for _, c := range s.closers {
		err = errors.Join(err, c())
	}
	return err
}

func (s *stage) clear(ctx context.Context) error {
	streams, err := s.store.Streams(ctx, s.pool)
	if err != nil {
		return err
	}
	for _, st := range streams {
		if _, err := s.store.Remove(ctx, st); err != nil {
			return err
		}
	}
	for more := true; more; {
		if _, more, err = s.store.Sweep(ctx, s.pool, 10_000); err != nil {
			return err
		}
	}
	return nil
}

// timedIndex measures how long the requests of one frontend wait for the index.
type timedIndex struct {
	frontend.Index
	longest atomic.Int64 // nanoseconds

	mu    sync.Mutex
	waits []wait
}

// wait is one call of the index.
type wait struct {
	at   time.Time
	took time.Duration
}

// Lookup is the index's.
func (t *timedIndex) Lookup(ctx context.Context, pool kvcache.PoolID, blocks []kvcache.BlockHash, o store.LookupOptions) (kvcache.OverlapScores, kvcache.IndexState, error) {
	defer t.observe(time.Now())
	return t.Index.Lookup(ctx, pool, blocks, o)
}

// PoolConfig is the index's.
func (t *timedIndex) PoolConfig(ctx context.Context, pool kvcache.PoolID) (store.PoolConfig, bool, error) {
	defer t.observe(time.Now())
	return t.Index.PoolConfig(ctx, pool)
}

func (t *timedIndex) observe(since time.Time) {
	d := time.Since(since).Nanoseconds()
	t.mu.Lock()
	t.waits = append(t.waits, wait{since, time.Duration(d)})
	t.mu.Unlock()
	for {
		longest := t.longest.Load()
		if d <= longest || t.longest.CompareAndSwap(longest, d) {
			return
		}
	}
}

// poll asks until the answer is yes. The last error, if any, is part of the one that it returns
// when ctx ends first.
func poll(ctx context.Context, what string, ask func() (bool, error)) error {
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

func isOverlap(header string) bool { return header != "" && strings.Trim(header, "0") != "" }

func newHTTPClient() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 10 * time.Second}}
}
