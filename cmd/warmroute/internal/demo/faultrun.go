package demo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/sim"
	"github.com/warmroute/warmroute/store/redisproc"
)

// FaultOptions configures one fault run.
type FaultOptions struct {
	Fault    string        // one of [redisproc.Faults]
	Fallback string        // the frontends' policy without the index; default theirs
	Warm     time.Duration // load before the fault. Default 3 s.
	Away     time.Duration // how long the fault lasts. Default 5 s.
	After    time.Duration // load after the recovery. Default 2 s.
	Rate     int           // requests per second through both frontends. Default 200.
	Logger   *slog.Logger  // Required.
	Progress func(part string, done, total int)
}

// FaultReport is what one fault did to requests and to the index.
type FaultReport struct {
	Fault       string             `json:"fault"`
	Requests    int                `json:"requests"`
	Rate        float64            `json:"rate"`         // requests per second, as achieved
	Failed      int                `json:"failed"`       // not a complete 200 answer
	WrongWorker int                `json:"wrong_worker"` // answered by none of the engines
	Degraded    int                `json:"degraded"`
	Partial     int                `json:"partial"`
	AddedMS     AddedMS            `json:"added_ms"`
	RecoveryMS  float64            `json:"recovery_ms"` // from Redis answering again to every frontend routing by the index
	RefillMS    float64            `json:"refill_ms"`   // from the end of the load to an index that equals the engines' caches
	IndexEqual  bool               `json:"index_equal"`
	Transitions int                `json:"transitions"`              // of all frontends' links, down and up
	LogLines    float64            `json:"log_lines_per_transition"` //
	DialsPerS   int                `json:"dials_per_s_max"`          // of the whole process, during the fault
	Probes      int                `json:"probes"`                   // of all links
	Goroutines  int                `json:"goroutines_left"`          // more than before the run
	Connections int                `json:"connections_left"`         // to Redis, after everything was closed
	Reasons     map[string]int     `json:"reasons"`                  // index_fallbacks_total
	HitRatio    map[string]float64 `json:"block_hit_ratio"`          // before, during, after
	TTFTMeanMS  map[string]float64 `json:"ttft_mean_ms"`             // before, during, after
}

// AddedMS is how long requests waited for the index.
type AddedMS struct {
	InFlightP99 float64 `json:"in_flight_p99"` // those that waited when it happened, or came within 100 ms
	DownP99     float64 `json:"down_p99"`      // those that came later, while the fault lasted
	Max         float64 `json:"max"`           // from its beginning to its end
}

// faultBudget is the default lookup budget: what users have.
const faultBudget = 20 * time.Millisecond

// fastEngine carries the rate on two cores: what is measured is the way to the engine.
func fastEngine(model string, logger *slog.Logger) sim.Options {
	return sim.Options{
		Model: model, BlockSize: blockSize, Blocks: 1400, MaxModelLen: 8192, Logger: logger,
		PrefillPerToken: 5 * time.Microsecond, DecodePerToken: 500 * time.Microsecond,
	}
}

