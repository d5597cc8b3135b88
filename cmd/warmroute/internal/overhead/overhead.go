// Package overhead measures what a frontend adds to a request, beside a plain reverse proxy: the frontend and nginx are
// processes of their own, the workers answer at once, and Redis is a real one.
package overhead

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Options says what to measure.
type Options struct {
	// Redis is the URL of the server. The benchmark writes a pool of its own, and takes it out again.
	Redis string
	// Frontend starts warmroute's frontend with the given arguments and returns its base URL, its process id, and what ends it.
	Frontend func(ctx context.Context, args ...string) (url string, pid int, stop func(), err error)
	// Nginx is the path of nginx; "" leaves it out.
	Nginx string
	// Tokens is the length of each prompt, given as token ids; the index holds its first half.
	Tokens int
	// Rate is the requests per second to each target while latency is measured, for Duration in all.
	Rate     int
	Duration time.Duration
	// Callers is how many requests are under way at a time while throughput is measured, for a second less than Duration.
	Callers int
	// Progress, if set, is told of each part.
	Progress func(part string, done, total int)
}

// Report is what came out.
type Report struct {
	Tokens  int      `json:"prompt_tokens"`
	Bytes   int      `json:"request_bytes"`
	Rate    int      `json:"rate"`
	Targets []Target `json:"targets"`
}

// Target is one way to the workers. Times are in milliseconds.
type Target struct {
	Name     string  `json:"name"`
	Requests int     `json:"requests"`
	Failed   int     `json:"failed"`
	P50      float64 `json:"p50_ms"`
	P99      float64 `json:"p99_ms"`
	AddedP50 float64 `json:"added_p50_ms"` // over the worker alone
	AddedP99 float64 `json:"added_p99_ms"`
	// Throughput is requests per second with as many callers as there were; CPU is the proxy's, in seconds per 1,000
	// requests meanwhile. Zero for the worker alone.
	Throughput float64 `json:"requests_per_second,omitempty"`
	CPU        float64 `json:"cpu_seconds_per_1000,omitempty"`
}

// PerCore is how many requests per second one core of CPU time pays for.
func (t Target) PerCore() float64 {
	if t.CPU == 0 {
		return 0
	}
	return 1000 / t.CPU
}

const (
	workers   = 4
	blockSize = 16
	slice     = time.Second // the targets take turns, so that a noisy machine is noisy for all of them
	bodies    = 64
)

// way is a target under measurement.
type way struct {
	Target
	urls []string // taken in turn
	pid  int
	took []time.Duration
}

// Run measures.
func Run(ctx context.Context, o Options) (_ Report, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	fleet, err := startWorkers(workers)
	if err != nil {
		return Report{}, err
	}
	defer fleet.stop()
	model := "bench-" + strconv.FormatUint(rand.Uint64(), 36)
	fleet.model = model
	prompts, shared := prompts(model, o.Tokens)
	index, err := store.New(store.Options{URL: o.Redis})
	if err != nil {
		return Report{}, err
	}
	pool := kvcache.PoolID{Tenant: kvcache.DefaultTenant, Model: model}
	defer func() { // when the frontend has ended, which writes too
		err = errors.Join(err, stage.Clear(ctx, index, pool), index.Close())
	}()
	if err := fill(ctx, index, pool, fleet.urls[0], shared); err != nil {
		return Report{}, err
	}
	args := []string{"--redis=" + o.Redis, "--listen=127.0.0.1:0", "--policy=kv"}
	for i, u := range fleet.urls {
		args = append(args, fmt.Sprintf("--worker=id=w%d,url=%s", i, u))
	}
	frontend, pid, stop, err := o.Frontend(ctx, args...)
	if err != nil {
		return Report{}, fmt.Errorf("start a frontend: %w", err)
	}
	defer stop()
	if err := awaitReady(ctx, frontend+"/ready"); err != nil {
		return Report{}, fmt.Errorf("the frontend is not ready: %w", err)
	}
	ways := []*way{
		{Target: Target{Name: "worker alone"}, urls: fleet.urls},
		{Target: Target{Name: "warmroute"}, urls: []string{frontend}, pid: pid},
	}
	if o.Nginx != "" {
		url, pid, stop, err := startNginx(ctx, o.Nginx, fleet.urls)
		if err != nil {
			return Report{}, fmt.Errorf("start nginx: %w", err)
		}
		defer stop()
		ways = append(ways, &way{Target: Target{Name: "nginx"}, urls: []string{url}, pid: pid})
	}
	c := &caller{
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}, prompts: prompts,
	}
	defer c.client.CloseIdleConnections()
	for _, w := range ways { // connections, the pool's configuration, scripts
		c.paced(ctx, &way{urls: w.urls}, o.Rate, slice)
	}
	rounds := max(int(o.Duration/slice), 1)
	for r := range rounds {
		for _, w := range ways {
			o.Progress("latency", r*len(ways), rounds*len(ways))
			c.paced(ctx, w, o.Rate, slice)
		}
	}
	for i, w := range ways[1:] {
		o.Progress("throughput", i, len(ways)-1)
		if err := c.saturate(ctx, w, o.Callers, o.Duration); err != nil {
			return Report{}, cmp.Or(ctx.Err(), err)
		}
	}
	if err := ctx.Err(); err != nil {
		return Report{}, err
	}
	report := Report{Tokens: o.Tokens, Bytes: len(prompts[0]), Rate: o.Rate}
	for _, w := range ways {
		w.summarize(&ways[0].Target)
		report.Targets = append(report.Targets, w.Target)
	}
	return report, nil
}

