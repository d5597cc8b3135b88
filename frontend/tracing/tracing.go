// Package tracing sends spans to a receiver by OTLP, the protocol of OpenTelemetry.
//
// # Guarantees
//
// Whoever ends a span never waits: it goes into a queue of bounded length, or is dropped where that is full. One goroutine
// sends what is queued, a batch at a time. Spans that were dropped, because the queue was full or because the receiver is away or
// refuses them, are counted; the log has one line as that begins and one as it ends. Memory is bounded by the queue and one batch.
//
// Nothing here asks Redis, and nothing here knows what the spans are of.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Options configures a Pipeline. What it does not say, the standard variables OTEL_EXPORTER_OTLP_… say (headers, certificates,
// compression, timeout, protocol), OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
type Options struct {
	// Endpoint is the receiver's base URL, such as http://127.0.0.1:4318; /v1/traces is added for OTLP over HTTP. Default: that of
	// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT.
	Endpoint string
	// Ratio is the share of traces that are recorded, 0 to 1, of those that begin here; for the others the caller has decided. Default: what
	// OTEL_TRACES_SAMPLER says, or else all.
	Ratio *float64
	// Service names the program, and Version its version, unless OTEL_SERVICE_NAME does.
	Service, Version string

	// Queue is how many spans wait at most. Default 2048.
	Queue int
	// Batch is how many spans are sent at a time, at most. Default 512.
	Batch int
	// Interval is how long a span waits for others to fill a batch. Default 1 s.
	Interval time.Duration
	// SendTimeout bounds the sending of one batch, repetitions included. Default 10 s.
	SendTimeout time.Duration
	// FlushTimeout bounds the sending of what is left at the end. Default 2 s.
	FlushTimeout time.Duration
	// Quiet is for how long no span must have been dropped before the log says that all is well again. Default 10 s.
	Quiet time.Duration

	// Logger is the logger. Default: discard.
	Logger *slog.Logger
	// Registerer gets the metrics. Default: they are not registered.
	Registerer prometheus.Registerer
}

// Pipeline makes spans and sends them, once it runs.
type Pipeline struct {
	o        Options
	metrics  *metrics
	exporter sdk.SpanExporter
	provider *sdk.TracerProvider
	queue    chan sdk.ReadOnlySpan

	losing atomic.Bool  // the log has said so
	lost   atomic.Int64 // spans since then
	lastly atomic.Int64 // when the last one was, in ns since 1970
}

