package ui

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// source is a fleet of one worker whose rank 0 has what the test says.
type source struct {
	load    int
	pools   []Pool
	err     error
	asked   atomic.Int32
	explain atomic.Int32
}

func (s *source) State() State {
	return State{
		Frontend: "here", Index: Index{State: "exact"},
		Workers: []Worker{
			{ID: "w", Tenant: "t", State: "healthy", Models: []string{"m"}, Ranks: []Rank{{Rank: 0, Load: Load{Requests: s.load}}}},
			{ID: "x", Tenant: "t", State: "open", Models: []string{"m"}, Ranks: []Rank{{Rank: 0, Load: Load{Requests: 99}}}},
		},
	}
}

func (s *source) Inspect(context.Context) ([]Pool, error) {
	s.asked.Add(1)
	pools := slices.Clone(s.pools) // a reading is the page's own
	for i := range pools {
		pools[i].Ranks = slices.Clone(pools[i].Ranks)
	}
	return pools, s.err
}

func (s *source) choice(overlap int) *Decision {
	return &Decision{
		Tenant: "t", Model: "m", Worker: "w", State: "exact", Known: true, Overlap: overlap, Blocks: 10, Index: time.Millisecond,
		Explain: func() any { s.explain.Add(1); return "why" },
	}
}

func stream(generation, epoch int64) []Pool {
	return []Pool{{Tenant: "t", Model: "m", Ranks: []PoolRank{{Worker: "w", Followed: true, Stream: Stream{
		Model: "m", Generation: generation, Epoch: epoch, Blocks: Blocks{Device: 5},
	}}}}}
}

// watcher reads a feed.
type watcher struct {
	t     *testing.T
	lines *bufio.Scanner
	stop  context.CancelFunc
	body  interface{ Close() error }
}

func watch(t *testing.T, p *Page) *watcher {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !p.ServeFeed(w, r) {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(server.Close)
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("status %d, %v", resp.StatusCode, resp.Header)
	}
	w := &watcher{t: t, lines: bufio.NewScanner(resp.Body), stop: cancel, body: resp.Body}
	w.lines.Buffer(nil, 1<<20)
	t.Cleanup(func() { cancel(); _ = resp.Body.Close() })
	return w
}

// next is the next message; false at the end of the feed.
func (w *watcher) next() (m message, ok bool) {
	w.t.Helper()
	for w.lines.Scan() {
		if raw, is := strings.CutPrefix(w.lines.Text(), "data: "); is {
			if err := json.Unmarshal([]byte(raw), &m); err != nil {
				w.t.Fatal(err)
			}
			return m, true
		}
	}
	return m, false
}

// until reads until a message fits.
func (w *watcher) until(what string, fits func(m message) bool) message {
	w.t.Helper()
	for {
		m, ok := w.next()
		if !ok {
			w.t.Fatalf("the feed ended before %s: %v", what, w.lines.Err())
		}
		if fits(m) {
			return m
		}
	}
}

func run(t *testing.T, p *Page) context.CancelFunc {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); p.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return cancel
}

func TestAFeedTellsWhatIsNew(t *testing.T) {
	s := &source{load: 4, pools: stream(7, 7)}
	p := New(Options{Source: s, Interval: 5 * time.Millisecond})
	for range keptDecisions + 10 {
		p.Record(s.choice(5))
	}
	stop := run(t, p)
	w := watch(t, p)
	m, _ := w.next()
	if n := len(m.Decisions); n != keptDecisions || m.Decisions[0].Seq != 11 || m.Decisions[n-1].Explanation != "why" {
		t.Fatalf("%d decisions at first, from %+v", n, m.Decisions[0])
	}
	p.Record(s.choice(10))
	m = w.until("the next decision", func(m message) bool { return len(m.Decisions) > 0 })
	if len(m.Decisions) != 1 || m.Decisions[0].Seq != keptDecisions+11 || m.Decisions[0].Overlap != 10 {
		t.Fatalf("then %+v", m.Decisions)
	}
	m = w.until("blocks", func(m message) bool { return m.Index.Read != nil })
	r := m.Workers[0].Ranks[0]
	if len(r.Streams) != 1 || r.Streams[0].Blocks.Device != 5 || r.Hits == nil || *r.Hits < 0.5 || r.PerSecond <= 0 {
		t.Errorf("rank %+v", r)
	}
	stop() // a drain does not wait for those who watch
	for ok := true; ok; {
		_, ok = w.next()
	}
	if first, f := p.watch(); f != nil {
		t.Errorf("a feed begins after the end: %s", first)
	}
}

