package outage

import (
	"bytes"
	"context"
	"log/slog"
	"regexp"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
)

// proberWatch looks again and again at how many probers there are.
type proberWatch struct {
	stage   *stage.Stage
	ended   chan struct{}
	stopped sync.WaitGroup
	once    sync.Once

	most, tooMany int
}

func watchProbers(s *stage.Stage) *proberWatch {
	w := &proberWatch{stage: s, ended: make(chan struct{})}
	w.stopped.Go(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				w.look()
			case <-w.ended:
				return
			}
		}
	})
	return w
}

// stop ends the watch. It returns the most probers that one frontend had at a time, and the most that were too many.
func (w *proberWatch) stop() (most, tooMany int) {
	w.once.Do(func() { close(w.ended) })
	w.stopped.Wait()
	return w.most, w.tooMany
}

func (w *proberWatch) look() {
	most, tooMany := w.compare()
	w.most = max(w.most, most)
	// One that has done its work may not have got round to ending, and links change while this looks: only what stays
	// is too many.
	for range 10 {
		if tooMany <= w.tooMany {
			return
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-w.ended:
			return
		}
		_, again := w.compare()
		tooMany = min(tooMany, again)
	}
	w.tooMany = max(w.tooMany, tooMany)
}

// compare counts the probers of the frontend that has the most, and those beyond one for each link that is down.
func (w *proberWatch) compare() (most, tooMany int) {
	before := w.down()
	probers := countProbers()
	for i, after := range w.down() {
		n := probers["frontend-"+strconv.Itoa(i)]
		most, tooMany = max(most, n), max(tooMany, n-max(before[i], after))
	}
	return most, tooMany
}

// down is how many links of each frontend are down.
func (w *proberWatch) down() []int {
	out := make([]int, len(w.stage.Indexes))
	for i, x := range w.stage.Indexes {
		for _, l := range x.Index.Links() {
			if !l.Up {
				out[i]++
			}
		}
	}
	return out
}

var (
	profileCount = regexp.MustCompile(`^(\d+) @`)
	profilePart  = regexp.MustCompile(`(?m)^# labels: .*"part":"([^"]*)"`)
)

// countProbers counts the goroutines that probe, by the part that they belong to.
func countProbers() map[string]int {
	var b bytes.Buffer
	_ = pprof.Lookup("goroutine").WriteTo(&b, 1) // a buffer takes everything
	out := map[string]int{}
	for entry := range strings.SplitSeq(b.String(), "\n\n") {
		if !strings.Contains(entry, "store.(*link).restore+") {
			continue
		}
		_, entry, _ = cutPreamble(entry)
		count := profileCount.FindStringSubmatch(entry)
		part := profilePart.FindStringSubmatch(entry)
		if count == nil || part == nil {
			continue
		}
		n, _ := strconv.Atoi(count[1]) // digits
		out[part[1]] += n
	}
	return out
}

// cutPreamble cuts off the profile's first line, which the first entry follows at once.
func cutPreamble(entry string) (preamble, rest string, found bool) {
	if strings.HasPrefix(entry, "goroutine profile:") {
		return strings.Cut(entry, "\n")
	}
	return "", entry, false
}

// lineCounter counts log lines by part.
type lineCounter struct {
	slog.Handler
	part   string
	counts *lineCounts
}

type lineCounts struct {
	on     atomic.Bool
	mu     sync.Mutex
	byPart map[string]int
	links  int
}

func newLineCounter(h slog.Handler) *lineCounter {
	return &lineCounter{Handler: h, counts: &lineCounts{byPart: map[string]int{}}}
}

// begin forgets what was before.
func (l *lineCounter) begin() { l.counts.on.Store(true) }

// of is the lines of parts whose names begin with a word.
func (l *lineCounter) of(word string) (n int) {
	l.counts.mu.Lock()
	defer l.counts.mu.Unlock()
	for part, lines := range l.counts.byPart {
		if strings.HasPrefix(part, word) {
			n += lines
		}
	}
	return n
}

// links is the lines about links.
func (l *lineCounter) links() int {
	l.counts.mu.Lock()
	defer l.counts.mu.Unlock()
	return l.counts.links
}

// Enabled is true for all that is counted.
func (l *lineCounter) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo || l.Handler.Enabled(ctx, level)
}

// Handle counts a line, and passes it on.
func (l *lineCounter) Handle(ctx context.Context, rec slog.Record) error {
	if rec.Level >= slog.LevelInfo && l.counts.on.Load() {
		l.counts.mu.Lock()
		l.counts.byPart[l.part]++
		if strings.HasPrefix(rec.Message, "index link ") {
			l.counts.links++
		}
		l.counts.mu.Unlock()
	}
	if !l.Handler.Enabled(ctx, rec.Level) {
		return nil
	}
	return l.Handler.Handle(ctx, rec)
}

// WithAttrs keeps counting, by part where the attributes name one.
func (l *lineCounter) WithAttrs(attrs []slog.Attr) slog.Handler {
	part := l.part
	for _, a := range attrs {
		if a.Key == "part" {
			part = a.Value.String()
		}
	}
	return &lineCounter{l.Handler.WithAttrs(attrs), part, l.counts}
}

// WithGroup keeps counting.
func (l *lineCounter) WithGroup(name string) slog.Handler {
	return &lineCounter{l.Handler.WithGroup(name), l.part, l.counts}
}
