package frontend

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/inflight"
)

const streamBody = `{"model":"llama","prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"stream":true}`

func TestBodyAndHeadersPassUnchanged(t *testing.T) {
	e := newEngine(t, "w1")
	e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("X-Request-Id", "the worker's own")
		w.Header().Set("X-Kv-Overlap-Blocks", "forged")
		w.Header().Set("X-Other", "kept")
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, `{"usage":{}}`)
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	odd := "{ \"model\" :\"llama\",\n\t\"prompt\":\"a\\u0041é\", \"x\":1e400, \"model\":\"llama\"}\n"
	res, body := f.post(completions, odd, "X-Request-Id", "abc", "Authorization", "Bearer k", "X-Forwarded-For", "6.6.6.6",
		"traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "User-Agent", "odd/1", "Content-Type", "application/json", "Connection", "Upgrade", "Upgrade", "websocket")
	if res.StatusCode != http.StatusTeapot || body != `{"usage":{}}` {
		t.Errorf("%d %s", res.StatusCode, body)
	}
	if got := res.Header["X-Request-Id"]; len(got) != 1 || got[0] != "abc" {
		t.Errorf("X-Request-Id %v", got)
	}
	if res.Header.Get("X-Other") != "kept" || res.Header.Get("X-Kv-Overlap-Blocks") != "0" {
		t.Errorf("headers %v", res.Header)
	}
	if got := string(e.bodies[0]); got != odd {
		t.Errorf("the worker got %q", got)
	}
	sent := e.requests[0].Header
	for h, want := range map[string]string{
		"X-Request-Id": "abc", "Authorization": "Bearer k", "X-Forwarded-For": "127.0.0.1", "User-Agent": "odd/1",
		"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Accept-Encoding": "", "Upgrade": "", "Connection": "",
	} {
		if got := sent.Get(h); got != want {
			t.Errorf("the worker got %s %q, want %q", h, got, want)
		}
	}
	res, _ = f.post(completions, odd, "X-Request-Id", "no spaces, please")
	if id := res.Header.Get("X-Request-Id"); len(id) != 32 || id != e.requests[1].Header.Get("X-Request-Id") {
		t.Errorf("made id %q, the worker got %q", id, e.requests[1].Header.Get("X-Request-Id"))
	}
}

// Each chunk arrives before the worker writes the next one, whatever the type and the encoding.
func TestChunksAreFlushed(t *testing.T) {
	for _, kind := range []string{"text/event-stream", "text/event-stream; charset=utf-8", "application/json", "application/x-ndjson"} {
		t.Run(kind, func(t *testing.T) {
			e := newEngine(t, "w1")
			next := make(chan struct{})
			const chunks = 4
			e.serve = func(w http.ResponseWriter, r *http.Request, _ []byte) {
				if got := r.Header.Get("Accept-Encoding"); got != "gzip" {
					t.Errorf("Accept-Encoding %q", got)
				}
				w.Header().Set("Content-Type", kind)
				w.Header().Set("Content-Length", fmt.Sprint(chunks*len("data: 0\n\n")))
				for i := range chunks {
					fmt.Fprintf(w, "data: %d\n\n", i)
					w.(http.Flusher).Flush()
					<-next
				}
			}
			f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
			res, err := client.Do(f.request(t.Context(), completions, streamBody, "Accept-Encoding", "gzip"))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			lines := bufio.NewReader(res.Body)
			for i := range chunks {
				line, err := lines.ReadString('\n')
				if err != nil || line != fmt.Sprintf("data: %d\n", i) {
					t.Fatalf("chunk %d: %q, %v", i, line, err)
				}
				_, _ = lines.ReadString('\n')
				next <- struct{}{}
			}
			if _, err := lines.ReadByte(); err != io.EOF {
				t.Errorf("end: %v", err)
			}
			if strings.HasPrefix(kind, "text/event-stream") && res.Header.Get("X-Accel-Buffering") != "no" {
				t.Error("no X-Accel-Buffering")
			}
		})
	}
}

func TestCompressedAnswerPassesAsItIs(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = io.WriteString(z, `{"text":"hello"}`)
	z.Close()
	e := newEngine(t, "w1")
	e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = w.Write(packed.Bytes())
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	res, body := f.post(completions, streamBody, "Accept-Encoding", "gzip")
	if res.Header.Get("Content-Encoding") != "gzip" || body != packed.String() {
		t.Errorf("encoding %q, %d bytes of %d", res.Header.Get("Content-Encoding"), len(body), packed.Len())
	}
}

