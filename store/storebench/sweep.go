package storebench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// SweepCell is the end of one big worker under lookups, with one size of step.
type SweepCell struct {
	Step       int     `json:"step"`      // blocks per call of the sweep
	RetireMs   float64 `json:"retire_ms"` // until no lookup credits its blocks
	SweepMs    float64 `json:"sweep_ms"`  // until their memory is free
	Before     Latency `json:"lookup"`    // without anything else
	During     Latency `json:"lookup_during_sweep"`
	P99Growth  float64 `json:"p99_growth_us"`
	Script     Latency `json:"script"` // of the calls of retire and sweep in Redis, by SLOWLOG: what else the machine does is in it
	LongestUs  float64 `json:"longest_script_us"`
	Swept      int     `json:"swept"`
	SweepCalls int     `json:"sweep_calls"`
}

// SweepReport is what [Sweep] measured.
type SweepReport struct {
	RedisVersion string      `json:"redis_version"`
	Blocks       int         `json:"blocks"`
	SlowFrom     float64     `json:"slow_from_us"` // shorter script calls are not looked at
	Cells        []SweepCell `json:"cells"`
}

const (
	slowFrom    = 50 * time.Microsecond
	sweepPrompt = 128 // blocks of one lookup
	sweepFleet  = 8   // workers that hold the prompt
	sweepPace   = 2 * time.Millisecond
)

// Sweep measures what the removal of a worker with so many blocks does to lookups.
func Sweep(ctx context.Context, o Options, blocks int, steps []int) (report SweepReport, err error) {
	r, err := newRig(ctx, o)
	if err != nil {
		return report, err
	}
	defer r.close()
	report.Blocks, report.SlowFrom = blocks, float64(slowFrom.Microseconds())
	if report.RedisVersion, err = r.version(ctx); err != nil {
		return report, err
	}
	restore, err := r.slowlog(ctx)
	if err != nil {
		return report, fmt.Errorf("SLOWLOG: %w", err)
	}
	defer func() { err = errors.Join(err, restore()) }()
	s, err := r.store(store.Options{})
	if err != nil {
		return report, err
	}
	for i, step := range steps {
		r.opts.Progress("sweeps", i, len(steps))
		c, err := r.sweepCell(ctx, s, blocks, step)
		if err != nil {
			return report, fmt.Errorf("steps of %d blocks: %w", step, err)
		}
		report.Cells = append(report.Cells, c)
	}
	r.opts.Progress("sweeps", len(steps), len(steps))
	return report, r.clean(ctx)
}

func (r *rig) sweepCell(ctx context.Context, s *store.Store, blocks, step int) (SweepCell, error) {
	c := SweepCell{Step: step}
	if err := r.clean(ctx); err != nil {
		return c, err
	}
	prompt := chain(0, 1, sweepPrompt)
	var big store.Stream
	for i := range sweepFleet {
		w := &writer{name: workerName(i), blocks: prompt}
		if i == 0 {
			w.blocks = append(slices.Clone(prompt), chain(prompt[len(prompt)-1], 2, blocks-len(prompt))...)
		}
		id := store.StreamID{Pool: benchPool, WorkerRank: kvcache.WorkerRank{Worker: w.name}}
		var err error
		if w.st, _, err = s.Register(ctx, id, store.Registration{BlockSize: 16}); err != nil {
			return c, err
		}
		if err := w.apply(ctx, s, 128, WayStore); err != nil {
			return c, err
		}
		if i == 0 {
			big = w.st
		}
	}
	lookups := func(f func() error) (Latency, error) {
		done := make(chan struct{})
		var times []time.Duration
		var failed error
		var wg sync.WaitGroup
		wg.Go(func() {
			tick := time.NewTicker(sweepPace)
			defer tick.Stop()
			for {
				select {
				case <-done:
					return
				case <-tick.C:
				}
				start := time.Now()
				got, _, err := s.Lookup(ctx, benchPool, prompt, store.LookupOptions{})
				times = append(times, time.Since(start))
				if err == nil && len(got.Scores) < sweepFleet-1 {
					err = fmt.Errorf("a lookup found %d workers", len(got.Scores))
				}
				if err != nil && failed == nil {
					failed = err
				}
			}
		})
		err := f()
		close(done)
		wg.Wait()
		return latency(times), errors.Join(err, failed)
	}
	var err error
	c.Before, err = lookups(func() error {
		select {
		case <-time.After(r.opts.CellTime):
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	if err != nil {
		return c, err
	}
	if err := r.raw.Do(ctx, "SLOWLOG", "RESET").Err(); err != nil {
		return c, err
	}
	c.During, err = lookups(func() error {
		start := time.Now()
		if o, err := s.Remove(ctx, big); err != nil || o != store.Applied {
			return fmt.Errorf("remove: %v %w", o, err)
		}
		c.RetireMs = float64(time.Since(start).Microseconds()) / 1e3
		for more := true; more; c.SweepCalls++ {
			var n int
			var err error
			if n, more, err = s.Sweep(ctx, benchPool, step); err != nil {
				return err
			}
			c.Swept += n
		}
		c.SweepMs = float64(time.Since(start).Microseconds()) / 1e3
		return nil
	})
	if err != nil {
		return c, err
	}
	if c.Swept != blocks {
		return c, fmt.Errorf("swept %d of %d blocks", c.Swept, blocks)
	}
	c.P99Growth = c.During.P99 - c.Before.P99
	times, err := r.scriptTimes(ctx)
	c.Script = latency(times)
	if len(times) > 0 { // sorted by now
		c.LongestUs = float64(times[len(times)-1].Microseconds())
	}
	return c, err
}

// slowlog makes Redis note slow script calls, and returns what makes it as it was.
func (r *rig) slowlog(ctx context.Context) (restore func() error, err error) {
	const from, length = "slowlog-log-slower-than", "slowlog-max-len"
	before := map[string]string{}
	for _, name := range []string{from, length} {
		v, err := r.raw.ConfigGet(ctx, name).Result()
		if err != nil {
			return nil, err
		}
		before[name] = v[name]
	}
	restore = func() error {
		ctx := context.WithoutCancel(ctx)
		return errors.Join(r.raw.ConfigSet(ctx, from, before[from]).Err(), r.raw.ConfigSet(ctx, length, before[length]).Err())
	}
	if err := r.raw.ConfigSet(ctx, from, fmt.Sprint(slowFrom.Microseconds())).Err(); err != nil {
		return nil, err
	}
	return restore, r.raw.ConfigSet(ctx, length, "100000").Err()
}

// scriptTimes are those of the script calls that the slow log has.
func (r *rig) scriptTimes(ctx context.Context) ([]time.Duration, error) {
	entries, err := r.raw.SlowLogGet(ctx, -1).Result()
	if err != nil {
		return nil, err
	}
	var times []time.Duration
	for _, e := range entries {
		if len(e.Args) > 0 && strings.HasPrefix(strings.ToLower(e.Args[0]), "eval") {
			times = append(times, e.Duration)
		}
	}
	return times, nil
}
