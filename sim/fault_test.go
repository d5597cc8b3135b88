package sim

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// longRequest is a streamed request that never ends by itself.
func longRequest(prompt []uint32) object {
	return object{"prompt": prompt, "max_tokens": 50000, "stream": true}
}

// slowEngine makes a token each millisecond.
func slowEngine(t *testing.T, o Options) *Engine {
	o.BlockSize, o.Blocks, o.DecodePerToken = 4, 20000, time.Millisecond
	return startEngine(t, o)
}

// firstChunk waits for the beginning of a stream.
func firstChunk(t *testing.T, res *http.Response) *bufio.Reader {
	t.Helper()
	r := bufio.NewReader(res.Body)
	if line, err := r.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: {") {
		t.Fatalf("stream begins with %q, %v", line, err)
	}
	return r
}

func TestDisconnectCancels(t *testing.T) {
	e := slowEngine(t, Options{})
	r, err := e.rank(0)
	if err != nil {
		t.Fatal(err)
	}
	for i, streamed := range []bool{true, false} {
		body := longRequest(numbers(1000*i, 9))
		body["stream"] = streamed
		ctx, cancel := context.WithCancel(t.Context())
		req := request(t, "POST", e.URL()+"/v1/completions", body).WithContext(ctx)
		failed := make(chan error, 1)
		go func() {
			res, err := client.Do(req)
			if err == nil {
				_, err = io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
			failed <- err
		}()
		eventually(t, "the request runs", func() bool { return r.load.Load() == 1 })
		if e.Cancelled() != int64(i) {
			t.Fatalf("%d cancelled too early", e.Cancelled())
		}
		cancel()
		if err := <-failed; !errors.Is(err, context.Canceled) {
			t.Fatalf("the client got %v", err)
		}
		eventually(t, "the sequence is cancelled", func() bool { return e.Cancelled() == int64(i+1) && r.load.Load() == 0 })
	}
	_, metrics, _ := call(t, "GET", e.URL()+"/metrics", nil)
	for _, want := range []string{
		`vllm:request_success_total{engine="0",finished_reason="abort",model_name="sim-model"} 2`,
		`vllm:num_requests_running{engine="0",model_name="sim-model"} 0`,
		`vllm:kv_cache_usage_perc{engine="0",model_name="sim-model"} 0`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
}

func TestCrash(t *testing.T) {
	e := slowEngine(t, Options{Ranks: 2})
	sub := subscribe(t, e, 0, "")
	res := send(t, "POST", e.URL()+"/v1/completions", longRequest(numbers(0, 9)), "X-data-parallel-rank", "0")
	defer res.Body.Close()
	stream := firstChunk(t, res)
	if err := e.Crash(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(stream); !errors.Is(err, syscall.ECONNRESET) || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("the stream ended with %v", err)
	}
	for {
		if _, _, err := sub.tryFrame(); err != nil {
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the subscriber got %v", err)
			}
			break
		}
	}
	for _, addr := range []string{e.Addr(), e.EventEndpoint(0), e.EventEndpoint(1), e.ReplayEndpoint(1)} {
		c, err := net.Dial("tcp", strings.TrimPrefix(addr, "tcp://"))
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: %v, want a refusal", addr, err)
		}
		if err == nil {
			c.Close()
		}
	}
	if e.Resident(0) != nil || e.LastSeq(0) != -1 || e.Cancelled() != 0 {
		t.Errorf("%d resident, last batch %d, %d cancelled", len(e.Resident(0)), e.LastSeq(0), e.Cancelled())
	}
	for name, f := range map[string]func() error{"Crash": e.Crash, "Hang": e.Hang, "ClearCache": func() error { return e.ClearCache(0) }} {
		if f() == nil {
			t.Errorf("%s of a crashed engine succeeds", name)
		}
	}
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	if cached := complete(t, e, numbers(0, 9), 1); cached != 0 {
		t.Errorf("%d cached after a crash", cached)
	}
}

