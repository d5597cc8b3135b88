// Package outage lets faults of Redis happen to real servers under load, and measures what requests and the index meet.
//
// # Guarantees
//
// Requests are sent at a constant rate, however slow the answers are. One that is not answered completely with status 200
// has failed, whatever the reason. What answered it says the engine itself, and what the index should hold say the caches
// of the engines.
//
// # When Redis is away
//
// That is the point: [Run] takes it away and gives it back. It starts servers of its own and needs redis-server on the PATH.
package outage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/sim"
)

// Options configures one fault run.
type Options struct {
	// Fault is one of [Faults]. Required.
	Fault string
	// Fallback is the frontends' policy without the index. Default: theirs.
	Fallback string
	// LookupBudget is the frontends'. Default 20 ms, as theirs.
	LookupBudget time.Duration
	// Warm is how long the load runs before the fault. Default 3 s.
	Warm time.Duration
	// Away is how long the fault lasts. Default 5 s.
	Away time.Duration
	// After is how long the load goes on when the frontends route by the index again. Default 2 s.
	After time.Duration
	// Rate is the requests per second through both frontends. Default 200.
	Rate int
	// Logger takes the log of every part. Required.
	Logger *slog.Logger
	// Progress is told how far the run is: done of total steps. Default: nobody is told.
	Progress func(part string, done, total int)
}

// recoveryTime is how long a run waits for the frontends to route by the index again, and for the index to equal the engines' caches.
const recoveryTime = time.Minute

// engine carries the rate on two cores: what is measured is the way to the engine.
var engine = sim.Options{Blocks: 1400, MaxModelLen: 8192, PrefillPerToken: 5 * time.Microsecond, DecodePerToken: 500 * time.Microsecond}

// workload fills the caches of the engines within seconds, so that blocks are stored and removed all the time.
var workload = stage.Shape{Chats: 48, Systems: 6, SystemWords: 160, Turns: 6, TurnWords: 60}

func (o *Options) complete() {
	for d, v := range map[*time.Duration]time.Duration{
		&o.LookupBudget: 20 * time.Millisecond, &o.Warm: 3 * time.Second, &o.Away: 5 * time.Second, &o.After: 2 * time.Second,
	} {
		if *d <= 0 {
			*d = v
		}
	}
	if o.Rate <= 0 {
		o.Rate = 200
	}
	if o.Progress == nil {
		o.Progress = func(string, int, int) {}
	}
}

// Run runs a fault on servers of its own under load. An error means that the run itself could not be made; what the
// requests met is in the report.
func Run(ctx context.Context, o Options) (r Report, err error) {
	o.complete()
	r.Fault = o.Fault
	goroutines := runtime.NumGoroutine()
	f, err := start(ctx, o)
	if err != nil {
		return r, err
	}
	stopServers := sync.OnceFunc(f.stop)
	defer stopServers()
	p := play{o: o, fault: f, cables: map[string]*stage.Cable{}, lines: newLineCounter(o.Logger.Handler())}
	so := stage.Options{
		Name: "fault", Redis: f.url, Policy: frontend.PolicyKV, Fallback: o.Fallback, LookupBudget: o.LookupBudget, PoolSize: f.poolSize,
		Engine: engine, WithoutRedis: f.boot, Cable: p.cable, Logger: slog.New(p.lines),
	}
	if strings.HasPrefix(f.url, "redis+cluster") {
		so.Shards = stage.NumEngines // one engine each, so that one node's loss is a partial one
	}
	if p.Stage, err = stage.New(ctx, so); err != nil {
		return r, err
	}
	closeStage := sync.OnceValue(p.Close)
	defer func() { err = errors.Join(err, closeStage()) }()
	if err := p.run(ctx, &r); err != nil {
		return r, err
	}
	if err := closeStage(); err != nil {
		return r, err
	}
	for _, c := range p.cables {
		r.Connections += c.Open()
	}
	stopServers()
	bounded, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_ = stage.Poll(bounded, "goroutines to end", func() (bool, error) {
		r.Goroutines = max(0, runtime.NumGoroutine()-goroutines)
		return r.Goroutines == 0, nil
	})
	return r, ctx.Err()
}

// play is a run with everything that watches it.
type play struct {
	*stage.Stage
	o      Options
	fault  *fault
	cables map[string]*stage.Cable // by part
	lines  *lineCounter

	start, begin, back, ended time.Time // of the load, of the fault, of Redis answering again, of the load
}

