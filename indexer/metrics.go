package indexer

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/warmroute/warmroute/indexer/wire"
)

// Results of events, the closed list of kv_events_total.
const (
	resultApplied   = "applied"
	resultDuplicate = "duplicate" // another indexer, or a replay, was first
	resultStale     = "stale"     // of a generation that is over
	resultOrphan    = "orphan"    // waits for its parent
	resultSkipped   = "skipped"   // not indexable, or malformed
)

// Reasons of gaps, resets and replays.
const (
	gapLive  = "live"  // the live stream jumped
	gapStore = "store" // Redis is behind what it had: it lost writes

	resetRestart     = "restart"     // the engine began again
	resetClear       = "clear"       // the engine cleared its cache
	resetGap         = "gap"         // lost messages that replay could not bring
	resetUndecodable = "undecodable" // a batch, or a removal in it, could not be read
	resetPanic       = "panic"       // a fault in this code
	resetLease       = "lease"       // no sign of life from the worker
	resetClaim       = "claim"       // a number that it was said to have reached was false
	resetOlder       = "older"       // Redis went back to an older generation

	checkSound    = "sound"    // nothing found
	checkRepaired = "repaired" // damage
	checkFailed   = "failed"

	replayJoin    = "join"    // after connecting
	replayGap     = "gap"     // to close a gap
	replayRestart = "restart" // from the first message of a restarted engine
	replayFailed  = "failed"  // of any of these: no complete answer
)

// metrics are those of the event streams.
type metrics struct {
	events  *prometheus.CounterVec
	errors  *prometheus.CounterVec
	gaps    *prometheus.CounterVec
	resets  *prometheus.CounterVec
	replays *prometheus.CounterVec
	lag     prometheus.Histogram

	settings prometheus.Gauge
	checks   *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	m := &metrics{
		events: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_kv_events_total",
			Help: "KV-cache events by type (stored, removed, cleared, unknown) and result (applied, duplicate, stale, orphan, skipped).",
		}, []string{"type", "result"}),
		errors: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_kv_event_errors_total", Help: "Messages, batches and events that could not be decoded, by error.",
		}, []string{"error"}),
		gaps: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_kv_stream_gaps_total", Help: "Gaps in event streams by reason (live, store).",
		}, []string{"reason"}),
		resets: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_kv_stream_resets_total",
			Help: "Streams whose blocks left the index, by reason (restart, clear, gap, undecodable, panic, lease, claim, older).",
		}, []string{"reason"}),
		replays: f.NewCounterVec(prometheus.CounterOpts{
			Name: "warmroute_kv_replays_total", Help: "Replays asked for, by reason (join, gap, restart), and those without a complete answer (failed).",
		}, []string{"reason"}),
		lag: f.NewHistogram(prometheus.HistogramOpts{
			Name: "warmroute_kv_stream_lag_seconds", Help: "Time from an engine's batch to its effect in the index, by the engine's clock.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 18), // 0.5 ms to 65 s
		}),
	}
	m.settings = f.NewGauge(prometheus.GaugeOpts{
		Name: "warmroute_index_setting_problems", Help: "Settings of Redis that would harm the index, such as an eviction policy.",
	})
	m.checks = f.NewCounterVec(prometheus.CounterOpts{
		Name: "warmroute_index_checks_total", Help: "Checks of a whole pool, by what came of it (sound, repaired, failed).",
	}, []string{"result"})
	// The series that alerts look at exist from the start.
	for _, r := range []string{gapLive, gapStore} {
		m.gaps.WithLabelValues(r)
	}
	for _, r := range []string{resetRestart, resetClear, resetGap, resetUndecodable, resetPanic, resetLease, resetClaim, resetOlder} {
		m.resets.WithLabelValues(r)
	}
	for _, r := range []string{replayJoin, replayGap, replayRestart, replayFailed} {
		m.replays.WithLabelValues(r)
	}
	for _, r := range []string{checkSound, checkRepaired, checkFailed} {
		m.checks.WithLabelValues(r)
	}
	for _, k := range []wire.Kind{wire.Stored, wire.Removed, wire.Cleared} {
		m.events.WithLabelValues(k.String(), resultApplied)
	}
	return m
}

func (m *metrics) event(k wire.Kind, result string, n int) {
	if n > 0 {
		m.events.WithLabelValues(k.String(), result).Add(float64(n))
	}
}

// observeLag takes the engine's time of a batch; clocks that disagree give no negative lag.
func (m *metrics) observeLag(ts float64, now time.Time) {
	m.lag.Observe(max(0, float64(now.UnixNano())/1e9-ts))
}
