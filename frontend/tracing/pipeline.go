package tracing

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
)

// processor is the Pipeline as the library wants it: spans that end come here, on the request's own time.
type processor struct{ p *Pipeline }

// OnStart does nothing.
func (processor) OnStart(context.Context, sdk.ReadWriteSpan) {}

// OnEnd queues a span, or drops it.
func (r processor) OnEnd(s sdk.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() {
		return
	}
	select {
	case r.p.queue <- s:
	default:
		r.p.drop(droppedQueue, 1, nil)
	}
}

// Shutdown does nothing: Run ends with its context.
func (processor) Shutdown(context.Context) error { return nil }

// ForceFlush does nothing: Run flushes as it ends.
func (processor) ForceFlush(context.Context) error { return nil }

// Run sends spans until ctx ends, then what is left, for FlushTimeout at most.
func (p *Pipeline) Run(ctx context.Context) {
	sending, abort := context.WithCancel(context.WithoutCancel(ctx))
	defer abort()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(p.o.FlushTimeout, abort) })()
	tick := time.NewTicker(p.o.Interval)
	defer tick.Stop()
	batch := make([]sdk.ReadOnlySpan, 0, p.o.Batch)
	send := func() {
		if len(batch) > 0 {
			p.send(sending, batch)
			clear(batch) // a span that was sent must not live on
			batch = batch[:0]
		}
	}
	add := func(s sdk.ReadOnlySpan) {
		if batch = append(batch, s); len(batch) == p.o.Batch {
			send()
		}
	}
	for ctx.Err() == nil {
		select {
		case s := <-p.queue:
			add(s)
		case <-tick.C:
			send()
		case <-ctx.Done():
		}
	}
	for left := len(p.queue); left > 0; left-- {
		add(<-p.queue) // this goroutine alone takes from it
	}
	send()
	_ = p.exporter.Shutdown(sending) // has nothing left to send
}

// send sends one batch. A receiver that is away or full is asked again by the library, until SendTimeout.
func (p *Pipeline) send(ctx context.Context, batch []sdk.ReadOnlySpan) {
	ctx, cancel := context.WithTimeout(ctx, p.o.SendTimeout)
	defer cancel()
	lost := 0
	if err := p.exporter.ExportSpans(ctx, batch); err != nil {
		if lost = rejected(err, len(batch)); lost > 0 {
			p.drop(droppedSend, lost, err)
		} else {
			p.o.Logger.Debug("the receiver of traces has taken all spans, and has something to say", "error", short(err))
		}
	}
	if lost == len(batch) {
		return
	}
	p.metrics.sent.Add(float64(len(batch) - lost))
	if time.Now().UnixNano()-p.lastly.Load() >= p.o.Quiet.Nanoseconds() && p.losing.CompareAndSwap(true, false) {
		p.o.Logger.Info("spans arrive again", "dropped", p.lost.Swap(0))
	}
}

// partly is how the library tells of a receiver that took a batch in part, or all of it with a warning. Its type is not exported.
var partly = regexp.MustCompile(`(?s)OTLP partial success: .*\((-?\d+) spans rejected\)$`)

// rejected is how many spans of a batch an error is about.
func rejected(err error, batch int) int {
	m := partly.FindStringSubmatch(err.Error())
	if m == nil {
		return batch
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		return batch
	}
	return min(max(n, 0), batch)
}

// drop counts spans that nobody will see.
func (p *Pipeline) drop(reason string, n int, err error) {
	p.metrics.dropped.WithLabelValues(reason).Add(float64(n))
	p.lost.Add(int64(n))
	p.lastly.Store(time.Now().UnixNano())
	if p.losing.CompareAndSwap(false, true) {
		p.o.Logger.Warn("spans are dropped: the receiver of traces is away, refuses them, or is too slow; requests go on", "reason", reason, "error", short(err))
	}
}

// short is an error's text without most of what a receiver may have answered.
func short(err error) string {
	const most = 300
	if err == nil {
		return ""
	}
	text := err.Error()
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}
