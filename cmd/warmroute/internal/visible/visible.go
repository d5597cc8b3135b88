// Package visible measures how long an event takes from the engine into the answers of lookups: simulated engines with real
// ZeroMQ sockets, one indexer, and a reader, in this process.
package visible

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
	"github.com/warmroute/warmroute/indexer"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/sim"
	"github.com/warmroute/warmroute/store"
	"golang.org/x/sync/errgroup"
)

// Options configures a run.
type Options struct {
	Redis   string        // URL. Required
	Workers int           // engines. Required
	Rate    int           // blocks per second, of all engines together. Required
	Time    time.Duration // how long to measure. Required
	Logger  *slog.Logger  // Required
}

// Report is what [Run] measured. The times begin before the request that makes the engine publish is sent, so that
// HTTP and the engine's own work are in them.
type Report struct {
	Workers int     `json:"workers"`
	Blocks  int     `json:"blocks"`
	Rate    float64 `json:"blocks_per_s"` // that came about
	P50     float64 `json:"p50_ms"`
	P99     float64 `json:"p99_ms"`
	Max     float64 `json:"max_ms"`
	Samples int     `json:"samples"`
}

const (
	blockSize = 16
	perEvent  = 16                     // blocks of one prompt, which the engine publishes in one event
	look      = 500 * time.Microsecond // between two looks whether a block is there
	sampled   = 8                      // one request in so many is looked for: looking costs Redis time too
	patience  = 30 * time.Second
)

var pool = kvcache.PoolID{Tenant: kvcache.DefaultTenant, Model: "warmroute-bench-visible"}

// Run measures.
func Run(ctx context.Context, o Options) (r Report, err error) {
	s, err := store.New(store.Options{URL: o.Redis, LookupBudget: 5 * time.Second, WriteTimeout: 5 * time.Second, Logger: o.Logger})
	if err != nil {
		return r, err
	}
	running, cancel := context.WithCancel(ctx)
	group, running := errgroup.WithContext(running)
	defer func() {
		cancel()
		if e := group.Wait(); err == nil && e != nil && !errors.Is(e, context.Canceled) {
			err = e
		}
		err = errors.Join(err, stage.Clear(ctx, s, pool), s.Close())
	}()
	var workers []indexer.Worker
	var engines []*sim.Engine
	for i := range o.Workers {
		e, err := sim.New(sim.Options{Model: pool.Model, BlockSize: blockSize, Blocks: 1 << 14, Logger: o.Logger})
		if err != nil {
			return r, err
		}
		group.Go(func() error { return e.Run(running) })
		engines = append(engines, e)
		workers = append(workers, indexer.Worker{
			ID: "engine-" + strconv.Itoa(i), Model: pool.Model, URL: e.URL(), BlockSize: blockSize,
			Endpoint: e.EventEndpoint(0), ReplayEndpoint: e.ReplayEndpoint(0),
		})
	}
	ix, err := indexer.New(indexer.Options{Store: s, Workers: workers, Listen: "127.0.0.1:0", Logger: o.Logger})
	if err != nil {
		return r, err
	}
	group.Go(func() error { return ix.Run(running) })

	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 4 * time.Second}}
	for i, e := range engines { // until each is followed
		if _, err := prompt(running, client, s, e, "engine-"+strconv.Itoa(i), true); err != nil {
			return r, err
		}
	}
	var mu sync.Mutex
	var times []time.Duration
	start := time.Now()
	until, stop := context.WithTimeout(running, o.Time)
	defer stop()
	load, loading := errgroup.WithContext(running)
	for i, e := range engines {
		load.Go(func() error {
			tick := time.NewTicker(time.Second * time.Duration(perEvent*o.Workers) / time.Duration(o.Rate))
			defer tick.Stop()
			for n := i; ; n++ {
				select {
				case <-until.Done():
					return nil
				case <-tick.C:
				}
				load.Go(func() error {
					took, err := prompt(loading, client, s, e, "engine-"+strconv.Itoa(i), n%sampled == 0)
					mu.Lock()
					defer mu.Unlock()
					r.Blocks += perEvent
					if took > 0 {
						times = append(times, took)
					}
					return err
				})
			}
		})
	}
	if err := load.Wait(); err != nil {
		return r, err
	}
	r.Workers, r.Samples = o.Workers, len(times)
	r.Rate = float64(r.Blocks) / time.Since(start).Seconds()
	if len(times) == 0 {
		return r, errors.New("no samples: a longer time is needed")
	}
	slices.Sort(times)
	ms := func(i int) float64 { return float64(times[i].Microseconds()) / 1e3 }
	r.P50, r.P99, r.Max = ms(len(times)/2), ms(len(times)*99/100), ms(len(times)-1)
	return r, nil
}

// prompt sends a new prompt to an engine and, where asked to, waits until lookups credit the engine with its last block.
func prompt(ctx context.Context, client *http.Client, s *store.Store, e *sim.Engine, worker string, wait bool) (time.Duration, error) {
	tokens := make([]uint32, perEvent*blockSize+1)
	for i := range tokens {
		tokens[i] = rand.Uint32N(1 << 16)
	}
	blocks := kvcache.HashTokens(kvcache.HashSpec{BlockSize: blockSize}, tokens)
	body, err := json.Marshal(map[string]any{"model": pool.Model, "prompt": tokens, "max_tokens": 1})
	if err != nil {
		return 0, err
	}
	start := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("the engine answers %s", res.Status)
	}
	if err != nil || !wait {
		return 0, err
	}
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		got, _, err := s.Lookup(ctx, pool, blocks[len(blocks)-1:], store.LookupOptions{})
		if err != nil {
			return 0, err
		}
		if got.Scores[kvcache.WorkerRank{Worker: worker}].Device == 1 {
			return time.Since(start), nil
		}
		if time.Since(start) > patience {
			return 0, fmt.Errorf("a block of %s is not visible after %v", worker, patience)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}
