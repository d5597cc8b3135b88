package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/demo"
	"github.com/warmroute/warmroute/store/redisproc"
)

// benchOutageCmd runs faults of Redis under load.
type benchOutageCmd struct {
	Fault    []string      `default:"all" placeholder:"NAME" help:"Faults to run, or all (default ${default})." env:"-"`
	Duration time.Duration `default:"5s" placeholder:"TIME" help:"How long each fault lasts (default ${default})." env:"-"`
	Rate     int           `default:"200" placeholder:"N" help:"Requests per second through two frontends (default ${default})." env:"-"`
	Policy   string        `name:"fallback-policy" default:"conversation-hash" enum:"conversation-hash,least-loaded,round-robin,random" placeholder:"POLICY" help:"The frontends' choice while the index is away (default ${default})." env:"-"`
	JSON     bool          `help:"Print one JSON object per fault." env:"-"`
}

// Help is the long form of the command's help.
func (benchOutageCmd) Help() string {
	return `Starts Redis servers of its own (redis-server has to be on the PATH), four simulated engines, an indexer and two
frontends with the default lookup budget, keeps up the load, and lets the fault happen.

The faults: ` + strings.Join(redisproc.Faults(), ", ") + `.

Example:

    warmroute bench outage --fault killed,stopped --json

Exit codes: 0 no request failed and the index equals the engines' caches again; 1 otherwise.`
}

// Run runs the faults one after the other.
func (c benchOutageCmd) Run(ctx context.Context, std *stdio, logger *slog.Logger, log *logOptions) error {
	if _, err := exec.LookPath(redisproc.Program); err != nil {
		return fmt.Errorf("this benchmark runs Redis servers of its own, and %s is not on the PATH: install it (apt-get install redis-server)", redisproc.Program)
	}
	if c.Duration <= 0 || c.Rate < 1 {
		return usagef("--duration and --rate must be positive")
	}
	names := c.Fault
	if slices.Equal(names, []string{"all"}) {
		names = redisproc.Faults()
	}
	for _, n := range names {
		if !slices.Contains(redisproc.Faults(), n) {
			return usagef("--fault: %q: want all, or some of %s", n, strings.Join(redisproc.Faults(), ", "))
		}
	}
	p := progress{w: std.Err, drawn: isTerminal(std.Err)}
	var reports []demo.FaultReport
	var bad []string
	for _, n := range names {
		r, err := demo.RunFault(ctx, demo.FaultOptions{
			Fault: n, Fallback: c.Policy, Away: c.Duration, Rate: c.Rate, Logger: log.quiet(logger), Progress: p.show,
		})
		if err != nil {
			p.end()
			return fmt.Errorf("fault %s: %w", n, err)
		}
		if r.Failed > 0 || r.WrongWorker > 0 || !r.IndexEqual {
			bad = append(bad, n)
		}
		reports = append(reports, r)
	}
	p.end()
	if c.JSON {
		e := json.NewEncoder(std.Out)
		for _, r := range reports {
			if err := e.Encode(r); err != nil {
				return err
			}
		}
	} else if err := outageTable(std, reports); err != nil {
		return err
	}
	if len(bad) > 0 {
		return fmt.Errorf("requests failed, or the index differs from the engines: %s", strings.Join(bad, ", "))
	}
	return nil
}

func outageTable(std *stdio, reports []demo.FaultReport) error {
	t := tabwriter.NewWriter(std.Out, 0, 0, 2, ' ', tabwriter.AlignRight)
	row(t, "fault", "requests", "per s", "failed", "degraded", "partial", "in flight p99 ms", "down p99 ms", "max ms", "exact after ms", "index equal", "dials/s", "lines/turn",
		"hits before", "during", "after", "reasons")
	for _, r := range reports {
		var reasons []string
		for _, k := range slices.Sorted(maps.Keys(r.Reasons)) {
			reasons = append(reasons, fmt.Sprintf("%s %d", k, r.Reasons[k]))
		}
		row(t, r.Fault, r.Requests, number(r.Rate, 0), r.Failed, r.Degraded, r.Partial, number(r.AddedMS.InFlightP99, 1), number(r.AddedMS.DownP99, 2), number(r.AddedMS.Max, 1),
			number(r.RecoveryMS, 0), r.IndexEqual, r.DialsPerS, number(r.LogLines, 1),
			number(r.HitRatio["before"], 2), number(r.HitRatio["during"], 2), number(r.HitRatio["after"], 2), strings.Join(reasons, ", "))
	}
	return t.Flush()
}
