package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/warmroute/warmroute/store/storebench"
)

// benchCmd measures the index on a Redis server.
type benchCmd struct {
	Lookup  benchLookupCmd  `cmd:"" help:"Overlap lookups, against other layouts in Redis."`
	Apply   benchApplyCmd   `cmd:"" help:"Writes of events, against bare ZADD and HSET."`
	Sweep   benchSweepCmd   `cmd:"" help:"The removal of a worker with a million blocks, under lookups."`
	Visible benchVisibleCmd `cmd:"" help:"From an engine's event into the answers of lookups."`
	Route   benchRouteCmd   `cmd:"" help:"What a frontend adds to a request, beside nginx."`
	Outage  benchOutageCmd  `cmd:"" help:"Requests and index while Redis is away, fault by fault."`
}

// Help is the long form of the command's help.
func (benchCmd) Help() string {
	return `Measures the index and, in the same run and on the same data, other ways to keep the same facts. The
layouts take turns, so that a noisy machine is noisy for all of them, and must give equal answers. On
standard settings lookup takes some minutes; --cell-time makes it shorter.

Use a server of its own: the benchmark fills it, measures its CPU, and empties what it filled.

Example: on a server for this alone

    redis-server --port 6390 --save '' &
    warmroute bench apply --redis redis://127.0.0.1:6390

Exit codes: 0 measured; 1 failed, or two layouts gave different answers; 2 wrong flags.`
}

// benchOptions are those of every benchmark.
type benchOptions struct {
	Redis    string        `placeholder:"URL" required:"" help:"Redis server to measure: redis://host:port." env:"-"`
	JSON     bool          `help:"Print one JSON object." env:"-"`
	CellTime time.Duration `default:"2s" placeholder:"TIME" help:"Time to measure each cell of the table (default ${default})." env:"-"`
}

// run measures, with a progress bar, and prints what came out.
func (o benchOptions) run(ctx context.Context, std *stdio, measure func(storebench.Options) (any, error), table func(io.Writer) error) error {
	if err := reachOne(ctx, o.Redis); err != nil {
		return err
	}
	p := progress{w: std.Err, drawn: isTerminal(std.Err)}
	report, err := measure(storebench.Options{URL: o.Redis, CellTime: o.CellTime, Progress: p.show})
	p.end()
	if err != nil {
		return err
	}
	if o.JSON {
		return json.NewEncoder(std.Out).Encode(report)
	}
	return table(std.Out)
}

type benchLookupCmd struct {
	Options benchOptions `embed:""`
	Workers []int        `default:"8,64,256" placeholder:"N" help:"Sizes of the fleet (default ${default})." env:"-"`
	Blocks  []int        `default:"32,128,512,2048" placeholder:"N" help:"Lengths of the prompt in blocks, at most 2048 (default ${default})." env:"-"`
	Callers []int        `default:"1,8" placeholder:"N" help:"Lookups at a time (default ${default})." env:"-"`
}

// Help is the long form of the command's help.
func (benchLookupCmd) Help() string {
	return `Every worker holds 4,000 blocks: 60 common to all, 500 common to its group of 8, private chains of 40.
Workers 0 to 3 hold the 1,988-block continuation of the common prefix instead of as many private blocks, and
that prefix is the prompt. The other layouts: pipelined ZMSCORE of every block at every worker's sorted set,
and pipelined HKEYS of one hash per block with a 105-byte JSON field per holder.

Example:

    warmroute bench lookup --redis redis://127.0.0.1:6379 --json

Exit codes: 0 measured; 1 failed, or two layouts gave different answers; 2 wrong flags.`
}

