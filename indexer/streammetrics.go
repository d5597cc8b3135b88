package indexer

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// States of a stream, the closed list of kv_streams.
const (
	streamLive         = "live"         // followed, and known to the index
	streamDisconnected = "disconnected" // its publisher cannot be reached
	streamUnregistered = "unregistered" // not in the index: no block size yet, another one than the pool's, or Redis is away
)

// streamMetrics shows the streams as they are when Prometheus asks; a worker that leaves takes its series along.
type streamMetrics struct {
	all                                          func() []*stream
	streams, leases, buffered, lastEvent, silent *prometheus.Desc
}

func newStreamMetrics(reg prometheus.Registerer, all func() []*stream) error {
	m := &streamMetrics{
		all: all,
		streams: prometheus.NewDesc("warmroute_kv_streams",
			"Event streams that this indexer follows, by state (live, disconnected, unregistered).", []string{"state"}, nil),
		leases: prometheus.NewDesc("warmroute_kv_leases",
			"Event streams by their lease: alive, failing (no sign of life for less than the grace), held (for longer, but the fault may be this indexer's), expired.",
			[]string{"state"}, nil),
		buffered: prometheus.NewDesc("warmroute_kv_buffered_messages",
			"Messages of all streams that wait to be applied to the index.", nil, nil),
		lastEvent: prometheus.NewDesc("warmroute_kv_stream_last_event_timestamp_seconds",
			"When the stream's last message came, in seconds since 1970; where none has come yet, since when it is followed.",
			[]string{"pool", "worker", "rank"}, nil),
		silent: prometheus.NewDesc("warmroute_worker_silent",
			"1 where a worker serves requests, by its own metrics, and has never published a KV event.",
			[]string{"pool", "worker", "rank"}, nil),
	}
	return reg.Register(m)
}

// Describe names the metrics.
func (m *streamMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.streams
	ch <- m.leases
	ch <- m.buffered
	ch <- m.lastEvent
	ch <- m.silent
}

// Collect reads the state of every stream.
func (m *streamMetrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	states := map[string]int{streamLive: 0, streamDisconnected: 0, streamUnregistered: 0}
	leases := map[string]int{leaseAlive: 0, leaseFailing: 0, leaseHeld: 0, leaseExpired: 0}
	waiting := 0
	for _, s := range m.all() {
		v := s.snapshot()
		waiting += v.Waiting
		leases[v.Lease]++
		switch {
		case v.Endpoint != "" && !v.Connected:
			states[streamDisconnected]++
		case !v.Registered:
			states[streamUnregistered]++
		default:
			states[streamLive]++
		}
		last := v.LastEvent
		if last.IsZero() {
			last = s.followed
		}
		labels := []string{s.id.Pool.String(), v.Worker, strconv.Itoa(v.Rank)}
		gauge(m.lastEvent, float64(last.UnixMilli())/1000, labels...)
		silent := 0.0
		if v.Silent {
			silent = 1
		}
		gauge(m.silent, silent, labels...)
	}
	for state, n := range states {
		gauge(m.streams, float64(n), state)
	}
	for state, n := range leases {
		gauge(m.leases, float64(n), state)
	}
	gauge(m.buffered, float64(waiting))
}
