package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"

	"github.com/warmroute/warmroute/frontend/ui"
	"github.com/warmroute/warmroute/kvcache"
)

// topCmd shows a frontend at work.
type topCmd struct {
	Asked askedFrontend `embed:""`
	Once  bool          `help:"Print one table and end, as without a terminal." env:"-"`
	JSON  bool          `help:"Print one JSON object per second, or with --once one." env:"-"`
}

// Help is the long form of the command's help.
func (topCmd) Help() string {
	return `The index state, requests per second, hit ratio and every worker rank, live: what the page /ui of the frontend shows, in a
terminal. Ctrl-C ends it.

REQUESTS are under way from this frontend, OF ALL from all of them. REQ/S and HITS, the share of the prompts' blocks that were there, are over about a
minute. DEVICE to PREDICTED are the blocks that the rank holds, by tier. SEQ is the number of the engine's last message in the index, LAG how long ago its
stream last changed or was renewed: with Redis at hand at most about ten seconds, also while the engine is idle.

Example:

    warmroute top --frontend http://10.0.0.7:8080

Example: for a script

    warmroute top --once --json

Exit codes: 0 shown, and with --once or without a terminal: the index is exact and every worker healthy; 1 they are not, or nobody
answers; 2 wrong flags.`
}

// watched is one message of the feed.
type watched struct {
	ui.State
	Time      time.Time   `json:"time"`
	Interval  float64     `json:"interval_seconds"`
	Samples   []ui.Sample `json:"samples"`
	Decisions []struct {
		Seq    uint64    `json:"seq"`
		Time   time.Time `json:"time"`
		Worker string    `json:"worker_id"`
		Rank   int       `json:"dp_rank"`
		State  string    `json:"index_state"`
	} `json:"decisions"`
}