func (w *way) summarize(alone *Target) {
	w.Requests = len(w.took)
	if w.Requests == 0 {
		return
	}
	slices.Sort(w.took)
	at := func(p float64) float64 { return float64(w.took[int(p*float64(w.Requests-1))].Microseconds()) / 1000 }
	w.P50, w.P99 = at(0.5), at(0.99)
	w.AddedP50, w.AddedP99 = w.P50-alone.P50, w.P99-alone.P99
}

// prompts are requests whose prompts have their first half in common, and that half's blocks.
func prompts(model string, tokens int) (out []string, shared []kvcache.BlockHash) {
	half := make([]uint32, tokens/2)
	var text strings.Builder
	for i := range half {
		half[i] = rand.Uint32N(100_000)
		text.WriteString(strconv.Itoa(int(half[i])))
		text.WriteByte(',')
	}
	for range bodies {
		ids := make([]string, tokens-len(half))
		for i := range ids {
			ids[i] = strconv.Itoa(rand.IntN(100_000))
		}
		out = append(out, `{"model":"`+model+`","max_tokens":1,"prompt":[`+text.String()+strings.Join(ids, ",")+`]}`)
	}
	return out, kvcache.HashTokens(kvcache.HashSpec{BlockSize: blockSize}, half)
}

// fill makes the pool, and its first worker warm.
func fill(ctx context.Context, s *store.Store, pool kvcache.PoolID, url string, blocks []kvcache.BlockHash) error {
	id := store.StreamID{Pool: pool, WorkerRank: kvcache.WorkerRank{Worker: "w0"}}
	st, _, err := s.Register(ctx, id, store.Registration{BlockSize: blockSize, URL: url})
	if err != nil {
		return err
	}
	var b store.Batch
	b.Message(0)
	for i, h := range blocks {
		b.Store(kvcache.Device, h, kvcache.EngineHash(i+1))
	}
	_, _, err = s.Apply(ctx, st, &b)
	return err
}

// caller sends requests.
type caller struct {
	client  *http.Client
	prompts []string
}

// paced sends a way's share of requests at a steady rate, whether the ones before are answered or not.
func (c *caller) paced(ctx context.Context, w *way, rate int, d time.Duration) {
	var mu sync.Mutex
	var all sync.WaitGroup
	defer all.Wait()
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	for i := range int(float64(rate) * d.Seconds()) {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		all.Go(func() {
			start := time.Now()
			ok := c.call(ctx, w.urls[i%len(w.urls)], c.prompts[i%len(c.prompts)])
			took := time.Since(start)
			mu.Lock()
			defer mu.Unlock()
			if w.took = append(w.took, took); !ok {
				w.Failed++
			}
		})
	}
}

// saturate keeps a number of requests under way.
func (c *caller) saturate(ctx context.Context, w *way, callers int, d time.Duration) error {
	before, err := cpuOf(w.pid)
	if err != nil {
		return err
	}
	start := time.Now()
	done := make([]int, callers)
	var all sync.WaitGroup
	for n := range callers {
		all.Go(func() {
			for i := n; time.Since(start) < d && ctx.Err() == nil; i++ {
				if c.call(ctx, w.urls[i%len(w.urls)], c.prompts[i%len(c.prompts)]) {
					done[n]++
				}
			}
		})
	}
	all.Wait()
	took := time.Since(start).Seconds()
	after, err := cpuOf(w.pid)
	if err != nil {
		return err
	}
	sum := 0
	for _, n := range done {
		sum += n
	}
	if sum == 0 {
		return fmt.Errorf("%s answered no request", w.Name)
	}
	w.Throughput = float64(sum) / took
	w.CPU = (after - before).Seconds() / float64(sum) * 1000
	return nil
}