func TestNothingIsWorkedOutWhileNobodyWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{pools: stream(1, 1)}
		p := New(Options{Source: s})
		run(t, p)
		time.Sleep(time.Second / 2) // between two samples
		for range 400 {
			p.Record(s.choice(1))
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if s.asked.Load() != 0 || s.explain.Load() != 0 {
			t.Errorf("Redis asked %d times, %d explanations", s.asked.Load(), s.explain.Load())
		}
		if len(p.samples) != keptSamples || p.samples[0].Hit != 1 || p.samples[0].Blocks != 10 {
			t.Errorf("%d samples are kept, the first %+v", len(p.samples), p.samples[0])
		}
	})
}

func TestSample(t *testing.T) {
	s := &source{load: 3}
	var r recorder
	for i := range 100 {
		d := s.choice(5)
		if i == 0 {
			d.Index = time.Second
		}
		r.Record(d)
	}
	r.Record(&Decision{Worker: "w", Tenant: "t", State: "degraded", Blocks: 10}) // an overlap that is unknown is not 0
	state := s.State()
	got := r.sample(time.UnixMilli(5), &state)
	if got.States != [4]int{100, 0, 1, 0} || got.Hit != 500 || got.Blocks != 1000 || got.Busiest != 3 || got.Mean != 3 || got.Time != 5 {
		t.Errorf("sample %+v", got)
	}
	if got.P50 < 800 || got.P50 > 1200 || got.P99 < 800 || got.P99 > 1200 {
		t.Errorf("p50 %v, p99 %v, want about 1,000 µs", got.P50, got.P99)
	}
	if again := r.sample(time.UnixMilli(6), &state); again.States != [4]int{} || again.Blocks != 0 || again.P50 != 0 {
		t.Errorf("the next sample counts again: %+v", again)
	}
	if hits, rate := r.rates(rankKey{"t", "w", 0}, time.Second); hits == nil || *hits != 0.5 || rate < 40 || rate > 101 {
		t.Errorf("rates %v, %v", hits, rate)
	}
	r.sample(time.UnixMilli(7), &State{})
	if hits, rate := r.rates(rankKey{"t", "w", 0}, time.Second); hits != nil || rate != 0 {
		t.Error("a rank that is gone is kept")
	}
}

func TestTimeBuckets(t *testing.T) {
	for _, d := range []time.Duration{0, 1, 4, 5, 999, time.Microsecond, 123 * time.Microsecond, 20 * time.Millisecond, 3 * time.Second, time.Hour} {
		i := timeBucket(d)
		if i < 0 || i >= timeBuckets {
			t.Fatalf("%v: bucket %d", d, i)
		}
		if us := float64(d) / 1e3; d >= 4 && d < time.Minute && (bucketTime(i) < us*0.8 || bucketTime(i) > us*1.25) {
			t.Errorf("%v reads as %v µs", d, bucketTime(i))
		}
	}
}

func TestWhatCannotBeReadStays(t *testing.T) {
	s := &source{pools: stream(7, 7)}
	p := New(Options{Source: s})
	p.inspect(t.Context())
	read := p.inspected.Load().at
	s.pools, s.err = nil, errors.New("connection")
	p.inspect(t.Context())
	state := s.State()
	m := p.message(time.Now(), &state)
	if st := m.Workers[0].Ranks[0].Streams; len(st) != 1 || st[0].Blocks.Device != 5 || m.Index.ReadError != "connection" || !m.Index.Read.Equal(read) {
		t.Errorf("streams %+v, index %+v", st, m.Index)
	}
}

func TestEndsOfGenerationsAreCounted(t *testing.T) {
	s := &source{}
	p := New(Options{Source: s})
	for _, st := range []struct {
		generation, epoch int64
		breaks, restarts  int
	}{{7, 7, 0, 0}, {7, 7, 0, 0}, {8, 7, 1, 0}, {9, 9, 1, 1}, {12, 9, 2, 1}} {
		s.pools = stream(st.generation, st.epoch)
		p.inspect(t.Context())
		if got := p.inspected.Load().pools[0].Ranks[0].Stream; got.Breaks != st.breaks || got.Restarts != st.restarts {
			t.Errorf("%+v: %+v", st, got)
		}
	}
	s.pools = nil
	p.inspect(t.Context())
	if len(p.ends) != 0 {
		t.Error("a stream that is gone is kept")
	}
}