// New makes a Pipeline. It contacts nobody: the receiver may be away. Without a receiver, or where OTEL_SDK_DISABLED or
// OTEL_TRACES_EXPORTER=none say so, there is none: nil and no error.
func New(ctx context.Context, o Options) (*Pipeline, error) {
	protocol := firstOf("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
	endpoint, variable := o.Endpoint, ""
	if endpoint == "" {
		endpoint, variable = named("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
	}
	if endpoint == "" || disabled() {
		return nil, nil
	}
	if err := checkEndpoint(endpoint, protocol); err != nil {
		if variable != "" {
			err = fmt.Errorf("%s: %w", variable, err)
		}
		return nil, err
	}
	if r := o.Ratio; r != nil && !(*r >= 0 && *r <= 1) {
		return nil, fmt.Errorf("ratio %v: want 0 to 1", *r)
	}
	o.complete()
	quietLibrary(o.Logger)
	exporter, err := newExporter(ctx, o.Endpoint, protocol)
	if err != nil {
		return nil, fmt.Errorf("traces: %w", err)
	}
	o.Logger.Info("requests are traced", "receiver", endpoint)
	return newPipeline(ctx, o, exporter), nil
}

func (o *Options) complete() {
	orDefault(&o.Queue, 2048)
	orDefault(&o.Batch, 512)
	orDefault(&o.Interval, time.Second)
	orDefault(&o.SendTimeout, 10*time.Second)
	orDefault(&o.FlushTimeout, 2*time.Second)
	orDefault(&o.Quiet, 10*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

func orDefault[T int | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

func newPipeline(ctx context.Context, o Options, exporter sdk.SpanExporter) *Pipeline {
	p := &Pipeline{o: o, exporter: exporter, queue: make(chan sdk.ReadOnlySpan, o.Queue), metrics: newMetrics(o.Registerer)}
	r, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithHost(), resource.WithService(),
		resource.WithAttributes(attribute.String("service.name", o.Service), attribute.String("service.version", o.Version)),
		resource.WithFromEnv())
	if err != nil { // what could be read of it is there
		o.Logger.Warn("not all that describes this process can be put into its traces", "error", err)
	}
	options := []sdk.TracerProviderOption{sdk.WithResource(r), sdk.WithSpanProcessor(processor{p}), sdk.WithoutPanicRecording()}
	if o.Ratio != nil {
		options = append(options, sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(*o.Ratio))))
	}
	p.provider = sdk.NewTracerProvider(options...)
	return p
}

// Tracer makes spans.
func (p *Pipeline) Tracer() trace.Tracer { return p.provider.Tracer("github.com/warmroute/warmroute") }

// named is the first variable that is set, and its name.
func named(variables ...string) (value, variable string) {
	for _, v := range variables {
		if value := strings.TrimSpace(os.Getenv(v)); value != "" {
			return value, v
		}
	}
	return "", ""
}

func firstOf(variables ...string) string {
	value, _ := named(variables...)
	return value
}

// disabled says whether the standard variables want no traces, or none by OTLP.
func disabled() bool {
	exporters := firstOf("OTEL_TRACES_EXPORTER")
	return strings.EqualFold(firstOf("OTEL_SDK_DISABLED"), "true") || exporters != "" && !slices.Contains(strings.Split(exporters, ","), "otlp")
}

const overGRPC = "grpc"

func checkEndpoint(endpoint, protocol string) error {
	u, err := url.Parse(endpoint)
	if err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" {
		if u.User != nil { // nobody would send it
			return errors.New("the URL of the receiver of traces cannot hold a password: put it into OTEL_EXPORTER_OTLP_HEADERS")
		}
		return nil
	}
	if protocol == overGRPC {
		return fmt.Errorf("%q: want a URL, such as http://127.0.0.1:4317", endpoint)
	}
	return fmt.Errorf("%q: want a URL, such as http://127.0.0.1:4318", endpoint)
}

// newExporter takes an endpoint where that does not come from a variable.
func newExporter(ctx context.Context, endpoint, protocol string) (*otlptrace.Exporter, error) {
	if protocol == overGRPC {
		var options []otlptracegrpc.Option
		if endpoint != "" {
			options = append(options, otlptracegrpc.WithEndpointURL(endpoint))
		}
		return otlptracegrpc.New(ctx, options...)
	}
	var options []otlptracehttp.Option
	if endpoint != "" {
		u, err := url.Parse(endpoint)
		if err != nil {
			return nil, err
		}
		u.Path = path.Join("/", u.Path, "v1/traces")
		options = append(options, otlptracehttp.WithEndpointURL(u.String()))
	}
	return otlptracehttp.New(ctx, options...)
}

// quietLibrary sends what the libraries would print on stderr to the log. The values that go with a message stay away: they may be those
// of a variable that holds a password.
func quietLibrary(log *slog.Logger) {
	otel.SetLogger(logr.New(librarySink{log}))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("tracing library", "error", err) }))
}

type librarySink struct{ log *slog.Logger }

// Init does nothing.
func (librarySink) Init(logr.RuntimeInfo) {}

// Enabled is true up to the library's level of warnings.
func (librarySink) Enabled(level int) bool { return level <= 1 }

// Info logs a warning.
func (s librarySink) Info(_ int, msg string, _ ...any) {
	s.log.Warn("tracing library", "message", msg)
}

// Error logs an error.
func (s librarySink) Error(err error, msg string, _ ...any) {
	s.log.Warn("tracing library", "message", msg, "error", err)
}

// WithValues keeps none.
func (s librarySink) WithValues(...any) logr.LogSink { return s }

// WithName keeps none.
func (s librarySink) WithName(string) logr.LogSink { return s }
