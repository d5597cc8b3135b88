package demo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
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
}

// workload is played twice. Its prefixes fit into the caches of all engines together, but not into one.
var workload = stage.Shape{Chats: 48, Systems: 6, SystemWords: 160, Turns: 6, TurnWords: 60}

// engine has a cache that holds about a third of the workload: together the engines can hold all of it, each
// alone cannot.
var engine = sim.Options{Blocks: 1400, MaxModelLen: 8192, PrefillPerToken: 100 * time.Microsecond, DecodePerToken: 5 * time.Millisecond}

const (
	// Longer than the default: engines, indexer, frontends, clients and possibly Redis share this
	// process, and a machine that is busy with them is not what the demo is about.
	lookupBudget = 100 * time.Millisecond

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

func newClient(s *stage.Stage) *stage.Client {
	return &stage.Client{
		HTTP: stage.NewHTTPClient(), Frontends: s.Frontends, Model: s.Pool.Model, MaxTokens: maxTokens, Timeout: 30 * time.Second,
	}
}

func newStage(ctx context.Context, o Options, name, policy string, way *stage.Cable) (*stage.Stage, error) {
	return stage.New(ctx, stage.Options{
		Name: name, Redis: o.Redis, Policy: policy, LookupBudget: lookupBudget, Engine: engine, Logger: o.Logger,
		Cable: func(string) *stage.Cable { return way },
	})
}

func runPolicy(ctx context.Context, o Options, name, part, policy string) (p Policy, err error) {
	s, err := newStage(ctx, o, name, policy, &stage.Cable{})
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, s.CloseAndClear(ctx)) }()
	c := newClient(s)
	defer c.HTTP.CloseIdleConnections()
	done := 0
	l := stage.Load{Client: c, Parallel: parallel, Observe: func(stage.Outcome) {
		done++
		o.Progress(part, done, workload.Requests())
	}}
	outcomes := l.Play(ctx, slices.Values(workload.Conversations(1)))
	stage.LogFailures(o.Logger, part, outcomes)
	return policyOf(outcomes), ctx.Err()
}

// runOutage keeps up the load while Redis is taken away and given back.
func runOutage(ctx context.Context, o Options) (out Outage, recovered bool, err error) {
	way := &stage.Cable{}
	s, err := newStage(ctx, o, "outage", frontend.PolicyKV, way)
	if err != nil {
		return out, false, err
	}
	defer func() {
		way.Cut(false)
		err = errors.Join(err, s.CloseAndClear(ctx))
	}()
	c := newClient(s)
	defer c.HTTP.CloseIdleConnections()

	watch := stage.NewWatch(stage.NumFrontends)
	l := stage.Load{Client: c, Parallel: parallel, Observe: watch.Observe}
	stop := make(chan struct{})
	var outcomes []stage.Outcome
	var playing sync.WaitGroup
	playing.Go(func() { outcomes = l.Play(ctx, workload.Endless(stop)) })
	begin := time.Now()
	step := func(d time.Duration) error { return o.wait(ctx, "Redis taken away", begin, d) }

	err = step(before)
	way.Cut(true)
	cut := time.Now()
	if err == nil {
		err = step(before + away)
	}
	for _, ix := range s.Indexes {
		for _, w := range ix.Waits() {
			if w.At.Add(w.Took).After(cut) {
				out.MaxAddedMS = max(out.MaxAddedMS, stage.Milliseconds(w.Took))
			}
		}
	}
	back := time.Now()
	watch.Since(back)
	way.Cut(false)
	if err == nil {
		select {
		case <-watch.Recovered:
			recovered = true
			out.RecoveryMS = stage.Milliseconds(watch.LastRecovery().Sub(back))
		case <-time.After(recoveryTime):
			out.RecoveryMS = stage.Milliseconds(recoveryTime)
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
	stage.LogFailures(o.Logger, "Redis taken away", outcomes)
	out.Requests = len(outcomes)
	for _, oc := range outcomes {
		if oc.Err != nil {
			out.Failed++
		}
		if oc.State == "degraded" || oc.State == "partial" {
			out.Degraded++
		}
	}
	if err := s.CaughtUp(ctx); err != nil {
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
