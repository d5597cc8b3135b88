package sim

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// The toy tokenizer. Text is cut into pieces (a word with the one space before it, or a
// single other character) and pieces into tokens of up to three bytes. A token id is the
// bytes themselves behind an offset, so ids mean the same in every process and can be
// turned back into text without a table. Special tokens are matched in text as well.

const (
	imStart = 1 // <|im_start|>
	imEnd   = 2 // <|im_end|>

	firstID1 = 256              // tokens of one byte
	firstID2 = firstID1 + 1<<8  // of two bytes
	firstID3 = firstID2 + 1<<16 // of three bytes
	vocab    = firstID3 + 1<<24 // the number of token ids
	specials = "<|"             // what every special token begins with
	reserved = "<|reserved_"    // text of ids that stand for nothing
)

var specialText = [...]string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"}

// Tokenize turns text into token ids. It is a pure function of the text, the same on
// every engine.
func Tokenize(text string) []uint32 {
	out := make([]uint32, 0, len(text)/2+1)
	for len(text) > 0 {
		if strings.HasPrefix(text, specials) {
			if id, n := special(text); n > 0 {
				out, text = append(out, id), text[n:]
				continue
			}
		}
		n := piece(text)
		for i := 0; i < n; i += 3 {
			out = append(out, tokenOf(text[i:min(i+3, n)]))
		}
		text = text[n:]
	}
	return out
}

// Detokenize turns token ids back into text. Ids at or above the vocabulary are an error.
func Detokenize(tokens []uint32) (string, error) {
	var b strings.Builder
	for _, t := range tokens {
		if t >= vocab {
			return "", fmt.Errorf("token id %d is out of vocabulary", t)
		}
		b.WriteString(tokenText(t))
	}
	return b.String(), nil
}

func special(text string) (id uint32, n int) {
	for i, s := range specialText {
		if strings.HasPrefix(text, s) {
			return uint32(i), len(s)
		}
	}
	return 0, 0
}

// piece is the length of the first piece of text.
func piece(text string) int {
	n := 0
	if text[0] == ' ' {
		n = 1
	}
	for n < len(text) {
		r, size := utf8.DecodeRuneInString(text[n:])
		if r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) {
			break
		}
		n += size
	}
	if n > 0 {
		return n
	}
	_, size := utf8.DecodeRuneInString(text)
	return size
}

func tokenOf(s string) uint32 {
	switch len(s) {
	case 1:
		return firstID1 + uint32(s[0])
	case 2:
		return firstID2 + uint32(s[0])<<8 + uint32(s[1])
	}
	return firstID3 + uint32(s[0])<<16 + uint32(s[1])<<8 + uint32(s[2])
}

func tokenText(t uint32) string {
	switch {
	case t < uint32(len(specialText)):
		return specialText[t]
	case t < firstID1:
		return reserved + strconv.Itoa(int(t)) + "|>"
	case t < firstID2:
		return string([]byte{byte(t - firstID1)})
	case t < firstID3:
		t -= firstID2
		return string([]byte{byte(t >> 8), byte(t)})
	}
	t -= firstID3
	return string([]byte{byte(t >> 16), byte(t >> 8), byte(t)})
}

// message is one turn of a conversation as the template sees it.
type message struct {
	role, content string
}

// renderChat is the chat template. What it gives for a conversation begins with what it
// gives for the same conversation with fewer turns.
func renderChat(tools string, messages []message, generationPrompt, continueFinal bool) string {
	var b strings.Builder
	if tools != "" {
		b.WriteString("<|im_start|>tools\n" + tools + "<|im_end|>\n")
	}
	for i, m := range messages {
		b.WriteString("<|im_start|>" + m.role + "\n" + m.content)
		if !continueFinal || i < len(messages)-1 {
			b.WriteString("<|im_end|>\n")
		}
	}
	if generationPrompt && !continueFinal {
		b.WriteString("<|im_start|>assistant\n")
	}
	return b.String()
}

// answer makes up the tokens that follow a prompt. They are a pure function of the prompt
// and the choice, and their text, appended to the prompt's, tokenizes to the same ids.
type answer struct {
	seed uint64
	bare bool // the first word needs no space before it
}

func newAnswer(prompt []uint32, choice int) answer {
	b := make([]byte, 0, 4*len(prompt))
	for _, t := range prompt {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	last := prompt[len(prompt)-1]
	return answer{
		seed: xxh3.HashSeed(b, uint64(choice)),
		bare: last == imStart || last == imEnd || last == firstID1+'\n',
	}
}

// token is the i-th token of the answer.
func (a answer) token(i int) uint32 {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(i))
	h := xxh3.HashSeed(b[:], a.seed)
	letter := func(shift int) byte { return "abcdefghijklmnopqrstuvwxyz"[h>>shift%26] }
	word := []byte{' ', letter(8), letter(16)}
	if i == 0 && a.bare {
		word[0] = letter(24)
	}
	return tokenOf(string(word))
}

// length is how long the answer is where the request sets no limit.
func (a answer) length() int { return 16 + int(a.seed%48) }