func TestRestart(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4, Seed: 42})
	where := e.Addr() + e.EventEndpoint(0) + e.ReplayEndpoint(0)
	complete(t, e, numbers(0, 8), 1)
	complete(t, e, numbers(1000, 8), 1)
	before := e.Resident(0)
	for range 3 {
		if err := e.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	if e.Addr()+e.EventEndpoint(0)+e.ReplayEndpoint(0) != where {
		t.Error("the addresses have changed")
	}
	if len(e.Resident(0)) != 0 || e.LastSeq(0) != -1 {
		t.Errorf("%d blocks and last batch %d after a restart", len(e.Resident(0)), e.LastSeq(0))
	}
	sub := subscribe(t, e, 0, "")
	complete(t, e, numbers(0, 8), 1)
	complete(t, e, numbers(1000, 8), 1)
	if seq, b := sub.live(); seq != 0 || b.events[0].parent != nil {
		t.Errorf("first batch %d: %+v", seq, b)
	}
	for i, r := range e.Resident(0) {
		if r.Content != before[i].Content || r.Engine == before[i].Engine {
			t.Errorf("block %d: %+v before, %+v after; want the same content under another engine hash", i, before[i], r)
		}
	}
}

// Two engines with the same prompts name their blocks differently.
func TestEngineHashesDifferBetweenEngines(t *testing.T) {
	a, b := startEngine(t, Options{BlockSize: 4, Seed: 1}), startEngine(t, Options{BlockSize: 4})
	complete(t, a, numbers(0, 8), 1)
	complete(t, b, numbers(0, 8), 1)
	for i, r := range a.Resident(0) {
		if s := b.Resident(0)[i]; r.Content != s.Content || r.Engine == s.Engine {
			t.Errorf("block %d: %+v and %+v", i, r, s)
		}
	}
}

func TestHang(t *testing.T) {
	e := slowEngine(t, Options{})
	res := send(t, "POST", e.URL()+"/v1/completions", longRequest(numbers(0, 9)))
	defer res.Body.Close()
	stream := firstChunk(t, res)
	// Over HTTP, since the controls have to work during a hang.
	if status, answer, _ := call(t, "POST", e.URL()+"/sim/hang", nil); status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	last := e.LastSeq(0)
	// New connections are accepted and get no answer.
	health := make(chan int, 1)
	req := request(t, "GET", e.URL()+"/health", nil)
	go func() {
		res, err := client.Do(req)
		if err != nil {
			health <- -1
			return
		}
		res.Body.Close()
		health <- res.StatusCode
	}()
	peer := dial(t, e.EventEndpoint(0))
	peer.raw(greeting())
	if err := peer.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.in.ReadByte(); err == nil {
		t.Error("a hanging engine shakes hands")
	}
	select {
	case status := <-health:
		t.Errorf("a hanging engine answers with %d", status)
	default:
	}
	// At most the step that had begun when the hang came is still published.
	if now := e.LastSeq(0); now > last+1 {
		t.Errorf("batches %d to %d during the hang", last, now)
	}
	if status, _, _ := call(t, "POST", e.URL()+"/sim/resume", nil); status != 200 {
		t.Fatalf("status %d", status)
	}
	if status := <-health; status != 200 {
		t.Errorf("after the hang: %d", status)
	}
	for range 20 {
		if _, err := stream.ReadString('\n'); err != nil {
			t.Fatalf("the stream has not survived: %v", err)
		}
	}
	if err := peer.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.in.ReadByte(); err != nil {
		t.Errorf("the peer is not greeted: %v", err)
	}
}

