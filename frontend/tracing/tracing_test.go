package tracing

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/trace"

	"github.com/warmroute/warmroute/frontend/tracing/tracingtest"
)

// plainly takes the variables away that the machine may have set.
func plainly(t *testing.T) {
	for _, v := range []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL",
		"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME",
		"OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPORTER_OTLP_HEADERS"} {
		t.Setenv(v, "")
	}
}

func TestOffUnlessAReceiverIsNamed(t *testing.T) {
	const receiver = "http://127.0.0.1:4318"
	for _, c := range []struct {
		endpoint string
		env      string
		on       bool
	}{
		{"", "", false},
		{receiver, "", true},
		{"", "OTEL_EXPORTER_OTLP_ENDPOINT=" + receiver, true},
		{"", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=" + receiver + "/v1/traces", true},
		{receiver, "OTEL_SDK_DISABLED=true", false},
		{receiver, "OTEL_TRACES_EXPORTER=none", false},
		{receiver, "OTEL_TRACES_EXPORTER=console", false},
		{receiver, "OTEL_TRACES_EXPORTER=console,otlp", true},
		{"", "OTEL_TRACES_EXPORTER=otlp", false}, // the machine's own port is nobody's choice
	} {
		t.Run(c.endpoint+" "+c.env, func(t *testing.T) {
			plainly(t)
			if name, value, ok := strings.Cut(c.env, "="); ok {
				t.Setenv(name, value)
			}
			p, err := New(t.Context(), Options{Endpoint: c.endpoint})
			if err != nil || (p != nil) != c.on {
				t.Errorf("%v, %v, want on: %v", p, err, c.on)
			}
		})
	}
}

func TestWrongSettingsAreNamed(t *testing.T) {
	for _, c := range []struct {
		endpoint, env string
		ratio         float64
		want          string
	}{
		{"collector:4318", "", 1, "want a URL, such as http://127.0.0.1:4318"},
		{"ftp://collector", "", 1, "want a URL"},
		{"http://", "", 1, "want a URL"},
		{"http://user:secret@collector:4318", "", 1, "OTEL_EXPORTER_OTLP_HEADERS"},
		{"", "OTEL_EXPORTER_OTLP_ENDPOINT=collector:4317", 1, "OTEL_EXPORTER_OTLP_ENDPOINT: "},
		{"http://collector:4318", "", 1.5, "ratio 1.5: want 0 to 1"},
		{"http://collector:4318", "", -0.1, "want 0 to 1"},
	} {
		t.Run(c.endpoint+c.env, func(t *testing.T) {
			plainly(t)
			if name, value, ok := strings.Cut(c.env, "="); ok {
				t.Setenv(name, value)
			}
			p, err := New(t.Context(), Options{Endpoint: c.endpoint, Ratio: &c.ratio})
			if p != nil || err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") {
				t.Errorf("%v, %v, want %q", p, err, c.want)
			}
		})
	}
}

