package integration

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/frontend/tracing"
	"github.com/warmroute/warmroute/indexer"
	"github.com/warmroute/warmroute/store"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

const metricsHead = `# Metrics

What frontends (at ` + "`--listen`) and indexers (at `--admin-listen`) serve at `/metrics`" + `, beside those of the Go runtime and the process. ` + "`serve`" + `
has all of them at both. Labels have closed sets of values: routes, reasons, names of configured pools and workers. Counters begin with their first event.
A [dashboard](monitoring/dashboard.json) and [alerts](monitoring/alerts.yaml) use them.

This page is made from what the program registers (` + "`make docs`" + `), and a test says when it is out of date.
`

var descHelp = regexp.MustCompile(`help: "((?:[^"\\]|\\.)*)"`)

// metricsPage is docs/metrics.md.
func metricsPage(t *testing.T) []byte {
	t.Helper()
	b := bytes.NewBufferString(metricsHead)
	section := func(title string, register func(r *recorder)) {
		r := &recorder{Registry: prometheus.NewRegistry()}
		register(r)
		lines := map[string]string{}
		for _, c := range r.collectors {
			descs := make(chan *prometheus.Desc)
			go func() {
				defer close(descs)
				c.Describe(descs)
			}()
			kind := "gauge"
			switch c.(type) {
			case *prometheus.CounterVec, prometheus.Counter:
				if _, gauge := c.(prometheus.Gauge); !gauge {
					kind = "counter"
				}
			case *prometheus.HistogramVec, prometheus.Histogram:
				kind = "histogram"
			}
			for d := range descs {
				name, labels, help := descName.FindStringSubmatch(d.String()), descLabels.FindStringSubmatch(d.String()), descHelp.FindStringSubmatch(d.String())
				if name == nil || labels == nil || help == nil || !strings.HasPrefix(name[1], "warmroute_") {
					continue
				}
				of := "`" + strings.ReplaceAll(labels[1], ",", "`, `") + "`"
				if labels[1] == "" {
					of = ""
				}
				lines[name[1]] = fmt.Sprintf("| `%s` | %s | %s | %s |\n", name[1], kind, of, strings.ReplaceAll(help[1], "|", "\\|"))
			}
		}
		fmt.Fprintf(b, "\n## %s\n\n| name | type | labels | meaning |\n|---|---|---|---|\n", title)
		for _, name := range slices.Sorted(maps.Keys(lines)) {
			b.WriteString(lines[name])
		}
	}
	newStore := func(reg prometheus.Registerer) *store.Store {
		s, err := store.New(store.Options{URL: "redis://127.0.0.1:1", Registerer: reg})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	section("Both: the index", func(r *recorder) { newStore(r) })
	section("Frontends", func(r *recorder) {
		if _, err := frontend.New(frontend.Options{Index: newStore(nil), Registerer: r, Gatherer: r}); err != nil {
			t.Fatal(err)
		}
	})
	section("Frontends that trace requests", func(r *recorder) {
		t.Setenv("OTEL_SDK_DISABLED", "")
		t.Setenv("OTEL_TRACES_EXPORTER", "")
		if _, err := tracing.New(t.Context(), tracing.Options{Endpoint: "http://127.0.0.1:1", Registerer: r}); err != nil {
			t.Fatal(err)
		}
	})
	section("Indexers", func(r *recorder) {
		ix, err := indexer.New(indexer.Options{Store: newStore(nil), Listen: "127.0.0.1:0", Registerer: r, Gatherer: r})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ix.Close() })
	})
	return b.Bytes()
}

func TestMetricsPageIsUpToDate(t *testing.T) {
	const page = "../docs/metrics.md"
	want := metricsPage(t)
	if *update {
		if err := os.WriteFile(page, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("docs/metrics.md is not what the packages register: run make docs")
	}
	families := registered(t)
	for name := range families {
		if strings.HasPrefix(name, "warmroute_") && !strings.Contains(string(got), "`"+name+"`") {
			t.Errorf("docs/metrics.md lacks %s", name)
		}
	}
}
