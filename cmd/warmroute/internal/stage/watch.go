package stage

import (
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Watch notices when every frontend routes by the index again.
type Watch struct {
	back  atomic.Pointer[time.Time]
	mu    sync.Mutex
	first []time.Time // per frontend: the first request since then that was routed by the index
	hit   time.Time   // the first one that found blocks, after that
	// Recovered is closed when they do.
	Recovered chan struct{}
}

// NewWatch watches so many frontends.
func NewWatch(frontends int) *Watch {
	return &Watch{first: make([]time.Time, frontends), Recovered: make(chan struct{})}
}

// Since says when Redis came back.
func (w *Watch) Since(t time.Time) { w.back.Store(&t) }

// Observe takes one outcome.
func (w *Watch) Observe(o Outcome) {
	back := w.back.Load()
	if back == nil || o.Err != nil || o.State != "exact" || o.Sent.Before(*back) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.first[o.Frontend].IsZero() {
		w.first[o.Frontend] = o.Sent
	}
	if w.hit.IsZero() && isOverlap(o.Overlap) {
		w.hit = o.Sent
	}
	if !w.hit.IsZero() && !slices.ContainsFunc(w.first, time.Time.IsZero) {
		select {
		case <-w.Recovered:
		default:
			close(w.Recovered)
		}
	}
}

// LastRecovery is when the last frontend began to route by the index again.
func (w *Watch) LastRecovery() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.MaxFunc(w.first, time.Time.Compare)
}

// FirstHit is when the first request was sent that found blocks again.
func (w *Watch) FirstHit() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.hit
}

func isOverlap(header string) bool { return header != "" && strings.Trim(header, "0") != "" }

// LogFailures explains failed requests; there should be none to explain.
func LogFailures(logger *slog.Logger, part string, outcomes []Outcome) {
	const most = 5
	failed := 0
	for _, o := range outcomes {
		if o.Err == nil {
			continue
		}
		if failed++; failed <= most {
			logger.Error("request failed", "part", part, "frontend", o.Frontend, "index_state", o.State, "error", o.Err)
		}
	}
}
