package tracing

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Reasons of trace_spans_dropped_total.
const (
	droppedQueue = "queue_full" // more ended than could be sent
	droppedSend  = "send"       // the receiver is away, late, or refused them
)

type metrics struct {
	sent    prometheus.Counter
	dropped *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	return &metrics{
		sent: f.NewCounter(prometheus.CounterOpts{
			Name: "warmroute_trace_spans_sent_total", Help: "Spans that the receiver of traces has taken.",
		}),
		dropped: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_trace_spans_dropped_total",
			Help: "Spans that were dropped, by reason: queue_full (more ended than could be sent), send (the receiver is away, late, or refused them).",
		}, []string{"reason"}),
	}
}