// Run measures lookups.
func (c benchLookupCmd) Run(ctx context.Context, std *stdio) error {
	for _, list := range [][]int{c.Workers, c.Blocks, c.Callers} {
		for _, n := range list {
			if n < 1 {
				return usagef("sizes must be at least 1")
			}
		}
	}
	for _, n := range c.Blocks {
		if n > 2048 {
			return usagef("--blocks: the workload's prompt has 2048 blocks")
		}
	}
	for _, n := range c.Workers {
		if n < 4 {
			return usagef("--workers: the workload needs at least 4")
		}
	}
	var r storebench.LookupReport
	return c.Options.run(ctx, std, func(o storebench.Options) (any, error) {
		var err error
		r, err = storebench.Lookup(ctx, o, storebench.LookupSizes{Workers: c.Workers, Blocks: c.Blocks, Callers: c.Callers})
		return r, err
	}, func(w io.Writer) error {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		row(t, "workers", "blocks", "callers", "layout", "p50 µs", "p99 µs", "× ours", "Redis µs", "µs/block", "sent B", "received B", "allocs")
		ours := 1.0
		for _, x := range r.Cells {
			if x.Layout == storebench.LayoutOurs {
				ours = x.P50
			}
			row(t, x.Workers, x.Blocks, x.Callers, x.Layout, number(x.P50, 0), number(x.P99, 0), number(x.P50/ours, 1),
				number(x.RedisCPU, 0), number(x.CPUPerBlock, 2), number(float64(x.Sent), 0), number(float64(x.Received), 0), number(float64(x.Allocs), 0))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		_, err := fmt.Fprintf(w, "\nRedis %s. Redis µs: time in commands per lookup (INFO commandstats).\n", r.RedisVersion)
		return err
	})
}

type benchApplyCmd struct {
	Options benchOptions `embed:""`
	Blocks  []int        `default:"1,8,32,128" placeholder:"N" help:"Blocks per event (default ${default})." env:"-"`
}

// Help is the long form of the command's help.
func (benchApplyCmd) Help() string {
	return `Eight streams at once write and remove blocks that no two of them share. The bare ways pipeline one ZADD, or
ZADD and HSET, per event, without any guarantee; ours coalesces the messages of a stream, as the indexer does: store, remove-known where the indexer still
remembers the block, and remove where it has to be found in Redis.

Example:

    warmroute bench apply --redis redis://127.0.0.1:6379 --json

Exit codes: 0 measured; 1 failed; 2 wrong flags.`
}

// Run measures writes.
func (c benchApplyCmd) Run(ctx context.Context, std *stdio) error {
	for _, n := range c.Blocks {
		if n < 1 || n > 1024 {
			return usagef("--blocks: 1 to 1024 blocks per event")
		}
	}
	var r storebench.ApplyReport
	return c.Options.run(ctx, std, func(o storebench.Options) (any, error) {
		var err error
		r, err = storebench.Apply(ctx, o, c.Blocks)
		return r, err
	}, func(w io.Writer) error {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		row(t, "blocks/event", "way", "blocks/s", "of ZADD", "of ZADD+HSET", "Redis µs/block", "process µs/block")
		for _, x := range r.Cells {
			row(t, x.BlocksPerEvent, x.Way, number(x.BlocksPerSec, 0), number(x.VsZAdd, 2), number(x.VsZAddHSet, 2), number(x.RedisCPU, 2), number(x.ProcessCPU, 2))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		_, err := fmt.Fprintf(w, "\nRedis %s. Memory per block and worker, nothing shared: %.0f bytes (sorted sets alone %.0f).\n"+
			"Clearing a worker of 4,000 blocks: p50 %.0f µs, p99 %.0f µs; the sweep then frees %.0f blocks per ms.\n",
			r.RedisVersion, r.MemoryPerBlock, r.ZAddMemory, r.ClearWorker.P50, r.ClearWorker.P99, r.SweepBlocksPerMs)
		return err
	})
}

// row writes one line of a table with right-aligned columns.
func row(w io.Writer, cells ...any) {
	for _, c := range cells {
		_, _ = fmt.Fprintf(w, "%v\t", c) // the table's Flush reports what went wrong
	}
	_, _ = fmt.Fprintln(w)
}

// number prints a figure with thousands separated.
func number(f float64, decimals int) string {
	s := fmt.Sprintf("%.*f", decimals, f)
	whole, fraction, _ := strings.Cut(s, ".")
	for i := len(whole) - 3; i > len(whole)-len(strings.TrimLeft(whole, "-")); i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return whole
}