// abort breaks the connection of a handler without an end of the answer.
func abort(w http.ResponseWriter) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	_ = conn.(*net.TCPConn).SetLinger(0)
	conn.Close()
}

func TestBrokenStreamIsNoCleanEnd(t *testing.T) {
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	for _, e := range []*engine{e1, e2} {
		e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, "data: 1\n\n")
			w.(http.Flusher).Flush()
			abort(w)
		}
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e1.worker(), e2.worker()}})
	res, err := client.Do(f.request(t.Context(), completions, streamBody))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	got, err := io.ReadAll(res.Body)
	if err == nil || res.StatusCode != 200 || string(got) != "data: 1\n\n" {
		t.Errorf("%d %q, error %v; want the first chunk and an error", res.StatusCode, got, err)
	}
	f.wantIdle()
	if n := e1.served() + e2.served(); n != 1 {
		t.Errorf("%d workers got the request", n)
	}
	if n := f.metric("warmroute_upstream_errors_total", "reason", failAborted); n != 1 {
		t.Errorf("%v aborted streams counted", n)
	}
}

func TestStreamThatStandsStillIsBroken(t *testing.T) {
	e := newEngine(t, "w1")
	ended := make(chan struct{})
	e.serve = func(w http.ResponseWriter, r *http.Request, _ []byte) {
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(ended)
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, IdleChunkTimeout: 300 * time.Millisecond})
	res, err := client.Do(f.request(t.Context(), completions, streamBody))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if got, err := io.ReadAll(res.Body); err == nil || string(got) != "data: 1\n\n" {
		t.Errorf("%q, error %v", got, err)
	}
	<-ended
	f.wantIdle()
	if n := f.metric("warmroute_upstream_errors_total", "reason", failIdle); n != 1 {
		t.Errorf("%v counted", n)
	}
}

func TestClientThatDoesNotReadIsDropped(t *testing.T) {
	e := newEngine(t, "w1")
	ended := make(chan struct{})
	e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		defer close(ended)
		chunk := make([]byte, 1<<20)
		for {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, SendTimeout: 300 * time.Millisecond})
	conn, err := net.Dial("tcp", f.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", completions, len(streamBody), streamBody)
	<-ended // the worker is not held by a client that stands still
	f.wantIdle()
}

// Wherever a client leaves, its request ends at the worker and leaves no count behind.
func TestClientThatLeavesEndsTheWork(t *testing.T) {
	for _, phase := range []string{"tokenize", "waiting for the header", "mid-stream"} {
		t.Run(phase, func(t *testing.T) {
			e := newEngine(t, "w1")
			reached, left := make(chan struct{}), make(chan struct{})
			hold := func(r *http.Request) {
				close(reached)
				<-r.Context().Done()
				close(left)
			}
			body := streamBody
			switch phase {
			case "tokenize":
				body = `{"model":"llama","prompt":"text"}`
				e.tokens = func(w http.ResponseWriter, _ *http.Request, b []byte) {
					close(reached)
					<-left
					answerTokens(w, b)
				}
			case "waiting for the header":
				e.serve = func(_ http.ResponseWriter, r *http.Request, _ []byte) { hold(r) }
			case "mid-stream":
				e.serve = func(w http.ResponseWriter, r *http.Request, _ []byte) {
					_, _ = io.WriteString(w, "data: 1\n\n")
					w.(http.Flusher).Flush()
					hold(r)
				}
			}
			f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() {
				res, err := client.Do(f.request(ctx, completions, body))
				if err == nil {
					_, err = io.ReadAll(res.Body)
					res.Body.Close()
				}
				done <- err
			}()
			<-reached
			if phase != "tokenize" && f.metric("warmroute_upstream_in_flight", "worker", "w1") != 1 {
				t.Error("the request is not counted while it is under way")
			}
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("client error %v", err)
			}
			f.wantIdle()
			if phase == "tokenize" {
				close(left)
			} else {
				<-left
			}
			if n := f.metric("warmroute_upstream_errors_total"); n != 0 {
				t.Errorf("%v errors are put on the worker", n)
			}
			if n := f.metric("warmroute_index_fallbacks_total"); n != 0 {
				t.Errorf("%v fallbacks", n)
			}
			if n := f.metric("warmroute_upstream_in_flight"); n != 0 {
				t.Errorf("gauge %v", n)
			}
		})
	}
}

// swap has connections to a worker go to another URL behind the fleet's back, and those that there are be of no use: it dies
// between two polls.
func (r *running) swap(id, to string) {
	for _, n := range r.fleet.Snapshot().Nodes() {
		if n.ID == id {
			r.moved.Store(n.URL.Host, strings.TrimPrefix(to, "http://"))
			return
		}
	}
	r.t.Fatalf("no worker %s", id)
}

