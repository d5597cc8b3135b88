package outage

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
	"github.com/warmroute/warmroute/kvcache"
)

// Report is what one fault did to requests and to the index.
type Report struct {
	Fault       string  `json:"fault"`
	Requests    int     `json:"requests"`
	Rate        float64 `json:"rate"`         // requests per second, as achieved
	LateMS      float64 `json:"late_ms_p99"`  // how much later than planned requests were sent: more than little means a busy machine
	Failed      int     `json:"failed"`       // not a complete 200 answer
	WrongWorker int     `json:"wrong_worker"` // not answered by the engine that the frontend named
	Degraded    int     `json:"degraded"`
	Partial     int     `json:"partial"`
	Bypassed    int     `json:"bypassed"`    // without tokens
	Waited      Waited  `json:"waited_ms"`   // for overlaps
	Chose       Waited  `json:"chose_ms"`    // for the choice by the loads that all frontends share
	Recovered   bool    `json:"recovered"`   // every frontend routed by the index again
	RecoveryMS  float64 `json:"recovery_ms"` // from Redis answering again to that
	WarmMS      float64 `json:"warm_ms"`     // from Redis answering again to the first request that found blocks
	RefillMS    float64 `json:"refill_ms"`   // from the end of the load to an index that equals the engines' caches
	IndexEqual  bool    `json:"index_equal"`

	Transitions    int     `json:"link_transitions"` // of all frontends' links, down and up
	Probes         int     `json:"probes"`           // of all links
	ProbersMax     int     `json:"probers_max"`      // at one time in one process
	ProbersTooMany int     `json:"probers_too_many"` // the most that there were beyond one for each link that was down
	Dials          PerPart `json:"dials_per_s_max"`  // within one second, of one process
	LogLines       Lines   `json:"log_lines"`        // from the beginning of the fault on
	Goroutines     int     `json:"goroutines_left"`  // more than before the run
	Connections    int     `json:"connections_left"` // to Redis, after everything was closed

	Reasons    map[string]int     `json:"reasons"`         // index_fallbacks_total
	HitRatio   map[string]float64 `json:"block_hit_ratio"` // before, during, after
	TTFTMeanMS map[string]float64 `json:"ttft_mean_ms"`    // before, during, after
	Extra      *Extra             `json:"extra,omitempty"` // of the faults that are clients themselves
}

// Waited is how long requests waited for the index, in ms, from the beginning of the fault until Redis answered again.
type Waited struct {
	InFlight Waits   `json:"in_flight"` // those that waited when it began, or when a link went down
	Down     Waits   `json:"down"`      // those that began while a link was down, and found no other one to be
	Up       Waits   `json:"up"`        // those that began while no link was down, and found none to be
	Max      float64 `json:"max"`
}

// Waits are those of some requests.
type Waits struct {
	Requests int     `json:"requests"`
	P99      float64 `json:"p99"`
	Max      float64 `json:"max"`
}

// PerPart is a number for each kind of process.
type PerPart struct {
	Frontend int `json:"frontend"`
	Indexer  int `json:"indexer"`
}

// Lines are log lines of level info and above.
type Lines struct {
	Frontends int `json:"frontends"` // of all frontends and their stores
	Links     int `json:"links"`     // of these, about links
	Indexer   int `json:"indexer"`
}

// Extra is what the clients met that are a part of the fault.
type Extra struct {
	Requests int `json:"requests"`
	HungUp   int `json:"hung_up"` // had left before an answer came
	Failed   int `json:"failed"`  // not a 200 answer, without having left
	Degraded int `json:"degraded"`
	Exact    int `json:"exact"`
}

// OK says whether no request failed and all is as before. What it costs is not asked.
func (r *Report) OK() bool {
	return r.Failed == 0 && r.WrongWorker == 0 && r.IndexEqual && r.Recovered && (r.Extra == nil || r.Extra.Failed == 0)
}

// Fallbacks is how many requests were routed without overlaps, by the frontends' own account.
func (r *Report) Fallbacks() int {
	n := 0
	for _, m := range r.Reasons {
		n += m
	}
	return n
}

