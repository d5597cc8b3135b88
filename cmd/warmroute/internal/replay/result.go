package replay

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// Result is what a run was worth.
type Result struct {
	Policy    string `json:"policy"`
	Frontends int    `json:"frontends"`
	OwnViews  bool   `json:"own_views"`
	Requests  int    `json:"requests"`
	// HitRatio is the part of all blocks of the prompts, partial ones included, that were cached where they were sent.
	HitRatio float64 `json:"hit_ratio"`
	// Busiest is the work of the worker with the most, in means.
	Busiest float64 `json:"busiest_over_mean"`
	// TTFT are the times to the first token, in seconds.
	TTFT Times `json:"ttft_seconds"`
	// Degraded is how many choices in real time were made without the index.
	Degraded int `json:"degraded,omitempty"`
	// Windows are the run in pieces of time.
	Windows []Window `json:"windows"`

	Outcomes []Outcome `json:"-"` // by arrival
}

// Name tells the run from others of the same trace.
func (r *Result) Name() string {
	switch {
	case r.Frontends == 1:
		return r.Policy
	case r.OwnViews:
		return fmt.Sprintf("%s, %d frontends with their own views", r.Policy, r.Frontends)
	}
	return fmt.Sprintf("%s, %d frontends", r.Policy, r.Frontends)
}

// Times are a distribution in seconds.
type Times struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
}

// Window is what happened to the requests that came in a piece of time.
type Window struct {
	Start    float64 `json:"start_seconds"`
	HitRatio float64 `json:"hit_ratio"`
	Busiest  float64 `json:"busiest_over_mean"`
}

// windows is into how many pieces a run is cut.
const windows = 30

func summarize(o Options, outcomes []Outcome) *Result {
	r := &Result{Policy: o.Policy, Frontends: o.Frontends, OwnViews: o.OwnViews, Requests: len(outcomes), Outcomes: outcomes}
	slices.SortStableFunc(outcomes, func(a, b Outcome) int { return int(a.Arrived - b.Arrived) })
	ttft := make([]float64, len(outcomes))
	for i, x := range outcomes {
		ttft[i] = x.TTFT.Seconds()
	}
	r.HitRatio, r.Busiest = share(outcomes, o.Workers)
	r.TTFT = timesOf(ttft)
	end := outcomes[len(outcomes)-1].Arrived + 1
	for i := range windows {
		from, to := end*time.Duration(i)/windows, end*time.Duration(i+1)/windows
		a, _ := slices.BinarySearchFunc(outcomes, from, byArrival)
		b, _ := slices.BinarySearchFunc(outcomes, to, byArrival)
		if a < b {
			w := Window{Start: from.Seconds()}
			w.HitRatio, w.Busiest = share(outcomes[a:b], o.Workers)
			r.Windows = append(r.Windows, w)
		}
	}
	return r
}

func byArrival(x Outcome, t time.Duration) int { return int(x.Arrived - t) }

// share is the hit ratio of some requests, and what the busiest worker had of their work in means.
func share(outcomes []Outcome, workers int) (hits, busiest float64) {
	work := make([]float64, workers)
	blocks, cached, all := 0, 0, 0.0
	for _, x := range outcomes {
		blocks += x.Blocks
		cached += x.Hits
		work[x.Worker] += x.Work
		all += x.Work
	}
	return float64(cached) / float64(blocks), slices.Max(work) * float64(workers) / math.Max(all, math.SmallestNonzeroFloat64)
}

func timesOf(v []float64) Times {
	slices.Sort(v)
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	at := func(q float64) float64 { return v[min(int(q*float64(len(v))), len(v)-1)] }
	return Times{Mean: sum / float64(len(v)), P50: at(0.5), P90: at(0.9), P99: at(0.99)}
}
