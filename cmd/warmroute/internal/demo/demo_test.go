package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const usage = `data: {"choices":[],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}` + "\n\n"

// answer writes one streamed chat completion.
func answer(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Kv-Index-State", "exact")
	w.Header().Set("X-Kv-Overlap-Blocks", "4")
	_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n")
	_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":%q}}]}\n\n", text)
	_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}\n\n"+usage+"data: [DONE]\n\n")
}

func TestLoadPlaysEveryTurnOnTheAnswerBefore(t *testing.T) {
	var mu sync.Mutex
	var asked [][]message
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Messages []message
			Stream   bool
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || !body.Stream {
			t.Errorf("body: %+v, %v", body, err)
		}
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, body.Messages)
		answer(w, fmt.Sprintf("answer to %s", body.Messages[len(body.Messages)-1].Content))
	}))
	defer server.Close()
	observed := 0
	l := load{client: testClient(server), parallel: 1, observe: func(outcome) { observed++ }}
	outcomes := l.play(t.Context(), slices.Values([]conversation{{id: "c", system: "s", turns: []string{"a", "b"}}}))
	want := [][]message{
		{{"system", "s"}, {"user", "a"}},
		{{"system", "s"}, {"user", "a"}, {"assistant", "answer to a"}, {"user", "b"}},
	}
	if !reflect.DeepEqual(asked, want) {
		t.Errorf("asked %v\nwant %v", asked, want)
	}
	if p := policyOf(outcomes); p.Requests != 2 || p.Failed != 0 || p.BlockHitRatio != 0.64 || p.TTFT.P50 <= 0 || observed != 2 {
		t.Errorf("got %+v, observed %d", p, observed)
	}
	if o := outcomes[1]; o.state != "exact" || o.overlap != "4" || o.frontend != 0 {
		t.Errorf("outcome %+v", o)
	}
}

