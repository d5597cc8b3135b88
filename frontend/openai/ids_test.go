package openai

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// What idArray reads is what encoding/json reads, and it reads all arrays of token ids.
func FuzzIDArray(f *testing.F) {
	for _, s := range []string{
		`[1]`, `[0]`, `[ 1 , 22,333, 4444,55555,666666,7777777,88888888,999999999,4294967295 ]`, `[4294967296]`, `[1,2,3,4,5,6,7,8,9,10,11]`,
		`[]`, `[,]`, `[1,]`, `[01,2]`, `[123456,012,3]`, `[12345678,1234567.5]`, `[1234567,12345x8]`, `[1,-2]`, `[1e3]`, `["a"]`, `[[1]]`, `[1`,
		`[100001, 100002, 100003,` + "\n" + `100004]`, `[12345678901234567890]`, `[111111,1111 11]`, `[1,2]]`,
	} {
		f.Add([]byte(s))
	}
	const limit = 10
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 || b[0] != '[' {
			return
		}
		ids, end := idArray(b, 0, limit)
		if end > 0 {
			var want []uint32
			if err := json.Unmarshal(b[:end], &want); err != nil || !slices.Equal(ids, want) {
				t.Fatalf("%q: got %v of %q, encoding/json %v %v", b, ids, b[:end], want, err)
			}
			return
		}
		var all []*uint32 // a null is no id
		if json.Unmarshal(b, &all) == nil && len(all) > 0 && len(all) <= limit && !slices.Contains(all, nil) {
			t.Fatalf("%q is not read", b)
		}
	})
}

// Prompts with ids of all lengths, however they are spaced, are read in one go wherever they stand.
func TestLongPromptsOfIDs(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, between := range []string{",", ", ", " ,", ",\n\t", ",  "} {
		for range 200 {
			want := make([]uint32, 1+r.IntN(400))
			texts := make([]string, len(want))
			for i := range want {
				want[i] = r.Uint32() >> r.IntN(33)
				texts[i] = strconv.FormatUint(uint64(want[i]), 10)
			}
			body := strings.Repeat(" ", r.IntN(9)) + `{"model":"m","prompt":[` + strings.Join(texts, between) + `],"seed":1}`
			got, err := Parse([]byte(body), Completions, 400)
			if err != nil || !slices.Equal(got.Tokens, want) {
				t.Fatalf("%s: %v %v", body, got.Tokens, err)
			}
			if _, err := Parse([]byte(body), Completions, len(want)-1); err == nil {
				t.Fatal("one too many was accepted")
			}
		}
	}
}

// The last of several prompts counts, whatever the others are.
func TestLastPromptCounts(t *testing.T) {
	for prompts, want := range map[string][]uint32{
		`"prompt":[1,2],"prompt":[3]`:        {3},
		`"prompt":[1,2],"prompt":"x"`:        nil,
		`"prompt":"x","prompt":[1,2]`:        {1, 2},
		`"prompt":[1,2],"prompt":[[3]]`:      {3},
		`"prompt":[1,2],"prompt":["x"]`:      nil,
		`"pr\u006fmpt":[4],"input":[5]`:      {4},
		`"prompt":[1],"x":{"prompt":[2]}`:    {1},
		`"prompt":[1],"prompt" : [ 7 , 8 ] `: {7, 8},
	} {
		got, err := Parse([]byte(`{"model":"m",`+prompts+`}`), Completions, 10)
		if err != nil || !slices.Equal(got.Tokens, want) {
			t.Errorf("%s: %v %v", prompts, got.Tokens, err)
		}
	}
	for _, bad := range []string{`"prompt":[1],"prompt":[]`, `"prompt":[1],"prompt":null`, `"prompt":[1],"prompt":[2,"x"]`, `"prompt":[1],"prompt":[2,]`} {
		if got, err := Parse([]byte(`{"model":"m",`+bad+`}`), Completions, 10); err == nil {
			t.Errorf("%s: %v", bad, got.Tokens)
		}
	}
}