func TestRefusedConnectionMovesOn(t *testing.T) {
	body, ids := prompt(64)
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	f := start(t, Options{
		Index:   holding(16, ids, map[string]int{"w1": 4}),
		Workers: []Worker{e1.worker(), e2.worker()},
	})
	f.swap("w1", refusing(t))
	for range 5 {
		res, _ := f.post(completions, body)
		if res.StatusCode != 200 || res.Header.Get("x-worker-instance-id") != "w2" || res.Header.Get("x-kv-overlap-blocks") != "0" {
			t.Fatalf("status %d, headers %v", res.StatusCode, res.Header)
		}
	}
	if got := string(e2.bodies[4]); got != body {
		t.Error("the second attempt brought another body")
	}
	f.wantIdle()
	if n := f.metric("warmroute_upstream_retries_total", "reason", failDial); n != 5 {
		t.Errorf("%v retries", n)
	}

	res, text := f.post(completions, body, "x-worker-instance-id", "w1") // pinned: nobody else may
	wantError(t, res, text, 502, "upstream_unreachable")
	f.swap("w2", refusing(t))
	res, text = f.post(completions, body)
	wantError(t, res, text, 502, "upstream_unreachable")
	if res.Header.Get("x-kv-index-state") != "exact" {
		t.Errorf("headers %v", res.Header)
	}
	f.wantIdle()
}

func TestRetriesAreBounded(t *testing.T) {
	body, _ := prompt(16)
	var workers []Worker
	for i := range 6 {
		e := newEngine(t, fmt.Sprintf("w%d", i))
		workers = append(workers, e.worker())
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: workers})
	for i := range 6 {
		f.swap(fmt.Sprintf("w%d", i), refusing(t))
	}
	res, text := f.post(completions, body)
	wantError(t, res, text, 502, "upstream_unreachable")
	if n := f.metric("warmroute_upstream_errors_total", "reason", failDial); n != 3 {
		t.Errorf("%v attempts, want 3", n)
	}
}

// What a worker may have accepted is not given to a second one.
func TestAcceptedRequestIsNotRepeated(t *testing.T) {
	for name, test := range map[string]struct {
		serve   func(w http.ResponseWriter, r *http.Request, body []byte)
		timeout time.Duration
		status  int
		code    string
		reason  string
	}{
		"no header in time": {func(_ http.ResponseWriter, r *http.Request, _ []byte) { <-r.Context().Done() }, 500 * time.Millisecond, 504, "upstream_timeout", failHeader},
		"reset":             {func(w http.ResponseWriter, _ *http.Request, _ []byte) { abort(w) }, time.Minute, 502, "upstream_error", failBroken},
		"not HTTP": {func(w http.ResponseWriter, _ *http.Request, _ []byte) {
			conn, _, _ := w.(http.Hijacker).Hijack()
			_, _ = io.WriteString(conn, "hello\r\n\r\n")
			conn.Close()
		}, time.Minute, 502, "upstream_error", failBroken},
	} {
		t.Run(name, func(t *testing.T) {
			e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
			e1.serve, e2.serve = test.serve, test.serve
			f := start(t, Options{
				Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e1.worker(), e2.worker()},
				ResponseHeaderTimeout: test.timeout,
			})
			f.transport.CloseIdleConnections() // those of the polls: each request gets a fresh one
			res, text := f.post(completions, streamBody)
			wantError(t, res, text, test.status, test.code)
			f.wantIdle()
			if n := e1.served() + e2.served(); n != 1 {
				t.Errorf("%d workers got the request", n)
			}
			if n := f.metric("warmroute_upstream_errors_total", "reason", test.reason); n != 1 {
				t.Errorf("reason %s counted %v times", test.reason, n)
			}
			if n := f.metric("warmroute_upstream_retries_total"); n != 0 {
				t.Errorf("%v retries", n)
			}
		})
	}
}

// A worker that takes the connection and never reads cannot hold a request for longer than the timeout either,
// though a large body is never sent in full.
func TestWorkerThatDoesNotReadTimesOut(t *testing.T) {
	e := newEngine(t, "w1")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // connections stay in its backlog
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, ResponseHeaderTimeout: 100 * time.Millisecond})
	f.swap("w1", "http://"+l.Addr().String())
	res, text := f.post(completions, `{"model":"llama","prompt":[1],"pad":"`+strings.Repeat("x", 24<<20)+`"}`)
	wantError(t, res, text, 504, "upstream_timeout")
	f.wantIdle()
}

