package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/warmroute/warmroute/store/storebench"
)

type benchSweepCmd struct {
	Options benchOptions `embed:""`
	Blocks  int          `default:"1000000" placeholder:"N" help:"Blocks of the worker that goes, at least 1000 (default ${default})." env:"-"`
	Steps   []int        `default:"100,250,500" placeholder:"N" help:"Blocks per call of the sweep, at most 1000 (default ${default})." env:"-"`
}

// Help is the long form of the command's help.
func (benchSweepCmd) Help() string {
	return `Removes a worker with many blocks and sweeps them, call after call without a pause, while lookups of 128 blocks at 8 workers go on, one every
2 ms. It reports how much their p99 grows, and, from Redis's SLOWLOG, how long the calls of scripts took there, whatever else the machine did.

Example:

    warmroute bench sweep --redis redis://127.0.0.1:6379 --json

Exit codes: 0 measured; 1 failed; 2 wrong flags.`
}

// Run measures sweeps.
func (c benchSweepCmd) Run(ctx context.Context, std *stdio) error {
	if c.Blocks < 1000 {
		return usagef("--blocks: at least 1000")
	}
	for _, n := range c.Steps {
		if n < 1 || n > 1000 {
			return usagef("--steps: 1 to 1000 blocks per call")
		}
	}
	var r storebench.SweepReport
	return c.Options.run(ctx, std, func(o storebench.Options) (any, error) {
		var err error
		r, err = storebench.Sweep(ctx, o, c.Blocks, c.Steps)
		return r, err
	}, func(w io.Writer) error {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		row(t, "blocks/call", "retire ms", "sweep ms", "lookup p50 µs", "p99 µs", "during: p50 µs", "p99 µs", "p99 growth µs", "script p50 µs", "p99 µs", "longest µs")
		for _, x := range r.Cells {
			row(t, x.Step, number(x.RetireMs, 2), number(x.SweepMs, 0), number(x.Before.P50, 0), number(x.Before.P99, 0),
				number(x.During.P50, 0), number(x.During.P99, 0), number(x.P99Growth, 0),
				number(x.Script.P50, 0), number(x.Script.P99, 0), number(x.LongestUs, 0))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		_, err := fmt.Fprintf(w, "\nRedis %s, %s blocks.\n", r.RedisVersion, number(float64(r.Blocks), 0))
		return err
	})
}
