package main

import (
	"context"
	"net"
	"strings"
	"testing"
)

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
