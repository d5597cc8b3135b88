package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// servePeer accepts connections on loopback and hands each to f; it returns the endpoint.
func servePeer(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				f(c)
			}()
		}
	}()
	return "tcp://" + l.Addr().String()
}

// greetAs plays the publisher's half of the handshake and returns what the client said: READY and, for a SUB,
// its subscription.
func greetAs(t *testing.T, c net.Conn, typ string, client SocketType) []byte {
	t.Helper()
	ready := appendFrame(nil, flagCommand, readyCommand(SocketType(typ)))
	if _, err := c.Write(append(greeting(), ready...)); err != nil {
		t.Error(err)
	}
	said := make([]byte, greetingSize+2+len(readyCommand(client)))
	if client == SocketSUB {
		said = make([]byte, len(said)+3)
	}
	if _, err := io.ReadFull(c, said); err != nil {
		t.Error(err)
	}
	return said
}

func dial(t *testing.T, endpoint string, typ SocketType, o Options) *Conn {
	t.Helper()
	c, err := Dial(t.Context(), endpoint, typ, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestTranscript(t *testing.T) {
	said := make(chan []byte, 1)
	ep := servePeer(t, func(c net.Conn) {
		said <- greetAs(t, c, "PUB", SocketSUB)
		_, _ = c.Write([]byte("\x01\x09kv-events\x01\x08\x00\x00\x00\x00\x00\x00\x00\x07\x00\x03abc"))
		long := append([]byte{2}, binary.BigEndian.AppendUint64(nil, 300)...)
		_, _ = c.Write(append(long, bytes.Repeat([]byte{'x'}, 300)...))
	})
	c := dial(t, ep, SocketSUB, Options{})
	want := "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x00NULL" + strings.Repeat("\x00", 16+1+31) +
		"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x08Identity\x00\x00\x00\x00" + "\x00\x01\x01"
	if got := <-said; string(got) != want {
		t.Errorf("client said\n%q\nwant\n%q", got, want)
	}
	if c.Peer() != "PUB" {
		t.Errorf("peer %q", c.Peer())
	}
	frames, err := c.Recv()
	if err != nil || len(frames) != 3 || string(frames[0]) != "kv-events" || string(frames[2]) != "abc" {
		t.Fatalf("first message %q, %v", frames, err)
	}
	frames, err = c.Recv()
	if err != nil || len(frames) != 1 || len(frames[0]) != 300 {
		t.Fatalf("long frame: %d frames, %v", len(frames), err)
	}
	if _, err = c.Recv(); !errors.Is(err, io.EOF) {
		t.Fatalf("after the peer closed: %v, want EOF", err)
	}
}

func TestDealerSend(t *testing.T) {
	got := make(chan []byte, 1)
	ep := servePeer(t, func(c net.Conn) {
		greetAs(t, c, "ROUTER", SocketDEALER)
		b := make([]byte, 12)
		if _, err := io.ReadFull(c, b); err != nil {
			t.Error(err)
		}
		got <- b
	})
	c := dial(t, ep, SocketDEALER, Options{})
	if err := c.Send(nil, []byte{0, 0, 0, 0, 0, 0, 0, 41}); err != nil {
		t.Fatal(err)
	}
	if b := <-got; string(b) != "\x01\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x29" {
		t.Errorf("sent %x", b)
	}
}

func TestBadPeers(t *testing.T) {
	ready := func(props string) []byte {
		return append(greeting(), appendFrame(nil, flagCommand, []byte("\x05READY"+props))...)
	}
	old := greeting()
	old[10] = 2
	curve := greeting()
	copy(curve[12:], "CURVE")
	for name, tc := range map[string]struct {
		say  []byte
		want error
	}{
		"http":             {[]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), ErrProtocol},
		"closes at once":   {nil, io.ErrUnexpectedEOF},
		"cut greeting":     {greeting()[:30], io.ErrUnexpectedEOF},
		"zmtp 2":           {old, ErrProtocol},
		"curve":            {curve, ErrProtocol},
		"cut property":     {ready("\x03ab"), ErrProtocol},
		"no value length":  {ready("\x0bSocket-Type\x00"), ErrProtocol},
		"huge value":       {ready("\x0bSocket-Type\xff\xff\xff\xffPUB"), ErrProtocol},
		"no socket type":   {ready(""), ErrProtocol},
		"wrong type":       {ready("\x0bSocket-Type\x00\x00\x00\x03REP"), ErrProtocol},
		"refused":          {append(greeting(), appendFrame(nil, flagCommand, []byte("\x05ERROR\x02no"))...), ErrProtocol},
		"message not cmd":  {append(greeting(), 0, 3, 'a', 'b', 'c'), ErrProtocol},
		"other command":    {append(greeting(), appendFrame(nil, flagCommand, []byte("\x05HELLO"))...), ErrProtocol},
		"reserved flags":   {append(greeting(), 0x80, 0), ErrProtocol},
		"huge READY":       {append(greeting(), 6, 0x7f, 255, 255, 255, 255, 255, 255, 255), ErrLimit},
		"negative as uint": {append(greeting(), 6, 255, 255, 255, 255, 255, 255, 255, 255), ErrLimit},
	} {
		t.Run(name, func(t *testing.T) {
			ep := servePeer(t, func(c net.Conn) {
				_, _ = c.Write(tc.say)
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = io.Copy(io.Discard, c)
			})
			c, err := Dial(t.Context(), ep, SocketSUB, Options{})
			if err == nil {
				_ = c.Close()
			}
			if !errors.Is(err, tc.want) {
				t.Errorf("error %v, want %v", err, tc.want)
			}
		})
	}
}

func TestLimits(t *testing.T) {
	o := Options{MaxFrame: 1000, MaxFrames: 3, MaxMessage: 1500}
	frame := func(flags byte, n int) []byte { return appendFrame(nil, flags, make([]byte, n)) }
	huge := func(n uint64) []byte { return binary.BigEndian.AppendUint64([]byte{flagLong}, n) }
	for name, tc := range map[string]struct {
		say  []byte
		want error // nil: the message arrives
	}{
		"frame at the limit":     {frame(0, 1000), nil},
		"frame above":            {frame(0, 1001), ErrLimit},
		"claims 64 MiB":          {huge(64 << 20), ErrLimit},
		"claims 2^62":            {huge(1 << 62), ErrLimit},
		"claims 2^64-1":          {huge(1<<64 - 1), ErrLimit},
		"message at the limit":   {slices.Concat(frame(1, 1000), frame(0, 500)), nil},
		"message above":          {slices.Concat(frame(1, 1000), frame(0, 501)), ErrLimit},
		"frames at the limit":    {slices.Concat(frame(1, 0), frame(1, 0), frame(0, 0)), nil},
		"frames above":           {slices.Concat(frame(1, 0), frame(1, 0), frame(1, 0), frame(0, 0)), ErrLimit},
		"cut frame":              {frame(0, 100)[:50], io.ErrUnexpectedEOF},
		"cut between frames":     {frame(1, 100), io.ErrUnexpectedEOF},
		"cut length":             {huge(5)[:4], io.ErrUnexpectedEOF},
		"command first":          {slices.Concat(frame(flagCommand, 20), frame(0, 1)), nil},
		"command inside":         {slices.Concat(frame(1, 1), frame(flagCommand, 20)), ErrProtocol},
		"command with more":      {frame(flagCommand|flagMore, 3), ErrProtocol},
		"reserved flag":          {frame(8, 3), ErrProtocol},
		"error command":          {appendFrame(nil, flagCommand, []byte("\x05ERROR\x03bad")), ErrProtocol},
		"command over the limit": {frame(flagCommand, 1001), ErrLimit},
	} {
		t.Run(name, func(t *testing.T) {
			ep := servePeer(t, func(c net.Conn) {
				greetAs(t, c, "PUB", SocketSUB)
				_, _ = c.Write(tc.say)
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = io.Copy(io.Discard, c)
			})
			c := dial(t, ep, SocketSUB, o)
			frames, err := c.Recv()
			if !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
				t.Errorf("%d frames, error %v, want %v", len(frames), err, tc.want)
			}
		})
	}
}

