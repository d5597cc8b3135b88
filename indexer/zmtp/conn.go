package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

// SocketType is the ZeroMQ pattern that a connection speaks.
type SocketType string

// The socket types that this client can be.
const (
	SocketSUB    SocketType = "SUB"    // reads what a PUB or XPUB publishes
	SocketDEALER SocketType = "DEALER" // asks a ROUTER
)

// peers lists the socket types that may answer.
func (t SocketType) peers() []string {
	if t == SocketSUB {
		return []string{"PUB", "XPUB"}
	}
	return []string{"ROUTER", "DEALER", "REP"}
}

// Errors that callers tell apart; those of the network itself come as they are.
var (
	// ErrProtocol: the peer does not speak ZMTP 3, or not as it should.
	ErrProtocol = errors.New("zmtp: protocol violation")
	// ErrLimit: the peer sent, or announced, more than [Options] allow.
	ErrLimit = errors.New("zmtp: limit exceeded")
)

// Options bounds what a peer may do. The zero value is the documented defaults.
type Options struct {
	// Topic is the prefix that a SUB socket subscribes to. Default "": everything.
	Topic string
	// HandshakeTimeout bounds connecting and the handshake. Default 5 s.
	HandshakeTimeout time.Duration
	// StallTimeout bounds the time from a message's first byte to its last, and one Send. Default 30 s.
	StallTimeout time.Duration
	// MaxFrame is the longest frame accepted, in bytes. Default 64 MiB.
	MaxFrame int
	// MaxFrames is the most frames of one message. Default 16.
	MaxFrames int
	// MaxMessage is the most bytes of one message over all its frames. Default MaxFrame + 64 KiB.
	MaxMessage int
	// Control, if set, is called with each address before it is connected to, as that of [net.Dialer]; its error refuses the address.
	Control func(network, address string, c syscall.RawConn) error
}

func (o Options) withDefaults() Options {
	if o.HandshakeTimeout <= 0 {
		o.HandshakeTimeout = 5 * time.Second
	}
	if o.StallTimeout <= 0 {
		o.StallTimeout = 30 * time.Second
	}
	if o.MaxFrame <= 0 {
		o.MaxFrame = 64 << 20
	}
	if o.MaxFrames <= 0 {
		o.MaxFrames = 16
	}
	if o.MaxMessage <= 0 {
		o.MaxMessage = o.MaxFrame + 64<<10
	}
	return o
}

// keepAlive finds a vanished peer after 10 + 3 × 5 seconds of silence.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3}

// Conn is one connection after its handshake. One goroutine may read while another writes.
type Conn struct {
	nc   net.Conn
	r    *bufio.Reader
	o    Options
	peer string

	readMu   sync.Mutex
	deadline time.Time // the reader's own, set by SetReadDeadline

	writeMu sync.Mutex
}

// Dial connects to endpoint, completes the handshake, and subscribes where typ is [SocketSUB].
// ctx bounds the dial only; closing the Conn ends what comes after.
func Dial(ctx context.Context, endpoint string, typ SocketType, o Options) (*Conn, error) {
	network, address, err := ParseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	o = o.withDefaults()
	ctx, cancel := context.WithTimeout(ctx, o.HandshakeTimeout)
	defer cancel()
	d := net.Dialer{KeepAliveConfig: keepAlive, Control: func(network, address string, c syscall.RawConn) error {
		if o.Control != nil {
			if err := o.Control(network, address, c); err != nil {
				return err
			}
		}
		return limitUnacked(network, address, c)
	}}
	nc, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", endpoint, err)
	}
	c, err := handshake(ctx, nc, typ, o)
	if err != nil {
		_ = nc.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", ctx.Err(), err) // in one line: it is shown as a status
		}
		return nil, fmt.Errorf("handshake with %s: %w", endpoint, err)
	}
	return c, nil
}

// handshake makes a Conn of a fresh connection; when ctx ends first, so does it.
func handshake(ctx context.Context, nc net.Conn, typ SocketType, o Options) (*Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = nc.SetDeadline(time.Unix(1, 0)) })
	c := &Conn{nc: nc, r: bufio.NewReaderSize(nc, 64<<10), o: o}
	err := c.greet(typ)
	if err == nil && typ == SocketSUB {
		err = c.writeFrames([][]byte{append([]byte{1}, o.Topic...)})
	}
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, err
	}
	return c, nc.SetDeadline(time.Time{})
}

// Peer is the socket type that the peer announced, such as "PUB".
func (c *Conn) Peer() string { return c.peer }

// Close closes the connection; a Recv or Send in progress returns an error.
func (c *Conn) Close() error { return c.nc.Close() }

