package frontend

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/warmroute/warmroute/frontend/fleet"
)

// Causes of a cancelled attempt that are not the client's.
var (
	errHeaderTimeout = errors.New("the response header did not come in time")
	errIdleTimeout   = errors.New("the response stood still for too long")
	errWorkerLost    = errors.New("the worker does not answer any more")
)

// Reasons of upstream_errors_total and upstream_retries_total.
const (
	failDial    = "dial"           // no connection: the worker cannot have got the request
	failStale   = "stale"          // a kept-alive connection was closed under the request
	failHeader  = "header_timeout" // connected, but no response header in time
	failBroken  = "broken"         // connected, then broken before a response header
	failIdle    = "idle_timeout"   // the response stood still
	failAborted = "aborted"        // the response broke off in its midst
	failLost    = "lost"           // the worker answers nobody any more
)

// attempt is one try of a request at one worker.
type attempt struct {
	ctx    context.Context // the attempt's; ends the work at the worker
	cancel context.CancelCauseFunc
	leave  func()      // [attempts.enter]
	timer  *time.Timer // cancels with errHeaderTimeout, later with errIdleTimeout
	late   atomic.Pointer[error]
	span   span

	connected atomic.Int64 // when, in Unix nanoseconds; 0 means never
	reused    atomic.Bool
	answered  atomic.Bool  // a byte of the response came
	heard     atomic.Int64 // when the last part of the response came, in Unix nanoseconds
}

// attempts are those under way, by worker.
type attempts struct {
	alive time.Duration // default [stillAlive]

	mu sync.Mutex
	at map[fleet.Key]map[*attempt]struct{}
}

// enter notes an attempt until leave is called.
func (s *attempts) enter(k fleet.Key, a *attempt) (leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at[k] == nil {
		s.at[k] = map[*attempt]struct{}{}
	}
	s.at[k][a] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if delete(s.at[k], a); len(s.at[k]) == 0 {
			delete(s.at, k)
		}
	}
}

// stillAlive is how recently a worker that answers no poll must have sent something to count as alive: one that is only busy
// goes on streaming.
const stillAlive = 5 * time.Second

// lost ends what waits for a worker that is not there any more.
func (s *attempts) lost(k fleet.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for a := range s.at[k] {
		if time.Since(time.Unix(0, a.heard.Load())) > s.alive {
			a.cancel(errWorkerLost)
		}
	}
}

// attempt begins one at a worker.
func (s *attempts) begin(parent context.Context, k fleet.Key, headerTimeout time.Duration) *attempt {
	a := &attempt{}
	ctx, cancel := context.WithCancelCause(parent)
	a.cancel = cancel
	a.late.Store(&errHeaderTimeout)
	a.timer = time.AfterFunc(headerTimeout, func() { cancel(*a.late.Load()) })
	a.ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		// The transport looks for another connection where nothing could be written to the one that it had kept: what counts then is
		// how that search ends.
		GetConn: func(string) { a.connected.Store(0) },
		GotConn: func(info httptrace.GotConnInfo) {
			a.reused.Store(info.Reused)
			a.connected.Store(time.Now().UnixNano())
		},
		GotFirstResponseByte: func() { a.answered.Store(true) },
	})
	a.leave = s.enter(k, a)
	return a
}

// fault classifies the error of a round trip; retry tells whether the worker cannot have accepted the
// request. A worker may have, as soon as it was connected and took longer to fail than a
// connection that was closed already: window bounds that.
func (a *attempt) fault(err error, window time.Duration) (reason string, retry bool) {
	at := a.connected.Load()
	switch {
	case errors.Is(context.Cause(a.ctx), errHeaderTimeout):
		return failHeader, false
	case errors.Is(context.Cause(a.ctx), errWorkerLost):
		return failLost, true // whatever it had begun with, nobody goes on with it
	case at == 0:
		return failDial, true
	case a.reused.Load() && !a.answered.Load() && isHangup(err) && time.Since(time.Unix(0, at)) < window:
		return failStale, true
	}
	return failBroken, false
}

func isHangup(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		err != nil && err.Error() == "http: server closed idle connection"
}

// end releases the attempt.
func (a *attempt) end() {
	a.leave()
	a.timer.Stop()
	a.cancel(nil)
	a.span.end()
}

// answerBody is the body of a worker's answer. It ends the attempt when it stands still.
type answerBody struct {
	io.ReadCloser
	a     *attempt
	idle  time.Duration
	first func()                         // called before the first byte is handed on
	chunk func(p []byte)                 // called before every chunk is handed on
	broke func(reason string, err error) // called once where the body breaks off
	ended func()                         // called once where it ends well
}

func (b *answerBody) Read(p []byte) (int, error) {
	b.a.timer.Reset(b.idle)
	n, err := b.ReadCloser.Read(p)
	b.a.timer.Stop()
	b.a.heard.Store(time.Now().UnixNano())
	if n > 0 {
		if b.first != nil {
			b.first()
			b.first = nil
		}
		b.chunk(p[:n])
	}
	if err == io.EOF && b.ended != nil {
		b.ended()
		b.ended = nil
	}
	if err != nil && err != io.EOF && b.broke != nil {
		switch cause := context.Cause(b.a.ctx); {
		case errors.Is(cause, errIdleTimeout):
			b.broke(failIdle, cause)
		case errors.Is(cause, errWorkerLost):
			b.broke(failLost, cause)
		default:
			b.broke(failAborted, err)
		}
		b.broke = nil
	}
	return n, err
}

func (b *answerBody) Close() error {
	b.a.end()
	return b.ReadCloser.Close()
}

// stream turns the attempt's timer to the chunks of the answer.
func (a *attempt) stream(res *http.Response, b *answerBody) {
	a.timer.Stop()
	a.late.Store(&errIdleTimeout)
	b.ReadCloser, b.a = res.Body, a
	res.Body = b
}
