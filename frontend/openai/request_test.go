package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestParse(t *testing.T) {
	for _, test := range []struct {
		name     string
		endpoint Endpoint
		body     string
		want     Request
	}{
		{"text", Completions, `{"model":"m","prompt":"hé\"llo","stream":true}`,
			Request{Model: "m", Stream: true, Tokenize: []byte(`{"model":"m","prompt":"hé\"llo"}`)}},
		{"text with options", Completions, `{"add_special_tokens":false, "prompt" : "x" ,"chat_template":"ignored","model":"m"}`,
			Request{Model: "m", Tokenize: []byte(`{"model":"m","prompt":"x","add_special_tokens":false}`)}},
		{"texts: the first routes", Completions, `{"model":"m","prompt":["a","b"]}`,
			Request{Model: "m", Tokenize: []byte(`{"model":"m","prompt":"a"}`)}},
		{"tokens", Completions, `{"model":"m","prompt":[1, 2,4294967295],"cache_salt":"s"}`,
			Request{Model: "m", CacheSalt: "s", Tokens: []uint32{1, 2, 4294967295}}},
		{"token arrays: the first routes", Completions, `{"model":"m","prompt":[[7,8],[9]]}`, Request{Model: "m", Tokens: []uint32{7, 8}}},
		{"embeds instead of a prompt", Completions, `{"model":"m","prompt":null,"prompt_embeds":"AAAA"}`, Request{Model: "m"}},
		{"truncated by the engine", Completions, `{"model":"m","prompt":[1,2],"truncate_prompt_tokens":1}`, Request{Model: "m"}},
		{"last of two keys wins", Completions, `{"model":"a","prompt":[1],"model":"b"}`, Request{Model: "b", Tokens: []uint32{1}}},
		{"escaped key", Completions, `{"mod\u0065l":"b","prompt":[1]}`, Request{Model: "b", Tokens: []uint32{1}}},
		{"keys are exact", Completions, `{"model":"b","Model":"c","prompt":[1],"PROMPT":3}`, Request{Model: "b", Tokens: []uint32{1}}},
		{"null is absent", Completions, `{"model":"m","prompt":[1],"stream":null,"cache_salt":null,"tools":null}`, Request{Model: "m", Tokens: []uint32{1}}},
		{"chat", Chat, `{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":0.5e-3,"tools":[{"type":"function"}],"chat_template_kwargs":{"a":[]}}`,
			Request{Model: "m", Tokenize: []byte(`{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":[]},"tools":[{"type":"function"}]}`)}},
		{"embeddings", Embeddings, `{"model":"m","input":[3,4]}`, Request{Model: "m", Tokens: []uint32{3, 4}}},
		{"embeddings of a chat", Embeddings, `{"model":"m","messages":[{}]}`, Request{Model: "m", Tokenize: []byte(`{"model":"m","messages":[{}]}`)}},
		{"responses", Responses, `{"model":"m","input":"hi","instructions":"be brief"}`,
			Request{Model: "m", Tokenize: []byte(`{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}]}`)}},
		{"responses of messages", Responses, `{"model":"m","input":[{"type":"message","role":"user","content":"hi"}]}`,
			Request{Model: "m", Tokenize: []byte(`{"model":"m","messages":[{"role":"user","content":"hi"}]}`)}},
		{"responses with parts", Responses, `{"model":"m","input":[{"role":"user","content":[{"type":"input_text","text":"x"}]}]}`, Request{Model: "m"}},
		{"responses that go on", Responses, `{"model":"m","input":"hi","previous_response_id":"r1"}`, Request{Model: "m"}},
		{"plain", Plain, `{"tokens":[1]}`, Request{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Parse([]byte(test.body), test.endpoint, 100)
			if err != nil {
				t.Fatal(err)
			}
			if got.Model != test.want.Model || got.Stream != test.want.Stream || got.CacheSalt != test.want.CacheSalt ||
				!slices.Equal(got.Tokens, test.want.Tokens) || !bytes.Equal(got.Tokenize, test.want.Tokenize) {
				t.Errorf("got  %+v %s\nwant %+v %s", got, got.Tokenize, test.want, test.want.Tokenize)
			}
			if got.Tokenize != nil && !json.Valid(got.Tokenize) {
				t.Errorf("not JSON: %s", got.Tokenize)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	for _, test := range []struct {
		endpoint Endpoint
		body     string
		says     string
	}{
		{Chat, ``, "empty"},
		{Chat, ` `, "empty"},
		{Chat, `[]`, "not a JSON object"},
		{Chat, `"x"`, "not a JSON object"},
		{Chat, `{`, "not valid JSON"},
		{Chat, `{"model":"m"} x`, "not valid JSON"},
		{Chat, `{"model":"m",}`, "not valid JSON"},
		{Chat, `{"model":01}`, "not valid JSON"},
		{Chat, `{"model":"m","x":` + strings.Repeat(`[`, 100_000), "nests deeper"},
		{Chat, `{"messages":[{}]}`, `"model" is missing`},
		{Chat, `{"model":7,"messages":[{}]}`, `"model" must be a string`},
		{Chat, `{"model":"m"}`, `"messages" is missing`},
		{Chat, `{"model":"m","messages":"x"}`, `"messages" must be an array`},
		{Chat, `{"model":"m","messages":[]}`, `"messages" is empty`},
		{Chat, `{"model":"m","messages":["x"]}`, "array of objects"},
		{Chat, `{"model":"m","messages":[{}],"stream":"yes"}`, `"stream" must be`},
		{Chat, `{"model":"m","messages":[{}],"tools":{}}`, `"tools" must be`},
		{Chat, `{"model":"m","messages":[{}],"cache_salt":1}`, `"cache_salt" must be`},
		{Completions, `{"model":"m"}`, `"prompt" is missing`},
		{Completions, `{"model":"m","prompt":{}}`, `"prompt" must be`},
		{Completions, `{"model":"m","prompt":[]}`, `"prompt" is empty`},
		{Completions, `{"model":"m","prompt":[[]]}`, `"prompt" is empty`},
		{Completions, `{"model":"m","prompt":[1,"a"]}`, "token ids"},
		{Completions, `{"model":"m","prompt":[true]}`, `"prompt" must be`},
		{Completions, `{"model":"m","prompt":[[1],["a"]]}`, `"prompt" must be`},
		{Completions, `{"model":"m","prompt":[-1]}`, "token ids"},
		{Completions, `{"model":"m","prompt":[1.5]}`, "token ids"},
		{Completions, `{"model":"m","prompt":[4294967296]}`, "token ids"},
		{Completions, `{"model":"m","prompt":[1,2,3,4,5,6]}`, "6 tokens, the limit is 5"},
		{Embeddings, `{"model":"m"}`, `"input" is missing`},
		{Responses, `{"model":"m"}`, `"input" is missing`},
		{Responses, `{"model":"m","input":7}`, `"input" must be`},
		{Responses, `{"model":"m","input":["x"]}`, `"input" must be`},
	} {
		_, err := Parse([]byte(test.body), test.endpoint, 5)
		var bad *BadRequest
		if !errors.As(err, &bad) || !strings.Contains(bad.Message, test.says) {
			t.Errorf("%.60s: got %v, want a BadRequest that says %q", test.body, err, test.says)
		}
	}
}

// Object accepts exactly what encoding/json accepts, up to its own bound on nesting, and finds
// the same members.
func FuzzObject(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":[1,-2.5e+7,{"b":null}],"c":"\u00e9\n"}`, `{"a":tru}`, "{\"a\":\"\x01\"}", `{"a":1,"a":2}`, `[1]`, `{"a":-}`, `{"":{}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got := map[string]string{}
		err := Object(b, func(key string, raw []byte) error { got[key] = string(raw); return nil })
		if errors.Is(err, errDepth) {
			return
		}
		var want map[string]json.RawMessage
		wantErr := json.Unmarshal(b, &want)
		if bytes.Equal(bytes.TrimSpace(b), []byte("null")) {
			wantErr = errors.New("null is no object")
		}
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%q: got %v, encoding/json says %v", b, err, wantErr)
		}
		if err != nil || !utf8.Valid(b) { // encoding/json rewrites such keys
			return
		}
		if len(got) != len(want) {
			t.Fatalf("%q: %d members, want %d", b, len(got), len(want))
		}
		for k, v := range want {
			if got[k] != string(v) {
				t.Fatalf("%q: member %q is %q, want %q", b, k, got[k], v)
			}
		}
	})
}

func BenchmarkParse(b *testing.B) {
	ids := make([]string, 8192)
	for i := range ids {
		ids[i] = fmt.Sprint(i * 7)
	}
	for name, body := range map[string]string{
		"8k-token-ids": `{"model":"m","prompt":[` + strings.Join(ids, ",") + `]}`,
		"40KB-chat":    `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 8192) + `"}]}`,
	} {
		b.Run(name, func(b *testing.B) {
			e := Completions
			if strings.Contains(name, "chat") {
				e = Chat
			}
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Parse([]byte(body), e, 1_000_000); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
