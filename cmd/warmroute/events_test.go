package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/indexer/wire"
)

// Whatever an engine calls its topic, and whatever it sends: a line is JSON.
func TestEventsAreJSON(t *testing.T) {
	for _, payload := range []string{"\x92\xc0\x91\x91\xb0AllBlocksCleared", "\xff\x00"} {
		var out bytes.Buffer
		c := eventsCmd{JSON: true, Follow: true}
		if err := c.print(&out, wire.Message{Topic: "a\x00\xff\"", Seq: 7, Payload: []byte(payload)}); err != nil {
			t.Fatal(err)
		}
		var line eventsLine
		if err := json.Unmarshal(out.Bytes(), &line); err != nil || line.Seq != 7 || (line.Error == "") == (line.Batch == nil) {
			t.Errorf("%v: %s", err, out.String())
		}
	}
}

// An interrupted wait for a message says what to look at, not what became of the connection.
func TestEventsInterrupted(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		if c, err := l.Accept(); err == nil {
			t.Cleanup(func() { _ = c.Close() })
		}
	}()
	err = eventsCmd{Endpoint: "tcp://" + l.Addr().String()}.Run(ctx, &stdio{}, nil)
	if err == nil || !strings.Contains(err.Error(), "interrupted after 0 messages (an idle engine is silent") {
		t.Errorf("got %v", err)
	}
}
