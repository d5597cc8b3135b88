package integration

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/indexer"
	"github.com/warmroute/warmroute/store"
)

const monitoring = "../docs/monitoring"

// alert is one rule of alerts.yaml.
type alert struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func readYAML(t *testing.T, name string, v any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(monitoring, name))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, v); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func alerts(t *testing.T) []alert {
	t.Helper()
	var file struct {
		Groups []struct {
			Rules []alert `yaml:"rules"`
		} `yaml:"groups"`
	}
	readYAML(t, "alerts.yaml", &file)
	var all []alert
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("alerts.yaml holds no alert")
	}
	return all
}

func TestAlertRulesPassPromtool(t *testing.T) {
	if _, err := exec.LookPath("promtool"); err != nil {
		needs(t, "promtool")
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yaml"}, {"test", "rules", "alerts_test.yaml"}} {
		cmd := exec.CommandContext(t.Context(), "promtool", args...)
		cmd.Dir = monitoring
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// Every alert is seen to fire, and not to fire where its series exist.
func TestEveryAlertHasTests(t *testing.T) {
	var file struct {
		Tests []struct {
			Rules []struct {
				Alert    string `yaml:"alertname"`
				Expected []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		} `yaml:"tests"`
	}
	readYAML(t, "alerts_test.yaml", &file)
	fires, silent := map[string]bool{}, map[string]bool{}
	for _, test := range file.Tests {
		for _, r := range test.Rules {
			if len(r.Expected) > 0 {
				fires[r.Alert] = true
			} else {
				silent[r.Alert] = true
			}
		}
	}
	for _, a := range alerts(t) {
		if !fires[a.Alert] || !silent[a.Alert] {
			t.Errorf("%s: tested to fire: %v, not to fire: %v", a.Alert, fires[a.Alert], silent[a.Alert])
		}
		delete(fires, a.Alert)
		delete(silent, a.Alert)
	}
	if len(fires)+len(silent) > 0 {
		t.Errorf("tests of alerts that do not exist: %v %v", fires, silent)
	}
}

// Every alert has a heading in operations.md with what it means, how to check and what to do, and no heading
// is of an alert that is gone.
func TestEveryAlertIsExplained(t *testing.T) {
	text, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for section := range strings.SplitSeq(string(text), "\n#") {
		heading, body, _ := strings.Cut(section, "\n")
		if name := strings.Trim(heading, "# "); strings.HasPrefix(name, "Warmroute") {
			sections[name] = body
		}
	}
	names := map[string]bool{}
	for _, a := range alerts(t) {
		if names[a.Alert] {
			t.Errorf("%s exists twice", a.Alert)
		}
		names[a.Alert] = true
		if got, want := a.Annotations["runbook_url"], "../operations.md#"+strings.ToLower(a.Alert); got != want {
			t.Errorf("%s: runbook_url %q, want %q", a.Alert, got, want)
		}
		if a.Annotations["summary"] == "" {
			t.Errorf("%s has no summary", a.Alert)
		}
		if s := a.Labels["severity"]; s != "critical" && s != "warning" {
			t.Errorf("%s: severity %q", a.Alert, s)
		}
		for _, part := range []string{"**Meaning.**", "**Check.**", "**Action.**"} {
			if !strings.Contains(sections[a.Alert], part) {
				t.Errorf("operations.md: the section of %s lacks %s", a.Alert, part)
			}
		}
	}
	for name := range sections {
		if !names[name] {
			t.Errorf("operations.md explains %s, which does not exist", name)
		}
	}
}

// The commands of "What to look at first" work, and show what the page says.
func TestFirstLookCommandsWork(t *testing.T) {
	for _, program := range []string{"curl", "redis-cli"} {
		if _, err := exec.LookPath(program); err != nil {
			needs(t, program)
		}
	}
	text, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "```sh\n")
	commands, _, ok := strings.Cut(rest, "```")
	if !ok {
		t.Fatal("operations.md has no shell commands")
	}
	redis := startRedis(t)
	e0 := startEngine(t, "e0")
	_, indexer := startIndexer(t, redis.url(), workers(e0)...)
	_, frontend := startFrontend(t, redis.url(), append(workers(e0), "--predict-ttl=0s")...) // an overlap is the work of events
	system, question := longPrompt("grapes"), message{"user", "what is it?"}
	awaitOverlap(t, frontend, "e0", chat(t, frontend, system, question), system, question)
	cmd := exec.CommandContext(t.Context(), "bash", "-eo", "pipefail", "-c", commands)
	cmd.Env = append(os.Environ(), "FRONTEND="+frontend, "INDEXER="+indexer, "REDIS="+redis.url(), "PATH="+filepath.Dir(warmroute)+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{`"worker/e0"`, `"index/`, `"in_flight"`, `"registered":1`, `"watermark"`, `"last_event"`, "sound (1 stream", "maxmemory_policy:noeviction", "evicted_keys:0"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%s is not in the output:\n%s", want, out)
		}
	}
}

// family is a metric that the code registers.
type family struct {
	labels    []string
	histogram bool
}

// recorder is a registry that remembers what it was given: a metric without samples shows nowhere else.
type recorder struct {
	*prometheus.Registry
	collectors []prometheus.Collector
}

func (r *recorder) Register(c prometheus.Collector) error {
	r.collectors = append(r.collectors, c)
	return r.Registry.Register(c)
}

func (r *recorder) MustRegister(cs ...prometheus.Collector) {
	for _, c := range cs {
		if err := r.Register(c); err != nil {
			panic(err)
		}
	}
}

var (
	descName   = regexp.MustCompile(`fqName: "([^"]+)"`)
	descLabels = regexp.MustCompile(`variableLabels: \{([^}]*)\}`)
)

// registered lists the metrics of all packages, and "up", which is Prometheus's own.
func registered(t *testing.T) map[string]family {
	t.Helper()
	r := &recorder{Registry: prometheus.NewRegistry()}
	s, err := store.New(store.Options{URL: "redis://127.0.0.1:1", Registerer: r})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	// Neither of these runs; each only binds an address.
	ix, err := indexer.New(indexer.Options{Store: s, Listen: "127.0.0.1:0", Registerer: r, Gatherer: r})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ix.Close() }()
	if _, err := frontend.New(frontend.Options{Index: s, Registerer: r, Gatherer: r}); err != nil {
		t.Fatal(err)
	}
	families := map[string]family{"up": {}}
	for _, c := range r.collectors {
		descs := make(chan *prometheus.Desc)
		go func() {
			defer close(descs)
			c.Describe(descs)
		}()
		for d := range descs {
			name, labels := descName.FindStringSubmatch(d.String()), descLabels.FindStringSubmatch(d.String())
			if name == nil || labels == nil {
				t.Fatalf("this test cannot read %s", d)
			}
			f := family{}
			if labels[1] != "" {
				f.labels = strings.Split(labels[1], ",")
			}
			switch c.(type) {
			case *prometheus.HistogramVec, prometheus.Histogram:
				f.histogram = true
				f.labels = append(f.labels, "le")
			}
			families[name[1]] = f
		}
	}
	return families
}

// find is the family that a series name belongs to.
func find(families map[string]family, series string) (family, bool) {
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		if f, ok := families[strings.TrimSuffix(series, suffix)]; ok && f.histogram && strings.HasSuffix(series, suffix) {
			return f, true
		}
	}
	f, ok := families[series]
	return f, ok && !f.histogram
}

