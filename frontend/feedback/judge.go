package feedback

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Options configures a Judge.
type Options struct {
	// Changed, if set, is called when a worker begins to disagree and when it ends. share is of the prompts: how much more
	// the worker had cached than predicted, in the mean of its last answers; negative means less.
	Changed func(worker string, disagrees bool, share float64)
	// Registerer gets the metrics. Default: they are not registered.
	Registerer prometheus.Registerer
}

// The verdict rests on a worker's last answers.
const (
	window   = 32
	fewest   = 16   // answers before there is a verdict
	far      = 0.25 // of the prompt: how far off an answer must be to count against the worker
	condemn  = 0.5  // of the answers: from here on the worker disagrees
	acquit   = 0.25 // and from here on no longer
	farLeast = 64   // tokens: what is less says nothing, however short the prompt
)

// Judge keeps the last answers of every worker.
type Judge struct {
	o         Options
	errors    *prometheus.HistogramVec
	disagrees *prometheus.GaugeVec

	mu      sync.Mutex
	workers map[string]*record
}

type record struct {
	shares    [window]float64
	off       [window]bool
	n         int // answers so far
	disagrees bool
}

// New makes a Judge.
func New(o Options) *Judge {
	if o.Changed == nil {
		o.Changed = func(string, bool, float64) {}
	}
	f := promauto.With(o.Registerer)
	return &Judge{
		o: o, workers: map[string]*record{},
		errors: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "warmroute_prediction_error_ratio",
			Help:    "Tokens that a worker says it had cached, less those that the index had predicted, as a share of the prompt.",
			Buckets: []float64{-0.75, -0.5, -0.25, -0.1, -0.02, 0.02, 0.1, 0.25, 0.5, 0.75, 1},
		}, []string{"worker"}),
		disagrees: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "warmroute_worker_disagrees",
			Help: "1 for a worker whose answers keep saying that it had much more or less cached than the index had predicted.",
		}, []string{"worker"}),
	}
}

// Observe takes one answer, in tokens.
func (j *Judge) Observe(worker string, prompt, predicted, cached int) {
	if prompt < 1 {
		return
	}
	share := float64(cached-predicted) / float64(prompt)
	j.errors.WithLabelValues(worker).Observe(share)

	j.mu.Lock()
	r := j.workers[worker]
	if r == nil {
		r = &record{}
		j.workers[worker] = r
		j.disagrees.WithLabelValues(worker).Set(0)
	}
	r.shares[r.n%window] = share
	r.off[r.n%window] = max(share, -share) > far && max(cached-predicted, predicted-cached) >= farLeast
	r.n++
	n := min(r.n, window)
	off, sum := 0, 0.0
	for i := range n {
		sum += r.shares[i]
		if r.off[i] {
			off++
		}
	}
	before := r.disagrees
	switch part := float64(off) / float64(n); {
	case n >= fewest && part >= condemn:
		r.disagrees = true
	case part < acquit:
		r.disagrees = false
	}
	now := r.disagrees
	if now != before {
		j.disagrees.WithLabelValues(worker).Set(map[bool]float64{true: 1}[now])
	}
	j.mu.Unlock()
	if now != before {
		j.o.Changed(worker, now, sum/float64(n))
	}
}

// Forget drops what is kept of a worker that left.
func (j *Judge) Forget(worker string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.workers, worker)
	j.errors.DeleteLabelValues(worker)
	j.disagrees.DeleteLabelValues(worker)
}
