package openai

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

func openingOf(t *testing.T, e Endpoint, body string) (string, Naming) {
	t.Helper()
	r, err := Parse([]byte(body), e, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	n := r.Opening(&b)
	return b.String(), n
}

func TestOpening(t *testing.T) {
	for name, test := range map[string]struct {
		endpoint Endpoint
		a, b     string
		naming   Naming
		same     bool
	}{
		"messages end with the first of a user": {Chat, `"messages":[{"role":"user","content":"x"}]`, `"messages":[{"role":"user","content":"x"},{"role":"user","content":"y"}]`, ByMessages, true},
		"no user":                               {Chat, `"messages":[{"role":"system","content":"x"}]`, `"messages":[{"role":"system","content":"y"}]`, ByMessages, false},
		"parts":                                 {Chat, `"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]`, `"messages":[{"role":"user","content":[{"type":"text","text":"y"}]}]`, ByMessages, false},
		"texts: the first names":                {Completions, `"prompt":["x","y"]`, `"prompt":"x"`, ByPrompt, true},
		"tokens":                                {Completions, `"prompt":[1,2]`, `"prompt":[[1, 2],[3]]`, ByPrompt, true},
		"other tokens":                          {Completions, `"prompt":[1,2]`, `"prompt":[1,3]`, ByPrompt, false},
		"a few more tokens":                     {Completions, `"prompt":[1,2,3,4]`, `"prompt":[1,2,3,4,5,6,7]`, ByPrompt, true},
		"truncated":                             {Completions, `"prompt":[1,2],"truncate_prompt_tokens":1`, `"prompt":[1,2]`, ByPrompt, true},
		"embeds":                                {Completions, `"prompt_embeds":"AAAA"`, `"prompt_embeds":"BBBB"`, Unnamed, true},
		"embeddings":                            {Embeddings, `"input":"x"`, `"input":["x","y"]`, ByPrompt, true},
		"responses":                             {Responses, `"input":"x"`, `"input":"x","previous_response_id":"r"`, ByPrompt, true},
		"responses with instructions":           {Responses, `"input":"x","instructions":"i"`, `"input":"x"`, ByPrompt, false},
		"items":                                 {Responses, `"input":[{"role":"user","content":"x"},{"role":"assistant","content":"a"}]`, `"input":[{"role":"user","content":"x"}],"tools":[]`, ByMessages, true},
		"plain":                                 {Plain, `"prompt":"x"`, `"prompt":"y"`, Unnamed, true},
	} {
		a, naming := openingOf(t, test.endpoint, `{"model":"m",`+test.a+`}`)
		b, again := openingOf(t, test.endpoint, `{"model":"m",`+test.b+`}`)
		if naming != test.naming || again != test.naming || (a == b) != test.same {
			t.Errorf("%s: %q by %v and %q by %v; want the same: %v, by %v", name, a, naming, b, again, test.same, test.naming)
		}
	}
}

// A long prompt is named by its beginning alone.
func TestOpeningIsBounded(t *testing.T) {
	long := strings.Repeat("word ", 4000)
	a, _ := openingOf(t, Completions, fmt.Sprintf(`{"model":"m","prompt":%q}`, long))
	b, _ := openingOf(t, Completions, fmt.Sprintf(`{"model":"m","prompt":%q}`, long+"and more"))
	if a != b || len(a) > openingBytes+64 {
		t.Errorf("%d bytes name the prompt, %d name its continuation", len(a), len(b))
	}
	ids := strings.Repeat("7,", 3000) + "7"
	a, _ = openingOf(t, Completions, `{"model":"m","prompt":[`+ids+`]}`)
	b, _ = openingOf(t, Completions, `{"model":"m","prompt":[`+ids+`,8]}`)
	if a != b || len(a) != openingBytes {
		t.Errorf("%d bytes name the tokens, %d name their continuation", len(a), len(b))
	}
	for n, want := range map[int]int{-1: 0, 0: 0, 1: 1, 2: 2, 3: 2, 1000: 512, 4096: 4096, 5000: 4096, 10000: 4096} {
		if got := Beginning(n, 4096); got != want {
			t.Errorf("Beginning(%d) = %d, want %d", n, got, want)
		}
	}
}
