package frontend

import (
	"bufio"
	"context"
	"io"
	"math"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/warmroute/warmroute/store"
)

// streaming is a request whose answer is under way.
func streaming(t *testing.T, f *running) *http.Response {
	t.Helper()
	// Its own connection: draining closes idle ones.
	own := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(own.CloseIdleConnections)
	res, err := own.Do(f.request(t.Context(), completions, streamBody))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	if line, err := bufio.NewReader(res.Body).ReadString('\n'); err != nil || line != "data: 1\n" {
		t.Fatalf("first chunk %q, %v", line, err)
	}
	return res
}

func streamUntil(end <-chan struct{}) func(http.ResponseWriter, *http.Request, []byte) {
	return func(w http.ResponseWriter, r *http.Request, _ []byte) {
		_, _ = io.WriteString(w, "data: 1\n")
		w.(http.Flusher).Flush()
		select {
		case <-end:
			_, _ = io.WriteString(w, "data: [DONE]\n")
		case <-r.Context().Done():
		}
	}
}

func TestDrainLetsStreamsFinish(t *testing.T) {
	e := newEngine(t, "w1")
	end := make(chan struct{})
	e.serve = streamUntil(end)
	f := start(t, Options{
		Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()},
		DrainDelay: 1500 * time.Millisecond, DrainLimit: time.Minute,
	})
	res := streaming(t, f)
	f.stop()
	f.eventually("the drain begins", f.draining.Load)
	// While the delay lasts, load balancers learn that they should go, and requests that come all the same are served.
	ready, text := f.get("/ready")
	if ready.StatusCode != 503 || !ready.Close {
		t.Errorf("/ready: %d %s, close %v", ready.StatusCode, text, ready.Close)
	}
	if models, _ := f.get("/v1/models"); models.StatusCode != 200 {
		t.Errorf("/v1/models: %d", models.StatusCode)
	}
	f.eventually("the listener closes", func() bool {
		conn, err := net.Dial("tcp", f.Addr())
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	close(end)
	if rest, err := io.ReadAll(res.Body); err != nil || string(rest) != "data: [DONE]\n" {
		t.Errorf("the stream ended with %q, %v", rest, err)
	}
	err := <-f.exited
	f.exited <- err
	if err != nil {
		t.Error(err)
	}
	f.wantIdle()
}

func TestDrainLimitAbortsStreams(t *testing.T) {
	e := newEngine(t, "w1")
	e.serve = streamUntil(nil)
	f := start(t, Options{
		Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, DrainLimit: 20 * time.Millisecond,
	})
	res := streaming(t, f)
	f.stop()
	if _, err := io.ReadAll(res.Body); err == nil {
		t.Error("an aborted stream ended cleanly")
	}
	err := <-f.exited
	f.exited <- err
	if err != nil {
		t.Errorf("Run: %v", err)
	}
	f.wantIdle()
}

func TestOptionsAreChecked(t *testing.T) {
	worker := []Worker{{ID: "w", URL: "http://localhost:1"}}
	for name, o := range map[string]Options{
		"no workers":       {},
		"unknown policy":   {Workers: worker, Policy: "best"},
		"bad address":      {Workers: worker, Listen: "8000"},
		"bad worker":       {Workers: []Worker{{ID: "w", URL: "localhost"}}},
		"negative timeout": {Workers: worker, ConnectTimeout: -1},
		"negative size":    {Workers: worker, MaxBody: -1, MaxBuffered: 1},
		"small buffers":    {Workers: worker, MaxBuffered: 1},
		"negative busy":    {Workers: worker, Busy: Load{Requests: -1}},
		"endless busy":     {Workers: worker, Busy: Load{DecodeBlocks: store.MaxBusy + 1}},
		"endless session":  {Workers: worker, SessionTTL: math.MaxInt64},
		"endless slack":    {Workers: worker, SessionSlack: math.MaxInt64},
	} {
		if f, err := New(o); err == nil {
			f.listener.Close()
			t.Errorf("%s: accepted", name)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := New(Options{Workers: worker, Listen: l.Addr().String()}); err == nil {
		t.Error("an address in use: accepted")
	}
}

func TestRunEndsWithAContextThatIsOver(t *testing.T) {
	f, err := New(Options{Workers: []Worker{{ID: "w", URL: refusing(t)}}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.Run(ctx); err != nil {
		t.Error(err)
	}
}
