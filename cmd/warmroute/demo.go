package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/schollz/progressbar/v3"
	"github.com/warmroute/warmroute/cmd/warmroute/internal/demo"
	"golang.org/x/term"
)

// demoCmd shows the point of it all on one machine.
type demoCmd struct {
	Redis string `placeholder:"URL" help:"Redis to use; its other content is left alone (default: one inside this process)." env:"-"`
	JSON  bool   `help:"Print the result as one JSON object." env:"-"`
}

// Help is the long form of the command's help.
func (demoCmd) Help() string {
	return `Runs four simulated engines, an indexer and two frontends, and plays a few hundred multi-turn
chat requests with shared system prompts: under kv routing, under round robin with fresh
engines, and under kv routing while Redis is taken away and given back. Under a minute.

Example: no Redis needed

    warmroute demo

Example: on a real Redis, for a script

    warmroute demo --redis redis://127.0.0.1:6379 --json

Exit codes: 0 no request failed and the index recovered; 1 otherwise; 2 wrong flags.`
}

// Run runs the demo and prints what it measured.
func (c demoCmd) Run(ctx context.Context, std *stdio, logger *slog.Logger, log *logOptions) error {
	if c.Redis == "" {
		url, stop, err := embeddedRedis()
		if err != nil {
			return err
		}
		defer stop()
		c.Redis = url
	} else if err := reach(ctx, c.Redis); err != nil {
		return err
	}
	p := progress{w: std.Err, drawn: isTerminal(std.Err)}
	_, _ = fmt.Fprintln(std.Err, "Four simulated engines, an indexer and two frontends, three runs, under a minute in all.")
	r, err := demo.Run(ctx, demo.Options{Redis: c.Redis, Logger: log.quiet(logger), Progress: p.show})
	p.end()
	if err != nil {
		return indexAway(err)
	}
	if c.JSON {
		err = r.WriteJSON(std.Out)
	} else {
		err = r.WriteTable(std.Out)
	}
	switch {
	case err != nil:
		return err
	case r.Failed() > 0:
		return fmt.Errorf("%d requests failed", r.Failed())
	case !r.Recovered:
		return fmt.Errorf("the index did not recover")
	}
	return nil
}

// progress draws one bar per part on a terminal, and says one line per part elsewhere.
type progress struct {
	w     io.Writer
	drawn bool
	part  string
	bar   *progressbar.ProgressBar
}

func (p *progress) show(part string, done, total int) {
	if part != p.part {
		p.end()
		p.part = part
		if p.drawn {
			p.bar = progressbar.NewOptions(total, progressbar.OptionSetWriter(p.w),
				progressbar.OptionSetDescription(fmt.Sprintf("%-17s", part)), progressbar.OptionSetWidth(30))
		} else {
			_, _ = fmt.Fprintf(p.w, "%s …\n", part)
		}
	}
	if p.bar != nil {
		_ = p.bar.Set(done) // a terminal that cannot be drawn on is no reason to stop
	}
}

// end leaves a finished bar on its line.
func (p *progress) end() {
	if p.bar != nil {
		_ = p.bar.Finish()
		_, _ = fmt.Fprintln(p.w)
		p.bar = nil
	}
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
