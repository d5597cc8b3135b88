package sim

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

var (
	errNotRunning = errors.New("sim: the engine is not running")
	errNoRank     = errors.New("sim: there is no such rank")
	errBusy       = errors.New("sim: the cache is in use")
)

// Engine is a simulated engine. Its addresses stay the same for its whole life, through
// crashes and restarts. All methods may be called from several goroutines.
type Engine struct {
	o         Options
	addr      addresses
	cancelled atomic.Int64
	failed    chan error
	closed    chan struct{}
	delayed   sync.WaitGroup // restarts that are still to come

	mu        sync.Mutex      // held while a process starts or stops
	proc      *process        // nil while crashed, and in the end
	lifetimes int             // processes so far
	ctx       context.Context // that of Run, nil before; each process lives under it
	done      bool
}

// New makes an engine and binds its addresses. It answers once [Engine.Run] is called.
func New(o Options) (*Engine, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	addr := addresses{http: o.Listen}
	if addr.events, err = rankAddresses(o.EventsListen, o.Ranks); err != nil {
		return nil, err
	}
	if !o.NoReplay {
		if addr.replay, err = rankAddresses(o.ReplayListen, o.Ranks); err != nil {
			return nil, err
		}
	}
	e := &Engine{o: o, failed: make(chan error, 1), closed: make(chan struct{}), lifetimes: 1}
	e.proc, err = newProcess(&e.o, func(a string) (net.Listener, error) { return net.Listen("tcp", a) }, addr, 0, &e.cancelled)
	if err != nil {
		return nil, err
	}
	e.addr = e.proc.addr
	return e, nil
}

// Run serves until the context ends or Close is called, which is no error, or until a
// listener fails. It can be called once.
func (e *Engine) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer e.delayed.Wait()
	defer cancel()
	e.mu.Lock()
	if e.done || e.ctx != nil {
		defer e.mu.Unlock()
		if e.done {
			return nil
		}
		return errors.New("sim: Run is called twice")
	}
	e.ctx = ctx
	e.proc.start(ctx, newHandler(e, e.proc), e.failed)
	e.mu.Unlock()
	e.o.Logger.InfoContext(ctx, "simulated engine is up", "model", e.o.Model, "url", e.URL(), "events", e.EventEndpoint(0), "replay", e.ReplayEndpoint(0))

	var err error
	select {
	case <-ctx.Done():
	case <-e.closed:
	case err = <-e.failed:
	}
	return errors.Join(err, e.Close())
}

// Close ends the engine and frees its addresses. Running requests are broken off.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.done {
		e.done = true
		close(e.closed)
	}
	if e.proc != nil {
		e.proc.stop(false)
		e.proc = nil
	}
	return nil
}

// Addr is the HTTP address, host:port, with which this machine reaches the engine.
func (e *Engine) Addr() string { return dialable(e.addr.http) }

// URL is the HTTP base URL, without a slash at the end.
func (e *Engine) URL() string { return "http://" + e.Addr() }

// EventEndpoint is where a rank publishes: tcp://host:port; "" for a rank that is not there.
func (e *Engine) EventEndpoint(rank int) string { return endpoint(e.addr.events, rank) }

// ReplayEndpoint is where a rank replays; "" without replay sockets.
func (e *Engine) ReplayEndpoint(rank int) string { return endpoint(e.addr.replay, rank) }

func endpoint(addrs []string, rank int) string {
	if rank < 0 || rank >= len(addrs) {
		return ""
	}
	return "tcp://" + dialable(addrs[rank])
}

// Cancelled is how many sequences (one per prompt and choice) were given up because their
// client had gone, over all lifetimes.
func (e *Engine) Cancelled() int64 { return e.cancelled.Load() }

// Resident lists the blocks in a rank's cache, ordered by content; nil while crashed.
func (e *Engine) Resident(rank int) []ResidentBlock {
	r, err := e.rank(rank)
	if err != nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pool.resident()
}

// LastSeq is the sequence number of a rank's newest event batch; -1 before the first, and
// while crashed.
func (e *Engine) LastSeq(rank int) int64 {
	r, err := e.rank(rank)
	if err != nil {
		return -1
	}
	return r.pub.lastSeq()
}

// Crash ends the process as if it were killed: connections are reset, the addresses
// refuse, the cache is gone.
func (e *Engine) Crash() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.proc == nil || e.ctx == nil {
		return errNotRunning
	}
	e.proc.stop(true)
	e.proc = nil
	return nil
}