// A frame length is a claim: memory follows what has arrived, not what was announced.
func TestClaimAllocatesLittle(t *testing.T) {
	var before, after runtime.MemStats
	claim := binary.BigEndian.AppendUint64([]byte{flagLong}, 64<<20)
	runtime.ReadMemStats(&before)
	for range 20 {
		r := io.MultiReader(bytes.NewReader(claim), bytes.NewReader(make([]byte, 1000)))
		c := newTestConn(r)
		if _, err := c.Recv(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("error %v", err)
		}
	}
	runtime.ReadMemStats(&after)
	if grew := after.TotalAlloc - before.TotalAlloc; grew > 20*4<<20 {
		t.Errorf("20 claims of 64 MiB with 1,000 bytes behind them allocated %d MiB", grew>>20)
	}
}

func TestSilentPeer(t *testing.T) {
	silent := servePeer(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	if _, err := Dial(t.Context(), silent, SocketSUB, Options{HandshakeTimeout: 50 * time.Millisecond}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("handshake timeout: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	connected := make(chan struct{})
	waiting := servePeer(t, func(c net.Conn) { close(connected); _, _ = io.Copy(io.Discard, c) })
	go func() { <-connected; cancel() }()
	if _, err := Dial(ctx, waiting, SocketSUB, Options{HandshakeTimeout: time.Hour}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled handshake: %v", err)
	}
}

func TestStallInsideMessage(t *testing.T) {
	ep := servePeer(t, func(c net.Conn) {
		greetAs(t, c, "PUB", SocketSUB)
		_, _ = c.Write([]byte{1, 2, 'a'})
		_, _ = io.Copy(io.Discard, c)
	})
	c := dial(t, ep, SocketSUB, Options{StallTimeout: 30 * time.Millisecond})
	if _, err := c.Recv(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("stall: %v", err)
	}
}

// A deadline that passes between messages leaves the connection as it was.
func TestReadDeadline(t *testing.T) {
	more := make(chan struct{})
	ep := servePeer(t, func(c net.Conn) {
		greetAs(t, c, "PUB", SocketSUB)
		<-more
		_, _ = c.Write([]byte{0, 1, 'a', 0, 1, 'b'})
		_, _ = io.Copy(io.Discard, c)
	})
	c := dial(t, ep, SocketSUB, Options{})
	if err := c.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Recv(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("passed deadline: %v", err)
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	close(more)
	for _, want := range []string{"a", "b"} {
		if f, err := c.Recv(); err != nil || string(f[0]) != want {
			t.Fatalf("got %q, %v; want %q", f, err, want)
		}
	}
	closed := make(chan error, 1)
	go func() { _, err := c.Recv(); closed <- err }()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-closed; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Recv after Close: %v", err)
	}
}

func TestKeepAliveIsOn(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads Linux's socket options")
	}
	ep := servePeer(t, func(c net.Conn) {
		greetAs(t, c, "PUB", SocketSUB)
		_, _ = io.Copy(io.Discard, c)
	})
	rc, err := dial(t, ep, SocketSUB, Options{}).nc.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	const idle, interval, count, userTimeout = 4, 5, 6, 18
	get := func(level, opt int) (v int) {
		if e := rc.Control(func(fd uintptr) { v, err = syscall.GetsockoptInt(int(fd), level, opt) }); e != nil || err != nil {
			t.Fatal(e, err)
		}
		return v
	}
	if get(syscall.SOL_SOCKET, syscall.SO_KEEPALIVE) != 1 {
		t.Error("keep-alive is off")
	}
	if d := get(syscall.IPPROTO_TCP, idle) + get(syscall.IPPROTO_TCP, interval)*get(syscall.IPPROTO_TCP, count); d < 15 || d > 30 {
		t.Errorf("a vanished peer is noticed after %d s, want 15 to 30", d)
	}
	if ms := get(syscall.IPPROTO_TCP, userTimeout); ms < 15000 || ms > 30000 {
		t.Errorf("unacknowledged bytes end a connection after %d ms, want 15 to 30 s", ms)
	}
}

func TestUnixSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		greetAs(t, c, "PUB", SocketSUB)
		_, _ = c.Write([]byte{0, 1, 'a'})
	}()
	if f, err := dial(t, "ipc://"+path, SocketSUB, Options{}).Recv(); err != nil || string(f[0]) != "a" {
		t.Errorf("got %q, %v", f, err)
	}
}

