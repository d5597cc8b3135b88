package store

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"time"

	"github.com/redis/go-redis/v9"
)

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// newDialer is the way to make connections, each within the deadline of the call that needs it.
//
// It never fails: where there is no connection it gives one that has the dial's error for everything. The library's
// connection pool counts failed dials, and after as many as it has connections it refuses to dial but once in a second by
// itself. That would be a second prober, and one that keeps the link's from finding Redis for up to that second.
func newDialer(o redis.UniversalOptions, opts Options) dialFunc {
	dial := opts.Dialer
	if dial == nil {
		d := &net.Dialer{Timeout: o.DialTimeout, KeepAlive: 5 * time.Minute}
		dial = d.DialContext
		if o.TLSConfig != nil {
			dial = (&tls.Dialer{NetDialer: d, Config: o.TLSConfig}).DialContext
		}
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return &deadConn{err: fmt.Errorf("%w", err)}, nil // the library unwraps it once, and the address should stay
		}
		return c, nil
	}
}

// deadConn is a connection that could not be made.
type deadConn struct {
	net.TCPAddr // of neither end
	err         error
}

func (c *deadConn) Read([]byte) (int, error)         { return 0, c.err }
func (c *deadConn) Write([]byte) (int, error)        { return 0, c.err }
func (c *deadConn) Close() error                     { return nil }
func (c *deadConn) LocalAddr() net.Addr              { return &c.TCPAddr }
func (c *deadConn) RemoteAddr() net.Addr             { return &c.TCPAddr }
func (c *deadConn) SetDeadline(time.Time) error      { return nil }
func (c *deadConn) SetReadDeadline(time.Time) error  { return nil }
func (c *deadConn) SetWriteDeadline(time.Time) error { return nil }
