package zmtp_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/warmroute/warmroute/indexer/zmtp"
	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
)

func dial(t *testing.T, endpoint string, typ zmtp.SocketType, o zmtp.Options) *zmtp.Conn {
	t.Helper()
	c, err := zmtp.Dial(t.Context(), endpoint, typ, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func seqOf(t *testing.T, frames [][]byte) int64 {
	t.Helper()
	if len(frames) != 3 || len(frames[1]) != 8 {
		t.Fatalf("live message of %d frames", len(frames))
	}
	return int64(binary.BigEndian.Uint64(frames[1]))
}

func TestLibzmqPublisherRestarts(t *testing.T) {
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	ep := e.Endpoint
	for restart := range 3 {
		c := dial(t, ep, zmtp.SocketSUB, zmtp.Options{Topic: "kv"})
		if topic := e.Subscribed(); topic != "kv" {
			t.Fatalf("subscribed to %q", topic)
		}
		payload := bytes.Repeat([]byte{byte(restart)}, 300)
		e.Publish("other", 0, nil)
		e.Publish("kv-events", 1, payload)
		f, err := c.Recv()
		if err != nil || seqOf(t, f) != 1 || string(f[0]) != "kv-events" || !bytes.Equal(f[2], payload) {
			t.Fatalf("restart %d: %q, %v", restart, f, err)
		}
		e.Kill()
		if _, err := c.Recv(); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("after the publisher died: %v", err)
		}
		if _, err := zmtp.Dial(t.Context(), ep, zmtp.SocketSUB, zmtp.Options{}); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("dial while it is down: %v", err)
		}
		e = zmtptest.Start(t, zmtptest.Config{XPUB: true, Pub: ep})
	}
}

// A plain PUB discards until the subscription is there. After the handshake and a short wait nothing is missed.
func TestLibzmqSlowJoiner(t *testing.T) {
	e := zmtptest.Start(t, zmtptest.Config{})
	e.Publish("", 0, []byte("lost"))
	c := dial(t, e.Endpoint, zmtp.SocketSUB, zmtp.Options{})
	// PUB cannot tell when it has the subscription: publish until something arrives, then nothing may be missing.
	first := make(chan int64, 1)
	go func() {
		f, err := c.Recv()
		if err == nil && len(f) == 3 {
			first <- int64(binary.BigEndian.Uint64(f[1]))
		}
		close(first)
	}()
	seq, from := int64(0), int64(-1)
	for from < 0 {
		seq++
		e.Publish("", seq, nil)
		select {
		case n, ok := <-first:
			if !ok {
				t.Fatal("the connection ended")
			}
			from = n
		default:
		}
	}
	if from < 1 {
		t.Fatalf("first sequence number %d: it was sent before the subscription", from)
	}
	e.Publish("", seq+1, nil)
	for want := from + 1; want <= seq+1; want++ {
		f, err := c.Recv()
		if err != nil || seqOf(t, f) != want {
			t.Fatalf("want %d, got %v, %v", want, f, err)
		}
	}
}

func TestLibzmqReplay(t *testing.T) {
	for layout, lead := range map[string]int{"v1": 1, "v2": 2} {
		t.Run(layout, func(t *testing.T) {
			e := zmtptest.Start(t, zmtptest.Config{Router: "*", Layout: layout})
			for i := range int64(5) {
				e.Publish("kv", i, []byte{byte(i)})
			}
			c := dial(t, e.ReplayEndpoint, zmtp.SocketDEALER, zmtp.Options{})
			if err := c.Send(nil, binary.BigEndian.AppendUint64(nil, 2)); err != nil {
				t.Fatal(err)
			}
			for want := uint64(2); want <= 5; want++ {
				f, err := c.Recv()
				if err != nil || len(f) != lead+2 || len(f[0]) != 0 {
					t.Fatalf("reply %q, %v", f, err)
				}
				seq := binary.BigEndian.Uint64(f[len(f)-2])
				if want == 5 {
					if seq != math.MaxUint64 || len(f[len(f)-1]) != 0 {
						t.Errorf("no END marker: %q", f)
					}
				} else if seq != want {
					t.Errorf("reply %d, want %d", seq, want)
				}
			}
		})
	}
}

func TestLibzmqOversized(t *testing.T) {
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	c := dial(t, e.Endpoint, zmtp.SocketSUB, zmtp.Options{MaxFrame: 1 << 20})
	e.Subscribed()
	e.Raw([]byte("kv"), make([]byte, 8), make([]byte, 1<<20))
	if f, err := c.Recv(); err != nil || len(f[2]) != 1<<20 {
		t.Fatalf("frame at the limit: %v", err)
	}
	e.Raw([]byte("kv"), make([]byte, 8), make([]byte, 1<<20+1))
	if _, err := c.Recv(); !errors.Is(err, zmtp.ErrLimit) {
		t.Fatalf("frame above the limit: %v", err)
	}
	many := make([][]byte, 17)
	d := dial(t, e.Endpoint, zmtp.SocketSUB, zmtp.Options{})
	e.Subscribed()
	e.Raw(many...)
	if _, err := d.Recv(); !errors.Is(err, zmtp.ErrLimit) {
		t.Fatalf("17 frames: %v", err)
	}
}

func TestLibzmqFlood(t *testing.T) {
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	c := dial(t, e.Endpoint, zmtp.SocketSUB, zmtp.Options{})
	e.Subscribed()
	e.Flood(20_000, 500)
	for want := range int64(20_000) {
		f, err := c.Recv()
		if err != nil || seqOf(t, f) != want || len(f[2]) != 500 {
			t.Fatalf("message %d: %v", want, err)
		}
	}
}

// A SUB that asks a ROUTER, or the reverse, is told so instead of waiting for ever.
func TestLibzmqWrongSocket(t *testing.T) {
	e := zmtptest.Start(t, zmtptest.Config{Router: "*"})
	o := zmtp.Options{HandshakeTimeout: 20 * time.Second}
	if c, err := zmtp.Dial(t.Context(), e.ReplayEndpoint, zmtp.SocketSUB, o); err == nil {
		_ = c.Close()
		t.Error("SUB to ROUTER: no error")
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("SUB to ROUTER: only a timeout: %v", err)
	}
	if c, err := zmtp.Dial(t.Context(), e.Endpoint, zmtp.SocketDEALER, o); err == nil {
		_ = c.Close()
		t.Error("DEALER to PUB: no error")
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("DEALER to PUB: only a timeout: %v", err)
	}
}
