package frontend

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sync/singleflight"

	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/openai"
)

// errNoTokens means that a prompt's tokens are not to be had now. The request goes on without.
var errNoTokens = errors.New("no tokens")

// A worker that failed to tokenize is not asked again for a while, so that a worker that hangs
// there, or has no such route, does not cost every request the timeout.
const (
	pauseAfterFailure = 2 * time.Second
	pauseWithoutRoute = 30 * time.Second
)

// Results of tokenize_total.
const (
	tokenizeCached  = "cached"
	tokenizeAsked   = "asked"   // a worker
	tokenizeShared  = "shared"  // the call of another request for the same prompt
	tokenizePaused  = "paused"  // every worker failed a moment ago, and none is asked
	tokenizeTimeout = "timeout" //
	tokenizeFailed  = "failed"
)

// tokenizer learns prompts' tokens from the workers, which alone apply their chat templates as
// they will when they serve the prompt.
type tokenizer struct {
	client  http.RoundTripper
	timeout time.Duration
	token   func() string // for the workers, in place of the client's
	limit   int           // longest prompt, in tokens
	cache   *tokenCache
	count   func(ctx context.Context, result string)
	calls   singleflight.Group

	mu     sync.Mutex
	paused map[string]time.Time // by worker id, until when
}

// tokens are those of the prompt that body, a tokenize request, holds. authorization is the client's header.
func (t *tokenizer) tokens(ctx context.Context, target fleet.Target, body []byte, authorization string) ([]uint32, error) {
	h := xxh3.New()
	_, _ = h.WriteString(target.Pool.String()) // a hash takes every write
	_, _ = h.Write([]byte{0})
	_, _ = h.Write(body)
	key := h.Sum128()
	if tokens, ok := t.cache.get(key); ok {
		t.count(ctx, tokenizeCached)
		return tokens, nil
	}
	node := t.pick(target.Nodes)
	if node == nil {
		t.count(ctx, tokenizePaused)
		return nil, errNoTokens
	}
	// The call belongs to everybody who waits for it: a client that leaves does not end it.
	flight := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, key.Lo), key.Hi)
	asks := false
	done := t.calls.DoChan(string(flight), func() (any, error) {
		asks = true
		if tokens, ok := t.cache.get(key); ok {
			return tokens, nil // a call ended between our look and our joining
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.timeout)
		defer cancel()
		tokens, pause, err := t.ask(ctx, node, body, authorization)
		if pause > 0 {
			t.pause(node.ID, pause)
		}
		if err == nil {
			t.cache.put(key, tokens)
		}
		return tokens, err
	})
	timer := time.NewTimer(t.timeout)
	defer timer.Stop()
	select {
	case r := <-done:
		switch {
		case errors.Is(r.Err, context.DeadlineExceeded):
			t.count(ctx, tokenizeTimeout)
		case r.Err != nil:
			t.count(ctx, tokenizeFailed)
		case asks: // the call was this request's own
			t.count(ctx, tokenizeAsked)
		default:
			t.count(ctx, tokenizeShared)
		}
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.([]uint32), nil
	case <-timer.C:
		t.count(ctx, tokenizeTimeout)
		return nil, fmt.Errorf("%w: timeout", errNoTokens)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// pick is any worker that is not paused.
func (t *tokenizer) pick(nodes []*fleet.Node) *fleet.Node {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	var chosen *fleet.Node
	n := 0
	for _, node := range nodes {
		if until, ok := t.paused[node.ID]; ok {
			if now.Before(until) {
				continue
			}
			delete(t.paused, node.ID)
		}
		n++
		if rand.IntN(n) == 0 {
			chosen = node
		}
	}
	return chosen
}

func (t *tokenizer) pause(worker string, d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.paused[worker] = time.Now().Add(d)
}

// forget drops what is kept of a worker that left.
func (t *tokenizer) forget(worker string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.paused, worker)
}

// ask is one call; pause is how long the worker is to be left alone after it.
func (t *tokenizer) ask(ctx context.Context, node *fleet.Node, body []byte, authorization string) (tokens []uint32, pause time.Duration, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, node.URL.JoinPath("tokenize").String(), bytes.NewReader(body))
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", errNoTokens, err)
	}
	req.Header.Set("Content-Type", "application/json")
	if token := t.token(); token != "" {
		authorization = "Bearer " + token
	}
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	inject(ctx, req.Header)
	res, err := t.client.RoundTrip(req)
	if err != nil {
		return nil, pauseAfterFailure, fmt.Errorf("%w: %w", errNoTokens, err)
	}
	defer res.Body.Close()
	switch s := res.StatusCode; {
	case s == http.StatusOK:
	case s == http.StatusNotFound || s == http.StatusMethodNotAllowed || s == http.StatusNotImplemented:
		return nil, pauseWithoutRoute, fmt.Errorf("%w: the worker has no /tokenize", errNoTokens)
	case s >= 500:
		return nil, pauseAfterFailure, fmt.Errorf("%w: status %d", errNoTokens, s)
	default:
		return nil, 0, fmt.Errorf("%w: status %d", errNoTokens, s) // the prompt's fault
	}
	// A token id takes at most ten digits and a comma; token_strs may come along.
	raw, err := io.ReadAll(io.LimitReader(res.Body, int64(t.limit)*32+1<<16))
	if err != nil {
		return nil, pauseAfterFailure, fmt.Errorf("%w: %w", errNoTokens, err)
	}
	tokens, err = parseTokens(raw, t.limit)
	if err != nil {
		return nil, 0, err
	}
	return tokens, 0, nil
}

func parseTokens(raw []byte, limit int) (tokens []uint32, err error) {
	var ids []byte
	err = openai.Object(raw, func(key string, value []byte) error {
		if key == "tokens" {
			ids = value
		}
		return nil
	})
	if err != nil || ids == nil {
		return nil, fmt.Errorf("%w: not an answer of /tokenize", errNoTokens)
	}
	tokens, err = openai.Tokens(ids, "tokens", limit)
	var bad *openai.BadRequest
	if errors.As(err, &bad) && bad.Code == openai.CodeTooLong {
		return nil, err // this one is the client's fault
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoTokens, err)
	}
	return tokens, nil
}
