package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// fill publishes n batches of rank 0.
func fill(t *testing.T, e *Engine, n int) {
	t.Helper()
	for range n {
		if err := e.ClearCache(0); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTopicFilter(t *testing.T) {
	e := startEngine(t, Options{Topic: "kv-events"})
	hit, miss := subscribe(t, e, 0, "kv"), subscribe(t, e, 0, "kw")
	fill(t, e, 1)
	if m := hit.message(); string(m[0]) != "kv-events" {
		t.Errorf("topic %q", m[0])
	}
	miss.raw("\x00\x01\x01") // subscribe to everything, as a message
	miss.raw("\x04\x07\x04PING\x00\x00")
	if body, _ := miss.frame(); string(body) != "\x04PONG" {
		t.Fatalf("got %q, want the PONG: the first batch does not match", body)
	}
	fill(t, e, 1)
	if seq, _ := miss.live(); seq != 1 {
		t.Errorf("got batch %d, want 1", seq)
	}
	if seq, _ := hit.live(); seq != 1 {
		t.Errorf("got batch %d, want 1", seq)
	}
	// ZMTP 3.1 commands, and an unsubscription.
	hit.raw("\x00\x03\x00kv")
	hit.raw("\x04\x0d\x09SUBSCRIBEkv-")
	hit.raw("\x04\x07\x04PING\x00\x00")
	if body, _ := hit.frame(); string(body) != "\x04PONG" {
		t.Fatalf("got %q, want the PONG", body)
	}
	fill(t, e, 1)
	if seq, _ := hit.live(); seq != 2 {
		t.Errorf("got batch %d, want 2", seq)
	}
}

// Neither a silent peer, nor one that does not read, nor garbage may keep others from
// their events.
func TestBadPeersHurtNobody(t *testing.T) {
	e := startEngine(t, Options{HighWaterMark: 16})
	dial(t, e.EventEndpoint(0)) // says nothing
	for _, garbage := range []string{
		"GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 64),
		greeting() + "\x04\x08\x05READY\x01x",                                              // a property cut short
		greeting() + "\x04\x06\x05READY",                                                   // no socket type
		greeting() + "\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH",                // the wrong one
		greeting() + "\x06\xff\xff\xff\xff\xff\xff\xff\xff",                                // a frame without end
		greeting() + "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x04\x01\xff",     // a command cut short
		greeting() + "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x04\x05\x04PING", // a PING without TTL
		greeting() + "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB" + strings.Repeat("\x01\x00", 100),
	} {
		p := dial(t, e.EventEndpoint(0))
		p.raw(garbage)
		if _, err := io.Copy(io.Discard, p); err != nil && !errors.As(err, new(*net.OpError)) {
			t.Errorf("%q: %v", garbage, err)
		}
	}
	slow := subscribe(t, e, 0, "") // reads no more
	good := subscribe(t, e, 0, "")
	r, err := e.rank(0)
	if err != nil {
		t.Fatal(err)
	}
	payload := make([]byte, 1<<18)
	publish := func(seq uint64) { r.pub.out.publish(nil, binary.BigEndian.AppendUint64(nil, seq), payload) }
	for i := range uint64(200) { // far more than socket buffers and the high-water mark hold
		publish(i)
		if m := good.message(); binary.BigEndian.Uint64(m[1]) != i {
			t.Fatalf("batch %d, want %d", binary.BigEndian.Uint64(m[1]), i)
		}
	}
	// What was queued for the slow one comes first, then a hole, then what is published now.
	for want := uint64(0); ; want++ {
		seq := binary.BigEndian.Uint64(slow.message()[1])
		if seq != want {
			break
		}
		if want == 200 {
			t.Fatal("the slow subscriber has lost nothing: the test did not fill its queue")
		}
		publish(1000 + want)
	}
}

func TestReplayRequestsThatAreNotAnswered(t *testing.T) {
	e := startEngine(t, Options{})
	fill(t, e, 3)
	p := connect(t, e.ReplayEndpoint(0), "DEALER")
	p.raw("\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00")             // no delimiter
	p.raw("\x01\x00\x01\x01x\x00\x01\x00")                        // a frame too many
	p.raw("\x01\x00\x00\x01\x02")                                 // a short number
	p.raw("\x01\x00\x00\x09\x01\x00\x00\x00\x00\x00\x00\x00\x00") // one beyond 64 bits
	var got []uint64
	for len(got) < 3 {
		m := p.message()
		got = append(got, binary.BigEndian.Uint64(m[2]))
	}
	if got[0] != 2 || got[1] != 1<<64-1 || got[2] != 1<<64-1 {
		t.Errorf("answers %x, want batch 2, its end marker, and an end marker", got)
	}
}

func TestNoReplay(t *testing.T) {
	e := startEngine(t, Options{NoReplay: true})
	if got := e.ReplayEndpoint(0); got != "" {
		t.Errorf("replay endpoint %q", got)
	}
}

// python is Debian's interpreter, for which libzmq's bindings are packaged.
const python = "/usr/bin/python3"

// libzmq runs a Python script that speaks through libzmq and msgpack's reference
// implementation. Its last line of output comes back.
func libzmq(t *testing.T, script string, args ...string) *exec.Cmd {
	t.Helper()
	if exec.CommandContext(t.Context(), python, "-c", "import zmq, msgpack").Run() != nil {
		if os.Getenv("REQUIRE_REDIS") == "1" {
			t.Fatal("python3-zmq and python3-msgpack are required")
		}
		t.Skip("needs python3-zmq and python3-msgpack")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, python, append([]string{"-c", script}, args...)...)
	cmd.Stderr = t.Output()
	return cmd
}

// A libzmq subscriber follows two lifetimes of the engine over one socket, then a libzmq
// DEALER replays the second.
func TestLibzmq(t *testing.T) {
	for _, layout := range []int{1, 2} {
		e := startEngine(t, Options{BlockSize: 4, Topic: "kv", ReplayLayout: layout, Encoding: EncodingArray})
		cmd := libzmq(t, `
import sys, zmq, msgpack
ctx = zmq.Context()
sub = ctx.socket(zmq.SUB)
sub.setsockopt(zmq.HEARTBEAT_IVL, 20)
sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
sub.setsockopt(zmq.RECONNECT_IVL, 10)
sub.setsockopt(zmq.RCVTIMEO, 20000)
sub.setsockopt(zmq.SUBSCRIBE, b"kv")
mon = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
sub.connect(sys.argv[1])
def say(*a):
    print(*a, flush=True)
for life in range(2):
    mon.recv_multipart()
    say("connected")
    for n in range(3):
        topic, seq, payload = sub.recv_multipart()
        ts, events, rank = msgpack.unpackb(payload)
        say(topic.decode(), int.from_bytes(seq, "big"), rank, [e[0] for e in events], [len(e) for e in events])
d = ctx.socket(zmq.DEALER)
d.setsockopt(zmq.RCVTIMEO, 20000)
d.connect(sys.argv[2])
d.send_multipart([b"", (1).to_bytes(8, "big")])
while True:
    f = d.recv_multipart()
    assert f[0] == b"", f
    say(len(f), int.from_bytes(f[-2], "big"), len(f[-1]) > 0)
    if f[-2] == b"\xff" * 8:
        break
ctx.destroy(0)
`, e.EventEndpoint(0), e.ReplayEndpoint(0))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := readLines(t, out)
		for life := range 2 {
			if life == 1 {
				if err := e.Restart(); err != nil {
					t.Fatal(err)
				}
			}
			lines("connected")
			// The handshake is done, but the subscription may still be on its way.
			eventually(t, "the subscription arrives", func() bool { return e.subscribers(0) == 1 })
			for i := range 3 {
				complete(t, e, numbers(1000*i, 4), 1)
			}
			lines("kv 0 0 ['BlockStored'] [10]")
			lines("kv 1 0 ['BlockStored'] [10]")
			lines("kv 2 0 ['BlockStored'] [10]")
		}
		frames := string(rune('2' + layout))
		lines(frames + " 1 True")
		lines(frames + " 2 True")
		lines(frames + " 18446744073709551615 False")
		if err := cmd.Wait(); err != nil {
			t.Errorf("python: %v", err)
		}
	}
}