func TestBreakStreams(t *testing.T) {
	e := startEngine(t, Options{})
	body := object{"prompt": "x", "max_tokens": 10, "stream": true}
	if err := e.BreakStreams(2, 3); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		res := send(t, "POST", e.URL()+"/v1/completions", body)
		all, done, err := chunks(t, res.Body)
		res.Body.Close()
		if i < 2 && (!errors.Is(err, syscall.ECONNRESET) || done || len(all) > 3) {
			t.Errorf("stream %d: %d chunks, done %v, %v", i, len(all), done, err)
		}
		if i == 2 && (err != nil || !done) {
			t.Errorf("the third stream must not break: %v", err)
		}
	}
	if e.Cancelled() != 0 {
		t.Error("a broken stream counts as cancelled by the client")
	}
}

func TestUnhealthyAndSleep(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4})
	complete(t, e, numbers(0, 8), 1)
	for _, c := range []struct {
		path, args string
		get        string
		status     int
		answer     string
	}{
		{"/sim/unhealthy", "", "/health", 503, ""},
		{"/sim/unhealthy", `{"unhealthy":false}`, "/health", 200, ""},
		{"/sim/sleep", "", "/is_sleeping", 200, `{"is_sleeping":true}`},
		{"/sim/sleep", `{"asleep":false}`, "/is_sleeping", 200, `{"is_sleeping":false}`},
		{"/sleep", "", "/is_sleeping", 200, `{"is_sleeping":true}`},
	} {
		if status, answer, _ := call(t, "POST", e.URL()+c.path, c.args); status != 200 {
			t.Fatalf("%s: %d %s", c.path, status, answer)
		}
		if status, answer, _ := call(t, "GET", e.URL()+c.get, nil); status != c.status || answer != c.answer {
			t.Errorf("%s after %s %s: %d %q", c.get, c.path, c.args, status, answer)
		}
	}
	if len(e.Resident(0)) != 0 || e.LastSeq(0) != 0 {
		t.Errorf("asleep: %d blocks, last batch %d; want none, and no event yet", len(e.Resident(0)), e.LastSeq(0))
	}
	answered := make(chan int, 1)
	req := request(t, "POST", e.URL()+"/v1/completions", object{"prompt": numbers(0, 9), "max_tokens": 1})
	go func() {
		res, err := client.Do(req)
		if err != nil {
			answered <- -1
			return
		}
		res.Body.Close()
		answered <- res.StatusCode
	}()
	eventually(t, "the request waits", func() bool {
		_, load, _ := call(t, "GET", e.URL()+"/load", nil)
		return load == `{"server_load":1}`
	})
	if err := e.WakeUp(); err != nil {
		t.Fatal(err)
	}
	if status := <-answered; status != 200 {
		t.Errorf("after waking up: %d", status)
	}
	if _, batches := replay(t, e, 0, 1); len(batches) != 1 || batches[0].events[0].tag != "AllBlocksCleared" {
		t.Errorf("the first batch after the sleep: %+v", batches)
	}
}

func TestControlsOverHTTP(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4, Ranks: 2})
	complete(t, e, numbers(0, 8), 1, "X-data-parallel-rank", "1")
	control := func(path, args string, want int) {
		t.Helper()
		if status, answer, _ := call(t, "POST", e.URL()+"/sim/"+path, args); status != want {
			t.Errorf("%s %s: %d %s, want %d", path, args, status, answer, want)
		}
	}
	control("drop_events", `{"n":1,"rank":1,"burnt":true}`, 200)
	control("drop_events", `{"rank":2}`, 400)
	control("drop_events", `{`, 400)
	control("clear", ``, 200)
	if seqs, _ := replay(t, e, 1, 0); len(seqs) != 1 || e.LastSeq(1) != 1 || e.LastSeq(0) != 0 {
		t.Errorf("replay %v, last batches %d and %d", seqs, e.LastSeq(0), e.LastSeq(1))
	}
	control("break_streams", `{"n":0}`, 200)
	_, state, _ := call(t, "GET", e.URL()+"/sim/state", nil)
	for _, want := range []string{`"last_seq":1`, `"events":"` + e.EventEndpoint(1), `"resident_blocks":0`, `"block_size":4`} {
		if !strings.Contains(state, want) {
			t.Errorf("state %s lacks %s", state, want)
		}
	}
	control("restart", ``, 202)
	eventually(t, "the restart", func() bool { return e.LastSeq(0) == -1 && healthy(t, e) })
	complete(t, e, numbers(0, 8), 1, "X-data-parallel-rank", "0")
	control("crash", `{"restart_after_ms":50}`, 202)
	eventually(t, "the crash and the restart", func() bool { return e.LastSeq(0) == -1 && healthy(t, e) })
	control("crash", `{}`, 202)
	eventually(t, "the crash", func() bool { return !healthy(t, e) })
}

