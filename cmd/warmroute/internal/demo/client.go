package demo

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

// outcome is what became of one request.
type outcome struct {
	err          error         // nil for a complete 200 answer
	frontend     int           // which frontend was asked
	sent         time.Time     // when
	state        string        // x-kv-index-state
	overlap      string        // x-kv-overlap-blocks
	worker       string        // x-worker-instance-id
	promptTokens int           // as the engine counted them
	cachedTokens int           // of these, found in the engine's cache
	ttft         time.Duration // until the first token arrived
}

// client asks the frontends in turn, as a load balancer would.
type client struct {
	http      *http.Client
	frontends []string // base URLs
	model     string
	maxTokens int
	timeout   time.Duration // of one request
}

// chat sends one streaming chat completion and reads the answer to its end. The reply is the
// text of a complete answer.
func (c *client) chat(ctx context.Context, n int, conversation string, messages []message) (o outcome, reply string) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	o = outcome{frontend: n % len(c.frontends), sent: time.Now()}
	body, err := json.Marshal(map[string]any{
		"model": c.model, "messages": messages, "max_tokens": c.maxTokens,
		"stream": true, "stream_options": map[string]bool{"include_usage": true},
	})
	if err != nil {
		o.err = err
		return o, ""
	}
	url := c.frontends[o.frontend] + "/v1/chat/completions"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		o.err = err
		return o, ""
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Session-Id", conversation)
	resp, err := c.http.Do(req)
	if err != nil {
		o.err = err
		return o, ""
	}
	defer func() { _ = resp.Body.Close() }()
	o.state = resp.Header.Get("X-Kv-Index-State")
	o.worker = resp.Header.Get("X-Worker-Instance-Id")
	o.overlap = resp.Header.Get("X-Kv-Overlap-Blocks")
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		o.err = fmt.Errorf("status %d: %s", resp.StatusCode, bytes.TrimSpace(text))
		return o, ""
	}
	reply, o.err = o.readStream(resp.Body)
	return o, reply
}

// chunk is the part of a streamed chat completion chunk that the demo looks at.
type chunk struct {
	Error   json.RawMessage `json:"error"`
	Choices []struct {
		Delta        message `json:"delta"`
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
func (o *outcome) readStream(r io.Reader) (string, error) {
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
		for _, choice := range c.Choices {
			if choice.Delta.Content != "" && reply.Len() == 0 {
				o.ttft = time.Since(o.sent)
			}
			reply.WriteString(choice.Delta.Content)
			finished = finished || choice.FinishReason != ""
		}
		if c.Usage != nil {
			usage = true
			o.promptTokens = c.Usage.PromptTokens
			o.cachedTokens = c.Usage.PromptTokensDetails.CachedTokens
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("broken stream: %w", err)
	}
	return "", errors.New("the stream ended without [DONE]")
}

// getJSON reads a JSON answer. Its status does not matter.
func getJSON(ctx context.Context, url string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	return json.NewDecoder(resp.Body).Decode(v)
}