// Run watches.
func (c topCmd) Run(ctx context.Context, std *stdio) error {
	frontend := c.Asked.server()
	live := !c.Once && !c.JSON && isTerminal(std.Out)
	if c.Once || !live && !c.JSON {
		return c.once(ctx, frontend, std.Out)
	}
	screen := screen{out: std.Out, live: live}
	screen.begin()
	defer screen.end()
	pause, seen := time.Second, false
	for {
		err := follow(ctx, frontend, func(raw []byte, m *watched) error {
			seen, pause = true, time.Second
			if c.JSON {
				_, err := fmt.Fprintf(std.Out, "%s\n", raw)
				return err
			}
			return screen.show(m, "")
		})
		switch {
		case ctx.Err() != nil:
			return nil // that is how it ends
		case !seen || errors.Is(err, errPrinting):
			return err
		case live:
			if err := screen.show(nil, err.Error()); err != nil {
				return err
			}
		default:
			_, _ = fmt.Fprintf(std.Err, "warmroute: %v\n", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = min(2*pause, 10*time.Second)
	}
}

// once prints one picture.
func (c topCmd) once(ctx context.Context, frontend server, out io.Writer) error {
	var raw json.RawMessage
	if err := frontend.ask(ctx, "/ui/state", nil, &raw); err != nil {
		return err
	}
	var m watched
	if err := json.Unmarshal(raw, &m); err != nil || m.Interval <= 0 {
		return frontend.notOurs("/ui/state", err)
	}
	var err error
	if c.JSON {
		_, err = fmt.Fprintf(out, "%s\n", raw)
	} else {
		_, err = io.WriteString(out, (&picture{}).of(&m, tintFor(out)))
	}
	bad := 0
	for _, w := range m.Workers {
		if w.State != "healthy" {
			bad++
		}
	}
	switch {
	case err != nil:
		return err
	case m.Index.State != "exact" && m.Index.State != "bypassed":
		return saysNothing(kvcache.IndexState(m.Index.State), m.Index.Reason, frontend)
	case bad > 0:
		return fmt.Errorf("%s not healthy", count(bad, "worker"))
	}
	return nil
}

// silence is how long a feed may say nothing.
const silence = 15 * time.Second

// follow calls f with each message of the frontend's feed until that breaks off.
func follow(ctx context.Context, frontend server, f func(raw []byte, m *watched) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watchdog := time.AfterFunc(silence, func() { cancel(fmt.Errorf("%s says nothing any more", frontend.url)) })
	defer watchdog.Stop()
	resp, err := frontend.stream(ctx, "/ui/events")
	if err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	defer func() { _ = resp.Close() }()
	lines := bufio.NewScanner(resp)
	lines.Buffer(nil, answerLimit)
	for lines.Scan() {
		raw, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		watchdog.Reset(silence)
		var m watched
		if err := json.Unmarshal(raw, &m); err != nil || m.Interval <= 0 {
			return frontend.notOurs("/ui/events", err)
		}
		if err := f(raw, &m); err != nil {
			return fmt.Errorf("%w: %w", errPrinting, err)
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return fmt.Errorf("%s ended the feed", frontend.url)
}

// stream begins a GET whose answer has no end.
func (s server) stream(ctx context.Context, path string) (io.ReadCloser, error) {
	base, err := s.base()
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path, nil)
	if err != nil {
		return nil, err
	}
	if s.token != "" {
		req.Header.Set("Authorization", "Bearer "+s.token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, s.away(err)
	}
	if resp.StatusCode != http.StatusOK {
		defer func() { _ = resp.Body.Close() }()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, answerLimit)) // what came tells enough
		return nil, refused(s, path, resp.StatusCode, text)
	}
	return resp.Body, nil
}

// picture remembers what one message does not repeat.
type picture struct{ samples []ui.Sample }

// recent is how many samples the rates are of.
const recent = 10

// of draws a message as text.
func (p *picture) of(m *watched, tint tinted) string {
	p.samples = append(p.samples, m.Samples...)
	p.samples = p.samples[max(0, len(p.samples)-recent):]
	requests, hit, blocks, p99 := 0, 0, 0, 0.0
	var states [4]int
	for _, s := range p.samples {
		hit, blocks, p99 = hit+s.Hit, blocks+s.Blocks, max(p99, s.P99)
		for i, n := range s.States {
			requests += n
			states[i] += n
		}
	}
	seconds := max(float64(len(p.samples))*m.Interval, m.Interval)
	var b strings.Builder
	state := m.Index.State
	if state == "exact" {
		state = tint.good(state)
	} else if state != "bypassed" {
		state = tint.bad(state)
	}
	fmt.Fprintf(&b, "%s  index %s", m.Frontend, state)
	if m.Index.Since != nil {
		fmt.Fprintf(&b, " for %v", m.Time.Sub(*m.Index.Since).Round(time.Second))
	}
	if m.Index.Reason != "" {
		fmt.Fprintf(&b, " (%s)", m.Index.Reason)
	}
	if m.Draining {
		b.WriteString(", draining")
	}
	fmt.Fprintf(&b, "\n%.1f requests/s  %d in flight  hit ratio %s  index p99 %s\n", float64(requests)/seconds, m.InFlight,
		share(float64(hit), float64(blocks)), time.Duration(p99*1e3).Round(10*time.Microsecond))
	fmt.Fprintf(&b, "by index state, per second: exact %.1f, partial %.1f, degraded %.1f, bypassed %.1f\n\n", float64(states[0])/seconds,
		float64(states[1])/seconds, float64(states[2])/seconds, float64(states[3])/seconds)
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "WORKER\tSTATE\tREQUESTS\tOF ALL\tREQ/S\tHITS\tDEVICE\tHOST\tDISK\tPREDICTED\tSEQ\tLAG\tGAPS\tRESETS\tPROBLEM")
	for _, w := range m.Workers {
		for _, r := range w.Ranks {
			hits, shared, seq, lag := "-", "-", "-", "-"
			if r.Hits != nil {
				hits = share(*r.Hits, 1)
			}
			if r.Shared != nil {
				shared = fmt.Sprint(r.Shared.Requests)
			}
			var sum ui.Blocks
			breaks, restarts := 0, 0
			for _, s := range r.Streams {
				sum.Device, sum.Host, sum.Disk, sum.Predicted = sum.Device+s.Blocks.Device, sum.Host+s.Blocks.Host, sum.Disk+s.Blocks.Disk, sum.Predicted+s.Blocks.Predicted
				breaks, restarts = breaks+s.Breaks, restarts+s.Restarts
				seq, lag = fmt.Sprint(s.Watermark), max(0, m.Time.Sub(s.Updated)).Round(100*time.Millisecond).String()
			}
			held := fmt.Sprintf("%d\t%d\t%d\t%d\t%s\t%s\t%d\t%d", sum.Device, sum.Host, sum.Disk, sum.Predicted, seq, lag, breaks, restarts)
			if m.Index.Read == nil && len(r.Streams) == 0 {
				held = "-\t-\t-\t-\t-\t-\t-\t-" // nobody knows, which is not none
			}
			_, _ = fmt.Fprintf(t, "%s/%d\t%s\t%d\t%s\t%.1f\t%s\t%s\t%s\n", w.ID, r.Rank, w.State, r.Load.Requests, shared,
				r.PerSecond, hits, held, tint.bad(w.Cause))
		}
	}
	_ = t.Flush() // a Builder takes everything
	switch {
	case m.Index.ReadError == "":
	case m.Index.Read == nil:
		b.WriteString("\nBlocks and streams were not read yet, and cannot be now: " + m.Index.ReadError + "\n")
	default:
		fmt.Fprintf(&b, "\nBlocks and streams are as read %v ago: %s\n", max(0, m.Time.Sub(*m.Index.Read)).Round(time.Second), m.Index.ReadError)
	}
	return b.String()
}

func share(part, whole float64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100*part/whole)
}

// screen draws over what it drew before.
type screen struct {
	out  io.Writer
	live bool
	picture
	last string // without the problem
}

func (s *screen) begin() {
	if s.live {
		_, _ = io.WriteString(s.out, "\x1b[?1049h\x1b[?25l") // the other screen, no cursor
	}
}

func (s *screen) end() {
	if s.live {
		_, _ = io.WriteString(s.out, "\x1b[?25h\x1b[?1049l")
	}
}

// show draws a message, or a problem above the last one.
func (s *screen) show(m *watched, problem string) error {
	tint := tintFor(s.out)
	if m != nil {
		s.last = s.of(m, tint)
	}
	text := s.last
	if problem != "" {
		text = tint.bad("No news, trying again: "+problem) + "\n" + text
	}
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if f, ok := s.out.(*os.File); ok {
		if _, height, err := term.GetSize(int(f.Fd())); err == nil && height > 1 && len(lines) > height {
			hidden := len(lines) - height + 1
			lines = append(lines[:height-1:height-1], tint.dim(fmt.Sprintf("and %d more lines", hidden)))
		}
	}
	// No line wraps, every line clears its rest, and then the rest of the screen.
	_, err := io.WriteString(s.out, "\x1b[H\x1b[?7l"+strings.Join(lines, "\x1b[K\r\n")+"\x1b[K\x1b[J\x1b[?7h")
	return err
}
