package store

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are those of the index itself; what a request or an event stream counts is the
// frontend's and the indexer's.
type metrics struct {
	linkUp          *prometheus.GaugeVec
	linkTransitions *prometheus.CounterVec
	probes          *prometheus.CounterVec
	lookupSeconds   prometheus.Histogram
	lookupBlocks    prometheus.Histogram
	selectSeconds   prometheus.Histogram
	applySeconds    *prometheus.HistogramVec
	applyBlocks     *prometheus.HistogramVec
	sweptBlocks     *prometheus.CounterVec
	predictions     *prometheus.CounterVec
	writeErrors     *prometheus.CounterVec
	lookupBudget    prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	latency := prometheus.ExponentialBuckets(50e-6, 2, 14) // 50 µs to 0.4 s
	sizes := prometheus.ExponentialBuckets(1, 4, 8)        // 1 to 16,384
	return &metrics{
		linkUp: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "warmroute_index_link_up", Help: "1 while the index shard answers, 0 while it is away, as requests find it: without any, and in an indexer, it stays as it is.",
		}, []string{"shard"}),
		linkTransitions: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_index_link_transitions_total", Help: "Changes of the link's state, by the state it changed to (up or down).",
		}, []string{"shard", "to"}),
		probes: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_index_probes_total", Help: "Probes of a shard that was away, by result (ok or failed).",
		}, []string{"shard", "result"}),
		lookupSeconds: f.NewHistogram(prometheus.HistogramOpts{
			Name: "warmroute_lookup_seconds", Help: "Time of one overlap lookup over all shards.", Buckets: latency,
		}),
		lookupBlocks: f.NewHistogram(prometheus.HistogramOpts{
			Name: "warmroute_lookup_blocks", Help: "Blocks of the prompts looked up.", Buckets: sizes,
		}),
		selectSeconds: f.NewHistogram(prometheus.HistogramOpts{
			Name: "warmroute_select_seconds", Help: "Time of one choice by the shared loads, reservation included.", Buckets: latency,
		}),
		applySeconds: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "warmroute_apply_seconds", Help: "Time of one application of a batch of events.", Buckets: latency,
		}, []string{"shard"}),
		applyBlocks: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "warmroute_apply_blocks", Help: "Blocks stored and removed by one application.", Buckets: sizes,
		}, []string{"shard"}),
		writeErrors: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_index_write_errors_total",
			Help: "Writes to the index that failed, by reason; refused means that Redis is full, a replica, or could not save.",
		}, []string{"reason"}),
		predictions: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_predictions_total",
			Help: "Routed prompts given to the predicted tier, by result (recorded, stale = no such stream, dropped = too many at a time, failed).",
		}, []string{"result"}),
		lookupBudget: f.NewGauge(prometheus.GaugeOpts{
			Name: "warmroute_lookup_budget_seconds", Help: "Longest time that a request waits for the index.",
		}),
		sweptBlocks: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_swept_blocks_total", Help: "Blocks of ended generations that the sweep cleared.",
		}, []string{"shard"}),
	}
}
