package stage

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Outcome is what became of one request.
type Outcome struct {
	Err          error         // nil for a complete 200 answer
	Frontend     int           // which frontend was asked
	Sent         time.Time     // when
	Late         time.Duration // how much later than planned, where a pace was given
	State        string        // x-kv-index-state
	Overlap      string        // x-kv-overlap-blocks
	Worker       string        // x-worker-instance-id
	Engine       string        // the name of the engine that answered, by its own word
	PromptTokens int           // as the engine counted them
	CachedTokens int           // of these, found in the engine's cache
	TTFT         time.Duration // until the first token arrived
}

// Client asks the frontends in turn, as a load balancer would.
type Client struct {
	HTTP      *http.Client
	Frontends []string // base URLs
	Model     string
	MaxTokens int
	Timeout   time.Duration // of one request
}

// Chat sends one streaming chat completion and reads the answer to its end. The reply is the
// text of a complete answer.
func (c *Client) Chat(ctx context.Context, n int, conversation string, messages []Message) (o Outcome, reply string) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	o = Outcome{Frontend: n % len(c.Frontends), Sent: time.Now()}
	body, err := json.Marshal(map[string]any{
		"model": c.Model, "messages": messages, "max_tokens": c.MaxTokens,
		"stream": true, "stream_options": map[string]bool{"include_usage": true},
	})
	if err != nil {
		o.Err = err
		return o, ""
	}
	url := c.Frontends[o.Frontend] + "/v1/chat/completions"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		o.Err = err
		return o, ""
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Session-Id", conversation)
	resp, err := c.HTTP.Do(req)
	if err != nil {
		o.Err = err
		return o, ""
	}
	defer func() { _ = resp.Body.Close() }()
	o.State = resp.Header.Get("X-Kv-Index-State")
	o.Worker = resp.Header.Get("X-Worker-Instance-Id")
	o.Overlap = resp.Header.Get("X-Kv-Overlap-Blocks")
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		o.Err = fmt.Errorf("status %d: %s", resp.StatusCode, bytes.TrimSpace(text))
		return o, ""
	}
	reply, o.Err = o.readStream(resp.Body)
	return o, reply
}

// chunk is the part of a streamed chat completion chunk that is looked at.
type chunk struct {
	Error   json.RawMessage `json:"error"`
	Engine  string          `json:"system_fingerprint"`
	Choices []struct {
		Delta        Message `json:"delta"`
		FinishReason string  `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		PromptTokens        int `json:"prompt_tokens"`
		PromptTokensDetails struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

// readStream reads server-sent events up to [DONE]. A stream without text, finish reason, usage
// or [DONE] is a broken answer.
func (o *Outcome) readStream(r io.Reader) (string, error) {
	var reply strings.Builder
	finished, usage := false, false
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data:")
		if !ok {
			continue
		}
		data = strings.TrimSpace(data)
		if data == "[DONE]" {
			if reply.Len() == 0 || !finished || !usage {
				return "", fmt.Errorf("incomplete stream: %d bytes of text, finished %v, usage %v", reply.Len(), finished, usage)
			}
			return reply.String(), nil
		}
		var c chunk
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			return "", fmt.Errorf("chunk of the stream: %w", err)
		}
		if c.Error != nil {
			return "", fmt.Errorf("error in the stream: %s", c.Error)
		}
		if c.Engine != "" {
			o.Engine = c.Engine
		}
		for _, choice := range c.Choices {
			if choice.Delta.Content != "" && reply.Len() == 0 {
				o.TTFT = time.Since(o.Sent)
			}
			reply.WriteString(choice.Delta.Content)
			finished = finished || choice.FinishReason != ""
		}
		if c.Usage != nil {
			usage = true
			o.PromptTokens = c.Usage.PromptTokens
			o.CachedTokens = c.Usage.PromptTokensDetails.CachedTokens
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("broken stream: %w", err)
	}
	return "", errors.New("the stream ended without [DONE]")
}

// getJSON reads a JSON answer. Its status does not matter.
func getJSON(ctx context.Context, client *http.Client, url string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	return json.NewDecoder(resp.Body).Decode(v)
}

// NewHTTPClient makes a client that keeps enough connections for a load.
func NewHTTPClient() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 10 * time.Second}}
}
