package demo

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
)

func TestReportJSON(t *testing.T) {
	r := Report{
		KV:         Policy{288, 0, 0.8712, TTFT{12.5, 40}},
		RoundRobin: Policy{288, 1, 0.5, TTFT{30, 90.25}},
		Outage:     Outage{500, 2, 120, 19.5, 310}, Recovered: true,
	}
	var b strings.Builder
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var got any
	if err := json.Unmarshal([]byte(b.String()), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"kv":          map[string]any{"requests": 288.0, "failed": 0.0, "block_hit_ratio": 0.8712, "ttft_ms": map[string]any{"p50": 12.5, "p99": 40.0}},
		"round_robin": map[string]any{"requests": 288.0, "failed": 1.0, "block_hit_ratio": 0.5, "ttft_ms": map[string]any{"p50": 30.0, "p99": 90.25}},
		"outage":      map[string]any{"requests": 500.0, "failed": 2.0, "degraded": 120.0, "max_added_ms": 19.5, "recovery_ms": 310.0},
		"recovered":   true,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if r.Failed() != 3 {
		t.Errorf("%d failed, want 3", r.Failed())
	}
}

func TestPolicyCountsOnlyAnswers(t *testing.T) {
	got := policyOf([]stage.Outcome{
		{PromptTokens: 100, CachedTokens: 64, TTFT: 10 * time.Millisecond},
		{PromptTokens: 100, TTFT: 30 * time.Millisecond},
		{Err: errors.New("broken"), PromptTokens: 1000, TTFT: time.Hour},
	})
	if want := (Policy{Requests: 3, Failed: 1, BlockHitRatio: 0.32, TTFT: TTFT{P50: 10, P99: 30}}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := policyOf(nil); got != (Policy{}) {
		t.Errorf("nothing: %+v", got)
	}
}