func TestAWorkerThatOnlyTheIndexKnows(t *testing.T) {
	s := &source{pools: []Pool{{Tenant: "t", Model: "m", Ranks: []PoolRank{
		{Worker: "stranger", Rank: 1, Followed: true}, {Worker: "stranger", Rank: 0, Followed: true}, {Worker: "load of old", Shared: &Load{Requests: 1}},
	}}}}
	p := New(Options{Source: s})
	p.inspect(t.Context())
	state := s.State()
	m := p.message(time.Now(), &state)
	if len(m.Workers) != 3 || m.Workers[2].ID != "stranger" || m.Workers[2].State != "unknown" || len(m.Workers[2].Ranks) != 2 || m.Workers[2].Ranks[0].Rank != 0 {
		t.Errorf("workers %+v", m.Workers)
	}
}

func TestWatchersAreBounded(t *testing.T) {
	p := New(Options{Source: &source{}, MaxWatchers: 2})
	var feeds []*feed
	for range 2 {
		_, f := p.watch()
		if f == nil {
			t.Fatal("refused too early")
		}
		feeds = append(feeds, f)
	}
	if _, f := p.watch(); f != nil {
		t.Error("a third watcher")
	}
	p.leave(feeds[0])
	p.leave(feeds[0])
	if _, f := p.watch(); f == nil {
		t.Error("no place after one left")
	}
	for range 100 { // one that reads nothing holds up nobody
		p.tick(time.Now())
	}
}

func TestRecordConcurrently(t *testing.T) {
	s := &source{}
	p := New(Options{Source: s})
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 1000 {
				p.Record(s.choice(1))
			}
		})
	}
	seen := uint64(0)
	for seen < 4000 {
		list, last := p.recorder.since(seen)
		for _, d := range list {
			if d.Seq <= seen {
				t.Fatalf("decision %d after %d", d.Seq, seen)
			}
			seen = d.Seq
		}
		seen = max(seen, last)
	}
	all.Wait()
	state := s.State()
	if got := p.recorder.sample(time.Now(), &state); got.States[0] != 4000 || got.Hit != 4000 {
		t.Errorf("%+v", got)
	}
}

func TestFiles(t *testing.T) {
	res := httptest.NewRecorder()
	if !ServeFile(res, "") {
		t.Fatal("there is no page")
	}
	csp := res.Header().Get("Content-Security-Policy")
	if strings.Contains(csp, "unsafe") || !strings.Contains(csp, "default-src 'none'") || res.Header().Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("headers %v", res.Header())
	}
	for _, name := range []string{"nothing.js", "..", "../ui.go", "assets"} {
		if res := httptest.NewRecorder(); ServeFile(res, name) || res.Body.Len() > 0 {
			t.Errorf("%q is served", name)
		}
	}
	names, err := fs.Glob(files, "assets/*")
	if err != nil {
		t.Fatal(err)
	}
	remote, inline := regexp.MustCompile(`(?i)(src|href|url\(|import)[^\n]{0,20}(https?:)?//`), regexp.MustCompile(`(?i)<script>|<style| style=| on[a-z]+=|innerHTML|eval\(`)
	for _, name := range names {
		res := httptest.NewRecorder()
		if !ServeFile(res, strings.TrimPrefix(name, "assets/")) || res.Header().Get("Content-Type") == "" {
			t.Errorf("%s: %v", name, res.Header())
		}
		if found := remote.FindString(res.Body.String()); found != "" {
			t.Errorf("%s asks elsewhere: %s", name, found)
		}
		if found := inline.FindString(res.Body.String()); found != "" && !strings.HasSuffix(name, ".js") {
			t.Errorf("%s: %s", name, found)
		}
		if strings.Contains(res.Body.String(), "innerHTML") {
			t.Errorf("%s makes elements of text", name)
		}
	}
}

// BenchmarkRecord is what a page costs a request.
func BenchmarkRecord(b *testing.B) {
	s := &source{}
	p := New(Options{Source: s})
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			p.Record(s.choice(5))
		}
	})
}

// BenchmarkTick is what it costs a second, with and without watchers, for 64 workers.
func BenchmarkTick(b *testing.B) {
	for _, watched := range []bool{false, true} {
		b.Run(map[bool]string{false: "nobody watches", true: "watched"}[watched], func(b *testing.B) {
			p := New(Options{Source: fleet(64)})
			if watched {
				p.watch()
			}
			b.ReportAllocs()
			for b.Loop() {
				p.tick(time.Now())
			}
		})
	}
}

// fleet is a source with so many workers.
type fleet int

func (n fleet) State() State {
	s := State{Index: Index{State: "exact"}, Workers: make([]Worker, n)}
	for i := range s.Workers {
		s.Workers[i] = Worker{ID: "w" + string(rune('0'+i)), State: "healthy", Ranks: make([]Rank, 1)}
	}
	return s
}

func (fleet) Inspect(context.Context) ([]Pool, error) { return nil, nil }
