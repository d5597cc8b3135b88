package frontend

import (
	"testing"

	"github.com/warmroute/warmroute/frontend/tracing/tracingtest"
)

// One proxied completion of 1,024 token ids: without traces, in a trace that the client does not record, and in one that it does.
func BenchmarkTracedRoute(b *testing.B) {
	for _, trace := range []string{"off", "unsampled", "sampled"} {
		b.Run("trace="+trace, func(b *testing.B) {
			body, ids := prompt(1024)
			e1, e2 := newEngine(b, "w1"), newEngine(b, "w2")
			o := Options{Index: holding(16, ids, map[string]int{"w1": 32}), Workers: []Worker{e1.worker(), e2.worker()}, PredictTTL: -1}
			if trace != "off" {
				o.Tracer = tracer(b, tracingtest.HTTP(b))
			}
			f := start(b, o)
			me := newCaller()
			b.ReportAllocs()
			for b.Loop() {
				if res, text := f.post(completions, body, "traceparent", me.parent(trace == "sampled")); res.StatusCode != 200 {
					b.Fatal(res.StatusCode, text)
				}
			}
		})
	}
}