// RunFault runs a fault on servers of its own under load. An error means that the run itself could not be made; what
// the requests met is in the report.
func RunFault(ctx context.Context, o FaultOptions) (r FaultReport, err error) {
	for d, v := range map[*time.Duration]time.Duration{&o.Warm: 3 * time.Second, &o.Away: 5 * time.Second, &o.After: 2 * time.Second} {
		if *d <= 0 {
			*d = v
		}
	}
	if o.Rate <= 0 {
		o.Rate = 200
	}
	if o.Progress == nil {
		o.Progress = func(string, int, int) {}
	}
	r.Fault = o.Fault
	goroutines := runtime.NumGoroutine()
	f, err := redisproc.StartFault(ctx, o.Fault)
	if err != nil {
		return r, err
	}
	defer f.Stop()
	way := &cable{}
	lines := &lineCounter{Handler: o.Logger.Handler()}
	so := Options{
		Redis: f.URL, Logger: slog.New(lines), Progress: o.Progress,
		lookupBudget: faultBudget, engine: fastEngine, redisAway: f.Boot, fallback: o.Fallback,
	}
	if strings.HasPrefix(f.URL, "redis+cluster") {
		so.shards = numEngines // one engine each, so that one node's loss is a partial one
	}
	s, err := newStage(ctx, so, "fault", frontend.PolicyKV, way)
	if err != nil {
		return r, err
	}
	closed := false
	defer func() {
		if !closed {
			err = errors.Join(err, s.close(ctx))
		}
	}()
	if err := s.underFault(ctx, o, f, way, &r); err != nil {
		return r, err
	}
	s.count(&r)
	if r.Transitions > 0 {
		r.LogLines = float64(lines.n.Load()) / float64(r.Transitions)
	}
	closed = true
	if err := s.close(ctx); err != nil {
		return r, err
	}
	r.Connections = way.open()
	_ = poll(ctx, "goroutines to end", func() (bool, error) {
		r.Goroutines = max(0, runtime.NumGoroutine()-goroutines)
		return r.Goroutines <= 4, nil // the runtime's and the HTTP client's own come and go
	})
	return r, nil
}

