package sim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"
)

// The server side of ZMTP 3.1 (NULL security) for the two sockets that an engine binds:
// PUB and ROUTER. Why not github.com/go-zeromq/zmq4: measured with 0.17, a peer that
// connects and says nothing keeps every later subscriber out; a subscriber that does not
// read stops all others; a malformed READY command panics the process; a closed PUB
// leaves a goroutine behind.

const (
	maxSubscriptions = 1024 // of one peer
	handshakeTimeout = 10 * time.Second
)

// zmtpServer is a bound PUB or ROUTER socket.
type zmtpServer struct {
	kind string // "PUB" or "ROUTER"
	ln   net.Listener
	hwm  int   // messages that may wait for one subscriber
	hung *gate // while shut, connections are accepted and nothing is said on them
	log  *slog.Logger
	// request answers one message of a ROUTER's peer with any number of messages.
	request func(ctx context.Context, frames [][]byte, send func(frames ...[]byte) error) error

	mu     sync.Mutex
	conns  map[*zmtpConn]struct{}
	closed bool
}

// zmtpConn is one peer.
type zmtpConn struct {
	net.Conn
	in *bufio.Reader

	writing sync.Mutex // held while one whole message is written

	mu      sync.Mutex
	topics  map[string]int // subscribed prefixes, counted as ZeroMQ does
	waiting [][]byte       // encoded messages
	wake    chan struct{}  // holds one token while waiting is not empty
}

// serve accepts peers until the listener is closed.
func (s *zmtpServer) serve(ctx context.Context) {
	var peers sync.WaitGroup
	defer peers.Wait()
	for {
		raw, err := s.ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
				return
			}
			s.log.WarnContext(ctx, "accept failed", "socket", s.kind, "error", err)
			if sleepUntil(ctx, time.Now().Add(50*time.Millisecond)) != nil {
				return
			}
			continue
		}
		c := &zmtpConn{Conn: raw, in: bufio.NewReader(raw), topics: map[string]int{}, wake: make(chan struct{}, 1)}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			raw.Close()
			return
		}
		s.conns[c] = struct{}{}
		s.mu.Unlock()
		peers.Go(func() { s.handle(ctx, c) })
	}
}

// close stops the server; reset makes its peers see a reset instead of an end.
func (s *zmtpServer) close(reset bool) {
	s.ln.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for c := range s.conns {
		if reset {
			resetOnClose(c.Conn)
		}
		c.Close()
	}
}

func (s *zmtpServer) handle(ctx context.Context, c *zmtpConn) {
	ctx, cancel := context.WithCancel(ctx)
	var writer sync.WaitGroup
	defer func() {
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		c.Close()
		cancel()
		writer.Wait()
	}()
	if _, err := s.hung.wait(ctx); err != nil {
		return
	}
	if err := s.handshake(c); err != nil {
		s.log.DebugContext(ctx, "peer refused", "socket", s.kind, "peer", c.RemoteAddr().String(), "error", err)
		return
	}
	if s.kind == "PUB" {
		writer.Go(func() { s.write(ctx, c) })
	}
	for {
		frames, err := c.readMessage()
		if err == nil {
			_, err = s.hung.wait(ctx)
		}
		if err == nil {
			err = s.message(ctx, c, frames)
		}
		if err != nil {
			if !errors.Is(err, io.EOF) && ctx.Err() == nil {
				s.log.DebugContext(ctx, "peer lost", "socket", s.kind, "peer", c.RemoteAddr().String(), "error", err)
			}
			return
		}
	}
}

// handshake exchanges greetings and READY commands.
func (s *zmtpServer) handshake(c *zmtpConn) error {
	if err := c.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10], greeting[11] = 0xff, 0x7f, 3, 1
	copy(greeting[12:32], "NULL")
	if _, err := c.Write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(c.in, greeting); err != nil {
		return err
	}
	mechanism, _, _ := strings.Cut(string(greeting[12:32]), "\x00")
	if greeting[0] != 0xff || greeting[9] != 0x7f || greeting[10] < 3 || mechanism != "NULL" {
		return errors.New("not a ZMTP 3 greeting with NULL security")
	}
	ready := property(property([]byte("\x05READY"), "Socket-Type", s.kind), "Identity", "")
	if err := c.writeFrame(flagCommand, ready); err != nil {
		return err
	}
	flags, body, err := c.readFrame()
	if err != nil {
		return err
	}
	rest, ok := bytes.CutPrefix(body, []byte("\x05READY"))
	if flags&flagCommand == 0 || !ok {
		return errors.New("no READY command")
	}
	peer, err := socketType(rest)
	if err != nil {
		return err
	}
	switch s.kind + " " + peer {
	case "PUB SUB", "PUB XSUB", "ROUTER DEALER", "ROUTER REQ", "ROUTER ROUTER":
		return c.SetDeadline(time.Time{})
	}
	return fmt.Errorf("a %s socket cannot talk to a %s", peer, s.kind)
}

