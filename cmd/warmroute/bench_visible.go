package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/visible"
)

type benchVisibleCmd struct {
	Redis   string        `placeholder:"URL" required:"" help:"Redis server to measure: redis://host:port." env:"-"`
	JSON    bool          `help:"Print one JSON object." env:"-"`
	Workers int           `default:"16" placeholder:"N" help:"Simulated engines (default ${default})." env:"-"`
	Rate    int           `default:"5000" placeholder:"N" help:"Blocks per second, of all engines together (default ${default})." env:"-"`
	Time    time.Duration `name:"duration" default:"10s" placeholder:"TIME" help:"How long to measure (default ${default})." env:"-"`
}

// Help is the long form of the command's help.
func (benchVisibleCmd) Help() string {
	return `Simulated engines get prompts of 16 new blocks, publish them over ZeroMQ, one indexer follows them, and every eighth
prompt is looked up until the answer has its last block. The times begin before the prompt is sent, so that HTTP and the
engine's own work are in them. Engines, indexer and reader are all in this process, and share its CPUs.

Example:

    warmroute bench visible --redis redis://127.0.0.1:6379 --json

Exit codes: 0 measured; 1 failed; 2 wrong flags.`
}

// Run measures.
func (c benchVisibleCmd) Run(ctx context.Context, std *stdio, logger *slog.Logger, log *logOptions) error {
	if c.Workers < 1 || c.Rate < 1 || c.Time <= 0 {
		return usagef("--workers, --rate and --duration must be positive")
	}
	if err := reach(ctx, c.Redis); err != nil {
		return err
	}
	p := progress{w: std.Err, drawn: isTerminal(std.Err)}
	p.show("events", 0, 1)
	r, err := visible.Run(ctx, visible.Options{Redis: c.Redis, Workers: c.Workers, Rate: c.Rate, Time: c.Time, Logger: log.quiet(logger)})
	p.end()
	if err != nil {
		return indexAway(err)
	}
	if c.JSON {
		return json.NewEncoder(std.Out).Encode(r)
	}
	_, err = fmt.Fprintf(std.Out, "%d engines, %s blocks/s: visible after p50 %s ms, p99 %s ms, at most %s ms (%d samples)\n",
		r.Workers, number(r.Rate, 0), number(r.P50, 1), number(r.P99, 1), number(r.Max, 1), r.Samples)
	return err
}
