package frontend

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/warmroute/warmroute/frontend/breaker"
	"github.com/warmroute/warmroute/frontend/feedback"
)

// watch is what is to be done with a worker's answer on its way to the client; part is the attempt's span. It must not keep the exchange's body.
func (f *Frontend) watch(ctx context.Context, x *exchange, res *http.Response, pool string, part span) *answerBody {
	worker := x.chosen.node.Key()
	events := strings.HasPrefix(res.Header.Get("Content-Type"), "text/event-stream")
	b := &answerBody{
		idle: f.o.IdleChunkTimeout,
		first: func() {
			f.metrics.ttfb.WithLabelValues(pool).Observe(time.Since(x.start).Seconds())
			part.firstByte()
			if x.lease.Prefilled(); events { // else the end follows at once
				x.reserved.Prefilled()
			}
		},
		broke: func(reason string, err error) {
			if ctx.Err() != nil {
				f.metrics.streamsAborted.WithLabelValues("client").Inc()
				return
			}
			f.metrics.streamsAborted.WithLabelValues("worker").Inc()
			part.fail(reason)
			f.breakers.Report(worker, breaker.Failure)
			f.workerFailed(x, reason, err)
		},
	}
	var tail *feedback.Tail
	if least, most, ok := x.predicted(); ok && res.StatusCode == http.StatusOK && plain(res.Header.Get("Content-Encoding")) {
		tail = &feedback.Tail{}
		tokens := x.tokens
		b.ended = func() {
			// Several prompts in one request: what was cached is told of all of them, what is predicted is of the first.
			if prompt, cached, ok := tail.Usage(); ok && prompt == tokens && f.fleet.Snapshot().Node(worker) != nil {
				f.judge.Observe(worker.ID, tokens, min(max(cached, least), most), cached)
			}
		}
	}
	grown := output{size: x.blockSize}
	b.chunk = func(p []byte) {
		if tail != nil {
			tail.Write(p)
		}
		if events {
			if n := grown.add(bytes.Count(p, eventStart)); n > 0 {
				x.lease.Output(n)
				x.reserved.Output(n)
			}
		}
	}
	return b
}

func plain(encoding string) bool { return encoding == "" || strings.EqualFold(encoding, "identity") }

// eventStart begins an event of a stream, which carries about one token.
var eventStart = []byte("data:")

// output counts blocks of tokens.
type output struct{ size, tokens int }

// add takes tokens and returns how many blocks are full by them.
func (o *output) add(n int) int {
	o.tokens += n
	full := o.tokens / o.size
	o.tokens -= full * o.size
	return full
}

// predicted is how many of the prompt's tokens the worker chosen should have cached: at least what its events have said, at
// most what was routed there as well. The last token is always computed, so that an engine never reports all blocks
// of a prompt that they fill. False where that is not known.
func (x *exchange) predicted() (least, most int, ok bool) {
	o := x.chosen.overlap
	if x.tokens == 0 || !x.overlapKnown(o.Any) {
		return 0, 0, false
	}
	full := (x.tokens - 1) / x.blockSize
	return min(o.Disk, full) * x.blockSize, min(o.Any, full) * x.blockSize, true
}
