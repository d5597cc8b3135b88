// Package monitoring makes the Grafana dashboard, dashboard.json, from the panels below. After a change:
//
//	make docs
//
// The panels are plain data, so that a test can ask a real Prometheus for every expression.
package monitoring

import (
	"bytes"
	"encoding/json"
)

// Panel is one panel of the dashboard.
type Panel struct {
	Title string
	// About says what the panel shows, and what to think of it.
	About string
	// Unit is Grafana's name of the unit: short, s, reqps, percentunit, bytes.
	Unit string
	// Kind is Grafana's panel type. Default timeseries.
	Kind string
	// Width is in 24ths of the dashboard. Default 8.
	Width int
	// Queries are the panel's lines.
	Queries []Query
}

// Query is one expression of a panel. $job stands for the regular expression of the jobs to show.
type Query struct {
	Expr   string
	Legend string
	// Quiet says why the expression has no result while nothing is wrong; "" means that a fleet with traffic
	// always has one.
	Quiet string
}

// Row is a heading with its panels.
type Row struct {
	Title  string
	Panels []Panel
}

const (
	firstEvent = "a counter begins with its first event"
	rate       = "[$__rate_interval]"
)

// quantile is a quantile of a histogram of all processes.
func quantile(q, histogram string) string {
	return "histogram_quantile(" + q + `, sum by (le) (rate(` + histogram + `_bucket{job=~"$job"}` + rate + ")))"
}

// rates is the rate of a counter by labels.
func rates(by, selector string) string { return "sum by (" + by + ") (rate(" + selector + rate + "))" }