// underFault plays the load through warm-up, fault and recovery.
func (s *stage) underFault(ctx context.Context, o FaultOptions, f *redisproc.Fault, way *cable, r *FaultReport) error {
	c := newClient(s)
	c.maxTokens = 8
	defer c.http.CloseIdleConnections()
	watch := newWatch(numFrontends)
	ticker := time.NewTicker(time.Second / time.Duration(o.Rate))
	defer ticker.Stop()
	l := load{client: c, parallel: 64, observe: watch.observe, pace: ticker.C}
	stop := make(chan struct{})
	var outcomes []outcome
	var playing sync.WaitGroup
	start := time.Now()
	playing.Go(func() { outcomes = l.play(ctx, endless(stop)) })
	stopLoad := sync.OnceFunc(func() { close(stop); playing.Wait() })
	defer stopLoad()

	total := int((o.Warm + o.Away + o.After).Milliseconds())
	sleep := func(d time.Duration) error {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
			o.Progress(o.Fault, min(total, int(time.Since(start).Milliseconds())), total)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := sleep(o.Warm); err != nil {
		return err
	}
	begin := time.Now()
	if err := f.Begin(ctx); err != nil {
		return fmt.Errorf("begin the fault: %w", err)
	}
	if err := sleep(o.Away); err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := f.End(bounded); err != nil {
		return fmt.Errorf("end the fault: %w", err)
	}
	back := time.Now()
	watch.since(back)
	select {
	case <-watch.recovered:
		r.RecoveryMS = milliseconds(max(0, watch.lastRecovery().Sub(back)))
	case <-time.After(recoveryTime):
		r.RecoveryMS = milliseconds(recoveryTime)
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := sleep(o.After); err != nil {
		return err
	}
	stopLoad()
	ended := time.Now()
	o.Progress(o.Fault, total, total)
	logFailures(o.Logger, o.Fault, outcomes)

	bounded, cancel = context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	err := poll(bounded, "the index to equal the engines' caches", func() (bool, error) { return s.equalsEngines(bounded) })
	r.IndexEqual = err == nil
	if err != nil {
		o.Logger.Error("the index differs from the engines", "error", err)
	}
	r.RefillMS = milliseconds(time.Since(ended))

	r.Requests, r.Rate = len(outcomes), float64(len(outcomes))/ended.Sub(start).Seconds()
	r.DialsPerS = way.busiestSecond(begin)
	r.addWaits(s, begin, back)
	r.addOutcomes(outcomes, begin, back)
	return nil
}

func (r *FaultReport) addWaits(s *stage, begin, back time.Time) {
	var inFlight, down []time.Duration
	for _, x := range s.indexes {
		x.mu.Lock()
		for _, w := range x.waits {
			switch {
			case w.at.Add(w.took).Before(begin) || w.at.After(back):
			case w.at.Before(begin.Add(100 * time.Millisecond)):
				inFlight = append(inFlight, w.took)
			default:
				down = append(down, w.took)
			}
		}
		x.mu.Unlock()
	}
	p99 := func(d []time.Duration) float64 {
		if len(d) == 0 {
			return 0
		}
		slices.Sort(d)
		return milliseconds(d[len(d)*99/100])
	}
	r.AddedMS = AddedMS{InFlightP99: p99(inFlight), DownP99: p99(down)}
	if all := slices.Concat(inFlight, down); len(all) > 0 {
		r.AddedMS.Max = milliseconds(slices.Max(all))
	}
}

func (r *FaultReport) addOutcomes(outcomes []outcome, begin, back time.Time) {
	prompt, cached := map[string]int{}, map[string]int{}
	ttft, answered := map[string]time.Duration{}, map[string]int{}
	for _, o := range outcomes {
		switch o.state {
		case "degraded":
			r.Degraded++
		case "partial":
			r.Partial++
		}
		if o.err != nil {
			r.Failed++
			continue
		}
		if !strings.HasPrefix(o.worker, "engine-") {
			r.WrongWorker++
		}
		phase := "during"
		switch {
		case o.sent.Before(begin):
			phase = "before"
		case o.sent.After(back):
			phase = "after"
		}
		prompt[phase] += o.promptTokens
		cached[phase] += o.cachedTokens
		ttft[phase] += o.ttft
		answered[phase]++
	}
	r.HitRatio, r.TTFTMeanMS = map[string]float64{}, map[string]float64{}
	for phase, n := range answered {
		r.HitRatio[phase] = float64(cached[phase]) / float64(max(prompt[phase], 1))
		r.TTFTMeanMS[phase] = milliseconds(ttft[phase] / time.Duration(n))
	}
}

// equalsEngines compares what the index holds of every engine with what the engine holds.
func (s *stage) equalsEngines(ctx context.Context) (bool, error) {
	held := map[string]map[kvcache.BlockHash]bool{}
	err := s.store.Dump(ctx, s.pool, func(e kvcache.RouterEvent) error {
		w := string(e.WorkerID)
		if held[w] == nil {
			held[w] = map[kvcache.BlockHash]bool{}
		}
		held[w][e.Event.Data.Stored.Blocks[0].BlockHash] = true
		return nil
	})
	if err != nil {
		return false, err
	}
	for i, e := range s.engines {
		want := map[kvcache.BlockHash]bool{}
		for _, b := range e.Resident(0) {
			want[b.Content] = true
		}
		if got := held[fmt.Sprintf("engine-%d", i)]; !maps.Equal(got, want) && len(got)+len(want) > 0 {
			return false, fmt.Errorf("engine-%d holds %d blocks, the index says %d", i, len(want), len(got))
		}
	}
	return true, nil
}

// count reads the metrics of frontends and their stores.
func (s *stage) count(r *FaultReport) {
	r.Reasons = map[string]int{}
	for _, reg := range s.metrics {
		families, err := reg.Gather()
		if err != nil {
			continue // a metric that cannot be read is missing in the report
		}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				n := int(m.GetCounter().GetValue())
				switch f.GetName() {
				case "warmroute_index_link_transitions_total":
					r.Transitions += n
				case "warmroute_index_probes_total":
					r.Probes += n
				case "warmroute_index_fallbacks_total":
					if n > 0 {
						r.Reasons[label(m, "reason")] += n
					}
				}
			}
		}
	}
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// lineCounter counts what a link says of its transitions.
type lineCounter struct {
	slog.Handler
	n atomic.Int64
}

func (l *lineCounter) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo || l.Handler.Enabled(ctx, level)
}

func (l *lineCounter) Handle(ctx context.Context, rec slog.Record) error {
	if strings.HasPrefix(rec.Message, "index link ") {
		l.n.Add(1)
	}
	if !l.Handler.Enabled(ctx, rec.Level) {
		return nil
	}
	return l.Handler.Handle(ctx, rec)
}
