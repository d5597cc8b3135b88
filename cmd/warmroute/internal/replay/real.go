package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/indexer"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/sim"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
)

// realBudget is the frontends' lookup budget: a replay is about choices, not about what a busy machine does to their time.
const realBudget = 500 * time.Millisecond

// RunReal replays a trace in real time, speed times as fast: real frontends, each in a process of its own where o.Frontend starts
// them, an indexer, simulated engines with real event streams, and a redis-server of its own. Times in the result are those of the trace. State, Seed, Predict and DecodeCost do not count here.
func RunReal(ctx context.Context, o Options, speed float64, logger *slog.Logger) (*Result, error) {
	o.State = Redis
	if err := o.check(); err != nil {
		return nil, err
	}
	if !(speed > 0) {
		return nil, errors.New("the speed is above 0")
	}
	if o.Policy == LongestPrefix {
		return nil, fmt.Errorf("frontends have no policy %s: it is a trap", LongestPrefix)
	}
	if o.Sessions {
		return nil, errors.New("sessions are named in virtual time only")
	}
	if longest := longestPrompt(o.Trace); longest > o.CacheBlocks*BlockTokens {
		return nil, fmt.Errorf("a prompt and its answer have %d tokens: more than a cache of %d blocks holds", longest, o.CacheBlocks)
	}
	s, err := openScene(ctx, o, speed, logger)
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	outcomes, degraded, err := s.send(ctx, o, speed)
	if err = errors.Join(err, s.close()); err != nil {
		return nil, err
	}
	r := summarize(o, outcomes)
	r.Degraded = degraded
	return r, nil
}

func longestPrompt(trace []Request) int {
	n := 0
	for i := range trace {
		n = max(n, trace[i].Input+trace[i].Output+1)
	}
	return n
}

// scene is what a replay in real time runs.
type scene struct {
	model     string
	frontends []string
	names     []kvcache.WorkerRank
	http      *http.Client
	group     *errgroup.Group
	cancel    context.CancelFunc
	closers   []func()
}

// ownView is a store that never tells what others have under way.
type ownView struct{ *store.Store }

func (ownView) Select(context.Context, kvcache.PoolID, store.Ask) (store.Choice, error) {
	return store.Choice{}, fmt.Errorf("loads are not shared in this replay: %w", store.ErrUnavailable)
}

func openScene(ctx context.Context, o Options, speed float64, logger *slog.Logger) (*scene, error) {
	running, cancel := context.WithCancel(ctx)
	group, running := errgroup.WithContext(running)
	s := &scene{model: "replay", names: names(o.Workers), http: stage.NewHTTPClient(), group: group, cancel: cancel}
	dir, err := os.MkdirTemp("", "warmroute-replay")
	if err != nil {
		return s, err
	}
	s.closers = append(s.closers, func() { _ = os.RemoveAll(dir) })
	redis, err := redisproc.Start(dir)
	if err != nil {
		return s, err
	}
	s.closers = append(s.closers, redis.Stop)
	open := func() (*store.Store, error) {
		st, err := store.New(store.Options{URL: redis.URL, LookupBudget: realBudget, Logger: logger})
		if err == nil {
			s.closers = append(s.closers, func() { _ = st.Close() })
		}
		return st, err
	}
	var followed []indexer.Worker
	var served []frontend.Worker
	perToken := func(seconds float64) time.Duration { return time.Duration(seconds / speed * float64(time.Second)) }
	for _, w := range s.names {
		e, err := sim.New(sim.Options{
			Model: s.model, BlockSize: BlockTokens, Blocks: o.CacheBlocks, MaxModelLen: o.CacheBlocks * BlockTokens, Logger: logger,
			PrefillPerToken: perToken(1 / o.Rate / BlockTokens), DecodePerToken: o.TokenTime, // see complete
		})
		if err != nil {
			return s, err
		}
		group.Go(func() error { return e.Run(running) })
		followed = append(followed, indexer.Worker{
			ID: w.Worker, Model: s.model, URL: e.URL(), Endpoint: e.EventEndpoint(0), ReplayEndpoint: e.ReplayEndpoint(0), BlockSize: BlockTokens,
		})
		served = append(served, frontend.Worker{ID: w.Worker, URL: e.URL()})
	}
	index, err := open()
	if err != nil {
		return s, err
	}
	follower, err := indexer.New(indexer.Options{Store: index, Workers: followed, Listen: "127.0.0.1:0", Logger: logger})
	if err != nil {
		return s, err
	}
	group.Go(func() error { return follower.Run(running) })
	for range o.Frontends {
		var url string
		if o.Frontend != nil && !o.OwnViews {
			url, err = s.process(running, o, redis.URL, served)
		} else {
			var st *store.Store
			if st, err = open(); err == nil {
				url, err = s.serve(running, o, st, served, logger)
			}
		}
		if err != nil {
			return s, err
		}
		s.frontends = append(s.frontends, url)
	}
	return s, s.ready(running, index, o.Workers)
}

const (
	pollInterval = time.Second
	pollTimeout  = 10 * time.Second
)

