package demo

import (
	"log/slog"
	"testing"
	"time"

	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// TestFaults lets every fault happen under load, on real servers: no request fails, the index equals the engines' caches
// afterwards, and nothing is left behind.
func TestFaults(t *testing.T) {
	storetest.Require(t, redisproc.Program, "apt-get install redis-server")
	// What each fault does to the frontends; the others leave lookups alone.
	degrades := map[string]bool{
		"acl": true, "clusterdown": true, "killed": true, "loading": true, "maxclients": true, "refused-at-boot": true, "reset": true,
		"sentinel-failover": true, "stopped": true, "swallowed": true,
	}
	partial := map[string]bool{"cluster-master-killed": true, "cluster-master-stopped": true}
	names := redisproc.Faults()
	if testing.Short() {
		names = []string{"killed", "stopped", "flushall"}
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			away := 1500 * time.Millisecond
			if name == "clusterdown" {
				away = 4 * time.Second // the nodes take two to notice
			}
			r, err := RunFault(t.Context(), FaultOptions{
				Fault: name, Warm: time.Second, Away: away, After: 500 * time.Millisecond, Rate: 100, Logger: slog.New(slog.DiscardHandler),
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%+v", r)
			if r.Requests < 50 || r.Failed != 0 || r.WrongWorker != 0 {
				t.Errorf("of %d requests %d failed, %d came from elsewhere", r.Requests, r.Failed, r.WrongWorker)
			}
			if !r.IndexEqual {
				t.Error("the index does not equal the engines' caches")
			}
			if r.RecoveryMS >= milliseconds(recoveryTime) {
				t.Error("the frontends did not come back to the index")
			}
			if degrades[name] && r.Degraded == 0 || partial[name] && r.Partial+r.Degraded == 0 {
				t.Errorf("no request noticed: %d degraded, %d partial", r.Degraded, r.Partial)
			}
			counted := 0
			for _, n := range r.Reasons {
				counted += n
			}
			if counted != r.Degraded {
				t.Errorf("%d degraded, reasons %v", r.Degraded, r.Reasons)
			}
			if r.LogLines > 2 {
				t.Errorf("%v log lines per transition", r.LogLines)
			}
			if r.DialsPerS > 200 {
				t.Errorf("%d dials in one second", r.DialsPerS)
			}
			if r.Connections != 0 || r.Goroutines > 10 {
				t.Errorf("left behind: %d connections, %d goroutines", r.Connections, r.Goroutines)
			}
		})
	}
	if _, err := RunFault(t.Context(), FaultOptions{Fault: "nonsense", Logger: slog.New(slog.DiscardHandler)}); err == nil {
		t.Error("a fault that is none was run")
	}
}
