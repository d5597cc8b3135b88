package integration

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	dashboard "github.com/warmroute/warmroute/docs/monitoring"
)

// prometheusServer is a real Prometheus that scrapes one process.
type prometheusServer struct {
	t    *testing.T
	base string
}

// startPrometheus starts Debian's Prometheus on a scrape target and rules, both of its own making.
func startPrometheus(t *testing.T, target, rules string) *prometheusServer {
	t.Helper()
	if _, err := exec.LookPath("prometheus"); err != nil {
		needs(t, "prometheus")
	}
	dir := t.TempDir()
	config := fmt.Sprintf(`
global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}
rule_files: [rules.yaml]
scrape_configs:
  - job_name: warmroute
    static_configs: [{targets: [%q]}]
`, strings.TrimPrefix(target, "http://"))
	for name, text := range map[string]string{"prometheus.yaml": config, "rules.yaml": rules} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	address := "127.0.0.1:" + freePort(t)
	cmd := exec.Command("prometheus", "--config.file="+filepath.Join(dir, "prometheus.yaml"), "--web.listen-address="+address,
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--log.level=warn")
	startCommand(t, "prometheus", cmd)
	p := &prometheusServer{t, "http://" + address}
	eventually(t, "Prometheus is ready", func() bool { return status(t, p.base+"/-/ready") == http.StatusOK })
	return p
}

func (p *prometheusServer) get(path string, v any) {
	p.t.Helper()
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	getJSON(p.t, p.base+path, &answer)
	if answer.Status != "success" {
		p.t.Fatalf("%s: %s", path, answer.Error)
	}
	if err := json.Unmarshal(answer.Data, v); err != nil {
		p.t.Fatalf("%s: %v", path, err)
	}
}

// values are the results of an expression now, without those that are no numbers.
func (p *prometheusServer) values(expr string) []float64 {
	p.t.Helper()
	var data struct {
		Result []struct{ Value [2]any }
	}
	p.get("/api/v1/query?query="+url.QueryEscape(expr), &data)
	var values []float64
	for _, r := range data.Result {
		if v, err := strconv.ParseFloat(fmt.Sprint(r.Value[1]), 64); err == nil && v == v {
			values = append(values, v)
		}
	}
	return values
}

// firing are the alerts that fire now, but for the one that speaks of the speed of the machine.
func (p *prometheusServer) firing() []string {
	p.t.Helper()
	var data struct {
		Alerts []struct {
			State  string
			Labels map[string]string
		}
	}
	p.get("/api/v1/alerts", &data)
	names := map[string]bool{}
	for _, a := range data.Alerts {
		if a.State == "firing" && a.Labels["alertname"] != "WarmrouteLookupSlow" {
			names[a.Labels["alertname"]] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

var (
	forClause = regexp.MustCompile(`(?m)^(\s+for: )(\d+)m$`)
	window    = regexp.MustCompile(`\[(\d+)m\]`)
)

// hurried is alerts.yaml with every time divided, but for windows no shorter than a few scrapes.
func hurried(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../docs/monitoring/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	scale := func(re *regexp.Regexp, text, form string, group int, by, least int) string {
		return re.ReplaceAllStringFunc(text, func(s string) string {
			m := re.FindStringSubmatch(s)
			minutes, _ := strconv.Atoi(m[group])
			return fmt.Sprintf(form, strings.TrimSuffix(m[1], m[group]), max(minutes*60/by, least))
		})
	}
	out := scale(forClause, string(text), "%s%ds", 2, 100, 1)
	out = scale(window, out, "[%s%ds]", 1, 20, 6)
	if strings.Contains(out, "for: 5m") || strings.Contains(out, "[5m]") {
		t.Fatal("some times are as they were")
	}
	return out
}

// load keeps asking a frontend until the test ends. Answers are not looked at: engines will fail.
func load(t *testing.T, frontend string) {
	var all sync.WaitGroup
	stop := make(chan struct{})
	for i := range 8 {
		all.Go(func() {
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-tick.C:
				}
				body := fmt.Sprintf(`{"model": %q, "max_tokens": 10, "messages": [
					{"role": "system", "content": %q}, {"role": "user", "content": "question %d %s"}]}`,
					model, longPrompt(fmt.Sprint("conversation ", i)).Content, n, strings.Repeat("why ", 40)) // never asked before: new blocks
				if resp, err := http.Post(frontend+"/v1/chat/completions", "application/json", strings.NewReader(body)); err == nil {
					_ = resp.Body.Close()
				}
			}
		})
	}
	t.Cleanup(func() {
		close(stop)
		all.Wait()
	})
}

// unseen are the series that rules and panels speak of and that this test cannot bring about, with the reason.
var unseen = map[string]string{
	`warmroute_index_fallbacks_total{reason="pool_exhausted"}`: "needs thousands of requests per second",
	`warmroute_index_fallbacks_total{reason="corrupt"}`:        "needs a stranger who writes to the index",
	`warmroute_index_fallbacks_total{reason="tokenize"}`:       "needs engines that do not tokenize; counters begin with their first event",
	`warmroute_kv_stream_resets_total{reason="panic"}`:         "needs a fault in warmroute",
	`warmroute_kv_event_errors_total`:                          "needs an engine that sends rubbish; counters begin with their first event",
	`warmroute_load_fallbacks_total`:                           "needs a Redis that answers lookups and no choices",
	`warmroute_requests_total{index_state="partial"}`:          "needs several shards",
	`warmroute_kv_events_total{result=~"orphan|skipped"}`:      "needs an engine whose events cannot be indexed",
}

// A real Prometheus scrapes a running warmroute: every panel of the dashboard has data, every rule speaks of series that exist, no alert
// fires while all is well, the right ones fire while Redis is away, and stop when it is back.
func TestMonitoringOnPrometheus(t *testing.T) {
	redis := startRedis(t)
	// Answers take a while, and the frontend is slow to notice, so that a crash meets requests under way and new ones; the budget
	// is long, so that a busy machine is no outage.
	e0, e1 := startEngine(t, "w0", "--decode-per-token=30ms"), startEngine(t, "w1", "--decode-per-token=30ms")
	serve, frontend := startServe(t, append(workers(e0, e1), "--redis="+redis.url(), "--lease-interval=500ms", "--poll-interval=2s", "--lookup-budget=2s")...)
	prometheus := startPrometheus(t, frontend, hurried(t))
	load(t, frontend)

	// All is well.
	for _, row := range dashboard.Rows {
		for _, panel := range row.Panels {
			for _, q := range panel.Queries {
				expr := dashboardExpr(q.Expr)
				if q.Quiet != "" {
					prometheus.values(expr) // it has to be understood
					continue
				}
				eventually(t, fmt.Sprintf("panel %q has data: %s", panel.Title, expr), func() bool { return len(prometheus.values(expr)) > 0 })
			}
		}
	}
	for _, a := range alerts(t) {
		prometheus.values(a.Expr) // it has to be understood with the windows that it really has
	}
	if got := prometheus.firing(); len(got) > 0 {
		t.Errorf("nothing is wrong, and these fire: %v", got)
	}

	// Redis goes.
	redis.stop()
	outage := []string{"WarmrouteIndexDegraded", "WarmrouteIndexLinkDown", "WarmrouteIndexProbesFailing", "WarmrouteIndexerNotApplying"}
	eventually(t, fmt.Sprint("during the outage these fire: ", outage), func() bool { return slices.Equal(prometheus.firing(), outage) })

	// It comes back, and so does silence.
	redis.start()
	eventually(t, "no alert fires any more", func() bool { return len(prometheus.firing()) == 0 })

	// An engine loses events, another crashes under load and comes back: now the rest of the panels has data.
	postJSON(t, e0.base+"/sim/drop_events", map[string]any{"n": 3}, nil)
	postJSON(t, e1.base+"/sim/crash", map[string]any{"restart_after_ms": 3000}, nil)
	eventually(t, "the stream of a crashed engine shows", func() bool {
		return slices.Contains(prometheus.values(`warmroute_kv_streams{state="disconnected"}`), 1)
	})
	for _, row := range dashboard.Rows {
		for _, panel := range row.Panels {
			for _, q := range panel.Queries {
				name := selector.FindString(strings.ReplaceAll(dashboardExpr(q.Expr), "process_", ""))
				metric, _, _ := strings.Cut(name, "{")
				if _, ok := unseen[metric]; ok || q.Quiet == "" {
					continue
				}
				eventually(t, fmt.Sprintf("panel %q has data after faults: %s", panel.Title, name), func() bool { return len(prometheus.values(name)) > 0 })
			}
		}
	}

	// All engines die.
	e0.kill()
	e1.kill()
	await := func(names ...string) {
		t.Helper()
		eventually(t, fmt.Sprint("these fire: ", names), func() bool {
			firing := prometheus.firing()
			return !slices.ContainsFunc(names, func(name string) bool { return !slices.Contains(firing, name) })
		})
	}
	await("WarmrouteNoWorker", "WarmrouteStreamDisconnected")
	for _, a := range alerts(t) {
		for _, s := range selector.FindAllString(a.Expr, -1) {
			if _, ok := unseen[s]; ok {
				continue
			}
			eventually(t, a.Alert+": there is "+s, func() bool { return len(prometheus.values(s)) > 0 })
		}
	}

	// And warmroute itself.
	serve.kill()
	await("WarmrouteNoIndexer", "WarmrouteTargetDown")
}

// dashboardExpr is an expression with Grafana's variables filled in.
func dashboardExpr(expr string) string {
	return strings.NewReplacer("$job", "warmroute.*", "$__rate_interval", "5s").Replace(expr)
}

// The dashboard names only what the code registers.
func TestDashboardNamesWhatIsRegistered(t *testing.T) {
	families, source := registered(t), literals(t)
	for _, row := range dashboard.Rows {
		for _, panel := range row.Panels {
			for _, q := range panel.Queries {
				for _, w := range misnamed(families, alert{Expr: q.Expr}, source) {
					t.Errorf("panel %q: nothing registers %s", panel.Title, w)
				}
			}
		}
	}
}