// An engine that closes kept-alive connections under our requests: each request that hits one
// goes to another worker, and none fails.
func TestStaleConnectionMovesOn(t *testing.T) {
	body, ids := prompt(64)
	stale, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer stale.Close()
	go func() { // answers the first request of a connection, closes under the second
		for {
			conn, err := stale.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				r := bufio.NewReader(conn)
				for n := 0; n < 2; n++ {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					if n == 0 {
						_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
					}
				}
			}()
		}
	}()
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	f := start(t, Options{
		Index:   holding(16, ids, map[string]int{"w1": 4}),
		Workers: []Worker{e1.worker(), e2.worker()},
	})
	f.swap("w1", "http://"+stale.Addr().String())
	for i, want := range []string{"w1", "w2", "w1", "w2"} {
		res, _ := f.post(completions, body)
		if got := res.Header.Get("x-worker-instance-id"); res.StatusCode != 200 || got != want {
			t.Fatalf("request %d: %d from %s, want %s", i, res.StatusCode, got, want)
		}
	}
	if n := f.metric("warmroute_upstream_retries_total", "reason", failStale); n != 2 {
		t.Errorf("%v retries", n)
	}
	f.wantIdle()
}

// The residue of a request that streams is one block; before its first byte it is all that
// the worker has to compute.
func TestStreamWeighsLessAfterItsFirstByte(t *testing.T) {
	body, ids := prompt(64)
	e := newEngine(t, "w1")
	waiting, goOn, end := make(chan struct{}), make(chan struct{}), make(chan struct{})
	e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.WriteHeader(200)
		w.(http.Flusher).Flush() // engines send the header before they compute
		close(waiting)
		<-goOn
		_, _ = io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-end
	}
	f := start(t, Options{Index: holding(16, ids, map[string]int{"w1": 1}), Workers: []Worker{e.worker()}})
	res, err := client.Do(f.request(t.Context(), completions, body))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	<-waiting
	at := []inflight.Place{f.candidates(f.mustTarget(), pin{rank: -1}, &knowledge{}, choose.DefaultTiers, nil)[0].place()}
	if got := f.inFlight.Loads(at)[0]; got != (Load{Requests: 1, PrefillTokens: 48, DecodeBlocks: 4}) {
		t.Errorf("before the first byte: %+v", got)
	}
	close(goOn)
	if _, err := io.ReadFull(res.Body, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	if got := f.inFlight.Loads(at)[0]; got != (Load{Requests: 1, DecodeBlocks: 4}) {
		t.Errorf("after the first byte: %+v", got)
	}
	close(end)
	_, _ = io.Copy(io.Discard, res.Body)
	f.wantIdle()
}

func TestManyAtOnceLeaveNothingBehind(t *testing.T) {
	e1, e2 := newEngine(t, "w1"), newEngine(t, "w2")
	for _, e := range []*engine{e1, e2} {
		e.serve = func(w http.ResponseWriter, r *http.Request, body []byte) {
			switch len(body) % 3 {
			case 0:
				abort(w)
			case 1:
				_, _ = io.WriteString(w, "data: 1\n\n")
				w.(http.Flusher).Flush()
				abort(w)
			}
		}
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e1.worker(), e2.worker()}})
	var all sync.WaitGroup
	for i := range 60 {
		all.Go(func() {
			body, _ := prompt(i + 1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			res, err := client.Do(f.request(ctx, completions, body))
			if err != nil {
				return
			}
			if i%4 == 0 {
				cancel()
			}
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
		})
	}
	all.Wait()
	f.wantIdle()
	if n := f.metric("warmroute_upstream_in_flight"); n != 0 {
		t.Errorf("gauge %v", n)
	}
}

// A worker that switches protocols has given no answer.
func TestSwitchOfProtocolsIsNoAnswer(t *testing.T) {
	e := newEngine(t, "w1")
	e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.Header().Set("Upgrade", "websocket")
		w.Header().Set("Connection", "Upgrade")
		w.WriteHeader(http.StatusSwitchingProtocols)
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	res, text := f.post(completions, streamBody)
	wantError(t, res, text, 502, "upstream_error")
	f.wantIdle()
}

// Our headers survive an informational answer before the real one.
func TestHeadersAfterAnInformationalAnswer(t *testing.T) {
	e := newEngine(t, "w1")
	e.serve = func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		w.WriteHeader(http.StatusEarlyHints)
		_, _ = io.WriteString(w, "{}")
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	res, _ := f.post(completions, streamBody, "X-Request-Id", "abc")
	if got := res.Header.Values("X-Request-Id"); len(got) != 1 || got[0] != "abc" {
		t.Errorf("request id %q", got)
	}
}
