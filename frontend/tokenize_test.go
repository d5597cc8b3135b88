package frontend

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
)

const textBody = `{"model":"llama","prompt":"a text of more than sixteen bytes"}`

func TestTokenizeFailureIsServedAndCounted(t *testing.T) {
	for name, test := range map[string]struct {
		tokens func(w http.ResponseWriter, r *http.Request, body []byte)
		asked  int // calls for two requests
	}{
		"no route":       {func(w http.ResponseWriter, _ *http.Request, _ []byte) { w.WriteHeader(404) }, 1},
		"broken":         {func(w http.ResponseWriter, _ *http.Request, _ []byte) { w.WriteHeader(500) }, 1},
		"refused":        {func(w http.ResponseWriter, _ *http.Request, _ []byte) { w.WriteHeader(400) }, 2},
		"not JSON":       {func(w http.ResponseWriter, _ *http.Request, _ []byte) { _, _ = io.WriteString(w, "<html>") }, 2},
		"no tokens":      {func(w http.ResponseWriter, _ *http.Request, _ []byte) { _, _ = io.WriteString(w, `{"count":3}`) }, 2},
		"tokens of text": {func(w http.ResponseWriter, _ *http.Request, _ []byte) { _, _ = io.WriteString(w, `{"tokens":["a"]}`) }, 2},
		"hangs":          {func(_ http.ResponseWriter, r *http.Request, _ []byte) { <-r.Context().Done() }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, "w1")
			e.tokens = test.tokens
			o := Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}}
			if name == "hangs" {
				o.TokenizeTimeout = 20 * time.Millisecond
			}
			f := start(t, o)
			for range 2 {
				res, _ := f.post(completions, textBody)
				if res.StatusCode != 200 || res.Header.Get("x-kv-index-state") != "bypassed" {
					t.Errorf("%d, headers %v", res.StatusCode, res.Header)
				}
				if v, ok := res.Header["X-Kv-Prompt-Blocks"]; ok {
					t.Errorf("x-kv-prompt-blocks %v of an unknown prompt", v)
				}
			}
			if n := f.metric("warmroute_index_fallbacks_total", "reason", "tokenize"); n != 2 {
				t.Errorf("%v fallbacks", n)
			}
			if n := f.metric("warmroute_tokenize_total", "result", tokenizeTimeout); (n > 0) != (name == "hangs") {
				t.Errorf("%v timeouts counted", n)
			}
			e.mu.Lock()
			defer e.mu.Unlock()
			if e.asked > test.asked || e.asked < test.asked && name != "hangs" { // its call may never leave a busy machine
				t.Errorf("asked %d times, want %d", e.asked, test.asked)
			}
			f.wantIdle()
		})
	}
}

func TestTokenizeIsSharedByConcurrentRequests(t *testing.T) {
	e := newEngine(t, "w1")
	begun, goOn := make(chan struct{}, 100), make(chan struct{})
	e.tokens = func(w http.ResponseWriter, _ *http.Request, body []byte) {
		begun <- struct{}{}
		<-goOn
		answerTokens(w, body)
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	const requests = 8
	var all sync.WaitGroup
	for range requests {
		all.Go(func() {
			if res, _ := f.post(completions, textBody); res.Header.Get("x-kv-index-state") != "exact" {
				t.Errorf("headers %v", res.Header)
			}
		})
	}
	<-begun
	f.eventually("all are under way", func() bool { return f.underWay.used.Load() == requests })
	close(goOn)
	all.Wait()
	f.post(completions, textBody)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.asked != 1 {
		t.Errorf("asked %d times for one prompt", e.asked)
	}
	if a, c := f.metric("warmroute_tokenize_total", "result", tokenizeAsked), f.metric("warmroute_tokenize_total", "result", tokenizeCached); a != 1 || c < 1 {
		t.Errorf("%v prompts were asked for and %v cached", a, c)
	}
	if n := f.metric("warmroute_tokenize_total"); n != requests+1 { // some joined the call, some came after it
		t.Errorf("%v prompts counted", n)
	}
}

func TestUnsupportedInputIsCounted(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	res, _ := f.post("/v1/responses", `{"model":"llama","input":[{"role":"user","content":[{"type":"input_image"}]}]}`)
	if res.StatusCode != 200 || f.metric("warmroute_index_fallbacks_total", "reason", "tokenize") != 1 {
		t.Errorf("%d, headers %v", res.StatusCode, res.Header)
	}
	for path, body := range map[string]string{
		"/v1/responses":        `{"model":"llama","input":"a question of more than sixteen bytes"}`,
		"/v1/embeddings":       `{"model":"llama","input":["a text of more than sixteen bytes","b"]}`,
		"/v1/completions":      `{"model":"llama","prompt":[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],[1]]}`,
		"/v1/chat/completions": `{"model":"llama","messages":[{"role":"user","content":"x"}],"tools":[]}`,
	} {
		res, _ := f.post(path, body)
		if res.StatusCode != 200 || res.Header.Get("x-kv-index-state") != "exact" || res.Header.Get("x-kv-prompt-blocks") == "0" {
			t.Errorf("%s: %d, headers %v", path, res.StatusCode, res.Header)
		}
	}
}

func TestTokenCacheIsBounded(t *testing.T) {
	key := func(i int) xxh3.Uint128 { return xxh3.HashString128(fmt.Sprint(i)) }
	tokens := make([]uint32, 100)
	one := (&cachedTokens{tokens: tokens}).size()
	c := newTokenCache(3 * one)
	for i := range 3 {
		c.put(key(i), tokens)
	}
	c.get(key(0)) // now 1 is the oldest
	c.put(key(3), tokens)
	for i, want := range []bool{true, false, true, true} {
		if _, ok := c.get(key(i)); ok != want {
			t.Errorf("entry %d there: %v", i, ok)
		}
	}
	c.put(key(3), tokens)
	c.put(key(9), make([]uint32, 1000)) // more than the limit
	if c.used != 3*one || c.order.Len() != 3 || len(c.byKey) != 3 {
		t.Errorf("%d bytes, %d entries, %d keys", c.used, c.order.Len(), len(c.byKey))
	}
}

func TestTokenizeUsesTheClientsKey(t *testing.T) {
	e := newEngine(t, "w1")
	var got string
	e.tokens = func(w http.ResponseWriter, r *http.Request, body []byte) {
		got = r.Header.Get("Authorization")
		if !strings.Contains(string(body), `"model":"llama"`) {
			t.Errorf("body %s", body)
		}
		answerTokens(w, body)
	}
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}})
	f.post(completions, textBody, "Authorization", "Bearer k")
	if got != "Bearer k" {
		t.Errorf("Authorization %q", got)
	}
}