// Restart begins a new lifetime of the process on the same addresses, after a crash where
// it was still running: the cache is empty, the next event batch has number 0, and
// equal content has other engine hashes than before.
func (e *Engine) Restart() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ctx == nil || e.done {
		return errNotRunning
	}
	if e.proc != nil {
		e.proc.stop(true)
		e.proc = nil
	}
	p, err := newProcess(&e.o, listenAgain(e.ctx), e.addr, e.lifetimes, &e.cancelled)
	if err != nil {
		return err
	}
	e.lifetimes++
	e.proc = p
	p.start(e.ctx, newHandler(e, p), e.failed)
	return nil
}

// crashThenRestart crashes and, where after is positive, restarts that much later.
func (e *Engine) crashThenRestart(after time.Duration) error {
	if err := e.Crash(); err != nil || after <= 0 {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.done {
		return nil
	}
	ctx := e.ctx
	e.delayed.Go(func() {
		if sleepUntil(ctx, time.Now().Add(after)) != nil {
			return
		}
		if err := e.Restart(); err != nil {
			e.o.Logger.ErrorContext(ctx, "restart failed", "error", err)
		}
	})
	return nil
}

// Hang makes the process stand still: it accepts connections and answers nothing, streams
// and events stop. Only POST /sim/… still works.
func (e *Engine) Hang() error { return e.withProcess(func(p *process) { p.hung.set(false) }) }

// Resume ends a hang; everything goes on where it stood.
func (e *Engine) Resume() error { return e.withProcess(func(p *process) { p.hung.set(true) }) }

// SetUnhealthy makes /health answer 503, or 200 again.
func (e *Engine) SetUnhealthy(unhealthy bool) error {
	return e.withProcess(func(p *process) { p.unhealthy.Store(unhealthy) })
}

// Sleep empties the caches, where they are idle, and stops generation; requests wait. As
// in vLLM the cleared event only goes out with the next step, after WakeUp.
func (e *Engine) Sleep() error {
	return e.withProcess(func(p *process) {
		p.asleep.set(false)
		for _, r := range p.ranks {
			r.clear(false)
			r.m.sleeping.Set(1)
		}
	})
}

// WakeUp ends the sleep.
func (e *Engine) WakeUp() error {
	return e.withProcess(func(p *process) {
		for _, r := range p.ranks {
			r.m.sleeping.Set(0)
		}
		p.asleep.set(true)
	})
}

// DropEvents makes a rank lose its next n event batches (id -1: each rank): they use up
// their sequence numbers, so that subscribers see a gap. Where burnt is set they are
// missing from replays as well.
func (e *Engine) DropEvents(id, n int, burnt bool) error {
	return e.eachRank(id, func(r *rank) error {
		r.pub.dropNext(n, burnt)
		return nil
	})
}

// ClearCache empties a rank's cache (id -1: each rank's) and publishes the event at
// once, while POST /reset_prefix_cache leaves it, as vLLM does, to the next step. It is
// an error while sequences are running.
func (e *Engine) ClearCache(id int) error {
	return e.eachRank(id, func(r *rank) error {
		if !r.clear(true) {
			return errBusy
		}
		return nil
	})
}

// BreakStreams resets the connection of each of the next n streamed answers after so many chunks.
func (e *Engine) BreakStreams(n, afterChunks int) error {
	return e.withProcess(func(p *process) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.breaks = breakPlan{streams: n, chunks: afterChunks}
	})
}

func (e *Engine) withProcess(f func(*process)) error {
	e.mu.Lock()
	p := e.proc
	e.mu.Unlock()
	if p == nil {
		return errNotRunning
	}
	f(p)
	return nil
}

func (e *Engine) rank(id int) (*rank, error) {
	var r *rank
	err := e.eachRank(id, func(found *rank) error {
		r = found
		return nil
	})
	if id < 0 {
		return nil, errNoRank
	}
	return r, err
}

// eachRank calls f for one rank, or for all where id is -1.
func (e *Engine) eachRank(id int, f func(*rank) error) error {
	var errs []error
	err := e.withProcess(func(p *process) {
		if id < -1 || id >= len(p.ranks) {
			errs = append(errs, errNoRank)
			return
		}
		for _, r := range p.ranks {
			if id == -1 || r.id == id {
				errs = append(errs, f(r))
			}
		}
	})
	return errors.Join(append(errs, err)...)
}
