package zmtp

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"testing"
	"time"
)

// readOnly is a net.Conn over a reader.
type readOnly struct{ io.Reader }

func (readOnly) Write(b []byte) (int, error)      { return len(b), nil }
func (readOnly) Close() error                     { return nil }
func (readOnly) LocalAddr() net.Addr              { return nil }
func (readOnly) RemoteAddr() net.Addr             { return nil }
func (readOnly) SetDeadline(time.Time) error      { return nil }
func (readOnly) SetReadDeadline(time.Time) error  { return nil }
func (readOnly) SetWriteDeadline(time.Time) error { return nil }

func newTestConn(r io.Reader) *Conn {
	return &Conn{nc: readOnly{r}, r: bufio.NewReader(r), o: Options{}.withDefaults()}
}

// FuzzPeer: whatever a peer says, what comes out is no more than what went in, and what is accepted can be
// written again and read the same.
func FuzzPeer(f *testing.F) {
	hello := append(greeting(), appendFrame(nil, flagCommand, readyCommand("PUB"))...)
	f.Add(append(bytes.Clone(hello), 1, 1, 'a', 0, 0))
	f.Add(append(bytes.Clone(hello), 2, 0, 0, 0, 0, 0, 0, 1, 0))
	f.Add([]byte("HTTP/1.1 200 OK\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		c := newTestConn(bytes.NewReader(in))
		if c.greet(SocketSUB) != nil {
			return
		}
		total := 0
		for {
			frames, err := c.Recv()
			if err != nil {
				return
			}
			var again []byte
			for i, fr := range frames {
				total += len(fr)
				var flags byte
				if i < len(frames)-1 {
					flags = flagMore
				}
				again = appendFrame(again, flags, fr)
			}
			if total > len(in) {
				t.Fatalf("%d bytes of frames out of %d bytes", total, len(in))
			}
			back, err := newTestConn(bytes.NewReader(again)).Recv()
			if err != nil || len(back) != len(frames) {
				t.Fatalf("round trip: %d frames, %v; want %d", len(back), err, len(frames))
			}
			for i := range back {
				if !bytes.Equal(back[i], frames[i]) {
					t.Fatalf("round trip: frame %d differs", i)
				}
			}
		}
	})
}