// process starts a frontend of its own.
func (s *scene) process(ctx context.Context, o Options, redis string, workers []frontend.Worker) (string, error) {
	args := []string{
		"--redis=" + redis, "--listen=127.0.0.1:0", "--policy=" + o.Policy, fmt.Sprint("--lookup-budget=", realBudget),
		fmt.Sprint("--kv-events-off-block-size=", BlockTokens), fmt.Sprint("--poll-interval=", pollInterval), fmt.Sprint("--poll-timeout=", pollTimeout),
	}
	for name, x := range map[string]float64{
		"prefill-scale": o.Weights.PrefillScale, "miss": o.Weights.Miss, "decode": o.Weights.Decode, "request": o.Weights.Request,
		"temperature": o.Weights.Temperature,
	} {
		args = append(args, "--cost-"+name+"="+strconv.FormatFloat(x, 'g', -1, 64))
	}
	for _, w := range workers {
		args = append(args, "--worker=id="+w.ID+",url="+w.URL)
	}
	url, _, stop, err := o.Frontend(ctx, args...)
	if err == nil {
		s.closers = append(s.closers, stop)
	}
	return url, err
}

// serve runs a frontend in this process.
func (s *scene) serve(ctx context.Context, o Options, index *store.Store, workers []frontend.Worker, logger *slog.Logger) (string, error) {
	var view frontend.Index = index
	if o.OwnViews {
		view = ownView{index}
	}
	f, err := frontend.New(frontend.Options{
		Index: view, Workers: workers, Policy: o.Policy, Weights: o.Weights, LookupBudget: realBudget, BlockSize: BlockTokens,
		PollInterval: pollInterval, PollTimeout: pollTimeout, DrainLimit: time.Second, Logger: logger,
	})
	if err != nil {
		return "", err
	}
	s.group.Go(func() error { return f.Run(ctx) })
	return "http://" + f.Addr(), nil
}

// ready waits until all frontends know all workers, and the index has a stream of each.
func (s *scene) ready(ctx context.Context, index *store.Store, workers int) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return stage.Poll(ctx, "frontends and index to know the engines", func() (bool, error) {
		streams, err := index.Streams(ctx, kvcache.PoolID{Model: s.model})
		if err != nil || len(streams) < workers {
			return false, err
		}
		for _, f := range s.frontends {
			var got struct{ Workers int }
			if err := s.getJSON(ctx, f+"/ready", &got); err != nil || got.Workers < workers {
				return false, err
			}
		}
		return true, nil
	})
}

func (s *scene) getJSON(ctx context.Context, url string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := s.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	return json.NewDecoder(resp.Body).Decode(v)
}

func (s *scene) close() error {
	s.cancel()
	err := s.group.Wait()
	s.http.CloseIdleConnections()
	for i := len(s.closers) - 1; i >= 0; i-- {
		s.closers[i]()
	}
	return err
}

// send sends every request at its time and waits for all answers.
func (s *scene) send(ctx context.Context, o Options, speed float64) (outcomes []Outcome, degraded int, err error) {
	var mu sync.Mutex
	var all errgroup.Group
	failed, done := 0, 0
	var first error
	start := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range o.Trace {
		q := &o.Trace[i]
		due := time.Duration(float64(q.At) / o.Load / speed)
		timer.Reset(time.Until(start.Add(due)))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil, 0, errors.Join(ctx.Err(), all.Wait())
		}
		all.Go(func() error {
			x, exact, err := s.complete(ctx, s.frontends[i%len(s.frontends)], q, speed)
			x.Arrived, x.TTFT = time.Duration(float64(due)*speed), time.Duration(float64(x.TTFT)*speed)
			mu.Lock()
			defer mu.Unlock()
			if done++; o.Progress != nil {
				o.Progress(done, len(o.Trace))
			}
			if err != nil {
				if failed++; first == nil {
					first = err
				}
				return nil
			}
			if !exact {
				degraded++
			}
			outcomes = append(outcomes, x)
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		return nil, 0, err
	}
	if failed > 0 {
		return nil, 0, fmt.Errorf("%d of %d requests failed, one of them: %w", failed, len(o.Trace), first)
	}
	return outcomes, degraded, nil
}

// tokensOf makes up the prompt that has those blocks.
func tokensOf(q *Request) []uint32 {
	out := make([]uint32, q.Input)
	for i := range out {
		out[i] = uint32(hashOf(q.Blocks[i/BlockTokens]+uint64(i%BlockTokens)<<32)>>40) % 150_000
	}
	return out
}

// complete sends one request and reads its streamed answer. The answer is shortened instead of its tokens hastened: it takes as
// long, and this machine has the less to stream.
func (s *scene) complete(ctx context.Context, frontend string, q *Request, speed float64) (x Outcome, exact bool, err error) {
	body, err := json.Marshal(map[string]any{
		"model": s.model, "prompt": tokensOf(q), "max_tokens": max(int(float64(q.Output)/speed), 1), "stream": true, "ignore_eos": true,
		"stream_options": map[string]bool{"include_usage": true},
	})
	if err != nil {
		return x, false, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, frontend+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return x, false, err
	}
	req.Header.Set("Content-Type", "application/json")
	sent := time.Now()
	resp, err := s.http.Do(req)
	if err != nil {
		return x, false, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return x, false, fmt.Errorf("status %d: %s", resp.StatusCode, bytes.TrimSpace(text))
	}
	worker, err := strconv.Atoi(strings.TrimPrefix(resp.Header.Get("X-Worker-Instance-Id"), "w"))
	if err != nil {
		return x, false, fmt.Errorf("which worker was it: %w", err)
	}
	a, err := readAnswer(resp.Body)
	if err != nil {
		return x, false, err
	}
	state := resp.Header.Get("X-Kv-Index-State")
	return Outcome{
		TTFT: a.first.Sub(sent), Worker: worker, Blocks: len(q.Blocks), Hits: a.cached / BlockTokens,
		Work: float64(q.Input-a.cached) / BlockTokens,
	}, state == string(kvcache.Exact) || state == string(kvcache.Bypassed), nil
}