func (p *play) cable(part string) *stage.Cable {
	c := &stage.Cable{}
	p.cables[part] = c
	return c
}

// run plays the load through warm-up, fault and recovery, and fills the report.
func (p *play) run(ctx context.Context, r *Report) error {
	c := &stage.Client{
		HTTP: stage.NewHTTPClient(), Frontends: p.Frontends, Model: p.Pool.Model, MaxTokens: 8, Timeout: 30 * time.Second,
	}
	defer c.HTTP.CloseIdleConnections()
	watch := stage.NewWatch(stage.NumFrontends)
	paced, stopPace := context.WithCancel(ctx)
	defer stopPace()
	l := stage.Load{Client: c, Parallel: 64, Observe: watch.Observe, Pace: stage.Pace(paced, p.o.Rate)}
	stop := make(chan struct{})
	var outcomes []stage.Outcome
	var playing sync.WaitGroup
	p.start = time.Now()
	playing.Go(func() { outcomes = l.Play(ctx, workload.Endless(stop)) })
	stopLoad := sync.OnceFunc(func() { close(stop); playing.Wait() })
	defer stopLoad()
	probers := watchProbers(p.Stage)
	defer probers.stop()

	if err := p.through(ctx, watch, r); err != nil {
		return err
	}
	stopLoad()
	p.ended = time.Now()
	r.ProbersMax, r.ProbersTooMany = probers.stop()
	stage.LogFailures(p.o.Logger, p.o.Fault, outcomes)

	bounded, cancel := context.WithTimeout(ctx, recoveryTime)
	defer cancel()
	var differs error
	err := stage.Poll(bounded, "the index to equal the engines' caches", func() (bool, error) {
		equal, err := equalsEngines(bounded, p.Stage)
		if bounded.Err() == nil {
			differs = err
		}
		return equal, err
	})
	if r.IndexEqual = err == nil; err != nil {
		p.o.Logger.Error("the index differs from the engines", "error", differs)
	}
	r.RefillMS = stage.Milliseconds(time.Since(p.ended))
	r.addOutcomes(outcomes, p)
	r.addWaits(p)
	r.addMetrics(p.Metrics)
	r.addExtra(p.fault.extra)
	for part, c := range p.cables {
		if strings.HasPrefix(part, "frontend") {
			r.Dials.Frontend = max(r.Dials.Frontend, c.BusiestSecond(p.begin))
		} else {
			r.Dials.Indexer = max(r.Dials.Indexer, c.BusiestSecond(p.begin))
		}
	}
	r.LogLines = Lines{Frontends: p.lines.of("frontend"), Links: p.lines.links(), Indexer: p.lines.of("indexer")}
	return nil
}

// through goes through the time of the fault, until all is as before.
func (p *play) through(ctx context.Context, watch *stage.Watch, r *Report) error {
	if err := p.sleep(ctx, p.o.Warm); err != nil {
		return err
	}
	p.lines.begin()
	p.begin = time.Now()
	if err := p.fault.begin(ctx, p.Stage); err != nil {
		return fmt.Errorf("begin the fault: %w", err)
	}
	p.back = time.Now()
	if p.fault.once {
		watch.Since(p.back)
	}
	if err := p.sleep(ctx, p.o.Away); err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := p.fault.end(bounded); err != nil {
		return fmt.Errorf("end the fault: %w", err)
	}
	if !p.fault.once {
		p.back = time.Now()
		watch.Since(p.back)
	}
	select {
	case <-watch.Recovered:
		r.Recovered = true
		r.RecoveryMS = stage.Milliseconds(watch.LastRecovery().Sub(p.back))
		r.WarmMS = stage.Milliseconds(watch.FirstHit().Sub(p.back))
	case <-time.After(recoveryTime):
		r.RecoveryMS, r.WarmMS = stage.Milliseconds(recoveryTime), stage.Milliseconds(recoveryTime)
	case <-ctx.Done():
		return ctx.Err()
	}
	return p.sleep(ctx, p.o.After)
}

// sleep lets the load run, and reports progress.
func (p *play) sleep(ctx context.Context, d time.Duration) error {
	total := int((p.o.Warm + p.o.Away + p.o.After).Milliseconds())
	until := time.NewTimer(d)
	defer until.Stop()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		p.o.Progress(p.o.Fault, min(total, int(time.Since(p.start).Milliseconds())), total)
		select {
		case <-until.C:
			return nil
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
