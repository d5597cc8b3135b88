package inflight

import (
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
)

func counts(known map[string]bool) (*Counts, *prometheus.GaugeVec) {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "g"}, []string{"worker"})
	return New(g, func(id string) bool { return known[id] }), g
}

func place(tenant, worker string) Place {
	return Place{tenant, kvcache.WorkerRank{Worker: worker}}
}

// The counts of a worker that comes and goes stay exact, and its series end with it.
func TestFlapping(t *testing.T) {
	known := map[string]bool{"w1": true}
	c, gauge := counts(known)
	at := place("default", "w1")
	first := c.Add(at, choose.Load{Requests: 1, PrefillTokens: 70, DecodeBlocks: 7})
	delete(known, "w1")
	c.Forget("w1")
	if got := c.Loads([]Place{at})[0]; got != (choose.Load{Requests: 1, PrefillTokens: 70, DecodeBlocks: 7}) {
		t.Errorf("%+v after the worker left", got)
	}
	known["w1"] = true
	i, second := c.Take([]Place{at}, func([]choose.Load) int { return 0 }, func(int) choose.Load { return choose.Load{Requests: 1, DecodeBlocks: 1} })
	if got := c.Loads([]Place{at})[0]; i != 0 || got != (choose.Load{Requests: 2, PrefillTokens: 70, DecodeBlocks: 8}) {
		t.Errorf("%+v", got)
	}
	first.Prefilled()
	first.Prefilled()
	first.Output(2)
	if got := c.Loads([]Place{at})[0]; got != (choose.Load{Requests: 2, DecodeBlocks: 10}) {
		t.Errorf("%+v after the first byte and two blocks", got)
	}
	delete(known, "w1")
	for range 3 {
		first.Release()
		first.Prefilled()
		first.Output(5)
		second.Release()
	}
	if !c.Idle() {
		t.Errorf("left over: %v %v", c.places, c.requests)
	}
	if gauge.DeleteLabelValues("w1") {
		t.Error("the series of a worker that left is still there")
	}
}

// Two tenants may have workers of one id: their loads are apart, their series is one.
func TestTenantsAreApart(t *testing.T) {
	c, _ := counts(map[string]bool{"w1": true})
	a, b := place("a", "w1"), place("b", "w1")
	l := c.Add(a, choose.Load{Requests: 1})
	if got := c.Loads([]Place{a, b}); got[0].Requests != 1 || got[1].Requests != 0 {
		t.Errorf("%+v", got)
	}
	l.Release()
}

// A pick that finds nobody counts nothing; a burst sees its own choices.
func TestTake(t *testing.T) {
	c, _ := counts(nil)
	places := []Place{place("d", "w1"), place("d", "w2"), place("d", "w3"), place("d", "w4")}
	one := func(int) choose.Load { return choose.Load{Requests: 1} }
	if _, l := c.Take(places, func([]choose.Load) int { return -1 }, one); l != nil || !c.Idle() {
		t.Error("nobody was chosen, and somebody counted")
	}
	least := func(loads []choose.Load) (best int) {
		for i, l := range loads {
			if l.Requests < loads[best].Requests {
				best = i
			}
		}
		return best
	}
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() { c.Take(places, least, one) })
	}
	all.Wait()
	for i, l := range c.Loads(places) {
		if l.Requests != 16 {
			t.Errorf("place %d has %d of 64", i, l.Requests)
		}
	}
}
