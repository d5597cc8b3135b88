package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/ui"
)

func TestScreen(t *testing.T) {
	hits := 0.25
	now := time.Now()
	since, read := now.Add(-90*time.Second), now.Add(-80*time.Second)
	m := &watched{Time: now, Interval: 1, State: ui.State{
		Frontend: "here", InFlight: 3, Index: ui.Index{State: "degraded", Reason: "connection", Since: &since, Read: &read, ReadError: "connection"},
		Workers: []ui.Worker{{ID: "w", State: "open", Cause: "it fails", Ranks: []ui.Rank{{
			Load: ui.Load{Requests: 2}, Shared: &ui.Load{Requests: 5}, Hits: &hits, PerSecond: 1.5,
			Streams: []ui.Stream{{Watermark: 41, Updated: now.Add(-2 * time.Second), Blocks: ui.Blocks{Device: 7, Disk: 9}, Breaks: 6, Restarts: 8}},
		}}}},
	}}
	for range 12 { // of which the last ten count
		m.Samples = append(m.Samples, ui.Sample{States: [4]int{1, 0, 3, 0}, Hit: 1, Blocks: 2, P99: 1500})
	}
	var out bytes.Buffer
	s := screen{out: &out, live: true}
	s.begin()
	if err := s.show(m, ""); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"index degraded for 1m30s (connection)", "4.0 requests/s  3 in flight  hit ratio 50%  index p99 1.5ms", "exact 1.0, partial 0.0, degraded 3.0",
		"as read 1m20s ago: connection",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in %q", want, out.String())
		}
	}
	row := ""
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, "w/0") {
			row = strings.Join(strings.Fields(line), " ")
		}
	}
	if !strings.HasPrefix(row, "w/0 open 2 5 1.5 25% 7 0 9 0 41 2s 6 8 it fails") {
		t.Errorf("the worker: %q", row)
	}
	out.Reset()
	unread := &watched{Time: now, Interval: 1, State: ui.State{
		Index:   ui.Index{State: "degraded", ReadError: "connection"},
		Workers: []ui.Worker{{ID: "w", State: "healthy", Ranks: []ui.Rank{{}}}},
	}}
	if err := (&screen{out: &out}).show(unread, ""); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(strings.Fields(out.String()), " "); !strings.Contains(got, "w/0 healthy 0 - 0.0 - - - - - - - - -") || !strings.Contains(got, "not read yet") {
		t.Errorf("with nothing read yet: %q", got)
	}
	out.Reset()
	if err := s.show(m, ""); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if err := s.show(nil, "it is away"); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); !strings.HasPrefix(got, "\x1b[H") || !strings.Contains(got, "No news, trying again: it is away") || !strings.Contains(got, "w/0") {
		t.Errorf("while the frontend is away: %q", got)
	}
	out.Reset()
	s.end()
	if out.String() != "\x1b[?25h\x1b[?1049l" {
		t.Errorf("the terminal is left as %q", out.String())
	}
	if err := (&screen{out: broken{}}).show(m, ""); err == nil {
		t.Error("an output that takes nothing is no error")
	}
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errors.New("closed") }
