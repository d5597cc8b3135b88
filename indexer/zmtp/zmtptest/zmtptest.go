// Package zmtptest runs a KV-event publisher on the real libzmq (python3-zmq) for tests.
//
// A machine without it skips the test; with REQUIRE_REDIS=1, as in CI, the test fails instead.
// It has nothing to do with Redis at run time.
package zmtptest

import (
	"bufio"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"
)

//go:embed engine.py
var script string

const python = "/usr/bin/python3"

// Config says how the publisher behaves. The zero value: free loopback ports, no replay, a PUB socket.
type Config struct {
	Pub    string // endpoint to bind; default tcp://127.0.0.1:*
	Router string // replay endpoint to bind; "" for none, "*" for a free port
	Layout string // replay frames: "v1" (default) or "v2"
	XPUB   bool   // report subscriptions (see [Engine.Subscribed]); the wire protocol is PUB's
}

// Engine is one running publisher process.
type Engine struct {
	Endpoint       string // where it publishes
	ReplayEndpoint string // where it answers replay requests; "" for none

	t          testing.TB
	cmd        *exec.Cmd
	in         io.WriteCloser
	done       chan string
	subscribed chan string
	asked      chan int64
	ended      chan struct{}
}

// Start runs a publisher until the test ends or [Engine.Kill].
func Start(t testing.TB, c Config) *Engine {
	t.Helper()
	if out, err := exec.Command(python, "-c", "import zmq").CombinedOutput(); err != nil {
		if os.Getenv("REQUIRE_REDIS") == "1" {
			t.Fatalf("libzmq publisher needed: install python3-zmq (%v: %.200s)", err, out)
		}
		t.Skip("no libzmq publisher: install python3-zmq")
	}
	arg := func(s, d string) string {
		if s == "" {
			return d
		}
		return s
	}
	kind, router := "pub", arg(c.Router, "-")
	if c.XPUB {
		kind = "xpub"
	}
	if router == "*" {
		router = "tcp://127.0.0.1:*"
	}
	e := &Engine{t: t, done: make(chan string, 1), subscribed: make(chan string, 1024), asked: make(chan int64, 1024), ended: make(chan struct{})}
	e.cmd = exec.Command(python, "-c", script, arg(c.Pub, "tcp://127.0.0.1:*"), router, arg(c.Layout, "v1"), kind)
	e.cmd.Stderr = os.Stderr
	in, err := e.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := e.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := e.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	e.in = in
	t.Cleanup(e.Kill)
	bound := make(chan struct{})
	go e.listen(out, bound)
	select {
	case <-bound:
	case <-e.ended:
		t.Fatal("the libzmq publisher ended at once")
	case <-time.After(30 * time.Second):
		t.Fatal("the libzmq publisher did not start")
	}
	return e
}

func (e *Engine) listen(out io.Reader, bound chan<- struct{}) {
	defer close(e.ended)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var w struct {
			Pub, Router, Done, Subscribed *string
			Asked                         *int64
		}
		if err := json.Unmarshal(lines.Bytes(), &w); err != nil {
			return
		}
		switch {
		case w.Pub != nil:
			e.Endpoint, e.ReplayEndpoint = *w.Pub, *w.Router
			close(bound)
		case w.Done != nil:
			e.done <- *w.Done
		case w.Subscribed != nil:
			e.subscribed <- *w.Subscribed
		case w.Asked != nil:
			e.asked <- *w.Asked
		}
	}
}

// Kill ends the process without a goodbye, as a crash does.
func (e *Engine) Kill() {
	_ = e.cmd.Process.Kill()
	<-e.ended
	_ = e.cmd.Wait()
}

// Publish sends a payload live and keeps it for replay.
func (e *Engine) Publish(topic string, seq int64, payload []byte) {
	e.t.Helper()
	e.do(map[string]any{"op": "publish", "topic": topic, "seq": seq, "payload": hex.EncodeToString(payload)})
}

// Lose keeps a payload for replay without sending it live.
func (e *Engine) Lose(topic string, seq int64, payload []byte) {
	e.t.Helper()
	e.do(map[string]any{"op": "publish", "topic": topic, "seq": seq, "payload": hex.EncodeToString(payload), "drop": true})
}

// Raw sends any frames.
func (e *Engine) Raw(frames ...[]byte) {
	e.t.Helper()
	h := make([]string, len(frames))
	for i, f := range frames {
		h[i] = hex.EncodeToString(f)
	}
	e.do(map[string]any{"op": "raw", "frames": h})
}

// Flood sends count messages of size bytes, numbered from 0.
func (e *Engine) Flood(count, size int) {
	e.t.Helper()
	e.do(map[string]any{"op": "flood", "count": count, "size": size})
}

// Replay says how requests are answered from now on.
type Replay struct {
	Skip   []int64 `json:"skip"`   // sequence numbers left out
	End    bool    `json:"end"`    // send the END marker
	Answer bool    `json:"answer"` // send the batches
	First  int64   `json:"first"`  // the oldest sequence number still kept
}

// SetReplay changes how replay requests are answered. At first everything kept is sent, and END.
func (e *Engine) SetReplay(r Replay) {
	e.t.Helper()
	if r.Skip == nil {
		r.Skip = []int64{}
	}
	e.do(map[string]any{"op": "replay", "skip": r.Skip, "end": r.End, "answer": r.Answer, "first": r.First})
}

// Subscribed waits until a subscription has arrived and returns its topic; XPUB only.
func (e *Engine) Subscribed() string {
	e.t.Helper()
	return wait(e, e.subscribed, "a subscription")
}

// Asked waits for a replay request and returns its start.
func (e *Engine) Asked() int64 {
	e.t.Helper()
	return wait(e, e.asked, "a replay request")
}

func (e *Engine) do(c map[string]any) {
	e.t.Helper()
	b, err := json.Marshal(c)
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := fmt.Fprintf(e.in, "%s\n", b); err != nil {
		e.t.Fatalf("libzmq publisher: %v", err)
	}
	wait(e, e.done, "the publisher")
}

func wait[T any](e *Engine, c <-chan T, what string) T {
	e.t.Helper()
	select {
	case v := <-c:
		return v
	case <-e.ended:
		e.t.Fatalf("waiting for %s: the publisher ended", what)
	case <-time.After(30 * time.Second):
		e.t.Fatalf("waiting for %s: nothing in 30 s", what)
	}
	panic("unreachable")
}

// Rebind makes the publisher listen on another endpoint as well.
func (e *Engine) Rebind(endpoint string) {
	e.t.Helper()
	e.do(map[string]any{"op": "bind", "endpoint": endpoint})
}
