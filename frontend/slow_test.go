package frontend

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warmroute/warmroute/frontend/ui"
	"github.com/warmroute/warmroute/kvcache"
)

// raw is a client on a real socket.
type raw struct {
	t *testing.T
	net.Conn
	in *bufio.Reader
}

func (f *running) raw(t *testing.T, say string) *raw {
	t.Helper()
	c, err := net.Dial("tcp", f.Addr())
	if err != nil {
		t.Error(err)
		c, _ = net.Pipe() // which nobody answers
		_ = c.Close()
	}
	t.Cleanup(func() { _ = c.Close() })
	r := &raw{t, c, bufio.NewReader(c)}
	r.say(say)
	return r
}

func (r *raw) say(s string) {
	r.t.Helper()
	if _, err := io.WriteString(r, s); err != nil {
		r.t.Error(err)
	}
}

// status is that of the next answer; 0 where the connection ends.
func (r *raw) status() int {
	res, err := http.ReadResponse(r.in, nil)
	if err != nil {
		return 0
	}
	_, _ = io.Copy(io.Discard, res.Body)
	return res.StatusCode
}

// impatient is a frontend whose server has limits that a test sees the end of.
func impatient(t *testing.T, o Options, limits func(*http.Server)) *running {
	t.Helper()
	reg := prometheus.NewRegistry()
	o.Registerer, o.Gatherer = reg, reg
	frontend, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	limits(frontend.server)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- frontend.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	f := &running{Frontend: frontend, t: t, url: "http://" + frontend.Addr(), reg: reg}
	f.waitWorkers(len(o.Workers))
	return f
}

const short = 50 * time.Millisecond

func TestSlowHeader(t *testing.T) {
	f := impatient(t, Options{Workers: []Worker{newEngine(t, "w1").worker()}}, func(s *http.Server) { s.ReadHeaderTimeout = short })
	for _, begun := range []string{"", "POST " + completions, "POST " + completions + " HTTP/1.1\r\nHost: x\r\nX-Slow: "} {
		c := f.raw(t, begun)
		if s := c.status(); s == 200 {
			t.Errorf("after %q: status %d", begun, s)
		}
		if s := c.status(); s != 0 {
			t.Errorf("after %q: the connection is still there", begun)
		}
	}
}

// A body that does not come ends, on routes that read it, on those that do not, and on those that there are not.
func TestSlowBody(t *testing.T) {
	o := Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{newEngine(t, "w1").worker()}, BodyTimeout: short}
	f := impatient(t, o, func(s *http.Server) { s.ReadTimeout = 2 * short })
	var ends sync.WaitGroup
	for _, route := range []string{"POST " + completions, "POST /query", "POST /ui/explore", "GET /workers", "GET /health", "GET /metrics", "GET /nothing", "DELETE /reservations/x"} {
		for _, length := range []string{"Content-Length: 1000\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"} {
			ends.Go(func() {
				c := f.raw(t, route+" HTTP/1.1\r\nHost: x\r\n"+length)
				c.status() // whatever it is
				if s := c.status(); s != 0 {
					t.Errorf("%s: the connection is still good for a status %d", route, s)
				}
			})
		}
	}
	ends.Wait()
	f.wantIdle()
}

func TestIdleConnection(t *testing.T) {
	f := impatient(t, Options{Workers: []Worker{newEngine(t, "w1").worker()}}, func(s *http.Server) { s.IdleTimeout = short })
	c := f.raw(t, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
	if s := c.status(); s != 200 {
		t.Fatalf("status %d", s)
	}
	if s := c.status(); s != 0 {
		t.Errorf("an idle connection: status %d", s)
	}
}

// A client that reads nothing holds no worker.
func TestSlowReader(t *testing.T) {
	e := newEngine(t, "w1")
	left := make(chan struct{})
	e.serve = func(w http.ResponseWriter, r *http.Request, _ []byte) { // an answer without end
		defer close(left)
		w.Header().Set("Content-Type", "text/event-stream")
		for chunk := []byte("data: " + strings.Repeat("x", 30_000) + "\n\n"); ; {
			if _, err := w.Write(chunk); err != nil || r.Context().Err() != nil {
				return
			}
		}
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, SendTimeout: short})
	f.raw(t, "POST "+completions+" HTTP/1.1\r\nHost: x\r\nContent-Length: "+strconv.Itoa(len(streamBody))+"\r\n\r\n"+streamBody)
	<-left
	f.wantIdle()
}