var (
	selector  = regexp.MustCompile(`\b(warmroute_\w+|up)\b(?:\{([^}]*)\})?`)
	matcher   = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"`)
	grouping  = regexp.MustCompile(`\b(?:by|on)\s*\(([^)]*)\)`)
	reference = regexp.MustCompile(`\$labels\.(\w+)`)
)

// misnamed lists what of an alert no code registers.
func misnamed(families map[string]family, a alert, literals string) (wrong []string) {
	target := []string{"job", "instance"}
	known := slices.Clone(target)
	for _, m := range selector.FindAllStringSubmatch(a.Expr, -1) {
		f, ok := find(families, m[1])
		if !ok {
			wrong = append(wrong, "metric "+m[1])
			continue
		}
		known = append(known, f.labels...)
		for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
			if !slices.Contains(f.labels, l[1]) && !slices.Contains(target, l[1]) {
				wrong = append(wrong, "label "+l[1]+" of "+m[1])
			}
			if l[1] == "job" || l[1] == "code" {
				continue // the operator's names, and numbers
			}
			for value := range strings.SplitSeq(l[2], "|") {
				value, prefix := strings.CutSuffix(value, ".*")
				if quoted := `"` + value; !strings.Contains(literals, quoted+`"`) && !(prefix && strings.Contains(literals, quoted)) {
					wrong = append(wrong, fmt.Sprintf("value %q of label %s of %s", value, l[1], m[1]))
				}
			}
		}
	}
	names := reference.FindAllStringSubmatch(strings.Join(slices.Collect(maps.Values(a.Annotations)), " "), -1)
	for _, m := range grouping.FindAllStringSubmatch(a.Expr, -1) {
		for l := range strings.SplitSeq(m[1], ",") {
			names = append(names, []string{"", strings.TrimSpace(l)})
		}
	}
	for _, n := range names {
		if n[1] != "" && !slices.Contains(known, n[1]) {
			wrong = append(wrong, "label "+n[1])
		}
	}
	return wrong
}

