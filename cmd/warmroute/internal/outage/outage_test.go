package outage

import (
	"encoding/json"
	"log/slog"
	"testing"
	"time"

	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// TestFaults lets every fault happen under load, on real servers: no request fails, the index equals the engines' caches
// afterwards, and nothing is left behind. How long things take is measured by the benchmark, not here.
func TestFaults(t *testing.T) {
	storetest.Require(t, redisproc.Program, "apt-get install redis-server")
	// What each fault does to the frontends; the others leave lookups alone.
	degrades := map[string]bool{
		"acl": true, "clusterdown": true, "killed": true, "loading": true, "lost-replies": true, "maxclients": true, "pool": true,
		"refused-at-boot": true, "reset": true, "sentinel-failover": true, "stopped": true, "swallowed": true,
	}
	partial := map[string]bool{"cluster-master-killed": true, "cluster-master-stopped": true}
	silent := map[string]bool{"cluster-master-stopped": true, "lost-replies": true, "stopped": true, "swallowed": true}
	names := Faults()
	if testing.Short() {
		names = []string{"killed", "stopped", "flushall", "hangup"}
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			o := Options{
				Fault: name, Warm: 800 * time.Millisecond, Away: time.Second, After: 300 * time.Millisecond, Rate: 50,
				LookupBudget: time.Second, // so that a busy machine is not taken for a fault
				Logger:       slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelError})),
			}
			if silent[name] {
				o.Away = 2500 * time.Millisecond // longer than lookups wait for an answer
			}
			if name == poolFault || name == hangUpFault {
				o.LookupBudget = 3 * time.Second // here the links must not go down, and a busy machine must not be why
			}
			r, err := Run(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			report, _ := json.Marshal(r)
			t.Logf("%s", report)
			if r.Requests < 50 || !r.OK() {
				t.Errorf("of %d requests %d failed, %d were answered by another engine; recovered %v, index equal %v",
					r.Requests, r.Failed, r.WrongWorker, r.Recovered, r.IndexEqual)
			}
			if degrades[name] && r.Fallbacks() == 0 || partial[name] && r.Partial+r.Degraded == 0 {
				t.Errorf("no request noticed: %d degraded, %d partial", r.Degraded, r.Partial)
			}
			answers, unread := r.Degraded+r.Bypassed, 0
			if r.Extra != nil {
				answers, unread = answers+r.Extra.Degraded, r.Extra.HungUp
			}
			if n := r.Fallbacks() - answers; n < 0 || n > unread {
				t.Errorf("%d answers without overlaps, reasons %v", answers, r.Reasons)
			}
			if r.ProbersTooMany > 0 {
				t.Errorf("%d probers more than links that are down", r.ProbersTooMany)
			}
			if r.LogLines.Links > 2*r.Transitions {
				t.Errorf("%d lines for %d transitions", r.LogLines.Links, r.Transitions)
			}
			if r.Dials.Frontend > 100 {
				t.Errorf("%d dials of a frontend in one second", r.Dials.Frontend)
			}
			if r.Connections != 0 || r.Goroutines != 0 {
				t.Errorf("left behind: %d connections, %d goroutines", r.Connections, r.Goroutines)
			}
			if x := r.Extra; x != nil {
				if r.Transitions != 0 {
					t.Errorf("%d transitions of links: nothing was wrong with Redis", r.Transitions)
				}
				if r.Reasons["pool_exhausted"]+r.Reasons["tokenize"] != r.Fallbacks() || // an engine may be late where all share two busy cores
					name == poolFault && r.Fallbacks() == 0 {
					t.Errorf("reasons %v", r.Reasons)
				}
				if name == hangUpFault && x.HungUp < 200 {
					t.Errorf("of %d clients %d hung up", x.Requests, x.HungUp)
				}
			}
		})
	}
	if _, err := Run(t.Context(), Options{Fault: "nonsense", Logger: slog.New(slog.DiscardHandler)}); err == nil {
		t.Error("a fault that is none was run")
	}
}
