package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// A trace in real time: two frontends are processes of their own, and together know what one knows.
func TestReplayThroughProcesses(t *testing.T) {
	storetest.Require(t, redisproc.Program, "apt-get install redis-server")
	const conversations, turns = 10, 8
	var trace strings.Builder
	for i := range conversations * turns {
		blocks := []int{0}
		for turn := range i/conversations + 1 {
			blocks = append(blocks, 1+i%conversations*turns+turn)
		}
		ids, err := json.Marshal(blocks)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&trace, `{"timestamp": %d, "input_length": %d, "output_length": 4, "hash_ids": %s}`+"\n", 1000*i, 512*len(blocks), ids)
	}
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(file, []byte(trace.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	out, errOut, code := output(t, "replay", file, "--real-time", "--speed=40", "--policy=kv", "--frontends=1,2", "--workers=2", "--prefill-rate=50", "--json")
	var report struct {
		Runs []struct {
			Frontends, Requests int
			HitRatio            float64 `json:"hit_ratio"`
		}
	}
	if err := json.Unmarshal([]byte(out), &report); code != 0 || err != nil || len(report.Runs) != 2 {
		t.Fatalf("exit code %d, %v\n%s%s", code, err, out, errOut)
	}
	// Of 440 blocks 81 are new, so that 0.8 can be had.
	for _, r := range report.Runs {
		if r.Requests != conversations*turns || r.HitRatio < 0.5 {
			t.Errorf("%+v", r)
		}
	}
}
