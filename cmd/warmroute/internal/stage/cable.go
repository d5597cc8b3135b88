package stage

import (
	"context"
	"net"
	"sync"
	"syscall"
	"time"
)

// Cable is a way to Redis, which can be cut and mended.
type Cable struct {
	mu    sync.Mutex
	cut   bool
	dials []time.Time
	conns map[*plug]struct{}
}

// Dial connects unless the cable is cut: then nobody listens.
func (c *Cable) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c.mu.Lock()
	c.dials = append(c.dials, time.Now())
	c.mu.Unlock()
	if c.isCut() {
		return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	p := &plug{Conn: conn, cable: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut {
		_ = conn.Close()
		return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
	}
	if c.conns == nil {
		c.conns = map[*plug]struct{}{}
	}
	c.conns[p] = struct{}{}
	return p, nil
}

// Open is how many connections there are.
func (c *Cable) Open() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.conns)
}

// BusiestSecond is the largest number of dials within one second since a time.
func (c *Cable) BusiestSecond(since time.Time) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	most, first := 0, 0
	for i, at := range c.dials {
		for at.Sub(c.dials[first]) > time.Second || c.dials[first].Before(since) && first < i {
			first++
		}
		if !at.Before(since) {
			most = max(most, i-first+1)
		}
	}
	return most
}

func (c *Cable) isCut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cut
}

// Cut cuts the cable, which resets all connections, or mends it.
func (c *Cable) Cut(cut bool) {
	c.mu.Lock()
	c.cut = cut
	var open []*plug
	if cut {
		for p := range c.conns {
			open = append(open, p)
		}
	}
	c.mu.Unlock()
	for _, p := range open {
		_ = p.Close()
	}
}

// plug is one connection. Its end by a cut looks like a reset by the other side.
type plug struct {
	net.Conn
	cable *Cable
}

func (p *plug) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	return n, p.reset("read", err)
}

func (p *plug) Write(b []byte) (int, error) {
	n, err := p.Conn.Write(b)
	return n, p.reset("write", err)
}

func (p *plug) reset(op string, err error) error {
	if err == nil || !p.cable.isCut() {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Addr: p.RemoteAddr(), Err: syscall.ECONNRESET}
}

// Close ends the connection.
func (p *plug) Close() error {
	p.cable.mu.Lock()
	delete(p.cable.conns, p)
	p.cable.mu.Unlock()
	return p.Conn.Close()
}