// Who asks for a dump and does not read it ends the reading of Redis; who watches the page and does not read gives the place back.
func TestSlowReadersOfTheIndex(t *testing.T) {
	ended := make(chan error, 1)
	x := &fakeIndex{blockSize: 16, dump: func(f func(kvcache.RouterEvent) error) error { // without end
		var err error
		for err == nil {
			err = f(kvcache.RouterEvent{WorkerID: "w1", Event: kvcache.CacheEvent{Data: kvcache.EventData{Cleared: true}}})
		}
		ended <- err
		return err
	}}
	var workers []Worker
	for i := range 400 { // so that a picture of them is no small message
		workers = append(workers, Worker{ID: "w" + strconv.Itoa(i) + strings.Repeat("x", 100), URL: "http://127.0.0.1:1"})
	}
	f := impatient(t, Options{Index: x, SendTimeout: short}, func(*http.Server) {})
	f.raw(t, "GET /dump HTTP/1.1\r\nHost: x\r\n\r\n")
	if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the dump ended by %v", err)
	}

	reg := prometheus.NewRegistry()
	g, err := New(Options{Workers: workers, SendTimeout: short, Registerer: reg, Gatherer: reg})
	if err != nil {
		t.Fatal(err)
	}
	g.page = ui.New(ui.Options{Source: pageSource{g}, Interval: time.Millisecond, MaxWatchers: 1})
	g.server.Handler = g.routes()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	r := &running{Frontend: g, t: t, url: "http://" + g.Addr(), reg: reg}
	watch := "GET /ui/events HTTP/1.1\r\nHost: x\r\n\r\n"
	first := r.raw(t, watch)
	if line, err := first.in.ReadString('\n'); err != nil || !strings.Contains(line, "200") {
		t.Fatalf("%q, %v", line, err)
	}
	r.eventually("the place is free again", func() bool {
		line, err := r.raw(t, watch).in.ReadString('\n')
		return err == nil && strings.Contains(line, "200")
	})
}

func TestHeaderLimit(t *testing.T) {
	f := start(t, Options{Workers: []Worker{newEngine(t, "w1").worker()}})
	for n, want := range map[int]int{30_000: 200, 60_000: 200, 200_000: 431, 5_000_000: 431} {
		c, err := net.Dial("tcp", f.Addr())
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\nX-Large: "+strings.Repeat("x", n)+"\r\n\r\n")
		}() // it need not take all of it
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || res.StatusCode != want {
			t.Errorf("%d bytes: %v, %v; want %d", n, res, err, want)
		}
		_ = c.Close()
	}
	// What a worker says in its header is bounded too.
	e := newEngine(t, "w2")
	e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("X-Large", strings.Repeat("x", 2<<20))
	}
	g := start(t, Options{Workers: []Worker{e.worker()}})
	res, text := g.post(completions, streamBody)
	wantError(t, res, text, 502, "upstream_error")
}

// Clients that hold all connections keep probes out of nothing, and others are told.
func TestTooManyConnections(t *testing.T) {
	e := newEngine(t, "w1")
	entered, leave := make(chan struct{}), make(chan struct{})
	e.serve = func(http.ResponseWriter, *http.Request, []byte) {
		entered <- struct{}{}
		<-leave
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, MaxConnections: 2})
	say := "POST " + completions + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + strconv.Itoa(len(streamBody)) + "\r\n\r\n" + streamBody
	first, second := f.raw(t, say), f.raw(t, say)
	<-entered
	<-entered
	client.CloseIdleConnections()
	for path, want := range map[string]int{"/health": 200, "/ready": 200, "/metrics": 200, "/workers": 503, "/nothing": 503} {
		res, text := f.get(path)
		if want == 503 {
			wantError(t, res, text, 503, "overloaded")
		} else if res.StatusCode != want {
			t.Errorf("%s: %d", path, res.StatusCode)
		}
	}
	res, text := f.post(completions, streamBody)
	wantError(t, res, text, 503, "overloaded")
	if n := f.metric("warmroute_connections_refused_total", "surface", "frontend", "how", "probes"); n == 0 {
		t.Error("nothing of it is counted")
	}
	close(leave)
	if a, b := first.status(), second.status(); a != 200 || b != 200 {
		t.Errorf("those that were there: %d, %d", a, b)
	}
	f.wantIdle()
}
