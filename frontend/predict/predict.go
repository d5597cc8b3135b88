// Package predict records in the index where prompts were routed, ahead of the engines' own events or in place of them.
// It is off the way of requests: what does not fit into its bounded queue is dropped and counted, and so is what Redis
// does not take.
package predict

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Index takes predictions. *store.Store is one.
type Index interface {
	Predict(ctx context.Context, pool kvcache.PoolID, w kvcache.WorkerRank, blocks []kvcache.BlockHash, o store.PredictOptions) (store.Outcome, error)
}

// Options configures a Recorder.
type Options struct {
	// Index takes the predictions.
	Index Index
	// MaxBlocks bounds the blocks in the queue. Default 1 million, which is 8 MB.
	MaxBlocks int64
	// Timeout bounds the recording of one prompt. Default 1 s.
	Timeout time.Duration
	// Registerer gets the metrics. Default: they are not registered.
	Registerer prometheus.Registerer
}

// Route is where a prompt was routed.
type Route struct {
	Pool   kvcache.PoolID
	At     kvcache.WorkerRank
	Blocks []kvcache.BlockHash // of the prompt, from the first
	store.PredictOptions
}

// Recorder records predictions, one after the other.
type Recorder struct {
	o       Options
	queue   chan Route
	blocks  atomic.Int64 // in the queue
	dropped prometheus.Counter
}

// New makes a Recorder.
func New(o Options) *Recorder {
	if o.MaxBlocks <= 0 {
		o.MaxBlocks = 1 << 20
	}
	if o.Timeout <= 0 {
		o.Timeout = time.Second
	}
	return &Recorder{
		o: o, queue: make(chan Route, 4096),
		dropped: promauto.With(o.Registerer).NewCounter(prometheus.CounterOpts{
			Name: "warmroute_predictions_dropped_total", Help: "Prompts whose route was not recorded in the index: the queue was full, or Redis did not take it.",
		}),
	}
}

// Record puts a route in the queue, and never waits.
func (r *Recorder) Record(route Route) {
	n := int64(len(route.Blocks))
	if n == 0 {
		return
	}
	if r.blocks.Add(n) <= r.o.MaxBlocks {
		select {
		case r.queue <- route:
			return
		default:
		}
	}
	r.blocks.Add(-n)
	r.dropped.Inc()
}

// Pending is how many blocks are in the queue.
func (r *Recorder) Pending() int64 { return r.blocks.Load() }

// Run records until ctx ends. What is in the queue then is dropped: it would soon expire.
func (r *Recorder) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case route := <-r.queue:
			bounded, cancel := context.WithTimeout(ctx, r.o.Timeout)
			_, err := r.o.Index.Predict(bounded, route.Pool, route.At, route.Blocks, route.PredictOptions)
			cancel()
			r.blocks.Add(-int64(len(route.Blocks)))
			if err != nil {
				r.dropped.Inc()
			}
		}
	}
}
