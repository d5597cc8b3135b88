package demo

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/sim"
)

// Options configures the demo.
type Options struct {
	// Redis is the URL of the Redis to use. Required.
	Redis string
	// Logger takes the log of every part. Required.
	Logger *slog.Logger
	// Progress is told how far a part is: done of total steps. Calls do not overlap. Required.
	Progress func(part string, done, total int)

	// What fault runs change.
	lookupBudget time.Duration // default: generous, see there
	engine       func(model string, logger *slog.Logger) sim.Options
	shards       int
	redisAway    bool // start although Redis does not answer
	fallback     string
}

// workload is played twice. Its prefixes fit into the caches of all engines together, but not into one.
var workload = shape{chats: 48, systems: 6, systemWords: 160, turns: 6, turnWords: 60}

const (
	parallel  = 16 // conversations at a time
	maxTokens = 24 // of one answer

	// The outage: how long the load runs before Redis goes, how long Redis is away, how long the load
	// goes on when the index is in use again, and how long that may take to happen.
	before       = 2 * time.Second
	away         = 4 * time.Second
	after        = 2 * time.Second
	recoveryTime = 15 * time.Second
)

// Run runs the three parts. An error means that the demo itself could not run; what the requests
// met is in the report.
func Run(ctx context.Context, o Options) (Report, error) {
	var r Report
	var err error
	if r.KV, err = runPolicy(ctx, o, "kv", "kv routing", frontend.PolicyKV); err != nil {
		return r, fmt.Errorf("kv routing: %w", err)
	}
	if r.RoundRobin, err = runPolicy(ctx, o, "rr", "round robin", frontend.PolicyRoundRobin); err != nil {
		return r, fmt.Errorf("round robin: %w", err)
	}
	if r.Outage, r.Recovered, err = runOutage(ctx, o); err != nil {
		return r, fmt.Errorf("redis taken away: %w", err)
	}
	return r, nil
}

func newClient(s *stage) *client {
	return &client{
		http: newHTTPClient(), frontends: s.frontends, model: s.pool.Model, maxTokens: maxTokens, timeout: 30 * time.Second,
	}
}

func runPolicy(ctx context.Context, o Options, name, part, policy string) (p Policy, err error) {
	s, err := newStage(ctx, o, name, policy, &cable{})
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	c := newClient(s)
	defer c.http.CloseIdleConnections()
	done := 0
	l := load{client: c, parallel: parallel, observe: func(outcome) {
		done++
		o.Progress(part, done, workload.requests())
	}}
	outcomes := l.play(ctx, slices.Values(workload.conversations(1)))
	logFailures(o.Logger, part, outcomes)
	return policyOf(outcomes), ctx.Err()
}

// runOutage keeps up the load while Redis is taken away and given back.
func runOutage(ctx context.Context, o Options) (out Outage, recovered bool, err error) {
	way := &cable{}
	s, err := newStage(ctx, o, "outage", frontend.PolicyKV, way)
	if err != nil {
		return out, false, err
	}
	defer func() {
		way.setCut(false)
		err = errors.Join(err, s.close(ctx))
	}()
	c := newClient(s)
	defer c.http.CloseIdleConnections()

	watch := newWatch(numFrontends)
	l := load{client: c, parallel: parallel, observe: watch.observe}
	stop := make(chan struct{})
	var outcomes []outcome
	var playing sync.WaitGroup
	playing.Go(func() { outcomes = l.play(ctx, endless(stop)) })
	begin := time.Now()
	step := func(d time.Duration) error { return o.wait(ctx, "Redis taken away", begin, d) }

	err = step(before)
	way.setCut(true)
	for _, ix := range s.indexes {
		ix.longest.Store(0)
	}
	if err == nil {
		err = step(before + away)
	}
	for _, ix := range s.indexes {
		out.MaxAddedMS = max(out.MaxAddedMS, milliseconds(time.Duration(ix.longest.Load())))
	}
	back := time.Now()
	watch.since(back)
	way.setCut(false)
	if err == nil {
		select {
		case <-watch.recovered:
			recovered = true
			out.RecoveryMS = milliseconds(watch.lastRecovery().Sub(back))
		case <-time.After(recoveryTime):
			out.RecoveryMS = milliseconds(recoveryTime)
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err == nil {
		err = step(before + away + after)
	}
	close(stop)
	playing.Wait()
	if err != nil {
		return out, false, err
	}
	logFailures(o.Logger, "Redis taken away", outcomes)
	out.Requests = len(outcomes)
	for _, oc := range outcomes {
		if oc.err != nil {
			out.Failed++
		}
		if oc.state == "degraded" || oc.state == "partial" {
			out.Degraded++
		}
	}
	if err := s.caughtUp(ctx); err != nil {
		o.Logger.Error("the index did not recover", "error", err)
		recovered = false
	}
	return out, recovered, nil
}

// wait waits until a time after begin, and reports progress meanwhile.
func (o Options) wait(ctx context.Context, part string, begin time.Time, until time.Duration) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	const total = before + away + after
	for {
		passed := time.Since(begin)
		o.Progress(part, int(min(passed, total).Milliseconds()), int(total.Milliseconds()))
		if passed >= until {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// endless makes new conversations, each workload after the other, until stop is closed.
func endless(stop <-chan struct{}) iter.Seq[conversation] {
	return func(yield func(conversation) bool) {
		for seed := uint64(2); ; seed++ {
			for _, c := range workload.conversations(seed) {
				select {
				case <-stop:
					return
				default:
				}
				if !yield(c) {
					return
				}
			}
		}
	}
}

// watch notices when every frontend routes by the index again.
type watch struct {
	back      atomic.Pointer[time.Time]
	mu        sync.Mutex
	first     []time.Time // per frontend: the first request since then that was routed by the index
	hit       bool        // one of them found blocks
	recovered chan struct{}
}

func newWatch(frontends int) *watch {
	return &watch{first: make([]time.Time, frontends), recovered: make(chan struct{})}
}

// since says when Redis came back.
func (w *watch) since(t time.Time) { w.back.Store(&t) }

func (w *watch) observe(o outcome) {
	back := w.back.Load()
	if back == nil || o.err != nil || o.state != "exact" || o.sent.Before(*back) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.first[o.frontend].IsZero() {
		w.first[o.frontend] = o.sent
	}
	w.hit = w.hit || isOverlap(o.overlap)
	if w.hit && !slices.ContainsFunc(w.first, time.Time.IsZero) {
		select {
		case <-w.recovered:
		default:
			close(w.recovered)
		}
	}
}

// lastRecovery is when the last frontend began to route by the index again.
func (w *watch) lastRecovery() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.MaxFunc(w.first, time.Time.Compare)
}

// logFailures explains failed requests; there should be none to explain.
func logFailures(logger *slog.Logger, part string, outcomes []outcome) {
	const most = 5
	failed := 0
	for _, o := range outcomes {
		if o.err == nil {
			continue
		}
		if failed++; failed <= most {
			logger.Error("request failed", "part", part, "frontend", o.frontend, "index_state", o.state, "error", o.err)
		}
	}
}
