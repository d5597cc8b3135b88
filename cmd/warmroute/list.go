package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/warmroute/warmroute/kvcache"
)

// workersCmd shows what frontend and indexer know of the workers, side by side.
type workersCmd struct {
	Asked   askedFrontend `embed:""`
	Indexer string        `default:"http://127.0.0.1:9201" placeholder:"URL" help:"Indexer to ask (default ${default})." env:"-"`
	JSON    bool          `help:"Print one JSON object per worker rank." env:"-"`
}

// Help is the long form of the command's help.
func (workersCmd) Help() string {
	return `One line per worker rank: can a frontend send requests to it, what is under way there, and does an indexer
follow its KV events into the index? A worker that only one of them knows stands out: the id must be the same.

REQUESTS are under way from this frontend. SEQ is the number of the last message of the engine that is in the index, -1 before the first, LAG the time
that one took, GAPS and RESETS are those that the indexer has seen. While Redis is away the table is as each process knows it, and the last line says so.

Example:

    warmroute workers --frontend http://10.0.0.7:8080 --indexer http://10.0.0.8:9201

Example: which ranks are not followed?

    warmroute workers --json

Exit codes: 0 every worker is healthy and followed; 1 one is not, Redis is away, or nobody answers; 2 wrong flags.`
}

// workerLine is the form of --json.
type workerLine struct {
	Worker     string   `json:"worker_id"`
	Rank       int      `json:"dp_rank"`
	URL        string   `json:"url,omitempty"`
	Models     []string `json:"models"`
	Known      bool     `json:"known_to_frontend"`
	Healthy    bool     `json:"healthy"`
	State      string   `json:"state,omitempty"` // the frontend's word
	Requests   int      `json:"requests"`        // this frontend's
	Followed   bool     `json:"followed"`        // connected and registered
	Generation int64    `json:"generation"`
	Watermark  int64    `json:"watermark"`
	Lag        float64  `json:"lag_seconds"`
	Gaps       int      `json:"gaps"`
	Resets     int      `json:"resets"`
	Problem    string   `json:"problem,omitempty"`
}

// Run asks both and joins what they say.
func (c workersCmd) Run(ctx context.Context, std *stdio) error {
	var nodes struct {
		Index struct {
			State kvcache.IndexState `json:"state"`
		} `json:"index"`
		Workers []struct {
			ID       string   `json:"id"`
			URL      string   `json:"url"`
			Healthy  bool     `json:"healthy"`
			State    string   `json:"state"`
			Cause    string   `json:"cause"`
			Models   []string `json:"models"`
			InFlight []struct {
				Rank     int `json:"dp_rank"`
				Requests int `json:"requests"`
			} `json:"in_flight"`
		} `json:"workers"`
	}
	var streams struct {
		Workers []struct {
			Worker     string  `json:"worker"`
			Rank       int     `json:"dp_rank"`
			Model      string  `json:"model"`
			URL        string  `json:"url"`
			Connected  bool    `json:"connected"`
			Registered bool    `json:"registered"`
			Generation int64   `json:"generation"`
			Watermark  int64   `json:"watermark"`
			Lag        float64 `json:"lag_seconds"`
			Gaps       int     `json:"gaps"`
			Resets     int     `json:"resets"`
			Error      string  `json:"error"`
		} `json:"workers"`
	}
	frontend, indexer := c.Asked.server(), c.Asked.at("--indexer", c.Indexer)
	for _, s := range []server{frontend, indexer} {
		if _, err := s.base(); err != nil {
			return err
		}
	}
	frontendErr := frontend.ask(ctx, "/workers", nil, &nodes)
	indexerErr := indexer.ask(ctx, "/workers", nil, &streams)
	if frontendErr != nil && indexerErr != nil {
		return fmt.Errorf("neither a frontend nor an indexer answers: %w; %w", frontendErr, indexerErr)
	}
	for who, err := range map[string]error{"frontend": frontendErr, "indexer": indexerErr} {
		if err != nil {
			_, _ = fmt.Fprintf(std.Err, "warmroute: without the %s: %v\n", who, err)
		}
	}
	type key struct {
		worker string
		rank   int
	}
	lines := map[key]*workerLine{}
	line := func(worker string, rank int) *workerLine {
		k := key{worker, rank}
		if lines[k] == nil {
			lines[k] = &workerLine{Worker: worker, Rank: rank, Models: []string{}, Watermark: -1}
		}
		return lines[k]
	}
	for _, n := range nodes.Workers {
		for _, r := range n.InFlight {
			l := line(n.ID, r.Rank)
			l.URL, l.Known, l.Healthy, l.State, l.Models, l.Requests, l.Problem = n.URL, true, n.Healthy, n.State, n.Models, r.Requests, n.Cause
		}
	}
	for _, s := range streams.Workers {
		l := line(s.Worker, s.Rank)
		l.URL = cmp.Or(l.URL, s.URL)
		if len(l.Models) == 0 {
			l.Models = []string{s.Model}
		}
		l.Followed, l.Generation, l.Watermark, l.Lag, l.Gaps, l.Resets = s.Connected && s.Registered, s.Generation, s.Watermark, s.Lag, s.Gaps, s.Resets
		l.Problem = cmp.Or(l.Problem, s.Error)
	}
	all := make([]*workerLine, 0, len(lines))
	bad := 0
	for _, l := range lines {
		switch {
		case frontendErr == nil && !l.Known:
			l.Problem = cmp.Or(l.Problem, "the frontend does not know it")
		case indexerErr == nil && !l.Followed:
			l.Problem = cmp.Or(l.Problem, "no indexer follows its KV events")
		}
		if l.Problem != "" || frontendErr == nil && !l.Healthy {
			bad++
		}
		all = append(all, l)
	}
	slices.SortFunc(all, func(a, b *workerLine) int { return cmp.Or(cmp.Compare(a.Worker, b.Worker), a.Rank-b.Rank) })
	if err := c.print(std.Out, all); err != nil {
		return err
	}
	switch {
	case len(all) == 0:
		return fmt.Errorf("there are no workers: give --worker to frontend and indexer, or POST /register to an indexer")
	case nodes.Index.State == kvcache.Degraded:
		return fmt.Errorf("the index is degraded: Redis is away, and requests go out without overlaps until it is back; GET %s/ready says why", c.Asked.Frontend)
	case bad > 0:
		return fmt.Errorf("%s not as it should be", count(bad, "worker rank"))
	case frontendErr != nil || indexerErr != nil:
		return fmt.Errorf("only one of frontend and indexer answers")
	}
	return nil
}

func (c workersCmd) print(w io.Writer, all []*workerLine) error {
	if c.JSON {
		enc := json.NewEncoder(w)
		for _, l := range all {
			if err := enc.Encode(l); err != nil {
				return err
			}
		}
		return nil
	}
	tint := tintFor(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "WORKER\tSTATE\tREQUESTS\tEVENTS\tSEQ\tLAG\tGAPS\tRESETS\tMODELS\tPROBLEM")
	for _, l := range all {
		state := "unknown"
		if l.Known {
			state = cmp.Or(l.State, map[bool]string{true: "healthy", false: "unhealthy"}[l.Healthy])
		}
		events := map[bool]string{true: "followed", false: "no"}[l.Followed]
		_, _ = fmt.Fprintf(t, "%s/%d\t%s\t%d\t%s\t%d\t%.3fs\t%d\t%d\t%s\t%s\n",
			l.Worker, l.Rank, state, l.Requests, events, l.Watermark, l.Lag, l.Gaps, l.Resets, strings.Join(l.Models, ","), tint.bad(l.Problem))
	}
	return t.Flush()
}
