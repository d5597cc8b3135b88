package store_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// counted sums a counter of a registry over all series.
func counted(t *testing.T, reg *prometheus.Registry, name string, labels ...string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			have := map[string]string{}
			for _, l := range m.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			for i := 0; i < len(labels); i += 2 {
				if have[labels[i]] != labels[i+1] {
					continue series
				}
			}
			sum += m.GetCounter().GetValue()
		}
	}
	return sum
}

// Redis comes back while 500 requests ask all the time: one probe finds it, and everybody who asks afterwards gets the
// whole answer, or is told that this process's connections are in use. Nobody dials on his own.
func TestRushAtTheMomentOfRecovery(t *testing.T) {
	const callers, connections = 500, 5
	r := storetest.Redis(t)
	proxy := storetest.Proxy(t, r.Addr)
	reg := prometheus.NewRegistry()
	s, _, p := filled(t, "redis://"+proxy.Addr, budget(5*time.Second), func(o *store.Options) { o.PoolSize, o.Registerer = connections, reg })

	proxy.Set(redisproc.Refuse)
	eventually(t, "the link to go down", func() bool {
		_, _, _ = s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
		return !s.Links()[0].Up
	})
	failed := counted(t, reg, "warmroute_index_probes_total")
	proxy.Set(redisproc.Pass)
	dials := proxy.Dials()
	var exact atomic.Int64
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			back := false
			for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
				got, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
				switch {
				case state == kvcache.Exact && err == nil && got.Scores[rank("a", 0)] == onDevice(len(p)):
					exact.Add(1)
					return
				case state == kvcache.Degraded && len(got.Scores) == 0 && store.Reason(err) == store.ReasonPoolExhausted:
					back = true
				case state == kvcache.Degraded && len(got.Scores) == 0 && errors.Is(err, store.ErrUnavailable) && !back:
				default:
					t.Errorf("%v %v %v", got, state, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if exact.Load() != callers {
		t.Errorf("%d of %d callers got the whole answer", exact.Load(), callers)
	}
	if down, up := counted(t, reg, "warmroute_index_link_transitions_total", "to", "down"), counted(t, reg, "warmroute_index_link_transitions_total", "to", "up"); down != 1 || up != 1 {
		t.Errorf("%v transitions down, %v up", down, up)
	}
	if ok := counted(t, reg, "warmroute_index_probes_total", "result", "ok"); ok != 1 {
		t.Errorf("%v probes found Redis", ok)
	}
	// The prober dials for each probe that fails, and lookups at most as many connections as they may have.
	probes := counted(t, reg, "warmroute_index_probes_total") - failed
	if n := proxy.Dials() - dials; float64(n) > probes+connections {
		t.Errorf("%d dials, %v probes, %d connections", n, probes, connections)
	}
}
