package frontend

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are those of requests; what the index does is counted by the store. Label values
// come from closed lists: route templates, status codes, the names of served models, the ids
// of workers in the fleet.
type metrics struct {
	requests      *prometheus.CounterVec
	fallbacks     *prometheus.CounterVec
	overlapRatio  *prometheus.HistogramVec
	routeSeconds  *prometheus.HistogramVec
	ttfb          *prometheus.HistogramVec
	selected      *prometheus.CounterVec
	retries       *prometheus.CounterVec
	upstreamError *prometheus.CounterVec
	inFlight      *prometheus.GaugeVec

	workerRequests *prometheus.CounterVec
	loadFallbacks  *prometheus.CounterVec
	streamsAborted *prometheus.CounterVec
	tokenize       *prometheus.CounterVec
}

// The states of warmroute_workers.
const (
	workersHealthy   = "healthy"
	workersUnhealthy = "unhealthy"
	workersDraining  = "draining"
	workersOpen      = "open" // answers its health check, but the breaker is open
)

// workerStates shows warmroute_workers as it is when Prometheus asks.
type workerStates struct {
	desc  *prometheus.Desc
	count func(state string) int
}

// countWorkers registers warmroute_workers.
func countWorkers(reg prometheus.Registerer, count func(state string) int) error {
	if reg == nil {
		return nil
	}
	return reg.Register(&workerStates{
		prometheus.NewDesc("warmroute_workers",
			"Workers by what this frontend may send them: open are those whose circuit breaker is.", []string{"state"}, nil), count,
	})
}

// Describe names the metric.
func (w *workerStates) Describe(ch chan<- *prometheus.Desc) { ch <- w.desc }

// Collect counts the workers.
func (w *workerStates) Collect(ch chan<- prometheus.Metric) {
	for _, state := range []string{workersHealthy, workersUnhealthy, workersDraining, workersOpen} {
		ch <- prometheus.MustNewConstMetric(w.desc, prometheus.GaugeValue, float64(w.count(state)), state)
	}
}

func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	return &metrics{
		requests: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_requests_total", Help: "Requests by route, status and what the index contributed (none where it is not involved).",
		}, []string{"endpoint", "code", "index_state"}),
		fallbacks: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_index_fallbacks_total", Help: "Requests routed without overlaps, by reason (connection, timeout, loading, cluster_down, pool_exhausted, corrupt; tokenize = token ids not to be had; disabled = a frontend without an index).",
		}, []string{"reason"}),
		overlapRatio: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "warmroute_overlap_ratio", Help: "Share of a prompt's blocks that the chosen worker holds, where the index knew.",
			Buckets: prometheus.LinearBuckets(0, 0.1, 11),
		}, []string{"pool"}),
		routeSeconds: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "warmroute_route_seconds", Help: "Time from the whole body to the choice of a worker.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 2, 16), // 50 µs to 1.6 s
		}, []string{"pool"}),
		ttfb: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "warmroute_time_to_first_byte_seconds", Help: "Time from the whole body to the first byte of the worker's answer.",
			Buckets: prometheus.ExponentialBuckets(1e-3, 2, 18), // 1 ms to 131 s
		}, []string{"pool"}),
		selected: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_selected_total", Help: "Choices of a worker, by policy and reason: overlap (the worker holds a part of the prompt), load (none of it, it has the least to do), session, conversation, prompt (by which the worker was hashed, or kept), spilled (that one had more than its share), unnamed (nothing to hash: least-loaded), pinned (the request restricts the choice), policy (no other reason).",
		}, []string{"pool", "policy", "reason"}),
		retries: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_upstream_retries_total", Help: "Requests tried on another worker, by what the one before did.",
		}, []string{"reason"}),
		upstreamError: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_upstream_errors_total", Help: "Attempts that a worker failed, by how (dial, stale, header_timeout, broken, idle_timeout, aborted, lost).",
		}, []string{"reason"}),
		inFlight: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "warmroute_upstream_in_flight", Help: "Requests of this frontend at each worker.",
		}, []string{"worker"}),
		workerRequests: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_worker_requests_total", Help: "Requests sent to each worker of the fleet, retries included.",
		}, []string{"worker"}),
		streamsAborted: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_answers_aborted_total", Help: "Answers that broke off after they had begun, by the side that left: client or worker.",
		}, []string{"side"}),
		tokenize: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_tokenize_total", Help: "Prompts whose token ids were wanted and not given, by how they came: cached, asked (a worker), shared (the call of another request), paused (no worker is asked for a while), timeout, failed.",
		}, []string{"result"}),
		loadFallbacks: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_load_fallbacks_total", Help: "Choices by this frontend's own loads because those of all frontends could not be had, by reason.",
		}, []string{"reason"}),
	}
}
