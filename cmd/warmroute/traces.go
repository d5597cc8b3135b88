package main

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/warmroute/warmroute/frontend/tracing"
)

// traceOptions say where the spans of requests go.
type traceOptions struct {
	OTLPEndpoint string `name:"otlp-endpoint" placeholder:"URL" help:"Send a trace of each request there by OTLP, such as http://127.0.0.1:4318 (default: what OTEL_EXPORTER_OTLP_ENDPOINT says; without either, there are no traces)." group:"Traces and profiles"`
	TraceRatio   ratio  `placeholder:"N" help:"Share of the traces that begin here that are recorded, 0 to 1; for the others the client has decided, by its traceparent (default: what OTEL_TRACES_SAMPLER says, or else 1)." group:"Traces and profiles"`
}

// start begins to send spans, and stop ends it after the last ones. Without traces, the tracer is nil.
func (o traceOptions) start(ctx context.Context, logger *slog.Logger, reg prometheus.Registerer, service string) (t trace.Tracer, stop func(), err error) {
	p, err := tracing.New(ctx, tracing.Options{
		Endpoint: o.OTLPEndpoint, Ratio: o.TraceRatio.n, Service: service, Version: version(), Logger: logger, Registerer: reg,
	})
	switch {
	case err != nil && o.OTLPEndpoint != "":
		return nil, nil, usagef("--otlp-endpoint: %w", err)
	case err != nil:
		return nil, nil, usagef("%w", err)
	case p == nil:
		return nil, func() {}, nil
	}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx)) // requests outlive ctx, by the drain
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Run(running)
	}()
	return p.Tracer(), func() {
		cancel()
		<-done
	}, nil
}

// ratio is a number from 0 to 1, if it is set.
type ratio struct{ n *float64 }

// UnmarshalText reads a number.
func (r *ratio) UnmarshalText(text []byte) error {
	n, err := strconv.ParseFloat(string(text), 64)
	if err != nil || !(n >= 0 && n <= 1) {
		return fmt.Errorf("%q: want a number from 0 to 1", text)
	}
	r.n = &n
	return nil
}
