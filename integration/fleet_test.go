package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

const model = "sim-model"

// engine is a simulated engine in a process of its own.
type engine struct {
	*process
	id, base       string
	events, replay string
}

func startEngine(t *testing.T, id string, args ...string) *engine {
	t.Helper()
	args = append([]string{"sim", "--http-listen=127.0.0.1:0", "--events-listen=tcp://127.0.0.1:0", "--replay-listen=tcp://127.0.0.1:0",
		"--prefill-per-token=0s", "--decode-per-token=0s"}, args...)
	p := start(t, args...)
	p.name = id
	up := p.awaitLog("simulated engine is up")
	return &engine{process: p, id: id, base: up["url"].(string), events: up["events"].(string), replay: up["replay"].(string)}
}

// spec is the engine as the value of --worker.
func (e *engine) spec() string {
	return fmt.Sprintf("id=%s,url=%s,model=%s,events=%s,replay=%s,block-size=16", e.id, e.base, model, e.events, e.replay)
}

// state is what the engine says about itself: /sim/state.
type state struct {
	Cancelled int64
	StartedMS int64 `json:"started_ms"`
	Ranks     []struct {
		LastSeq  int64 `json:"last_seq"`
		Resident int   `json:"resident_blocks"`
	}
}

func (e *engine) state() (s state) {
	e.t.Helper()
	getJSON(e.t, e.base+"/sim/state", &s)
	return s
}

func workers(engines ...*engine) []string {
	var args []string
	for _, e := range engines {
		args = append(args, "--worker="+e.spec())
	}
	return args
}

// startIndexer starts an indexer and returns it with the URL of its admin surface.
func startIndexer(t *testing.T, redis string, args ...string) (*process, string) {
	t.Helper()
	p := start(t, append([]string{"indexer", "--redis=" + redis, "--admin-listen=127.0.0.1:0", "--lease-interval=500ms"}, args...)...)
	return p, p.url("indexer")
}

// startFrontend starts a frontend, waits until it knows a healthy worker, and returns it with its URL.
func startFrontend(t *testing.T, redis string, args ...string) (*process, string) {
	t.Helper()
	p := start(t, append([]string{"frontend", "--redis=" + redis, "--listen=127.0.0.1:0", "--poll-interval=100ms"}, args...)...)
	url := p.url("frontend")
	awaitReady(t, url)
	return p, url
}

// startServe starts everything but the engines in one process.
func startServe(t *testing.T, args ...string) (*process, string) {
	t.Helper()
	p := start(t, append([]string{"serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--poll-interval=100ms"}, args...)...)
	url := p.url("frontend")
	awaitReady(t, url)
	return p, url
}

func awaitReady(t *testing.T, url string) {
	t.Helper()
	eventually(t, url+" is ready", func() bool { return status(t, url+"/ready") == http.StatusOK })
}

// status is the status of a GET, 0 where nobody answers.
func status(t *testing.T, url string) int {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		return 0
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

func getJSON(t *testing.T, url string, v any) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(resp.Body).Decode(v); err != nil {
		t.Fatalf("%s: %v", url, err)
	}
}

// postJSON posts a body and decodes the answer into v unless that is nil.
func postJSON(t *testing.T, url string, body, v any) *http.Response {
	t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post(url, "application/json", bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s: %v", url, err)
	}
	if v != nil {
		if err := json.Unmarshal(answer, v); err != nil {
			t.Fatalf("%s: status %d, %v: %.200s", url, resp.StatusCode, err, answer)
		}
	}
	return resp
}

// message is one entry of a chat.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// answer is what a frontend said to a chat completion.
type answer struct {
	text            string
	cached, prompt  int    // tokens, by the engine's count
	worker, state   string // x-worker-instance-id, x-kv-index-state
	overlap, blocks int    // x-kv-overlap-blocks, x-kv-prompt-blocks
}

// chat asks for a chat completion, which has to succeed.
func chat(t *testing.T, url string, messages ...message) answer {
	t.Helper()
	var body struct {
		Choices []struct{ Message message }
		Usage   struct {
			PromptTokens int `json:"prompt_tokens"`
			Details      struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	resp := postJSON(t, url+"/v1/chat/completions", map[string]any{"model": model, "messages": messages, "max_tokens": 20}, &body)
	if resp.StatusCode != http.StatusOK || len(body.Choices) != 1 {
		t.Fatalf("chat: status %d, %+v", resp.StatusCode, body)
	}
	number := func(header string) int {
		n, _ := strconv.Atoi(resp.Header.Get(header))
		return n
	}
	return answer{
		text: body.Choices[0].Message.Content, cached: body.Usage.Details.Cached, prompt: body.Usage.PromptTokens,
		worker: resp.Header.Get("X-Worker-Instance-Id"), state: resp.Header.Get("X-Kv-Index-State"),
		overlap: number("X-Kv-Overlap-Blocks"), blocks: number("X-Kv-Prompt-Blocks"),
	}
}

// longPrompt is a system message of many blocks that begins with its name.
func longPrompt(name string) message {
	return message{"system", name + strings.Repeat(" the quick brown fox jumps over the lazy dog", 40)}
}

// overlaps asks a frontend's index how many tokens of a prompt each worker holds.
func overlaps(t *testing.T, url string, messages ...message) map[string]int {
	t.Helper()
	var tokens struct{ Tokens []uint32 }
	postJSON(t, url+"/tokenize", map[string]any{"model": model, "messages": messages}, &tokens)
	var found struct {
		Scores map[string]map[string]int
	}
	postJSON(t, url+"/query", map[string]any{"model": model, "token_ids": tokens.Tokens}, &found)
	most := map[string]int{}
	for worker, ranks := range found.Scores {
		for _, n := range ranks {
			most[worker] = max(most[worker], n)
		}
	}
	return most
}

// awaitOverlap waits until the index knows that a worker holds most of a prompt.
func awaitOverlap(t *testing.T, url, worker string, a answer, messages ...message) {
	t.Helper()
	eventually(t, "the index knows that "+worker+" is warm", func() bool {
		return overlaps(t, url, messages...)[worker] >= a.prompt/16*16
	})
}
