package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/replay"
	"github.com/warmroute/warmroute/frontend/choose"
)

// replayCmd replays a trace under one policy or several.
type replayCmd struct {
	Trace       string        `arg:"" placeholder:"FILE" help:"Trace: JSON lines of timestamp, input_length, output_length, hash_ids; - is standard input."`
	Policy      []string      `default:"all" placeholder:"NAME" help:"Policies to compare, or all (default ${default})." env:"-"`
	Frontends   []int         `default:"1" placeholder:"N" help:"How many frontends share the requests; several numbers are compared (default ${default})." env:"-"`
	Views       []string      `default:"shared" placeholder:"VIEW" help:"What frontends know of the load: shared, or own = only what each has sent itself (default ${default})." env:"-"`
	Workers     int           `default:"8" placeholder:"N" help:"Workers (default ${default})." env:"-"`
	CacheBlocks int           `default:"4000" placeholder:"N" help:"Cache of a worker in blocks of 512 tokens (default ${default})." env:"-"`
	PrefillRate float64       `default:"8" placeholder:"N" help:"Blocks of prompts that a worker computes in a second (default ${default})." env:"-"`
	TokenTime   time.Duration `default:"20ms" placeholder:"TIME" help:"Time of a token of the answer (default ${default})." env:"-"`
	DecodeCost  float64       `default:"0" placeholder:"X" help:"An answer under way slows computing at its worker by this part (default ${default})." env:"-"`
	Load        float64       `default:"1" placeholder:"X" help:"How many times as fast as in the trace requests come (default ${default})." env:"-"`
	Predict     bool          `default:"true" negatable:"" help:"The index knows what is on its way to a worker (default ${default})." env:"-"`

	PrefillScale float64 `default:"${prefill_scale}" placeholder:"X" help:"Cost: weight of the work before a first token (default ${default})." env:"-"`
	Miss         float64 `default:"${miss}" placeholder:"X" help:"Cost: weight of a block that has to be computed, against one that waits (default ${default})." env:"-"`
	Decode       float64 `default:"${decode}" placeholder:"X" help:"Cost: weight of a block that a request under way occupies (default ${default})." env:"-"`
	Request      float64 `default:"${request}" placeholder:"X" help:"Cost: weight of a request under way, in blocks (default ${default})." env:"-"`
	Temperature  float64 `default:"0" placeholder:"X" help:"Cost: above 0 the choice is a lottery (default ${default})." env:"-"`

	Sessions     bool `help:"Name the conversations of the trace, as x-session-id does; not with --real-time." env:"-"`
	SessionSlack int  `default:"8192" zero:"" placeholder:"TOKENS" help:"With --sessions: prompt tokens by which a session's worker may have a longer queue than the cheapest before the session moves (default ${default})." env:"-"`

	State    string  `default:"memory" enum:"memory,redis" placeholder:"WHERE" help:"Where index and loads are: memory, or redis = the real store on a redis-server of its own (default ${default})." env:"-"`
	Seed     uint64  `default:"1" placeholder:"N" help:"Seed of all chances (default ${default})." env:"-"`
	RealTime bool    `help:"Real frontends as processes, an indexer and simulated engines, on a redis-server of their own." env:"-"`
	Speed    float64 `default:"10" placeholder:"X" help:"How many times as fast --real-time runs (default ${default})." env:"-"`
	Requests int     `placeholder:"N" help:"Replay only the first N requests of the trace." env:"-"`

	JSON bool   `help:"Print one JSON object." env:"-"`
	SVG  string `type:"path" placeholder:"FILE" help:"Write a plot of hit ratio and spread over time." env:"-"`
}

// replayDefaults are the weights that the help shows.
func replayDefaults() map[string]string {
	f := func(x float64) string { return fmt.Sprintf("%g", x) }
	d := choose.Default
	return map[string]string{"prefill_scale": f(d.PrefillScale), "miss": f(d.Miss), "decode": f(d.Decode), "request": f(d.Request)}
}

// Help is the long form of the command's help.
func (replayCmd) Help() string {
	return `Sends the requests of a trace through frontends to simulated workers, in virtual time, and shows what each
policy is worth: the part of the prompts' blocks that were cached, the work of the busiest worker in means, and
the time to the first token. A trace of 12,000 requests takes less than a second per policy, with --state redis
some seconds, and gives the same figures: the choice in memory and the one in Redis are the same arithmetic.

A worker computes one prompt after the other, keeps whole blocks in an LRU cache, and decodes beside it. Trust the
order of the policies, not the seconds.

The policies: ` + strings.Join(replay.Policies, ", ") + `.
Traces in this form are published by the Mooncake project (github.com/kvcache-ai/Mooncake, FAST25-release/traces).
A line of one, in ms and tokens, with an id for each 512 tokens of the prompt; equal ids from the first on are an equal prefix:

    {"timestamp": 0, "input_length": 1500, "output_length": 50, "hash_ids": [1, 2, 3]}

Example: all policies on a fleet of eight

    warmroute replay conversation_trace.jsonl --svg replay.svg

Example: do many frontends choose as well as one?

    warmroute replay conversation_trace.jsonl --policy kv --frontends 1,2,4,8 --views shared,own

Example: the same through real processes, real HTTP and real event streams, in real time

    warmroute replay conversation_trace.jsonl --real-time --requests 2000 --policy kv,conversation-hash

Example: another weight on blocks that have to be computed

    warmroute replay conversation_trace.jsonl --policy kv --miss 1

Exit codes: 0 replayed; 1 the trace is no trace, or a file cannot be written; 2 wrong flags.`
}

