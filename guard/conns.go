package guard

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// ConnOptions configures [Guard].
type ConnOptions struct {
	// Surface names the server in metrics: frontend or indexer.
	Surface string
	// Max is how many connections may be open. At the limit, the one that was idle the longest is closed for a new one. Where none is
	// idle, [Spare] more are taken for probes; further ones are closed at once. Required.
	Max int
	// SendTimeout is how long a client may take to accept a part of an answer, of 64 KiB at most. Required.
	SendTimeout time.Duration
	// Registerer gets the metrics. Default: they are kept but not registered.
	Registerer prometheus.Registerer
}

// Spare is how many connections over the limit are taken for probes.
const Spare = 64

// conns are the connections of one server.
type conns struct {
	o     ConnOptions
	gauge prometheus.Gauge
	over  *prometheus.CounterVec

	mu   sync.Mutex
	open int
	idle *list.List // of *conn; the first has been idle the longest
}

// conn is one of them; conns.mu guards what is below it.
type conn struct {
	net.Conn
	of    *conns
	spare bool // taken over the limit

	closed bool
	idle   *list.Element
}

// Guard makes a server's connections bounded ones. Its Serve must get what this returns for its listener.
func Guard(s *http.Server, l net.Listener, o ConnOptions) net.Listener {
	c := &conns{
		o: o, gauge: newOpen(o.Registerer).WithLabelValues(o.Surface), idle: list.New(),
		over: newCrowded(o.Registerer).MustCurryWith(prometheus.Labels{"surface": o.Surface}),
	}
	s.ConnState = c.state
	s.ConnContext = func(ctx context.Context, nc net.Conn) context.Context {
		if k, ok := nc.(*conn); ok && k.spare {
			return context.WithValue(ctx, crowdedKey{}, k)
		}
		return ctx
	}
	return &listener{l, c}
}

type crowdedKey struct{}

// Crowded tells whether a request came over a connection that was taken for probes alone, and is still one too many.
func Crowded(ctx context.Context) bool {
	k, ok := ctx.Value(crowdedKey{}).(*conn)
	if !ok {
		return false
	}
	k.of.mu.Lock()
	defer k.of.mu.Unlock()
	return k.of.open > k.of.o.Max
}

type listener struct {
	net.Listener
	conns *conns
}

// Accept waits for the next connection that is taken.
func (l *listener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if k := l.conns.admit(nc); k != nil {
			return k, nil
		}
		_ = nc.Close() // nobody has said anything yet
	}
}

// admit takes a connection, or returns nil.
func (c *conns) admit(nc net.Conn) *conn {
	k := &conn{Conn: nc, of: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open >= c.o.Max {
		if first := c.idle.Front(); first != nil {
			old := first.Value.(*conn)
			c.forget(old)
			_ = old.Conn.Close() // which makes the server notice
			c.over.WithLabelValues("evicted").Inc()
		}
	}
	switch {
	case c.open < c.o.Max:
	case c.open < c.o.Max+Spare:
		k.spare = true
		c.over.WithLabelValues("probes").Inc()
	default:
		c.over.WithLabelValues("closed").Inc()
		return nil
	}
	c.open++
	c.gauge.Set(float64(c.open))
	return k
}

// forget drops a connection from the counts; c.mu is held.
func (c *conns) forget(k *conn) {
	if k.closed {
		return
	}
	k.closed = true
	c.open--
	c.gauge.Set(float64(c.open))
	c.notIdle(k)
}

func (c *conns) notIdle(k *conn) {
	if k.idle != nil {
		c.idle.Remove(k.idle)
		k.idle = nil
	}
}

// state is a server's ConnState.
func (c *conns) state(nc net.Conn, s http.ConnState) {
	k, ok := nc.(*conn)
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case k.closed:
	case s == http.StateIdle:
		c.notIdle(k)
		k.idle = c.idle.PushBack(k)
	default:
		c.notIdle(k)
	}
}

// Close closes it, once.
func (k *conn) Close() error {
	k.of.mu.Lock()
	k.of.forget(k)
	k.of.mu.Unlock()
	return k.Conn.Close()
}

// CloseWrite lets a server wait for the client to read its last words.
func (k *conn) CloseWrite() error {
	if w, ok := k.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// part is what a client has SendTimeout for.
const part = 64 << 10

// Write writes all of p, or fails where the client does not take a part of it in time.
func (k *conn) Write(p []byte) (n int, err error) {
	for {
		next := p[n:min(len(p), n+part)]
		if err := k.SetWriteDeadline(time.Now().Add(k.of.o.SendTimeout)); err != nil {
			return n, err
		}
		m, err := k.Conn.Write(next)
		n += m
		if err != nil || n == len(p) {
			return n, err
		}
	}
}
