package sim

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTokenizeReverses(t *testing.T) {
	for _, text := range []string{
		"", " ", "a", "hello world", "  two  spaces ", "tabs\tand\nnewlines\r\n", "punctuation, (here)! a_b c-d",
		"Grüße aus Köln", "日本語のテキスト", "emoji 🙂🙂", "bad \xff\xfe bytes", "<|im_start|>user\nhi<|im_end|>\n", "<|im_star", "<|<|im_end|>",
		strings.Repeat("long", 1000),
	} {
		back, err := Detokenize(Tokenize(text))
		if err != nil || back != text {
			t.Errorf("Detokenize(Tokenize(%q)) = %q, %v", text, back, err)
		}
	}
}

func TestTokenizeKnown(t *testing.T) {
	// Ids are part of recorded workloads: they must not change.
	got := Tokenize("<|im_start|>user\nHello, you")
	want := []uint32{imStart, 7763301, 370, 266, 4810604, 28271, 300, 2194287, 373}
	if !slices.Equal(got, want) {
		t.Fatalf("Tokenize = %v, want %v", got, want)
	}
}

func TestDetokenizeOutOfVocabulary(t *testing.T) {
	if _, err := Detokenize([]uint32{vocab}); err == nil {
		t.Error("a token beyond the vocabulary was taken")
	}
	if text, err := Detokenize([]uint32{200, vocab - 1}); err != nil || text != "<|reserved_200|>\xff\xff\xff" {
		t.Errorf("got %q, %v", text, err)
	}
}

// A conversation's next turn must begin with the tokens of the turn before and its answer.
func TestChatPrefixProperty(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	words := []string{"What", "is", "a <|im_end|> token?", "\n\n", "übermorgen", "🙂", " ", "x"}
	for range 200 {
		var conversation []message
		var known []uint32
		for turn := range 4 {
			var text strings.Builder
			for range rng.IntN(6) {
				text.WriteString(words[rng.IntN(len(words))])
			}
			conversation = append(conversation, message{"user", text.String()})
			prompt := Tokenize(renderChat("", conversation, true, false))
			if !slices.Equal(prompt[:min(len(known), len(prompt))], known) {
				t.Fatalf("turn %d of %q does not begin with the turn before", turn, conversation)
			}
			a := newAnswer(prompt, 0)
			var answer []uint32
			for i := range a.length() {
				answer = append(answer, a.token(i))
			}
			known = append(slices.Clone(prompt), answer...)
			conversation = append(conversation, message{"assistant", textOf(answer)})
		}
	}
}

// The text of a completion, appended to its prompt, must tokenize to prompt and answer.
func TestCompletionPrefixProperty(t *testing.T) {
	for _, prompt := range []string{"foo", "foo ", "foo.", "foo\n", "<|im_start|>", "x<|im_end|>", "日本", "a_", "bad \xff"} {
		ids := Tokenize(prompt)
		a := newAnswer(ids, 0)
		var answer []uint32
		for i := range 20 {
			answer = append(answer, a.token(i))
		}
		if got := Tokenize(prompt + textOf(answer)); !slices.Equal(got, append(slices.Clone(ids), answer...)) {
			t.Errorf("prompt %q with its answer %q tokenizes differently", prompt, textOf(answer))
		}
	}
}

func FuzzTokenize(f *testing.F) {
	f.Add("hello <|im_end|> world")
	f.Fuzz(func(t *testing.T, text string) {
		ids := Tokenize(text)
		back, err := Detokenize(ids)
		if err != nil || back != text {
			t.Fatalf("Detokenize(Tokenize(%q)) = %q, %v", text, back, err)
		}
		if utf8.ValidString(text) && len(text) > 0 && len(ids) == 0 {
			t.Fatal("no tokens")
		}
	})
}