// SetReadDeadline bounds the wait of this and later calls of [Conn.Recv]; the zero time means no bound.
// After a Recv that missed it in the middle of a message the Conn is of no further use.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.deadline = t
	return c.nc.SetReadDeadline(t)
}

// Buffered reports whether bytes that have arrived are waiting to be read.
func (c *Conn) Buffered() bool { return c.r.Buffered() > 0 }

// Recv returns the frames of the next message. It waits for the first byte until the read deadline,
// and for the rest at most StallTimeout. After any error but a deadline missed before the first byte the Conn is of
// no further use. The frames belong to the caller.
func (c *Conn) Recv() ([][]byte, error) {
	var frames [][]byte
	var total int
	for {
		if _, err := c.r.Peek(1); err != nil {
			return nil, eof(err, len(frames) > 0)
		}
		if len(frames) == 0 {
			defer c.stallGuard()()
		}
		flags, body, err := c.readFrame(c.o.MaxFrame, c.o.MaxMessage-total)
		if err != nil {
			return nil, eof(err, true)
		}
		if flags&flagCommand != 0 {
			if len(frames) > 0 {
				return nil, fmt.Errorf("%w: command inside a message", ErrProtocol)
			}
			if reason, ok := bytes.CutPrefix(body, []byte("\x05ERROR")); ok {
				return nil, fmt.Errorf("%w: peer reports %q", ErrProtocol, reason)
			}
			continue // a heartbeat or what later versions add: no concern of ours
		}
		if len(frames) == c.o.MaxFrames {
			return nil, fmt.Errorf("%w: more than %d frames in a message", ErrLimit, c.o.MaxFrames)
		}
		frames = append(frames, body)
		total += len(body)
		if flags&flagMore == 0 {
			return frames, nil
		}
	}
}

// stallGuard bounds the read of the message that has begun, unless the deadline is nearer, and returns what undoes it.
func (c *Conn) stallGuard() func() {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	limit := time.Now().Add(c.o.StallTimeout)
	if !c.deadline.IsZero() && c.deadline.Before(limit) {
		return func() {}
	}
	_ = c.nc.SetReadDeadline(limit)
	return func() {
		c.readMu.Lock()
		defer c.readMu.Unlock()
		_ = c.nc.SetReadDeadline(c.deadline)
	}
}

// Send sends one message.
func (c *Conn) Send(frames ...[]byte) error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.o.StallTimeout)); err != nil {
		return err
	}
	return c.writeFrames(frames)
}

const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

func (c *Conn) writeFrames(frames [][]byte) error {
	var b []byte
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		b = appendFrame(b, flags, f)
	}
	_, err := c.nc.Write(b)
	return err
}

func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		b = append(b, flags|flagLong)
		b = binary.BigEndian.AppendUint64(b, uint64(len(body)))
	} else {
		b = append(b, flags, byte(len(body)))
	}
	return append(b, body...)
}

// readFrame reads one frame, refusing a length above the limits before it allocates.
func (c *Conn) readFrame(maxFrame, maxTotal int) (flags byte, body []byte, err error) {
	if flags, err = c.r.ReadByte(); err != nil {
		return 0, nil, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 || flags&(flagMore|flagCommand) == flagMore|flagCommand {
		return 0, nil, fmt.Errorf("%w: frame flags %#x", ErrProtocol, flags)
	}
	var n uint64
	if flags&flagLong != 0 {
		var l [8]byte
		if _, err := io.ReadFull(c.r, l[:]); err != nil {
			return 0, nil, err
		}
		n = binary.BigEndian.Uint64(l[:])
	} else {
		l, err := c.r.ReadByte()
		if err != nil {
			return 0, nil, err
		}
		n = uint64(l)
	}
	if n > uint64(maxFrame) {
		return 0, nil, fmt.Errorf("%w: frame of %d bytes, at most %d", ErrLimit, n, maxFrame)
	}
	if n > uint64(max(maxTotal, 0)) {
		return 0, nil, fmt.Errorf("%w: message of more than %d bytes", ErrLimit, c.o.MaxMessage)
	}
	body, err = readBody(c.r, int(n))
	return flags, body, err
}

// eagerBody is how much is allocated on a peer's word alone.
const eagerBody = 1 << 20

func readBody(r io.Reader, n int) ([]byte, error) {
	if n <= eagerBody {
		body := make([]byte, n)
		_, err := io.ReadFull(r, body)
		return body, err
	}
	var b bytes.Buffer
	b.Grow(eagerBody)
	if _, err := io.CopyN(&b, r, int64(n)); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// eof turns the end of the stream inside a message into what it is.
func eof(err error, inside bool) error {
	if inside && errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