// Rows are the dashboard, top to bottom.
var Rows = []Row{
	{"Is the index there?", []Panel{
		{Title: "Shards that answer", Kind: "stat", Width: 4, Unit: "percentunit",
			About:   "Share of the links between processes and index shards that are up. Below 100 %, requests go on by the fallback.",
			Queries: []Query{{Expr: `avg(warmroute_index_link_up{job=~"$job"})`, Legend: "up"}}},
		{Title: "Requests by index state", Width: 10, Unit: "reqps",
			About:   "exact: the index knew. partial: some shards were away. degraded: all were. bypassed: not asked.",
			Queries: []Query{{Expr: rates("index_state", `warmroute_requests_total{job=~"$job", index_state!="none"}`), Legend: "{{index_state}}"}}},
		{Title: "Routed without overlaps, by reason", Width: 10, Unit: "reqps",
			About:   "tokenize: the prompt's tokens could not be had. The others: the index did not answer.",
			Queries: []Query{{Expr: rates("reason", `warmroute_index_fallbacks_total{job=~"$job"}`), Legend: "{{reason}}", Quiet: firstEvent}}},
		{Title: "Links", Kind: "state-timeline", Width: 12, Unit: "short",
			About:   "1 while a process reaches a shard.",
			Queries: []Query{{Expr: `warmroute_index_link_up{job=~"$job"}`, Legend: "{{instance}} {{shard}}"}}},
		{Title: "Lookup time", Width: 12, Unit: "s",
			About: "At the budget a request goes on without the index.",
			Queries: []Query{
				{Expr: quantile("0.5", "warmroute_lookup_seconds"), Legend: "p50"},
				{Expr: quantile("0.99", "warmroute_lookup_seconds"), Legend: "p99"},
				{Expr: `max(warmroute_lookup_budget_seconds{job=~"$job"})`, Legend: "budget"},
			}},
	}},
	{"Is it worth it?", []Panel{
		{Title: "Overlap ratio", Unit: "percentunit",
			About: "Mean share of a prompt's blocks that the chosen worker held. " +
				"Always 0 means that something does not fit together: see troubleshooting.md.",
			Queries: []Query{{Expr: rates("pool", `warmroute_overlap_ratio_sum{job=~"$job"}`) + " / " + rates("pool", `warmroute_overlap_ratio_count{job=~"$job"}`),
				Legend: "{{pool}}"}}},
		{Title: "Overlap ratio, spread", Kind: "heatmap", Unit: "percentunit",
			About:   "How many requests met how warm a worker.",
			Queries: []Query{{Expr: `sum by (le) (increase(warmroute_overlap_ratio_bucket{job=~"$job"}` + rate + "))", Legend: "{{le}}"}}},
		{Title: "Cached, against the prediction", Unit: "percentunit",
			About: "Tokens that workers say they had cached, less those that the index had predicted, as a share of the prompt. " +
				"Far below 0: stale entries.",
			Queries: []Query{{Expr: rates("worker", `warmroute_prediction_error_ratio_sum{job=~"$job"}`) + " / " + rates("worker", `warmroute_prediction_error_ratio_count{job=~"$job"}`),
				Legend: "{{worker}}"}}},
		{Title: "Blocks per prompt", Unit: "short",
			About: "Length of the prompts that were looked up.",
			Queries: []Query{
				{Expr: quantile("0.5", "warmroute_lookup_blocks"), Legend: "p50"},
				{Expr: quantile("0.95", "warmroute_lookup_blocks"), Legend: "p95"},
			}},
	}},
	{"Requests", []Panel{
		{Title: "Requests by status", Unit: "reqps",
			About:   "What clients got.",
			Queries: []Query{{Expr: rates("code", `warmroute_requests_total{job=~"$job", endpoint!~"/ready|/health|/metrics"}`), Legend: "{{code}}"}}},
		{Title: "Time to first byte", Unit: "s",
			About: "From the whole body to the first byte of the worker's answer: routing, queue and prefill.",
			Queries: []Query{
				{Expr: quantile("0.5", "warmroute_time_to_first_byte_seconds"), Legend: "p50"},
				{Expr: quantile("0.95", "warmroute_time_to_first_byte_seconds"), Legend: "p95"},
				{Expr: quantile("0.99", "warmroute_time_to_first_byte_seconds"), Legend: "p99"},
			}},
		{Title: "Time to route", Unit: "s",
			About: "Part of it that is ours: tokens, lookup, choice.",
			Queries: []Query{
				{Expr: quantile("0.5", "warmroute_route_seconds"), Legend: "p50"},
				{Expr: quantile("0.99", "warmroute_route_seconds"), Legend: "p99"},
			}},
		{Title: "Workers", Unit: "short",
			About:   "By what a frontend may send them; open: they fail requests and get none for a while.",
			Queries: []Query{{Expr: `warmroute_workers{job=~"$job"}`, Legend: "{{instance}} {{state}}"}}},
		{Title: "Time to choose by the shared loads", Unit: "s",
			About: "One script, reservation included.",
			Queries: []Query{
				{Expr: quantile("0.5", "warmroute_select_seconds"), Legend: "p50"},
				{Expr: quantile("0.99", "warmroute_select_seconds"), Legend: "p99"},
			}},
		{Title: "Chosen by a frontend's own loads", Unit: "reqps",
			About:   "Because those of all frontends could not be had.",
			Queries: []Query{{Expr: rates("reason", `warmroute_load_fallbacks_total{job=~"$job"}`), Legend: "{{reason}}", Quiet: firstEvent}}},
		{Title: "In flight by worker", Unit: "short",
			About:   "Requests of all frontends at each worker.",
			Queries: []Query{{Expr: `sum by (worker) (warmroute_upstream_in_flight{job=~"$job"})`, Legend: "{{worker}}"}}},
		{Title: "Choices", Unit: "reqps",
			About:   "By the policy that made them, and why.",
			Queries: []Query{{Expr: rates("policy, reason", `warmroute_selected_total{job=~"$job"}`), Legend: "{{policy}}: {{reason}}"}}},
		{Title: "Workers that failed", Unit: "reqps",
			About: "Attempts that a worker failed, and those tried again elsewhere.",
			Queries: []Query{
				{Expr: rates("reason", `warmroute_upstream_errors_total{job=~"$job"}`), Legend: "{{reason}}", Quiet: firstEvent},
				{Expr: rates("reason", `warmroute_upstream_retries_total{job=~"$job"}`), Legend: "retried: {{reason}}", Quiet: firstEvent},
			}},
	}},
	{"KV events", []Panel{
		{Title: "Streams", Unit: "short",
			About:   "live: followed, and in the index. Each indexer follows all.",
			Queries: []Query{{Expr: `sum by (instance, state) (warmroute_kv_streams{job=~"$job"})`, Legend: "{{instance}} {{state}}"}}},
		{Title: "Events", Unit: "short",
			About:   "Per second. orphan and skipped are not in the index; duplicate is what another indexer had applied.",
			Queries: []Query{{Expr: rates("type, result", `warmroute_kv_events_total{job=~"$job"}`), Legend: "{{type}} {{result}}"}}},
		{Title: "From the engine to the index", Unit: "s",
			About: "By the engine's clock.",
			Queries: []Query{
				{Expr: quantile("0.5", "warmroute_kv_stream_lag_seconds"), Legend: "p50"},
				{Expr: quantile("0.99", "warmroute_kv_stream_lag_seconds"), Legend: "p99"},
			}},
		{Title: "Blocks written", Unit: "short",
			About: "Blocks per second stored and removed, and swept after a generation ended.",
			Queries: []Query{
				{Expr: `sum(rate(warmroute_apply_blocks_sum{job=~"$job"}` + rate + "))", Legend: "applied"},
				{Expr: `sum(rate(warmroute_swept_blocks_total{job=~"$job"}` + rate + "))", Legend: "swept", Quiet: firstEvent},
			}},
		{Title: "Write time", Unit: "s",
			About:   "One batch.",
			Queries: []Query{{Expr: quantile("0.99", "warmroute_apply_seconds"), Legend: "p99"}}},
		{Title: "Write errors", Unit: "short",
			About:   "refused: Redis is full, a replica, or could not save.",
			Queries: []Query{{Expr: rates("instance, reason", `warmroute_index_write_errors_total{job=~"$job"}`), Legend: "{{instance}} {{reason}}", Quiet: firstEvent}}},
		{Title: "Waiting for the index", Unit: "short",
			About:   "Messages in the indexers' buffers. Grows while Redis is away.",
			Queries: []Query{{Expr: `sum by (instance) (warmroute_kv_buffered_messages{job=~"$job"})`, Legend: "{{instance}}"}}},
		{Title: "Gaps, resets, replays", Unit: "short",
			About: "Per second. A reset costs a stream its blocks.",
			Queries: []Query{
				{Expr: rates("reason", `warmroute_kv_stream_gaps_total{job=~"$job"}`), Legend: "gap: {{reason}}"},
				{Expr: rates("reason", `warmroute_kv_stream_resets_total{job=~"$job"}`), Legend: "reset: {{reason}}"},
				{Expr: rates("reason", `warmroute_kv_replays_total{job=~"$job"}`), Legend: "replay: {{reason}}"},
			}},
		{Title: "Not decoded", Unit: "short",
			About:   "Messages, batches and events per second.",
			Queries: []Query{{Expr: rates("error", `warmroute_kv_event_errors_total{job=~"$job"}`), Legend: "{{error}}", Quiet: firstEvent}}},
		{Title: "Since the last event", Unit: "s",
			About:   "By worker, the newest that any indexer has seen. An idle worker is quiet by right.",
			Queries: []Query{{Expr: `time() - max by (worker) (warmroute_kv_stream_last_event_timestamp_seconds{job=~"$job"})`, Legend: "{{worker}}"}}},
		{Title: "Workers that never publish", Unit: "short",
			About:   "1 for a worker that serves requests and has never published a KV event: see troubleshooting.md.",
			Queries: []Query{{Expr: `max by (worker) (warmroute_worker_silent{job=~"$job"})`, Legend: "{{worker}}"}}},
		{Title: "Redis settings that lose the index", Kind: "stat", Width: 4, Unit: "short",
			About:   "Has to be 0: see operations.md.",
			Queries: []Query{{Expr: `max(warmroute_index_setting_problems{job=~"$job"})`, Legend: "problems"}}},
		{Title: "Checks of the index", Unit: "short",
			About:   "By result: repaired means that Redis had lost something, see operations.md.",
			Queries: []Query{{Expr: `sum by (result) (increase(warmroute_index_checks_total{job=~"$job"}[3h]))`, Legend: "{{result}}"}}},
		{Title: "CPU", Width: 6, Unit: "short",
			About:   "Cores, by process.",
			Queries: []Query{{Expr: `rate(process_cpu_seconds_total{job=~"$job"}` + rate + ")", Legend: "{{instance}}"}}},
		{Title: "Memory", Width: 6, Unit: "bytes",
			About:   "Resident, by process.",
			Queries: []Query{{Expr: `process_resident_memory_bytes{job=~"$job"}`, Legend: "{{instance}}"}}},
	}},
}