func TestWhatIsNotACompleteAnswerIsAFailure(t *testing.T) {
	const text = `data: {"choices":[{"delta":{"content":"x"}}]}` + "\n\n"
	const finish = `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	const done = "data: [DONE]\n\n"
	for name, c := range map[string]struct {
		status int
		body   string
	}{
		"an error status":     {http.StatusServiceUnavailable, text + finish + usage + done},
		"no DONE":             {http.StatusOK, text + finish + usage},
		"no text":             {http.StatusOK, finish + usage + done},
		"no finish reason":    {http.StatusOK, text + usage + done},
		"no usage":            {http.StatusOK, text + finish + done},
		"an error in between": {http.StatusOK, text + "data: {\"error\":{\"message\":\"engine died\"}}\n\n" + finish + usage + done},
		"no JSON":             {http.StatusOK, text + "data: {\n\n" + finish + usage + done},
		"nothing":             {http.StatusOK, ""},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.body)
			}))
			defer server.Close()
			if o, _ := testClient(server).chat(t.Context(), 0, "c", nil); o.err == nil {
				t.Error("this counts as an answer")
			}
		})
	}
	t.Run("a broken connection", func(t *testing.T) {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, text)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}))
		defer server.Close()
		if o, _ := testClient(server).chat(t.Context(), 0, "c", nil); o.err == nil {
			t.Error("this counts as an answer")
		}
	})
	t.Run("nobody there", func(t *testing.T) {
		server := httptest.NewServer(http.NotFoundHandler())
		server.Close()
		outcomes := (&load{client: testClient(server), parallel: 2}).play(t.Context(), slices.Values(shape{chats: 3, systems: 1, turns: 2}.conversations(1)))
		if p := policyOf(outcomes); p.Requests != 6 || p.Failed != 6 || p.BlockHitRatio != 0 {
			t.Errorf("got %+v", p)
		}
	})
}

func testClient(s *httptest.Server) *client {
	return &client{http: s.Client(), frontends: []string{s.URL}, model: "m", maxTokens: 4, timeout: 10 * time.Second}
}

func TestConversationsShareSystemPrompts(t *testing.T) {
	s := shape{chats: 12, systems: 3, systemWords: 20, turns: 2, turnWords: 5}
	a := s.conversations(7)
	if !reflect.DeepEqual(a, s.conversations(7)) {
		t.Error("the same seed gives another workload")
	}
	systems, turns, ids := map[string]int{}, map[string]bool{}, map[string]bool{}
	for _, c := range a {
		systems[c.system]++
		ids[c.id] = true
		for _, turn := range c.turns {
			turns[turn] = true
		}
	}
	if len(a) != 12 || len(systems) != 3 || len(ids) != 12 || len(turns) != s.requests() {
		t.Errorf("%d conversations, %d system prompts, %d ids, %d different turns", len(a), len(systems), len(ids), len(turns))
	}
	for system, n := range systems {
		if n != 4 {
			t.Errorf("%d conversations share %q, want 4", n, system)
		}
	}
}

func TestPercentile(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	for _, c := range []struct {
		values []time.Duration
		p      int
		want   time.Duration
	}{
		{nil, 50, 0}, {hundred[:1], 50, 1}, {hundred[:1], 99, 1}, {hundred[:2], 50, 1}, {hundred[:3], 50, 2}, {hundred, 50, 50}, {hundred, 99, 99}, {hundred, 100, 100},
	} {
		if got := percentile(c.values, c.p); got != c.want {
			t.Errorf("percentile %d of %d values: got %d, want %d", c.p, len(c.values), got, c.want)
		}
	}
}

func TestReportJSON(t *testing.T) {
	r := Report{
		KV:         Policy{288, 0, 0.8712, TTFT{12.5, 40}},
		RoundRobin: Policy{288, 1, 0.5, TTFT{30, 90.25}},
		Outage:     Outage{500, 2, 120, 19.5, 310}, Recovered: true,
	}
	var b strings.Builder
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var got any
	if err := json.Unmarshal([]byte(b.String()), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"kv":          map[string]any{"requests": 288.0, "failed": 0.0, "block_hit_ratio": 0.8712, "ttft_ms": map[string]any{"p50": 12.5, "p99": 40.0}},
		"round_robin": map[string]any{"requests": 288.0, "failed": 1.0, "block_hit_ratio": 0.5, "ttft_ms": map[string]any{"p50": 30.0, "p99": 90.25}},
		"outage":      map[string]any{"requests": 500.0, "failed": 2.0, "degraded": 120.0, "max_added_ms": 19.5, "recovery_ms": 310.0},
		"recovered":   true,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	if r.Failed() != 3 {
		t.Errorf("%d failed, want 3", r.Failed())
	}
}

func TestCableCutsAndRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	way := &cable{}
	conn, err := way.dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan error)
	go func() {
		_, err := conn.Read(make([]byte, 1))
		read <- err
	}()
	way.setCut(true)
	if err := <-read; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a read that waits: %v, want a reset", err)
	}
	if _, err := conn.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a write afterwards: %v, want a reset", err)
	}
	if _, err := way.dial(t.Context(), "tcp", l.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v, want a refusal", err)
	}
	way.setCut(false)
	again, err := way.dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatalf("dial after mending: %v", err)
	}
	_ = again.Close()
}

func TestWatchWantsEveryFrontendAndAHit(t *testing.T) {
	w := newWatch(2)
	back := time.Now()
	exact := func(frontend int, overlap string, at time.Duration) outcome {
		return outcome{frontend: frontend, sent: back.Add(at), state: "exact", overlap: overlap}
	}
	done := func() bool {
		select {
		case <-w.recovered:
			return true
		default:
			return false
		}
	}
	w.observe(exact(0, "5", 1)) // before anybody said that Redis is back
	w.since(back)
	w.observe(exact(0, "5", -time.Second)) // sent before it was
	w.observe(outcome{frontend: 0, sent: back.Add(1), state: "degraded", overlap: "0"})
	failed := exact(0, "5", 1)
	failed.err = errors.New("failed")
	w.observe(failed)
	w.observe(exact(1, "0", 3*time.Millisecond))
	w.observe(exact(0, "0", 7*time.Millisecond))
	if done() {
		t.Fatal("recovered without a hit")
	}
	w.observe(exact(0, "12", 9*time.Millisecond))
	if !done() {
		t.Fatal("not recovered")
	}
	if got := w.lastRecovery().Sub(back); got != 7*time.Millisecond {
		t.Errorf("recovery after %v, want 7ms", got)
	}
	w.observe(exact(1, "12", 11*time.Millisecond)) // must not close twice
}

func TestPollNamesWhatItWaitedFor(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := poll(ctx, "spring", func() (bool, error) { return false, errors.New("still winter") })
	if err == nil || !strings.Contains(err.Error(), "waiting for spring") || !strings.Contains(err.Error(), "still winter") {
		t.Errorf("got %v", err)
	}
}