func TestParseEndpoint(t *testing.T) {
	for ep, want := range map[string]string{
		"tcp://h:5557": "tcp h:5557", "tcp://[::1]:5557": "tcp [::1]:5557", "ipc:///tmp/x": "unix /tmp/x", "ipc://@x": "unix @x",
		"tcp://*:5557": "", "tcp://0.0.0.0:5557": "", "tcp://[::]:5557": "", "tcp://:5557": "", "tcp://h": "", "tcp://h:0": "", "tcp://h:65536": "",
		"tcp://h:*": "", "ipc://": "", "ipc://*": "", "inproc://x": "", "h:5557": "", "": "", "http://h:1": "",
	} {
		network, address, err := ParseEndpoint(ep)
		if got := strings.TrimSpace(network + " " + address); got != want || (err == nil) != (want != "") {
			t.Errorf("ParseEndpoint(%q) = %q, %v; want %q", ep, got, err, want)
		}
	}
	for _, tc := range []struct {
		ep   string
		rank int
		want string
	}{
		{"tcp://h:5557", 0, "tcp://h:5557"}, {"tcp://h:5557", 3, "tcp://h:5560"}, {"tcp://[::1]:5557", 1, "tcp://[::1]:5558"},
		{"tcp://h:65535", 1, ""}, {"tcp://h:5557", -1, ""}, {"ipc:///tmp/x", 0, "ipc:///tmp/x"}, {"ipc:///tmp/x", 1, ""},
	} {
		if got, err := WithRank(tc.ep, tc.rank); got != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("WithRank(%q, %d) = %q, %v; want %q", tc.ep, tc.rank, got, err, tc.want)
		}
	}
}
