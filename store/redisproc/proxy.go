package redisproc

import (
	"net"
	"sync"
	"time"
)

// Proxy is a TCP path to a server that can be cut in the ways in which networks fail.
type Proxy struct {
	Addr string // where it listens

	target   string
	listener net.Listener

	mu    sync.Mutex
	mode  Mode
	moved sync.Cond // mode changed
	conns map[net.Conn]struct{}
	dials int
	delay time.Duration
	wg    sync.WaitGroup
}

// Mode is what a [Proxy] does with bytes.
type Mode int

const (
	Pass    Mode = iota // both ways
	Swallow             // accepts connections and bytes, delivers nothing, resets nothing
	Refuse              // resets every connection, new ones too
	Deafen              // delivers what goes to the server, and nothing of what it answers
)

// NewProxy listens on a free port and passes everything to target, a host:port.
func NewProxy(target string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{Addr: l.Addr().String(), target: target, listener: l, conns: map[net.Conn]struct{}{}}
	p.moved.L = &p.mu
	p.wg.Go(p.accept)
	return p, nil
}

// Set changes the mode. Bytes that were swallowed never arrive: when the path passes again, the
// connections of that time are reset.
func (p *Proxy) Set(m Mode) {
	p.mu.Lock()
	was := p.mode
	p.mode = m
	var reset []net.Conn
	if m == Refuse || was == Swallow || was == Deafen {
		for c := range p.conns {
			reset = append(reset, c)
		}
	}
	p.moved.Broadcast()
	p.mu.Unlock()
	for _, c := range reset {
		p.drop(c)
	}
}

// Delay holds every answer of the server back by d, as a slow or distant one would.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Dials is how many connections were asked for so far.
func (p *Proxy) Dials() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dials
}

// Close ends the proxy and all its connections.
func (p *Proxy) Close() {
	_ = p.listener.Close()
	p.Set(Refuse)
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		p.dials++
		refused := p.mode == Refuse
		p.conns[c] = struct{}{}
		p.mu.Unlock()
		if refused {
			p.drop(c)
			continue
		}
		p.wg.Go(func() { p.serve(c) })
	}
}

func (p *Proxy) serve(c net.Conn) {
	defer p.drop(c)
	s, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	p.mu.Lock()
	p.conns[s] = struct{}{}
	p.mu.Unlock()
	done := make(chan struct{}, 2)
	for i, way := range [][2]net.Conn{{s, c}, {c, s}} {
		p.wg.Go(func() {
			p.copy(way[0], way[1], i == 1)
			p.drop(c)
			p.drop(s)
			done <- struct{}{}
		})
	}
	<-done
	<-done
}

// copy passes bytes on while the path passes, and waits while it swallows.
func (p *Proxy) copy(dst, src net.Conn, answers bool) {
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		p.mu.Lock()
		for p.mode == Swallow || answers && p.mode == Deafen {
			p.moved.Wait()
			n = 0 // gone
		}
		delay := p.delay
		p.mu.Unlock()
		if answers && delay > 0 {
			time.Sleep(delay)
		}
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// drop resets a connection.
func (p *Proxy) drop(c net.Conn) {
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}