// Run replays.
func (c replayCmd) Run(ctx context.Context, std *stdio, logger *slog.Logger, log *logOptions) error {
	policies := c.Policy
	if slices.Equal(policies, []string{"all"}) {
		policies = replay.Policies
	}
	for _, p := range policies {
		if !slices.Contains(replay.Policies, p) {
			return usagef("--policy: %q: want all, or some of %s", p, strings.Join(replay.Policies, ", "))
		}
	}
	for _, v := range c.Views {
		if v != "shared" && v != "own" {
			return usagef("--views: %q: want shared or own", v)
		}
	}
	in := std.In
	if c.Trace != "-" {
		f, err := os.Open(c.Trace)
		if err != nil {
			return usagef("%w", err)
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	trace, err := replay.ReadTrace(in)
	if err != nil {
		return fmt.Errorf("%s: %w", c.Trace, err)
	}
	if c.Requests > 0 {
		trace = trace[:min(c.Requests, len(trace))]
	}
	if c.RealTime && slices.Equal(c.Policy, []string{"all"}) {
		policies = slices.DeleteFunc(slices.Clone(policies), func(p string) bool { return p == replay.LongestPrefix })
	}
	p := progress{w: std.Err, drawn: isTerminal(std.Err)}
	var results []*replay.Result
	for _, policy := range policies {
		for _, n := range c.Frontends {
			for _, view := range c.Views {
				if n == 1 && view == "own" && slices.Contains(c.Views, "shared") {
					continue // one frontend's own view is all there is
				}
				o := c.options(trace, policy, n, view == "own")
				name := policy
				if len(c.Frontends) > 1 {
					name = fmt.Sprintf("%s %d %s", policy, n, view)
				}
				o.Progress = func(done, of int) {
					if done%64 == 0 || done == of {
						p.show(name, done, of)
					}
				}
				r, err := c.replay(ctx, o, log.quiet(logger))
				p.end()
				if err != nil {
					return err
				}
				results = append(results, r)
			}
		}
	}
	if c.JSON {
		err = json.NewEncoder(std.Out).Encode(map[string]any{"options": c.settings(), "runs": results})
	} else {
		err = replayTable(std.Out, results)
	}
	if err == nil && c.SVG != "" { // last: what was measured is not lost with a file that cannot be written
		err = writePlot(c.SVG, results)
	}
	return err
}

func (c replayCmd) replay(ctx context.Context, o replay.Options, logger *slog.Logger) (*replay.Result, error) {
	if c.RealTime {
		o.Frontend = startFrontend
		return replay.RunReal(ctx, o, c.Speed, logger)
	}
	return replay.Run(ctx, o)
}

func (c replayCmd) options(trace []replay.Request, policy string, frontends int, own bool) replay.Options {
	return replay.Options{
		Trace: trace, Policy: policy, Workers: c.Workers, CacheBlocks: c.CacheBlocks, Rate: c.PrefillRate, TokenTime: c.TokenTime,
		DecodeCost: c.DecodeCost, Predict: c.Predict, Sessions: c.Sessions, SessionSlack: c.SessionSlack, Load: c.Load, Frontends: frontends, OwnViews: own, State: c.State, Seed: c.Seed,
		Weights: choose.Weights{PrefillScale: c.PrefillScale, Miss: c.Miss, Decode: c.Decode, Request: c.Request, Temperature: c.Temperature},
	}
}

// settings are what the runs have in common, for the JSON.
func (c replayCmd) settings() map[string]any {
	return map[string]any{
		"workers": c.Workers, "cache_blocks": c.CacheBlocks, "prefill_rate": c.PrefillRate, "token_seconds": c.TokenTime.Seconds(),
		"decode_cost": c.DecodeCost, "load": c.Load, "predict": c.Predict, "state": c.State, "seed": c.Seed,
		"prefill_scale": c.PrefillScale, "miss": c.Miss, "decode": c.Decode, "request": c.Request, "temperature": c.Temperature,
		"sessions": c.Sessions, "session_slack": c.SessionSlack,
	}
}

func writePlot(name string, results []*replay.Result) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	if err := replay.Plot(f, results); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

func replayTable(w io.Writer, results []*replay.Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	row(t, "policy", "frontends", "views", "hit ratio", "busiest", "TTFT mean s", "p50", "p90", "p99")
	for _, r := range results {
		views := "shared"
		if r.OwnViews {
			views = "own"
		}
		row(t, r.Policy, r.Frontends, views, number(r.HitRatio, 3), number(r.Busiest, 3),
			number(r.TTFT.Mean, 2), number(r.TTFT.P50, 2), number(r.TTFT.P90, 2), number(r.TTFT.P99, 2))
	}
	return t.Flush()
}
