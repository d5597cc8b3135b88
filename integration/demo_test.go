package integration

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestDemoOnARealRedisPrintsOneJSONObject(t *testing.T) {
	redis := startRedis(t)
	stdout, stderr, code := output(t, "demo", "--json", "--redis="+redis.url())
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	type policy struct {
		Requests, Failed int
		BlockHitRatio    float64                    `json:"block_hit_ratio"`
		TTFT             struct{ P50, P99 float64 } `json:"ttft_ms"`
	}
	var r struct {
		KV         policy
		RoundRobin policy `json:"round_robin"`
		Outage     struct {
			Requests, Failed, Degraded int
			MaxAddedMS                 float64 `json:"max_added_ms"`
			RecoveryMS                 float64 `json:"recovery_ms"`
		}
		Recovered bool
	}
	d := json.NewDecoder(strings.NewReader(stdout))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil || d.More() {
		t.Fatalf("%v: %s", err, stdout)
	}
	if r.KV.Requests < 200 || r.RoundRobin.Requests != r.KV.Requests {
		t.Errorf("requests: kv %d, round robin %d, want the same few hundred", r.KV.Requests, r.RoundRobin.Requests)
	}
	if r.KV.Failed+r.RoundRobin.Failed+r.Outage.Failed != 0 {
		t.Errorf("failed requests: %s", stdout)
	}
	if r.KV.BlockHitRatio < r.RoundRobin.BlockHitRatio+0.1 {
		t.Errorf("kv routing hits %v, round robin %v: want clearly more", r.KV.BlockHitRatio, r.RoundRobin.BlockHitRatio)
	}
	for _, p := range []policy{r.KV, r.RoundRobin} {
		if p.TTFT.P50 <= 0 || p.TTFT.P99 < p.TTFT.P50 {
			t.Errorf("time to first token: %+v", p.TTFT)
		}
	}
	if r.Outage.Degraded == 0 || r.Outage.Degraded >= r.Outage.Requests || r.Outage.RecoveryMS <= 0 || !r.Recovered {
		t.Errorf("outage: %+v, recovered %v", r.Outage, r.Recovered)
	}
	if _, stderr, code := output(t, "check", "--redis="+redis.url()); code != 0 {
		t.Errorf("check after the demo: %s", stderr)
	}
}
