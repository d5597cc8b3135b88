package stage

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
	"testing/synctest"
	"time"
)

const usage = `data: {"choices":[],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}` + "\n\n"

// answer writes one streamed chat completion.
func answer(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Kv-Index-State", "exact")
	w.Header().Set("X-Kv-Overlap-Blocks", "4")
	_, _ = fmt.Fprintf(w, "data: {\"system_fingerprint\":\"e\",\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n")
	_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":%q}}]}\n\n", text)
	_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}\n\n"+usage+"data: [DONE]\n\n")
}

func TestLoadPlaysEveryTurnOnTheAnswerBefore(t *testing.T) {
	var mu sync.Mutex
	var asked [][]Message
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Messages []Message
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
	l := Load{Client: testClient(server), Parallel: 1, Observe: func(Outcome) { observed++ }}
	outcomes := l.Play(t.Context(), slices.Values([]Conversation{{ID: "c", System: "s", Turns: []string{"a", "b"}}}))
	want := [][]Message{
		{{"system", "s"}, {"user", "a"}},
		{{"system", "s"}, {"user", "a"}, {"assistant", "answer to a"}, {"user", "b"}},
	}
	if !reflect.DeepEqual(asked, want) {
		t.Errorf("asked %v\nwant %v", asked, want)
	}
	if len(outcomes) != 2 || observed != 2 {
		t.Fatalf("%d outcomes, %d observed, want 2", len(outcomes), observed)
	}
	for _, o := range outcomes {
		if o.Err != nil || o.PromptTokens != 100 || o.CachedTokens != 64 || o.TTFT <= 0 || o.Engine != "e" {
			t.Errorf("outcome %+v", o)
		}
	}
	if o := outcomes[1]; o.State != "exact" || o.Overlap != "4" || o.Frontend != 0 {
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
			if o, _ := testClient(server).Chat(t.Context(), 0, "c", nil); o.Err == nil {
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
		if o, _ := testClient(server).Chat(t.Context(), 0, "c", nil); o.Err == nil {
			t.Error("this counts as an answer")
		}
	})
	t.Run("nobody there", func(t *testing.T) {
		server := httptest.NewServer(http.NotFoundHandler())
		server.Close()
		outcomes := (&Load{Client: testClient(server), Parallel: 2}).Play(t.Context(), slices.Values(Shape{Chats: 3, Systems: 1, Turns: 2}.Conversations(1)))
		if len(outcomes) != 6 || slices.ContainsFunc(outcomes, func(o Outcome) bool { return o.Err == nil }) {
			t.Errorf("got %+v", outcomes)
		}
	})
}

func testClient(s *httptest.Server) *Client {
	return &Client{HTTP: s.Client(), Frontends: []string{s.URL}, Model: "m", MaxTokens: 4, Timeout: 10 * time.Second}
}

func TestConversationsShareSystemPrompts(t *testing.T) {
	s := Shape{Chats: 12, Systems: 3, SystemWords: 20, Turns: 2, TurnWords: 5}
	a := s.Conversations(7)
	if !reflect.DeepEqual(a, s.Conversations(7)) {
		t.Error("the same seed gives another workload")
	}
	systems, turns, ids := map[string]int{}, map[string]bool{}, map[string]bool{}
	for _, c := range a {
		systems[c.System]++
		ids[c.ID] = true
		for _, turn := range c.Turns {
			turns[turn] = true
		}
	}
	if len(a) != 12 || len(systems) != 3 || len(ids) != 12 || len(turns) != s.Requests() {
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
		if got := Percentile(c.values, c.p); got != c.want {
			t.Errorf("percentile %d of %d values: got %d, want %d", c.p, len(c.values), got, c.want)
		}
	}
}

func TestCableCutsAndRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	way := &Cable{}
	conn, err := way.Dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan error)
	go func() {
		_, err := conn.Read(make([]byte, 1))
		read <- err
	}()
	way.Cut(true)
	if err := <-read; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a read that waits: %v, want a reset", err)
	}
	if _, err := conn.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a write afterwards: %v, want a reset", err)
	}
	if _, err := way.Dial(t.Context(), "tcp", l.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v, want a refusal", err)
	}
	way.Cut(false)
	again, err := way.Dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatalf("dial after mending: %v", err)
	}
	_ = again.Close()
}

func TestWatchWantsEveryFrontendAndAHit(t *testing.T) {
	w := NewWatch(2)
	back := time.Now()
	exact := func(frontend int, overlap string, at time.Duration) Outcome {
		return Outcome{Frontend: frontend, Sent: back.Add(at), State: "exact", Overlap: overlap}
	}
	done := func() bool {
		select {
		case <-w.Recovered:
			return true
		default:
			return false
		}
	}
	w.Observe(exact(0, "5", 1)) // before anybody said that Redis is back
	w.Since(back)
	w.Observe(exact(0, "5", -time.Second)) // sent before it was
	w.Observe(Outcome{Frontend: 0, Sent: back.Add(1), State: "degraded", Overlap: "0"})
	failed := exact(0, "5", 1)
	failed.Err = errors.New("failed")
	w.Observe(failed)
	w.Observe(exact(1, "0", 3*time.Millisecond))
	w.Observe(exact(0, "0", 7*time.Millisecond))
	if done() {
		t.Fatal("recovered without a hit")
	}
	w.Observe(exact(0, "12", 9*time.Millisecond))
	if !done() {
		t.Fatal("not recovered")
	}
	if got := w.LastRecovery().Sub(back); got != 7*time.Millisecond {
		t.Errorf("recovery after %v, want 7ms", got)
	}
	w.Observe(exact(1, "12", 11*time.Millisecond)) // must not close twice
}

func TestPollNamesWhatItWaitedFor(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := Poll(ctx, "spring", func() (bool, error) { return false, errors.New("still winter") })
	if err == nil || !strings.Contains(err.Error(), "waiting for spring") || !strings.Contains(err.Error(), "still winter") {
		t.Errorf("got %v", err)
	}
}

func TestPaceLeavesNothingOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		due := Pace(ctx, 100)
		start := <-due
		<-time.After(time.Second) // nobody takes any
		for n := 1; n <= 150; n++ {
			if at := <-due; at.Sub(start) != time.Duration(n)*10*time.Millisecond {
				t.Fatalf("the %dth was due after %v", n, at.Sub(start))
			}
		}
		if got := time.Since(start); got != 1500*time.Millisecond {
			t.Errorf("150 at 100 per second took %v", got)
		}
	})
}
