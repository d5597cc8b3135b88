package tracing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

type registry struct{ *prometheus.Registry }

func newRegistry() *registry { return &registry{prometheus.NewRegistry()} }

// counts are the metrics in one line.
func (r *registry) counts(t *testing.T) string {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	n := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := "sent"
			if l := m.GetLabel(); len(l) > 0 {
				key = l[0].GetValue()
			}
			n[key] += m.GetCounter().GetValue()
		}
	}
	return fmt.Sprintf("sent %v, queue_full %v, send %v", n["sent"], n["queue_full"], n["send"])
}

// receiver is an exporter in the test's hands.
type receiver struct {
	mu      sync.Mutex
	err     error
	block   chan struct{} // not nil: sending waits for it, or for its context
	batches []int
}

// ExportSpans takes a batch.
func (r *receiver) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	r.mu.Lock()
	err, block := r.err, r.block
	r.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches = append(r.batches, len(spans))
	return nil
}

// Shutdown does nothing.
func (*receiver) Shutdown(context.Context) error { return nil }

func (r *receiver) set(err error, block chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err, r.block = err, block
}

func (r *receiver) got() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return fmt.Sprint(r.batches)
}

// logBuffer is a log that may be read while it is written.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// underTest is a pipeline with a queue of 4 and batches of 2.
type underTest struct {
	*Pipeline
	*receiver
	reg *registry
	log *logBuffer
	end func()
}

func start(t *testing.T) *underTest {
	u := &underTest{receiver: &receiver{}, reg: newRegistry(), log: &logBuffer{}}
	o := Options{Queue: 4, Batch: 2, Registerer: u.reg, Logger: slog.New(slog.NewTextHandler(u.log, nil))}
	o.complete()
	u.Pipeline = newPipeline(t.Context(), o, u.receiver)
	u.end = run(t, u.Pipeline)
	return u
}

func (u *underTest) spans(t *testing.T, n int) {
	for range n {
		_, s := u.Tracer().Start(t.Context(), "request")
		s.End()
	}
}

func (u *underTest) want(t *testing.T, counts string, lines ...string) {
	t.Helper()
	synctest.Wait()
	if got := u.reg.counts(t); got != counts {
		t.Errorf("%s, want %s", got, counts)
	}
	var got []string
	if text := u.log.String(); text != "" {
		got = strings.Split(strings.TrimSpace(text), "\n")
	}
	ok := len(got) == len(lines)
	for i := range lines {
		ok = ok && strings.Contains(got[i], lines[i])
	}
	if !ok {
		t.Errorf("log %q, want %q", got, lines)
	}
}

func TestBatchesAreSentWhenFullOrOld(t *testing.T) {
	plainly(t)
	synctest.Test(t, func(t *testing.T) {
		u := start(t)
		u.spans(t, 3)
		u.want(t, "sent 2, queue_full 0, send 0")
		time.Sleep(time.Second)
		u.want(t, "sent 3, queue_full 0, send 0")
		u.spans(t, 1)
		u.end()
		u.want(t, "sent 4, queue_full 0, send 0")
		if u.got() != "[2 1 1]" {
			t.Errorf("batches %s", u.got())
		}
	})
}

// A receiver that hangs costs those who end spans nothing, and memory for the queue and one batch only.
func TestFullQueueDropsAndNobodyWaits(t *testing.T) {
	plainly(t)
	synctest.Test(t, func(t *testing.T) {
		u := start(t)
		defer u.end()
		hung := make(chan struct{})
		u.set(nil, hung)
		begun := time.Now()
		u.spans(t, 2)
		synctest.Wait() // they are being sent
		u.spans(t, 1000)
		if waited := time.Since(begun); waited != 0 {
			t.Errorf("ending spans took %v", waited)
		}
		const line = "spans are dropped"
		u.want(t, "sent 0, queue_full 996, send 0", line)
		if n := len(u.queue); n != 4 {
			t.Errorf("%d spans wait", n)
		}

		close(hung)
		u.want(t, "sent 6, queue_full 996, send 0", line) // too soon to say that it is over
		time.Sleep(9 * time.Second)
		u.spans(t, 2)
		u.want(t, "sent 8, queue_full 996, send 0", line)
		time.Sleep(time.Second)
		u.spans(t, 2)
		u.want(t, "sent 10, queue_full 996, send 0", line, "spans arrive again\" dropped=996")
	})
}

// A receiver that is away for hours makes two lines of log.
func TestReceiverAwayIsSaidOnce(t *testing.T) {
	plainly(t)
	synctest.Test(t, func(t *testing.T) {
		u := start(t)
		defer u.end()
		u.spans(t, 2)
		u.want(t, "sent 2, queue_full 0, send 0")
		u.set(errors.New("connection refused "+strings.Repeat("x", 1000)), nil)
		for range 1000 {
			u.spans(t, 2)
			synctest.Wait()
			time.Sleep(10 * time.Second)
		}
		u.want(t, "sent 2, queue_full 0, send 2000", "reason=send error=\"connection refused")
		if n := len(u.log.String()); n > 700 {
			t.Errorf("the line has %d bytes", n)
		}
		u.set(nil, nil)
		u.spans(t, 2)
		u.want(t, "sent 4, queue_full 0, send 2000", "spans are dropped", "dropped=2000")
		u.set(errors.New("away again"), nil)
		u.spans(t, 2)
		u.want(t, "sent 4, queue_full 0, send 2002", "spans are dropped", "dropped=2000", "away again")
	})
}

// A batch that is not taken in time is given up, and the next one is tried.
func TestSendingIsBounded(t *testing.T) {
	plainly(t)
	synctest.Test(t, func(t *testing.T) {
		u := start(t)
		defer u.end()
		u.set(nil, make(chan struct{}))
		u.spans(t, 2)
		synctest.Wait()
		u.set(nil, nil)
		u.spans(t, 2)
		time.Sleep(9 * time.Second)
		u.want(t, "sent 0, queue_full 0, send 0")
		time.Sleep(2 * time.Second)
		u.want(t, "sent 2, queue_full 0, send 2", "deadline exceeded")
	})
}

// A receiver that hangs holds up the end of the process for FlushTimeout.
func TestEndIsBounded(t *testing.T) {
	plainly(t)
	synctest.Test(t, func(t *testing.T) {
		u := start(t)
		u.set(nil, make(chan struct{}))
		u.spans(t, 2)
		synctest.Wait()
		u.spans(t, 4)
		begun := time.Now()
		u.end()
		if d := time.Since(begun); d != 2*time.Second {
			t.Errorf("the end took %v", d)
		}
		u.want(t, "sent 0, queue_full 0, send 6", "spans are dropped")
	})
}
