package feedback

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

const details = `"usage":{"prompt_tokens":640,"total_tokens":650,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":624}}`

func TestUsage(t *testing.T) {
	for name, test := range map[string]struct {
		body           string
		prompt, cached int
		ok             bool
	}{
		"json":                  {`{"id":"x","choices":[{"text":"hello"}],` + details + `,"kv_transfer_params":null}`, 640, 624, true},
		"spaced":                {`{"usage": {"prompt_tokens" : 640 , "prompt_tokens_details" : { "cached_tokens" : 624 } } }`, 640, 624, true},
		"stream":                {`data: {"choices":[{"text":"a"}]}` + "\n\n" + `data: {"choices":[],` + details + "}\n\ndata: [DONE]\n\n", 640, 624, true},
		"last chunk counts":     {`data: {"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}` + "\n\n" + `data: {` + details + "}\n\n", 640, 624, true},
		"nothing cached":        {`{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":0}}}`, 5, 0, true},
		"not told":              {`{"usage":{"prompt_tokens":5,"prompt_tokens_details":null}}`, 0, 0, false},
		"null":                  {`{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":null}}}`, 0, 0, false},
		"no usage":              {`{"choices":[]}`, 0, 0, false},
		"told by the model":     {`{"choices":[{"text":"\"usage\":{\"prompt_tokens\":9,\"cached_tokens\":9}"}],"usage":{"prompt_tokens":5}}`, 0, 0, false},
		"far from the end":      {`{` + details + `,"padding":"` + strings.Repeat("x", 3*tailBytes) + `"}`, 0, 0, false},
		"number without end":    {`{"usage":{"prompt_tokens":5,"cached_tokens":` + strings.Repeat("9", 400), 5, 2147483647, true},
		"cut in front of usage": {details[9:], 0, 0, false},
		"empty":                 {"", 0, 0, false},
	} {
		for _, chunk := range []int{1, 7, 100, 4096, 1 << 20} {
			var tail Tail
			for rest := []byte(test.body); len(rest) > 0; {
				n := min(chunk, len(rest))
				tail.Write(rest[:n])
				rest = rest[n:]
			}
			prompt, cached, ok := tail.Usage()
			if ok != test.ok || ok && (prompt != test.prompt || cached < test.cached) {
				t.Errorf("%s in chunks of %d: %d %d %v", name, chunk, prompt, cached, ok)
			}
			if cap(tail.b) > 4*tailBytes {
				t.Errorf("%s: %d bytes kept", name, cap(tail.b))
			}
		}
	}
}

// Whatever an answer is, its end is read without a panic, and what is found stands in it.
func FuzzUsage(f *testing.F) {
	f.Add([]byte(`{`+details+`}`), 3)
	f.Add([]byte(`"usage""cached_tokens"`), 1)
	f.Fuzz(func(t *testing.T, b []byte, chunk int) {
		chunk = max(1, chunk%5000)
		var tail Tail
		for rest := b; len(rest) > 0; {
			n := min(chunk, len(rest))
			tail.Write(rest[:n])
			rest = rest[n:]
		}
		prompt, cached, ok := tail.Usage()
		if ok && (prompt < 0 || cached < 0 || !strings.Contains(string(b), `"cached_tokens"`)) {
			t.Errorf("%d %d from %q", prompt, cached, b)
		}
		if keep := min(len(b), tailBytes); !strings.HasSuffix(string(tail.b), string(b[len(b)-keep:])) {
			t.Error("the tail is not the end")
		}
	})
}

func TestJudge(t *testing.T) {
	var changes []string
	reg := prometheus.NewRegistry()
	j := New(Options{Registerer: reg, Changed: func(w string, d bool, share float64) {
		changes = append(changes, fmt.Sprintf("%s %v %.1f", w, d, share))
	}})
	for range 100 {
		j.Observe("good", 1000, 800, 784)
		j.Observe("short", 100, 0, 60) // far off, and yet less than a few blocks
		j.Observe("nothing", 0, 0, 0)
	}
	for range 15 {
		j.Observe("stale", 1000, 800, 0)
	}
	if len(changes) != 0 {
		t.Errorf("a verdict too early: %v", changes)
	}
	for range 100 {
		j.Observe("stale", 1000, 800, 0)
	}
	for range 32 {
		j.Observe("stale", 1000, 800, 800)
	}
	for range 30 {
		j.Observe("unseen", 1000, 0, 800)
	}
	if want := []string{"stale true -0.8", "stale false -0.2", "unseen true 0.8"}; !slices.Equal(changes, want) {
		t.Errorf("changes %v, want %v", changes, want)
	}
	for _, w := range []string{"good", "short", "stale", "unseen"} {
		j.Forget(w)
	}
	if families, err := reg.Gather(); err != nil || len(families) != 0 {
		t.Errorf("series of workers that left: %v %v", families, err)
	}
}
