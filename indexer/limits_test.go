package indexer

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warmroute/warmroute/guard"
)

// Slow clients of the admin surface end, on real sockets.
func TestSlowClients(t *testing.T) {
	ix := newIndexer(t, Options{Store: newStore(t)})
	const short = 50 * time.Millisecond
	ix.server.ReadHeaderTimeout, ix.server.ReadTimeout, ix.server.IdleTimeout = short, 2*short, short
	start(t, ix)
	var ends sync.WaitGroup
	for _, say := range []string{
		"", "GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ", "POST /register HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
		"POST /events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", "GET /workers HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
	} {
		ends.Go(func() {
			c, err := net.Dial("tcp", ix.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = c.Close() }()
			if _, err := io.WriteString(c, say); err != nil {
				t.Error(err)
			}
			_, _ = io.Copy(io.Discard, c) // to the end of the connection
		})
	}
	ends.Wait()
}

// Where all connections are held, probes are answered, and others are told.
func TestTooManyConnections(t *testing.T) {
	ix := newIndexer(t, Options{Store: newStore(t)})
	ix.listener = guard.Guard(ix.server, ix.listener, guard.ConnOptions{Surface: "test", Max: 1, SendTimeout: time.Minute})
	start(t, ix)
	busy, err := net.Dial("tcp", ix.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = busy.Close() }()
	if _, err := io.WriteString(busy, "POST /register HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(busy).ReadString('\n'); err != nil || !strings.Contains(line, "100") { // it is being served
		t.Fatalf("%q, %v", line, err)
	}
	for path, want := range map[string]int{"/health": 200, "/ready": 200, "/metrics": 200, "/workers": 503, "/nothing": 503} {
		if code, v := request(t, ix, "GET", path, ""); code != want {
			t.Errorf("%s: %d %v, want %d", path, code, v, want)
		}
	}
}

// A body that is announced as too large is not waited for.
func TestAnnouncedBodyTooLarge(t *testing.T) {
	ix := newIndexer(t, Options{Store: newStore(t)})
	start(t, ix)
	for _, path := range []string{"/register", "/unregister", "/events"} {
		c, err := net.Dial("tcp", ix.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{", path, maxBody+1); err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(c)
		if res, err := http.ReadResponse(in, nil); err != nil || res.StatusCode != http.StatusRequestEntityTooLarge || !res.Close {
			t.Errorf("%s: %v, %v", path, res, err)
		}
		_ = c.Close()
	}
}

func TestHeaderLimit(t *testing.T) {
	ix := newIndexer(t, Options{Store: newStore(t)})
	start(t, ix)
	large, err := net.Dial("tcp", ix.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = large.Close() }()
	go func() {
		_, _ = io.WriteString(large, "GET /health HTTP/1.1\r\nHost: x\r\nX-Large: "+strings.Repeat("x", 1<<20)+"\r\n\r\n")
	}()
	if res, err := http.ReadResponse(bufio.NewReader(large), nil); err != nil || res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("a large header: %v, %v", res, err)
	}
}
