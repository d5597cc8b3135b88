package storebench_test

import (
	"testing"
	"time"

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
