package guard

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// registered is a collector in a registry that may have it already: frontend and indexer can be one process.
func registered[T prometheus.Collector](reg prometheus.Registerer, c T) T {
	if reg == nil {
		return c
	}
	var already prometheus.AlreadyRegisteredError
	if err := reg.Register(c); errors.As(err, &already) {
		if have, ok := already.ExistingCollector.(T); ok {
			return have
		}
	}
	return c
}

func newRefused(reg prometheus.Registerer) *prometheus.CounterVec {
	return registered(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "warmroute_addresses_refused_total", Help: "Addresses of workers that --worker-network does not allow, by where: register (the registration was refused) or dial (each attempt).",
	}, []string{"at"}))
}

func newOpen(reg prometheus.Registerer) *prometheus.GaugeVec {
	return registered(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "warmroute_connections", Help: "Connections from clients, by the surface that they are to (frontend or indexer).",
	}, []string{"surface"}))
}

func newCrowded(reg prometheus.Registerer) *prometheus.CounterVec {
	return registered(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "warmroute_connections_refused_total", Help: "Connections over the limit, by surface and what became of them: evicted (an idle one was closed for a new one), probes (taken for probes only), closed.",
	}, []string{"surface", "how"}))
}