func (r *Report) addWaits(p *play) {
	var all []stage.Wait
	for _, x := range p.Indexes {
		for _, w := range x.Waits() {
			if !w.At.Add(w.Took).Before(p.begin) && !w.At.After(p.back) {
				all = append(all, w)
			}
		}
	}
	r.Waited, r.Chose = waited(all, false, p.begin), waited(all, true, p.begin)
}

func waited(all []stage.Wait, choices bool, begin time.Time) Waited {
	var inFlight, down, up []time.Duration
	for _, w := range all {
		switch {
		case w.Choice != choices:
		case w.At.Before(begin) || w.Noticed:
			inFlight = append(inFlight, w.Took)
		case w.Down > 0:
			down = append(down, w.Took)
		default:
			up = append(up, w.Took)
		}
	}
	v := Waited{InFlight: waits(inFlight), Down: waits(down), Up: waits(up)}
	v.Max = max(v.InFlight.Max, v.Down.Max, v.Up.Max)
	return v
}

func waits(d []time.Duration) Waits {
	slices.Sort(d)
	return Waits{Requests: len(d), P99: stage.Milliseconds(stage.Percentile(d, 99)), Max: stage.Milliseconds(stage.Percentile(d, 100))}
}

func (r *Report) addOutcomes(outcomes []stage.Outcome, p *play) {
	prompt, cached := map[string]int{}, map[string]int{}
	ttft, answered := map[string]time.Duration{}, map[string]int{}
	var late []time.Duration
	for _, o := range outcomes {
		late = append(late, o.Late)
		switch kvcache.IndexState(o.State) {
		case kvcache.Degraded:
			r.Degraded++
		case kvcache.Partial:
			r.Partial++
		case kvcache.Bypassed:
			r.Bypassed++
		}
		if o.Err != nil {
			r.Failed++
			continue
		}
		if o.Engine == "" || o.Worker != o.Engine {
			r.WrongWorker++
		}
		phase := "during"
		switch {
		case o.Sent.Before(p.begin):
			phase = "before"
		case o.Sent.After(p.back):
			phase = "after"
		}
		prompt[phase] += o.PromptTokens
		cached[phase] += o.CachedTokens
		ttft[phase] += o.TTFT
		answered[phase]++
	}
	slices.Sort(late)
	r.LateMS = stage.Milliseconds(stage.Percentile(late, 99))
	r.Requests, r.Rate = len(outcomes), stage.Round(float64(len(outcomes))/p.ended.Sub(p.start).Seconds(), 1)
	r.HitRatio, r.TTFTMeanMS = map[string]float64{}, map[string]float64{}
	for phase, n := range answered {
		r.HitRatio[phase] = stage.Round(float64(cached[phase])/float64(max(prompt[phase], 1)), 4)
		r.TTFTMeanMS[phase] = stage.Milliseconds(ttft[phase] / time.Duration(n))
	}
}

// addMetrics reads those of the frontends and their stores.
func (r *Report) addMetrics(registries []*prometheus.Registry) {
	r.Reasons = map[string]int{}
	for _, reg := range registries {
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

func (r *Report) addExtra(counts *counts) {
	if counts == nil {
		return
	}
	e := counts.read()
	r.Extra = &e
}

// equalsEngines compares what the index holds of every engine with what the engine holds.
func equalsEngines(ctx context.Context, s *stage.Stage) (bool, error) {
	held := map[string]map[kvcache.BlockHash]bool{}
	err := s.Store.Dump(ctx, s.Pool, func(e kvcache.RouterEvent) error {
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
	for i, e := range s.Engines {
		want := map[kvcache.BlockHash]bool{}
		for _, b := range e.Resident(0) {
			want[b.Content] = true
		}
		if got := held[stage.WorkerID(i)]; !maps.Equal(got, want) && len(got)+len(want) > 0 {
			return false, fmt.Errorf("%s holds %d blocks, the index says %d", stage.WorkerID(i), len(want), len(got))
		}
		delete(held, stage.WorkerID(i))
	}
	if len(held) > 0 {
		return false, fmt.Errorf("the index knows workers that are none: %s", strings.Join(slices.Sorted(maps.Keys(held)), ", "))
	}
	return true, nil
}