// Dashboard is the content of dashboard.json, to be imported into Grafana 10 or later.
func Dashboard() ([]byte, error) {
	type object = map[string]any
	source := object{"type": "prometheus", "uid": "${datasource}"}
	panels, y, id := []object{}, 0, 0
	for _, row := range Rows {
		id++
		panels = append(panels, object{"id": id, "type": "row", "title": row.Title, "collapsed": false, "panels": []any{},
			"gridPos": object{"x": 0, "y": y, "w": 24, "h": 1}})
		y++
		x := 0
		for _, p := range row.Panels {
			kind, width := p.Kind, p.Width
			if kind == "" {
				kind = "timeseries"
			}
			if width == 0 {
				width = 8
			}
			if x+width > 24 {
				x, y = 0, y+8
			}
			about := p.About
			targets := []object{}
			for i, q := range p.Queries {
				t := object{"refId": string(rune('A' + i)), "datasource": source, "expr": q.Expr, "legendFormat": q.Legend, "range": true}
				if kind == "heatmap" {
					t["format"] = "heatmap"
				}
				targets = append(targets, t)
				if q.Quiet != "" && i == 0 {
					about += " May be empty: " + q.Quiet + "."
				}
			}
			id++
			panels = append(panels, object{
				"id": id, "type": kind, "title": p.Title, "description": about, "datasource": source, "targets": targets,
				"gridPos":     object{"x": x, "y": y, "w": width, "h": 8},
				"fieldConfig": object{"defaults": object{"unit": p.Unit}, "overrides": []any{}},
				"options":     object{},
			})
			x += width
		}
		y += 8
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	err := enc.Encode(object{
		"uid": "warmroute", "title": "warmroute", "tags": []string{"warmroute"}, "schemaVersion": 39, "version": 1,
		"editable": true, "refresh": "30s", "timezone": "browser", "time": object{"from": "now-1h", "to": "now"},
		"templating": object{"list": []object{
			{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
			{"name": "job", "label": "Jobs", "type": "textbox", "query": "warmroute.*",
				"current": object{"text": "warmroute.*", "value": "warmroute.*"}},
		}},
		"annotations": object{"list": []object{{
			"name": "Links", "enable": true, "iconColor": "red", "datasource": source,
			"expr": `changes(warmroute_index_link_up{job=~"$job"}[1m]) > 0`, "titleFormat": "{{instance}}: link of {{shard}}",
		}}},
		"panels": panels,
	})
	return b.Bytes(), err
}
