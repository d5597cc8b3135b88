package storebench_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/store/storebench"
	"github.com/warmroute/warmroute/store/storetest"
)

// The tables themselves, small: every layout must give the workload's answer.
func TestLookupLayoutsAgree(t *testing.T) {
	r := storetest.Redis(t)
	report, err := storebench.Lookup(t.Context(), storebench.Options{URL: r.URL, CellTime: 10 * time.Millisecond, Quick: true},
		storebench.LookupSizes{Workers: []int{8, 20}, Blocks: []int{32, 512, 2048}, Callers: []int{1, 4}})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Cells) != 2*3*2*3 {
		t.Fatalf("%d cells", len(report.Cells))
	}
	for _, c := range report.Cells {
		if c.Count == 0 || c.P50 <= 0 || c.P99 < c.P50 || c.RedisCPU <= 0 || c.Sent <= 0 || c.Received <= 0 {
			t.Errorf("cell without figures: %+v", c)
		}
	}
}

func TestApplyTable(t *testing.T) {
	r := storetest.Redis(t)
	report, err := storebench.Apply(t.Context(), storebench.Options{URL: r.URL, CellTime: time.Millisecond, Quick: true}, []int{1, 128})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Cells) != 2*5 || report.MemoryPerBlock <= report.ZAddMemory || report.ClearWorker.Count != 4 {
		t.Fatalf("%+v", report)
	}
	for _, c := range report.Cells {
		if c.BlocksPerSec <= 0 || c.VsZAdd <= 0 || c.VsZAddHSet <= 0 {
			t.Errorf("cell without figures: %+v", c)
		}
	}
}

func TestSweepTable(t *testing.T) {
	r := storetest.Redis(t)
	report, err := storebench.Sweep(t.Context(), storebench.Options{URL: r.URL, CellTime: 20 * time.Millisecond}, 3000, []int{50, 500})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Cells) != 2 || report.Blocks != 3000 {
		t.Fatalf("%+v", report)
	}
	for _, c := range report.Cells {
		if c.Swept != 3000 || c.SweepCalls < 3000/c.Step || c.RetireMs <= 0 || c.SweepMs < c.RetireMs || c.Before.Count == 0 {
			t.Errorf("cell without figures: %+v", c)
		}
	}
	v, err := redis.NewClient(&redis.Options{Addr: r.Addr}).ConfigGet(t.Context(), "slowlog-max-len").Result()
	if err != nil || v["slowlog-max-len"] != "128" {
		t.Errorf("the slow log is not as it was: %v %v", v, err)
	}
}
