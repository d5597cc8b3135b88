package outage

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store/redisproc"
)

// fault is one of Redis, or one that clients make.
type fault struct {
	url      string
	boot     bool // Redis is away before everything else starts
	once     bool // Redis answers again when begin returns
	poolSize int  // of the frontends' stores; 0 is the default
	extra    *counts

	begin func(context.Context, *stage.Stage) error
	end   func(context.Context) error
	stop  func()
}

// Those that are not Redis's: nothing is wrong with it, and nobody may think so.
const (
	poolFault   = "pool"   // 500 lookups at a time through 5 connections
	hangUpFault = "hangup" // 200 clients, again and again, that hang up during the lookup
)

// Faults are the names that [Options.Fault] takes.
func Faults() []string {
	names := append(redisproc.Faults(), poolFault, hangUpFault)
	slices.Sort(names)
	return names
}

func start(ctx context.Context, o Options) (*fault, error) {
	switch o.Fault {
	case poolFault:
		// So slow that most cannot get a turn within the budget, and whoever gets one is in time.
		return withClients(o.LookupBudget/20, 5, func(ctx context.Context, s *stage.Stage, c *counts) { burst(ctx, s, c, 500) })
	case hangUpFault:
		// So slow that the frontend notices before the lookup ends.
		return withClients(o.LookupBudget/20, 0, func(ctx context.Context, s *stage.Stage, c *counts) { hangUp(ctx, s, c, 200) })
	}
	f, err := redisproc.StartFault(ctx, o.Fault)
	if err != nil {
		return nil, err
	}
	return &fault{
		url: f.URL, boot: f.Boot, once: f.Once,
		begin: func(ctx context.Context, _ *stage.Stage) error { return f.Begin(ctx) }, end: f.End, stop: f.Stop,
	}, nil
}

// withClients is a Redis that takes so long for each answer, and clients that come again and again while the fault lasts,
// with a rest in between: it is a rush on the connections, not on the processors, that is to be seen.
func withClients(delay time.Duration, poolSize int, come func(context.Context, *stage.Stage, *counts)) (*fault, error) {
	dir, err := os.MkdirTemp("", "warmroute-fault-")
	if err != nil {
		return nil, err
	}
	s, err := redisproc.Start(dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	stop := func() { s.Stop(); _ = os.RemoveAll(dir) }
	p, err := redisproc.NewProxy(s.Addr)
	if err != nil {
		stop()
		return nil, err
	}
	f := &fault{url: "redis://" + p.Addr, poolSize: poolSize, extra: &counts{}, stop: func() { p.Close(); stop() }}
	ended := make(chan struct{})
	var clients sync.WaitGroup
	f.begin = func(ctx context.Context, st *stage.Stage) error {
		p.Delay(delay)
		clients.Go(func() {
			for ctx.Err() == nil {
				come(ctx, st, f.extra)
				select {
				case <-ended:
					return
				case <-time.After(500 * time.Millisecond):
				}
			}
		})
		return nil
	}
	f.end = func(context.Context) error {
		close(ended)
		clients.Wait()
		p.Delay(0)
		return nil
	}
	return f, nil
}

// burst asks one frontend n things at the same time.
func burst(ctx context.Context, s *stage.Stage, c *counts, n int) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: n}}
	defer client.CloseIdleConnections()
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { ask(ctx, client, s, 0, kvcache.BlockHash(i+1), c) })
	}
	all.Wait()
}

// hangUp lets n clients ask, a few at a time, and hang up as soon as the lookup has begun.
func hangUp(ctx context.Context, s *stage.Stage, c *counts, n int) {
	var waiting sync.Map // first block → hang up
	for _, x := range s.Indexes {
		x.Tap(func(blocks []kvcache.BlockHash) {
			if len(blocks) == 0 {
				return
			}
			if leave, ok := waiting.LoadAndDelete(blocks[0]); ok {
				leave.(context.CancelFunc)()
			}
		})
		defer x.Tap(nil)
	}
	client := stage.NewHTTPClient()
	defer client.CloseIdleConnections()
	turns := make(chan struct{}, 8)
	var all sync.WaitGroup
	for i := range n {
		turns <- struct{}{}
		all.Go(func() {
			defer func() { <-turns }()
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			block := kvcache.BlockHash(i + 1)
			waiting.Store(block, cancel)
			ask(ctx, client, s, i%len(s.Frontends), block, c)
		})
	}
	all.Wait()
}

// ask asks a frontend who holds a block, and counts what it gets.
func ask(ctx context.Context, client *http.Client, s *stage.Stage, frontend int, block kvcache.BlockHash, c *counts) {
	body := fmt.Sprintf(`{"model":%s,"seq_hashes":["%s"]}`, strconv.Quote(s.Pool.Model), block)
	state, err := func() (string, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.Frontends[frontend]+"/query_by_hash", bytes.NewReader([]byte(body)))
		if err != nil {
			return "", err
		}
		resp, err := client.Do(req)
		if err != nil {
			return "", err
		}
		defer func() { _ = resp.Body.Close() }()
		var got struct {
			State string `json:"index_state"`
		}
		if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
			return "", err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		if resp.StatusCode != http.StatusOK {
			return "", fmt.Errorf("status %d", resp.StatusCode)
		}
		return got.State, err
	}()
	c.count(kvcache.IndexState(state), err, ctx.Err() != nil)
}

// counts is an [Extra] that many clients fill.
type counts struct {
	mu sync.Mutex
	n  Extra
}

func (c *counts) count(state kvcache.IndexState, err error, left bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n.Requests++
	switch {
	case err != nil && left:
		c.n.HungUp++
	case err != nil:
		c.n.Failed++
	case state == kvcache.Exact:
		c.n.Exact++
	default:
		c.n.Degraded++
	}
}

func (c *counts) read() Extra {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}
