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

	"github.com/warmroute/warmroute/cmd/warmroute/internal/outage"
	"github.com/warmroute/warmroute/store/redisproc"
)

// benchOutageCmd runs faults of Redis under load.
type benchOutageCmd struct {
	Fault  []string      `default:"all" placeholder:"NAME" help:"Faults to run, or all (default ${default})." env:"-"`
	Away   time.Duration `default:"5s" placeholder:"TIME" help:"How long each fault lasts (default ${default})." env:"-"`
	Rate   int           `default:"200" placeholder:"N" help:"Requests per second through two frontends (default ${default})." env:"-"`
	Budget time.Duration `name:"lookup-budget" default:"20ms" placeholder:"TIME" help:"The lookup budget of the frontends (default ${default})." env:"-"`
	Policy string        `name:"fallback" default:"conversation-hash" enum:"conversation-hash,prefix-hash,least-loaded,power-of-two,round-robin,random" placeholder:"POLICY" help:"The frontends' choice while the index is away (default ${default})." env:"-"`
	JSON   bool          `help:"Print one JSON object per fault." env:"-"`
}

// Help is the long form of the command's help.
func (benchOutageCmd) Help() string {
	return `Starts Redis servers of its own (redis-server has to be on the PATH), four simulated engines, an indexer and two
frontends, keeps up the load, and lets the fault happen.

The faults: ` + strings.Join(outage.Faults(), ", ") + `.

Example:

    warmroute bench outage --fault killed,stopped --json

Exit codes: 0 no request failed and the index equals the engines' caches again; 1 otherwise; 2 wrong flags.`
}

// Run runs the faults one after the other.
func (c benchOutageCmd) Run(ctx context.Context, std *stdio, logger *slog.Logger, log *logOptions) error {
	if _, err := exec.LookPath(redisproc.Program); err != nil {
		return fmt.Errorf("this benchmark runs Redis servers of its own, and %s is not on the PATH: install it (apt-get install redis-server)", redisproc.Program)
	}
	if c.Away <= 0 || c.Budget <= 0 || c.Rate < 1 {
		return usagef("--away, --lookup-budget and --rate must be positive")
	}
	names := c.Fault
	if slices.Equal(names, []string{"all"}) {
		names = outage.Faults()
	}
	for _, n := range names {
		if !slices.Contains(outage.Faults(), n) {
			return usagef("--fault: %q: want all, or some of %s", n, strings.Join(outage.Faults(), ", "))
		}
	}
	p := progress{w: std.Err, drawn: isTerminal(std.Err)}
	var reports []outage.Report
	var bad []string
	for _, n := range names {
		r, err := outage.Run(ctx, outage.Options{
			Fault: n, Fallback: c.Policy, LookupBudget: c.Budget, Away: c.Away, Rate: c.Rate, Logger: log.quiet(logger), Progress: p.show,
		})
		if err != nil {
			p.end()
			return fmt.Errorf("fault %s: %w", n, err)
		}
		if !r.OK() {
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

func outageTable(std *stdio, reports []outage.Report) error {
	t := tabwriter.NewWriter(std.Out, 0, 0, 2, ' ', tabwriter.AlignRight)
	row(t, "fault", "requests", "per s", "failed", "degraded", "partial", "in flight p99 ms", "down p99 ms", "up p99 ms", "exact after ms", "index equal",
		"turns", "probers", "dials/s", "lines", "hits before", "during", "after", "reasons")
	for _, r := range reports {
		var reasons []string
		for _, k := range slices.Sorted(maps.Keys(r.Reasons)) {
			reasons = append(reasons, fmt.Sprintf("%s %d", k, r.Reasons[k]))
		}
		row(t, r.Fault, r.Requests, number(r.Rate, 0), r.Failed, r.Degraded, r.Partial, number(r.Waited.InFlight.P99, 1), number(r.Waited.Down.P99, 2),
			number(r.Waited.Up.P99, 2), number(r.RecoveryMS, 0), r.IndexEqual, r.Transitions, r.ProbersMax, r.Dials.Frontend, r.LogLines.Frontends,
			number(r.HitRatio["before"], 2), number(r.HitRatio["during"], 2), number(r.HitRatio["after"], 2), strings.Join(reasons, ", "))
	}
	return t.Flush()
}
