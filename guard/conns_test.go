package guard

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// guarded is a server on a real socket.
type guarded struct {
	t       *testing.T
	addr    string
	server  *http.Server
	reg     *prometheus.Registry
	ended   chan error    // the error of the last write of a long answer
	holding chan struct{} // a request to /hold is there
	release chan struct{}
	conns   *conns
}

// serve answers /long with an answer that no socket buffers, /hold when it is released, and everything else at once.
func serve(t *testing.T, o ConnOptions) *guarded {
	t.Helper()
	g := &guarded{t: t, reg: prometheus.NewRegistry(), ended: make(chan error, 1), holding: make(chan struct{}, 100), release: make(chan struct{})}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g.addr = l.Addr().String()
	g.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case Crowded(r.Context()):
			w.WriteHeader(http.StatusServiceUnavailable)
		case r.URL.Path == "/long":
			var err error
			for chunk := make([]byte, 300_000); err == nil; {
				_, err = w.Write(chunk)
			}
			g.ended <- err
		case r.URL.Path == "/hold":
			g.holding <- struct{}{}
			<-g.release
		}
	})}
	o.Surface, o.Registerer = "test", g.reg
	bounded := Guard(g.server, l, o)
	g.conns = bounded.(*listener).conns
	served := make(chan struct{})
	go func() { defer close(served); _ = g.server.Serve(bounded) }()
	t.Cleanup(func() { _ = g.server.Close(); <-served })
	return g
}

func (g *guarded) dial() net.Conn {
	g.t.Helper()
	c, err := net.Dial("tcp", g.addr)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = c.Close() })
	return c
}

// get sends a request; the answer's status comes with get's status.
func get(t *testing.T, c net.Conn, path string) {
	t.Helper()
	if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
}

// status is the next answer's; 0 where the connection ended instead.
func status(t *testing.T, c net.Conn) int {
	t.Helper()
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0
	}
	_, _ = io.Copy(io.Discard, res.Body)
	return res.StatusCode
}

func (g *guarded) metric(name string) float64 {
	g.t.Helper()
	families, err := g.reg.Gather()
	if err != nil {
		g.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			sum := 0.0
			for _, m := range f.GetMetric() {
				sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
			return sum
		}
	}
	return 0
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.After(30 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("never: %s", what)
		}
	}
}

// A client that reads nothing, or next to nothing, holds nobody for ever; one that reads gets all of it.
func TestAClientThatDoesNotRead(t *testing.T) {
	g := serve(t, ConnOptions{Max: 10, SendTimeout: 50 * time.Millisecond})
	c := g.dial()
	get(t, c, "/long")
	if err := <-g.ended; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the answer ended by %v", err)
	}
	slow := g.dial()
	get(t, slow, "/long")
	sips := time.NewTicker(time.Millisecond)
	defer sips.Stop()
	for reading := true; reading; {
		select {
		case err := <-g.ended:
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the answer ended by %v", err)
			}
			reading = false
		case <-sips.C:
			_, _ = slow.Read(make([]byte, 1))
		}
	}
	eventually(t, "the connections are given back", func() bool { return g.metric("warmroute_connections") == 0 })
}

// One write that is longer than what a client takes in the time has the time for each part.
func TestALargeAnswerToASteadyClient(t *testing.T) {
	near, far := net.Pipe() // without a buffer: each part waits for its reader
	defer func() { _ = far.Close() }()
	k := &conn{Conn: near, of: &conns{o: ConnOptions{SendTimeout: time.Minute}}}
	go func() {
		_, _ = k.Write(make([]byte, 5*part+1))
		_ = near.Close()
	}()
	if n, err := io.Copy(io.Discard, far); n != 5*part+1 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	if n, err := k.Write([]byte("x")); n != 0 || err == nil {
		t.Errorf("a closed connection takes %d bytes", n)
	}
}

// lastIdle waits until the server has seen that a connection is idle.
func (g *guarded) lastIdle(c net.Conn) {
	g.t.Helper()
	eventually(g.t, "it is idle", func() bool {
		g.conns.mu.Lock()
		defer g.conns.mu.Unlock()
		last := g.conns.idle.Back()
		return last != nil && last.Value.(*conn).RemoteAddr().String() == c.LocalAddr().String()
	})
}

func TestIdleConnectionsMakeRoom(t *testing.T) {
	g := serve(t, ConnOptions{Max: 2, SendTimeout: time.Minute})
	first, second := g.dial(), g.dial()
	for _, c := range []net.Conn{first, second, first} { // the second is idle the longest
		get(t, c, "/")
		if s := status(t, c); s != 200 {
			t.Fatalf("status %d", s)
		}
		g.lastIdle(c)
	}
	third := g.dial()
	get(t, third, "/")
	if s := status(t, third); s != 200 {
		t.Errorf("the third one: status %d", s)
	}
	if s := status(t, second); s != 0 {
		t.Errorf("the second one was to go, and says %d", s)
	}
	get(t, first, "/")
	if s := status(t, first); s != 200 {
		t.Errorf("the first one was to stay: status %d", s)
	}
}

// Where nobody is idle, further connections are for probes, so many and no more; when somebody leaves they are as good as any.
func TestTooManyConnections(t *testing.T) {
	g := serve(t, ConnOptions{Max: 3, SendTimeout: time.Minute})
	var busy []net.Conn
	for range 3 {
		c := g.dial()
		get(t, c, "/hold")
		<-g.holding
		busy = append(busy, c)
	}
	var spare []net.Conn
	for range Spare {
		spare = append(spare, g.dial())
	}
	eventually(t, "the spare ones are taken", func() bool { return g.metric("warmroute_connections") == 3+Spare })
	get(t, spare[0], "/")
	if s := status(t, spare[0]); s != http.StatusServiceUnavailable {
		t.Errorf("a spare connection: status %d", s)
	}
	g.lastIdle(spare[0])
	// The one that is idle now goes for the next, which is a spare one too; then there is no room.
	next := g.dial()
	eventually(t, "an idle one goes", func() bool { return status(t, spare[0]) == 0 })
	if _, err := g.dial().Read(make([]byte, 1)); err == nil {
		t.Error("a connection beyond all limits is served")
	}
	for _, c := range spare[1:] {
		_ = c.Close()
	}
	close(g.release)
	for _, c := range busy {
		if s := status(t, c); s != 200 {
			t.Errorf("one that was there: status %d", s)
		}
		_ = c.Close()
	}
	eventually(t, "all but one have left", func() bool { return g.metric("warmroute_connections") == 1 })
	get(t, next, "/")
	if s := status(t, next); s != 200 {
		t.Errorf("with room again: status %d", s)
	}
	how := "# HELP warmroute_connections_refused_total Connections over the limit, by surface and what became of them: evicted (an idle one was closed for a new one), probes (taken for probes only), closed.\n" +
		"# TYPE warmroute_connections_refused_total counter\n" + `warmroute_connections_refused_total{how="closed",surface="test"} 1
warmroute_connections_refused_total{how="evicted",surface="test"} 1
warmroute_connections_refused_total{how="probes",surface="test"} 65
`
	if err := testutil.GatherAndCompare(g.reg, strings.NewReader(how), "warmroute_connections_refused_total"); err != nil {
		t.Error(err)
	}
}