func property(b []byte, name, value string) []byte {
	b = append(b, byte(len(name)))
	b = append(b, name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

// socketType finds the peer's socket type in the properties of its READY command.
func socketType(b []byte) (string, error) {
	for len(b) > 0 {
		n := 1 + int(b[0])
		if len(b) < n+4 {
			break
		}
		name := string(b[1:n])
		size := binary.BigEndian.Uint32(b[n:])
		b = b[n+4:]
		if uint64(size) > uint64(len(b)) {
			break
		}
		if strings.EqualFold(name, "Socket-Type") {
			return string(b[:size]), nil
		}
		b = b[size:]
	}
	return "", errors.New("malformed READY command")
}

// message handles what a peer sent: a command (one frame, marked by a leading nil), a
// subscription, or a request.
func (s *zmtpServer) message(ctx context.Context, c *zmtpConn, frames [][]byte) error {
	if frames[0] == nil {
		return s.command(c, frames[1])
	}
	if s.kind == "ROUTER" {
		return s.request(ctx, frames, func(reply ...[]byte) error {
			if _, err := s.hung.wait(ctx); err != nil {
				return err
			}
			return c.writeRaw(encodeMessage(reply))
		})
	}
	if b := frames[0]; len(frames) == 1 && len(b) > 0 && b[0] <= 1 {
		return c.subscribe(string(b[1:]), b[0] == 1)
	}
	return nil
}

func (s *zmtpServer) command(c *zmtpConn, body []byte) error {
	if len(body) == 0 || len(body) < 1+int(body[0]) {
		return errors.New("malformed command")
	}
	name, rest := string(body[1:1+body[0]]), body[1+body[0]:]
	switch name {
	case "PING": // two bytes of TTL, then a context to be returned
		if len(rest) < 2 {
			return errors.New("malformed PING")
		}
		return c.writeFrame(flagCommand, append([]byte("\x04PONG"), rest[2:]...))
	case "SUBSCRIBE":
		return c.subscribe(string(rest), true)
	case "CANCEL":
		return c.subscribe(string(rest), false)
	case "ERROR":
		return errors.New("the peer sent an error")
	}
	return nil
}

func (c *zmtpConn) subscribe(topic string, on bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if on {
		c.topics[topic]++
		if len(c.topics) > maxSubscriptions {
			return errors.New("too many subscriptions")
		}
	} else if c.topics[topic]--; c.topics[topic] <= 0 {
		delete(c.topics, topic)
	}
	return nil
}

// publish queues a message for each subscriber of its first frame. It never waits: a
// subscriber whose queue is full loses the message.
func (s *zmtpServer) publish(frames ...[]byte) {
	raw := encodeMessage(frames)
	topic := string(frames[0])
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.mu.Lock()
		if len(c.waiting) < s.hwm && c.subscribed(topic) {
			c.waiting = append(c.waiting, raw)
			select {
			case c.wake <- struct{}{}:
			default:
			}
		}
		c.mu.Unlock()
	}
}

func (c *zmtpConn) subscribed(topic string) bool {
	for prefix := range c.topics {
		if strings.HasPrefix(topic, prefix) {
			return true
		}
	}
	return false
}

// write sends a subscriber what waits for it.
func (s *zmtpServer) write(ctx context.Context, c *zmtpConn) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		}
		if _, err := s.hung.wait(ctx); err != nil {
			return
		}
		// What is being written no longer counts against the high-water mark, as in ZeroMQ.
		c.mu.Lock()
		waiting := c.waiting
		c.waiting = nil
		c.mu.Unlock()
		for _, raw := range waiting {
			if c.writeRaw(raw) != nil {
				c.Close() // the reader ends with it
				return
			}
		}
	}
}

// resetOnClose makes the peer of a connection see a reset when it is closed.
func resetOnClose(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // fails only on a connection that is already closed
	}
}