func healthy(t *testing.T, e *Engine) bool {
	res, err := client.Do(request(t, "GET", e.URL()+"/health", nil))
	if err != nil {
		return false
	}
	res.Body.Close()
	return res.StatusCode == 200
}

func TestClearNeedsAnIdleCache(t *testing.T) {
	e := slowEngine(t, Options{})
	res := send(t, "POST", e.URL()+"/v1/completions", longRequest(numbers(0, 9)))
	defer res.Body.Close()
	firstChunk(t, res)
	if status, _, _ := call(t, "POST", e.URL()+"/sim/clear", nil); status != http.StatusConflict {
		t.Errorf("status %d", status)
	}
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"negative":         {Blocks: -1},
		"model length":     {Blocks: 10, BlockSize: 16, MaxModelLen: 161},
		"adapter twice":    {LoRAs: []string{"a", "a"}},
		"adapter is model": {Model: "a", LoRAs: []string{"a"}},
		"encoding":         {Encoding: "json"},
		"arity":            {ArrayArity: 11},
		"layout":           {ReplayLayout: 3},
		"scheme":           {EventsListen: "ipc:///tmp/x"},
		"port":             {ReplayListen: "tcp://127.0.0.1:65535", Ranks: 2},
		"address":          {Listen: "127.0.0.1:99999"},
		"time":             {DecodePerToken: -1},
	} {
		if e, err := New(o); err == nil {
			e.Close()
			t.Errorf("%s: taken", name)
		}
	}
}

// An explicit port is the one of rank 0; the next ranks follow.
func TestExplicitPorts(t *testing.T) {
	first, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	taken := "tcp://" + first.Addr().String()
	if _, err := New(Options{EventsListen: taken}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a taken port: %v", err)
	}
	got, err := rankAddresses("tcp://*:5557", 3)
	if err != nil || strings.Join(got, " ") != ":5557 :5558 :5559" {
		t.Errorf("addresses %v, %v", got, err)
	}
	if got := dialable("[::]:5557"); got != "127.0.0.1:5557" {
		t.Errorf("dialable %q", got)
	}
}

func TestCloseBeforeRun(t *testing.T) {
	var log bytes.Buffer
	e, err := New(Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if e.Crash() == nil || e.Restart() == nil {
		t.Error("an engine that does not run can be crashed or restarted")
	}
	if err := errors.Join(e.Close(), e.Close(), e.Run(t.Context())); err != nil {
		t.Error(err)
	}
	ln, err := net.Listen("tcp", e.Addr())
	if err != nil {
		t.Fatalf("the address is not free: %v", err)
	}
	ln.Close()
	if e.Restart() == nil {
		t.Error("a closed engine can be restarted")
	}
}

func TestNothingIsLeftRunning(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		e, err := New(Options{Ranks: 2, DecodePerToken: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		eventually(t, "the engine answers", func() bool { return healthy(t, e) })
		res := send(t, "POST", e.URL()+"/v1/completions", object{"prompt": "x", "max_tokens": 9, "stream": true})
		firstChunk(t, res)
		subscribe(t, e, 1, "")
		if err := e.Hang(); err != nil {
			t.Fatal(err)
		}
		dial(t, e.ReplayEndpoint(0))
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		res.Body.Close()
	}
	eventually(t, "the goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}
