package demo

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/stage"
)

// Report is what the demo measured.
type Report struct {
	KV         Policy `json:"kv"`          // the kv policy: to the worker with the warmest cache
	RoundRobin Policy `json:"round_robin"` // the same workload, dealt out in turn
	Outage     Outage `json:"outage"`      // kv again, while Redis is taken away and given back
	Recovered  bool   `json:"recovered"`   // the index was exact again afterwards, and used
}

// Policy is the outcome of the workload under one routing policy.
type Policy struct {
	Requests      int     `json:"requests"`
	Failed        int     `json:"failed"`          // not a complete 200 answer
	BlockHitRatio float64 `json:"block_hit_ratio"` // cached prompt tokens ÷ prompt tokens, as the engines report them
	TTFT          TTFT    `json:"ttft_ms"`
}

// TTFT is the time to the first token, in milliseconds.
type TTFT struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// Outage is the outcome of the run in which Redis was away.
type Outage struct {
	Requests   int     `json:"requests"`     // before, during and after
	Failed     int     `json:"failed"`       // not a complete 200 answer
	Degraded   int     `json:"degraded"`     // answered without the index
	MaxAddedMS float64 `json:"max_added_ms"` // longest time that a request waited for the index while Redis was away
	RecoveryMS float64 `json:"recovery_ms"`  // from the return of Redis until every frontend routed by the index again
}

// Failed is the number of failed requests of the whole demo.
func (r Report) Failed() int { return r.KV.Failed + r.RoundRobin.Failed + r.Outage.Failed }

// WriteJSON writes the report as one JSON object.
func (r Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteTable writes the report for people.
func (r Report) WriteTable(w io.Writer) error {
	var b strings.Builder
	row := func(label string, cells ...string) {
		fmt.Fprintf(&b, "%-28s", label)
		for _, c := range cells {
			fmt.Fprintf(&b, "%14s", c)
		}
		b.WriteByte('\n')
	}
	both := func(label string, cell func(Policy) string) { row(label, cell(r.KV), cell(r.RoundRobin)) }
	row("", "kv routing", "round robin")
	both("requests", func(p Policy) string { return strconv.Itoa(p.Requests) })
	both("failed", func(p Policy) string { return strconv.Itoa(p.Failed) })
	both("block hit ratio", func(p Policy) string { return fmt.Sprintf("%.1f %%", 100*p.BlockHitRatio) })
	both("time to first token, p50", func(p Policy) string { return fmt.Sprintf("%.0f ms", p.TTFT.P50) })
	both("                     p99", func(p Policy) string { return fmt.Sprintf("%.0f ms", p.TTFT.P99) })
	b.WriteString("\nkv routing, Redis taken away under load and given back\n")
	row("requests", strconv.Itoa(r.Outage.Requests))
	row("failed", strconv.Itoa(r.Outage.Failed))
	row("routed without the index", strconv.Itoa(r.Outage.Degraded))
	row("longest wait for the index", fmt.Sprintf("%.1f ms", r.Outage.MaxAddedMS))
	row("index in use again after", fmt.Sprintf("%.0f ms", r.Outage.RecoveryMS))
	row("recovered", map[bool]string{true: "yes", false: "NO"}[r.Recovered])
	_, err := io.WriteString(w, b.String())
	return err
}

// policyOf sums up the outcomes of one run.
func policyOf(outcomes []stage.Outcome) Policy {
	p := Policy{Requests: len(outcomes)}
	var prompt, cached int
	var ttft []time.Duration
	for _, o := range outcomes {
		if o.Err != nil {
			p.Failed++
			continue
		}
		prompt += o.PromptTokens
		cached += o.CachedTokens
		ttft = append(ttft, o.TTFT)
	}
	if prompt > 0 {
		p.BlockHitRatio = stage.Round(float64(cached)/float64(prompt), 4)
	}
	slices.Sort(ttft)
	p.TTFT = TTFT{P50: stage.Milliseconds(stage.Percentile(ttft, 50)), P99: stage.Milliseconds(stage.Percentile(ttft, 99))}
	return p
}
