package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"text/tabwriter"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/overhead"
)

// benchRouteCmd measures what a frontend adds to a request.
type benchRouteCmd struct {
	Redis    string        `placeholder:"URL" required:"" help:"Redis server for the index: redis://host:port." env:"-"`
	Tokens   int           `default:"8192" placeholder:"N" help:"Length of each prompt, given as token ids (default ${default})." env:"-"`
	Rate     int           `default:"200" placeholder:"N" help:"Requests per second while latency is measured (default ${default})." env:"-"`
	Duration time.Duration `default:"10s" placeholder:"TIME" help:"Time for each target's latency, and again for its throughput (default ${default})." env:"-"`
	Callers  int           `default:"16" placeholder:"N" help:"Requests at a time while throughput is measured (default ${default})." env:"-"`
	JSON     bool          `help:"Print one JSON object." env:"-"`
}

// Help is the long form of the command's help.
func (benchRouteCmd) Help() string {
	return `Starts four workers that answer at once, a frontend in a process of its own and, where it is installed, nginx as a plain
reverse proxy, and sends all of them the same completions. The index holds the first half of every prompt. The targets take
turns, second by second, so that a noisy machine is noisy for all of them.

Added: what a request takes longer than at the worker alone, by percentile. CPU: of the proxy's process.

Example:

    warmroute bench route --redis redis://127.0.0.1:6379 --json

Exit codes: 0 measured; 1 failed; 2 wrong flags.`
}

// Run measures.
func (c benchRouteCmd) Run(ctx context.Context, std *stdio) error {
	if c.Tokens < 32 || c.Rate < 1 || c.Rate > 100_000 || c.Duration < time.Second || c.Callers < 1 {
		return usagef("want at least 32 tokens, 1 to 100000 requests per second, 1 s, and 1 caller")
	}
	if err := reach(ctx, c.Redis); err != nil {
		return err
	}
	p := progress{w: std.Err, drawn: isTerminal(std.Err)}
	nginx, _ := exec.LookPath("nginx") // without it, nothing stands beside
	r, err := overhead.Run(ctx, overhead.Options{
		Redis: c.Redis, Frontend: startFrontend, Nginx: nginx, Tokens: c.Tokens, Rate: c.Rate, Duration: c.Duration, Callers: c.Callers,
		Progress: p.show,
	})
	p.end()
	if err != nil {
		return err
	}
	if c.JSON {
		return json.NewEncoder(std.Out).Encode(r)
	}
	t := tabwriter.NewWriter(std.Out, 0, 0, 2, ' ', tabwriter.AlignRight)
	row(t, "target", "requests", "failed", "p50 ms", "p99 ms", "added p50", "added p99", "requests/s", "CPU s/1,000", "requests/s/core")
	for _, x := range r.Targets {
		row(t, x.Name, x.Requests, x.Failed, number(x.P50, 2), number(x.P99, 2), number(x.AddedP50, 2), number(x.AddedP99, 2),
			number(x.Throughput, 0), number(x.CPU, 3), number(x.PerCore(), 0))
	}
	return t.Flush()
}

// startFrontend starts this program's frontend as a process of its own.
func startFrontend(ctx context.Context, args ...string) (url string, pid int, stop func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return "", 0, nil, err
	}
	cmd := exec.CommandContext(ctx, self, append([]string{"frontend", "--log-format=json"}, args...)...)
	log, err := cmd.StderrPipe()
	if err != nil {
		return "", 0, nil, err
	}
	if err := cmd.Start(); err != nil {
		return "", 0, nil, err
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	lines := bufio.NewScanner(log)
	last := ""
	for lines.Scan() {
		last = lines.Text()
		var entry struct{ Msg, Addr string }
		if json.Unmarshal(lines.Bytes(), &entry) == nil && entry.Msg == "listening" {
			go func() { _, _ = io.Copy(io.Discard, log) }()
			return "http://" + entry.Addr, cmd.Process.Pid, stop, nil
		}
	}
	stop()
	return "", 0, nil, errors.Join(fmt.Errorf("the frontend ended: %s", last), lines.Err())
}