// literals is the source code, in which every value of a label occurs as a text.
func literals(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, dir := range []string{"store", "frontend", "indexer", "kvcache"} {
		files, err := filepath.Glob("../" + dir + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatalf("no source in %s: %v", dir, err)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(text)
		}
	}
	return all.String()
}

func TestAlertsNameWhatIsRegistered(t *testing.T) {
	families, source := registered(t), literals(t)
	for _, a := range alerts(t) {
		for _, w := range misnamed(families, a, source) {
			t.Errorf("%s: nothing registers %s", a.Alert, w)
		}
	}
	// The check itself, on rules that are wrong.
	for expr, want := range map[string]string{
		`warmroute_index_link == 0`:                                       "metric warmroute_index_link",
		`warmroute_lookup_seconds > 1`:                                    "metric warmroute_lookup_seconds", // a histogram has no such series
		`warmroute_kv_streams_bucket > 1`:                                 "metric warmroute_kv_streams_bucket",
		`warmroute_kv_streams{status="live"} > 1`:                         "label status of warmroute_kv_streams",
		`warmroute_kv_streams{state=~"live|dead"} > 1`:                    `value "dead" of label state of warmroute_kv_streams`,
		`sum by (instance, kind) (rate(warmroute_kv_events_total[5m]))`:   "label kind",
		`sum by (le) (rate(warmroute_kv_stream_lag_seconds_bucket[5m]))`:  "",
		`warmroute_requests_total{endpoint=~"/v1/.*|/query", code="999"}`: "",
	} {
		if got := strings.Join(misnamed(families, alert{Expr: expr}, source), "; "); got != want {
			t.Errorf("%s: %q, want %q", expr, got, want)
		}
	}
}

// What the processes really serve agrees with what this test reads of the code.
func TestScrapedMetricsAreThoseRegistered(t *testing.T) {
	e0 := startEngine(t, "e0")
	p, url := startServe(t, workers(e0)...)
	chat(t, url, longPrompt("grapes"), message{"user", "what is it?"})
	families := registered(t)
	seen := map[string]bool{}
	for _, base := range []string{url, p.url("indexer")} {
		for line := range strings.SplitSeq(get(t, base+"/metrics"), "\n") {
			m := selector.FindStringSubmatch(line)
			if m == nil || strings.HasPrefix(line, "#") {
				continue
			}
			seen[m[1]] = true
			f, ok := find(families, m[1])
			if !ok {
				t.Errorf("%s is served and not registered by any package", m[1])
			}
			for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
				if !slices.Contains(f.labels, l[1]) {
					t.Errorf("%s has the label %s, expected only %v", m[1], l[1], f.labels)
				}
			}
		}
	}
	for _, name := range []string{"warmroute_requests_total", "warmroute_kv_streams", "warmroute_index_link_up", "warmroute_overlap_ratio_sum"} {
		if !seen[name] {
			t.Errorf("%s is not served after a request", name)
		}
	}
}