// run starts a pipeline; what it returns ends it and waits for what is left.
func run(t *testing.T, p *Pipeline) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// Spans arrive over HTTP and gRPC, by a setting or by the standard variables, and the last ones as the pipeline ends.
func TestSpansArrive(t *testing.T) {
	for _, c := range []struct {
		name    string
		start   func(testing.TB) *tracingtest.Receiver
		setting string // "" = by variable
		env     []string
	}{
		{"http", tracingtest.HTTP, "%s", nil},
		{"http below a path", tracingtest.HTTP, "%s/otlp/", nil},
		{"http by variable", tracingtest.HTTP, "", []string{"OTEL_EXPORTER_OTLP_ENDPOINT=%s", "OTEL_EXPORTER_OTLP_HEADERS=x-key=s3cret", "OTEL_EXPORTER_OTLP_COMPRESSION=gzip"}},
		{"http by the variable of traces", tracingtest.HTTP, "", []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=%s/v1/traces", "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:1"}},
		{"the setting wins", tracingtest.HTTP, "%s", []string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_HEADERS=x-key=s3cret"}},
		{"grpc", tracingtest.GRPC, "%s", []string{"OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}},
		{"grpc by variable", tracingtest.GRPC, "", []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc", "OTEL_EXPORTER_OTLP_ENDPOINT=%s"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			plainly(t)
			r := c.start(t)
			fill := func(s string) string { return strings.ReplaceAll(s, "%s", r.URL) }
			for _, e := range c.env {
				name, value, _ := strings.Cut(fill(e), "=")
				t.Setenv(name, value)
			}
			t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
			p, err := New(t.Context(), Options{Endpoint: fill(c.setting), Service: "warmroute-frontend", Version: "v1"})
			if err != nil || p == nil {
				t.Fatal(p, err)
			}
			end := run(t, p)
			ctx, parent := p.Tracer().Start(t.Context(), "request")
			_, child := p.Tracer().Start(ctx, "lookup", trace.WithSpanKind(trace.SpanKindClient))
			child.End()
			parent.End()
			end()
			got := r.Trace(t, parent.SpanContext().TraceID().String(), map[string]int{"request": 1, "lookup": 1})
			if p := got["request"][0]; got["lookup"][0].Parent() != p.ID() || p.Parent() != "" {
				t.Errorf("not parent and child: %v", got)
			}
			of := got["request"][0].Resource
			if of["service.name"] != "warmroute-frontend" || of["service.version"] != "v1" || of["deployment.environment.name"] != "test" ||
				of["service.instance.id"] == "" || of["host.name"] == "" {
				t.Errorf("resource %v", of)
			}
			if h := r.Header(); h != nil && strings.Contains(strings.Join(c.env, " "), "x-key") && h.Get("x-key") != "s3cret" {
				t.Errorf("header %v", h)
			}
		})
	}
}

func TestServiceNameOfTheVariableWins(t *testing.T) {
	plainly(t)
	t.Setenv("OTEL_SERVICE_NAME", "edge")
	r := tracingtest.HTTP(t)
	p, err := New(t.Context(), Options{Endpoint: r.URL, Service: "warmroute"})
	if err != nil {
		t.Fatal(err)
	}
	end := run(t, p)
	_, s := p.Tracer().Start(t.Context(), "request")
	s.End()
	end()
	if s := r.Spans(); len(s) != 1 || s[0].Resource["service.name"] != "edge" {
		t.Errorf("%v", s)
	}
}

// The caller's decision counts where there is one; the ratio is for traces that begin here.
func TestSampling(t *testing.T) {
	parent := func(flags trace.TraceFlags) trace.SpanContext {
		return trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: flags, Remote: true})
	}
	all, none, half := 1.0, 0.0, 0.5
	for _, c := range []struct {
		name     string
		ratio    *float64
		env, arg string
		parent   trace.SpanContext
		from, to int // of 400 spans
	}{
		{"all by default", nil, "", "", trace.SpanContext{}, 400, 400},
		{"none", &none, "", "", trace.SpanContext{}, 0, 0},
		{"half", &half, "", "", trace.SpanContext{}, 100, 300}, // ten times the standard deviation
		{"none, but the caller's", &none, "", "", parent(trace.FlagsSampled), 400, 400},
		{"all, but not the caller's", &all, "", "", parent(0), 0, 0},
		{"by variable", nil, "always_off", "", trace.SpanContext{}, 0, 0},
		{"by variable, whatever the caller wants", nil, "traceidratio", "0", parent(trace.FlagsSampled), 0, 0},
		{"the setting wins", &all, "always_off", "", trace.SpanContext{}, 400, 400},
	} {
		t.Run(c.name, func(t *testing.T) {
			plainly(t)
			t.Setenv("OTEL_TRACES_SAMPLER", c.env)
			t.Setenv("OTEL_TRACES_SAMPLER_ARG", c.arg)
			r := tracingtest.HTTP(t)
			p, err := New(t.Context(), Options{Endpoint: r.URL, Ratio: c.ratio})
			if err != nil {
				t.Fatal(err)
			}
			end := run(t, p)
			for range 400 {
				_, s := p.Tracer().Start(trace.ContextWithRemoteSpanContext(t.Context(), c.parent), "request")
				s.End()
			}
			end()
			if n := len(r.Spans()); n < c.from || n > c.to {
				t.Errorf("%d spans of 400, want %d to %d", n, c.from, c.to)
			}
		})
	}
}

// Variables may hold passwords. One that cannot be read is named in the log, and not shown.
func TestLogHoldsNoHeader(t *testing.T) {
	plainly(t)
	var log bytes.Buffer
	r := tracingtest.HTTP(t)
	for _, headers := range []string{"authorization-s3cret", "authorization=Bearer%zzs3cret"} {
		t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
		log.Reset()
		if _, err := New(t.Context(), Options{Endpoint: r.URL, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}); err != nil {
			t.Fatal(err)
		}
		if text := log.String(); !strings.Contains(text, "header") || strings.Contains(text, "s3cret") {
			t.Errorf("log: %s", text)
		}
	}
}

// What a receiver refuses is counted, and the log shows the beginning of what it says.
func TestReceiverThatRefuses(t *testing.T) {
	plainly(t)
	var log bytes.Buffer
	r := tracingtest.HTTP(t)
	r.Answer = func(*http.Request) int { return http.StatusForbidden }
	reg := newRegistry()
	p, err := New(t.Context(), Options{Endpoint: r.URL, Logger: slog.New(slog.NewTextHandler(&log, nil)), Registerer: reg})
	if err != nil {
		t.Fatal(err)
	}
	end := run(t, p)
	for i := range 3 {
		_, s := p.Tracer().Start(t.Context(), fmt.Sprint(i))
		s.End()
	}
	end()
	if got := reg.counts(t); got != "sent 0, queue_full 0, send 3" {
		t.Error(got)
	}
	if text := log.String(); strings.Count(text, "\n") != 2 || !strings.Contains(text, "requests are traced") || !strings.Contains(text, "403") {
		t.Errorf("log: %s", text)
	}
}

// A receiver that takes a part of a batch says so, and what it took counts as sent; one that has only something to say has taken all of it.
func TestReceiverThatTakesAPart(t *testing.T) {
	for name, start := range map[string]func(testing.TB) *tracingtest.Receiver{"http": tracingtest.HTTP, "grpc": tracingtest.GRPC} {
		for _, c := range []struct {
			rejected  int64
			complaint string
			counts    string
			line      string
		}{
			{2, "too old (9 spans rejected)", "sent 3, queue_full 0, send 2", "too old"},
			{2, "", "sent 3, queue_full 0, send 2", "spans are dropped"},
			{5, "all", "sent 0, queue_full 0, send 5", "spans are dropped"},
			{99, "beyond reason", "sent 0, queue_full 0, send 5", "spans are dropped"},
			{-1, "beyond reason", "sent 5, queue_full 0, send 0", ""},
			{0, "soon to be deprecated", "sent 5, queue_full 0, send 0", ""},
		} {
			t.Run(fmt.Sprint(name, " ", c.rejected), func(t *testing.T) {
				plainly(t)
				t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", map[string]string{"grpc": "grpc"}[name])
				r := start(t)
				r.Rejected, r.Complaint = c.rejected, c.complaint
				reg, log := newRegistry(), &logBuffer{}
				p, err := New(t.Context(), Options{Endpoint: r.URL, Registerer: reg, Logger: slog.New(slog.NewTextHandler(log, nil))})
				if err != nil {
					t.Fatal(err)
				}
				end := run(t, p)
				for range 5 {
					_, s := p.Tracer().Start(t.Context(), "request")
					s.End()
				}
				end()
				if got := reg.counts(t); got != c.counts {
					t.Errorf("%s, want %s", got, c.counts)
				}
				if text := log.String(); c.line == "" && strings.Contains(text, "WARN") || !strings.Contains(text, c.line) {
					t.Errorf("want %q in the log:\n%s", c.line, text)
				}
			})
		}
	}
}
