package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// addresses are where an engine listens.
type addresses struct {
	http           string
	events, replay []string // per rank; replay is nil without replay sockets
}

// process is one lifetime of the engine: everything that a crash takes away.
type process struct {
	o       *Options
	started time.Time
	seed    uint64 // of engine hashes
	addr    addresses
	ctx     context.Context // ends with the process; set by start
	cancel  context.CancelFunc
	running sync.WaitGroup

	ln       net.Listener
	server   *http.Server
	sockets  []*zmtpServer
	ranks    []*rank
	registry *prometheus.Registry
	metrics  metrics
	hung     gate
	asleep   gate

	unhealthy atomic.Bool
	next      atomic.Uint64 // where the search for the least loaded rank begins
	cancelled *atomic.Int64 // the engine's count of requests that clients gave up
	inFlight  atomic.Int64  // generation requests

	mu      sync.Mutex
	conns   map[net.Conn]struct{} // HTTP connections
	stopped bool
	breaks  breakPlan
}

// breakPlan says which of the next streams break.
type breakPlan struct {
	streams int // still to be broken
	chunks  int // sent before the break
}

// listener binds a TCP address.
type listener func(addr string) (net.Listener, error)

// newProcess binds all addresses. What is bound is closed again where one fails.
func newProcess(o *Options, listen listener, addr addresses, lifetime int, cancelled *atomic.Int64) (*process, error) {
	p := &process{
		o: o, started: time.Now(), seed: o.Seed + uint64(lifetime),
		registry: prometheus.NewRegistry(), conns: map[net.Conn]struct{}{}, cancelled: cancelled,
	}
	if o.Seed == 0 {
		p.seed = rand.Uint64()
	}
	p.metrics = newMetrics(p.registry, o, p.started)
	if err := p.bind(listen, addr); err != nil {
		p.stop(false)
		return nil, fmt.Errorf("sim: %w", err)
	}
	return p, nil
}

func (p *process) bind(listen listener, addr addresses) error {
	var err error
	if p.ln, err = listen(addr.http); err != nil {
		return err
	}
	p.addr.http = p.ln.Addr().String()
	for id := range p.o.Ranks {
		log := p.o.Logger.With("rank", id)
		pub := &publisher{
			topic: []byte(p.o.Topic), layout: p.o.ReplayLayout, steps: p.o.BufferSteps, log: log,
			writer: eventWriter{encoding: p.o.Encoding, arity: p.o.ArrayArity, blockSize: p.o.BlockSize, rank: id},
		}
		if pub.out, err = p.socket(listen, "PUB", addr.events[id]); err != nil {
			return err
		}
		p.addr.events = append(p.addr.events, pub.out.ln.Addr().String())
		if addr.replay != nil {
			router, err := p.socket(listen, "ROUTER", addr.replay[id])
			if err != nil {
				return err
			}
			router.request = pub.replay
			p.addr.replay = append(p.addr.replay, router.ln.Addr().String())
		}
		p.ranks = append(p.ranks, &rank{
			id: id, o: p.o, hung: &p.hung, asleep: &p.asleep, m: p.metrics.ranks[id],
			slots: make(chan struct{}, p.o.MaxConcurrent), prefill: make(chan struct{}, 1),
			pool: newBlockPool(p.o), freed: make(chan struct{}), pub: pub,
		})
	}
	return nil
}

func (p *process) socket(listen listener, kind, addr string) (*zmtpServer, error) {
	ln, err := listen(addr)
	if err != nil {
		return nil, err
	}
	s := &zmtpServer{
		kind: kind, ln: ln, hwm: p.o.HighWaterMark, hung: &p.hung, conns: map[*zmtpConn]struct{}{},
		log: p.o.Logger.With("address", ln.Addr().String()),
	}
	p.sockets = append(p.sockets, s)
	return s, nil
}

// listenAgain binds an address that an earlier lifetime had. Where the port is taken it
// tries again for a while: it may be, for a moment, some connection's ephemeral port.
func listenAgain(ctx context.Context) listener {
	deadline := time.Now().Add(2 * time.Second)
	return func(addr string) (net.Listener, error) {
		for {
			ln, err := net.Listen("tcp", addr)
			if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) ||
				sleepUntil(ctx, time.Now().Add(20*time.Millisecond)) != nil {
				return ln, err
			}
		}
	}
}

// start serves until stop. The handler is what answers HTTP requests; failed takes the
// failure of a server, if it has room.
func (p *process) start(ctx context.Context, handler http.Handler, failed chan<- error) {
	p.ctx, p.cancel = context.WithCancel(ctx)
	p.server = &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       5 * time.Second, // as uvicorn, vLLM's server
		BaseContext:       func(net.Listener) context.Context { return p.ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
		ConnState: p.track,
		ErrorLog:  slog.NewLogLogger(p.o.Logger.Handler(), slog.LevelDebug),
	}
	p.running.Go(func() {
		if err := p.server.Serve(p.ln); !errors.Is(err, http.ErrServerClosed) && p.ctx.Err() == nil {
			select {
			case failed <- fmt.Errorf("sim: HTTP server: %w", err):
			default:
			}
		}
	})
	for _, s := range p.sockets {
		p.running.Go(func() { s.serve(p.ctx) })
	}
}

// connKey is the context key under which a handler finds its connection.
type connKey struct{}

func (p *process) track(c net.Conn, state http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch state {
	case http.StateNew:
		p.conns[c] = struct{}{}
		if p.stopped {
			c.Close()
		}
	case http.StateClosed, http.StateHijacked:
		delete(p.conns, c)
	}
}

// stop ends the process at once; reset makes its peers see resets, as after a crash.
func (p *process) stop(reset bool) {
	p.mu.Lock()
	p.stopped = true
	if reset {
		for c := range p.conns {
			resetOnClose(c)
		}
	}
	p.mu.Unlock()
	if p.server != nil {
		p.server.Close() // before the listener, so that Serve knows why it ends
	}
	if p.ln != nil {
		p.ln.Close()
	}
	for _, s := range p.sockets {
		s.close(reset)
	}
	if p.cancel != nil {
		p.cancel()
	}
	p.running.Wait()
}

// ending reports whether the process, and not a client, is what breaks connections.
func (p *process) ending() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stopped || p.ctx.Err() != nil
}

// pick chooses the rank with the fewest sequences, or the pinned one, and counts the
// sequence that will run there; the caller takes it off again.
func (p *process) pick(pinned int) *rank {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pinned < 0 {
		first := int(p.next.Add(1) % uint64(len(p.ranks)))
		pinned = first
		for i := range p.ranks {
			r := (first + i) % len(p.ranks)
			if p.ranks[r].load.Load() < p.ranks[pinned].load.Load() {
				pinned = r
			}
		}
	}
	p.ranks[pinned].load.Add(1)
	return p.ranks[pinned]
}

// lora finds an adapter by name; ok is false for a model that is not served.
func (p *process) lora(model string) (a adapter, ok bool) {
	if model == "" || model == p.o.Model {
		return adapter{}, true
	}
	for i, name := range p.o.LoRAs {
		if name == model {
			return adapter{name: name, id: i + 1}, true
		}
	}
	return adapter{}, false
}
