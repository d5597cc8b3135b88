// Package feedback compares what engines say they had cached with what the index had predicted. Answers pass through it
// unchanged; it reads nothing but the numbers in "usage", from the end of an answer.
package feedback

import "bytes"

// tailBytes is how much of the end of an answer is kept. "usage" is a few hundred bytes, and among the last of them.
const tailBytes = 4 << 10

// Tail keeps the end of an answer. The zero value is ready.
type Tail struct{ b []byte }

// Write adds a part of the answer. It copies no more than the last 4 KiB of it.
func (t *Tail) Write(p []byte) {
	if len(p) > tailBytes {
		p = p[len(p)-tailBytes:]
	}
	if len(t.b)+len(p) > 2*tailBytes {
		t.b = append(t.b[:0], t.b[len(t.b)-min(len(t.b), tailBytes):]...)
	}
	t.b = append(t.b, p...)
}

// Usage finds the last usage: the tokens of the prompt, and how many of them were cached. An engine that does not tell is
// not one that had nothing cached: then ok is false.
func (t *Tail) Usage() (prompt, cached int, ok bool) {
	// A quote inside a JSON string is escaped, so a text that an engine writes cannot look like these members.
	at := bytes.LastIndex(t.b, []byte(`"cached_tokens"`))
	if at < 0 {
		return 0, 0, false
	}
	usage := bytes.LastIndex(t.b[:at], []byte(`"usage"`))
	if usage < 0 {
		return 0, 0, false
	}
	cached, ok = number(t.b[at:], `"cached_tokens"`)
	if !ok {
		return 0, 0, false
	}
	prompt, ok = number(t.b[usage:], `"prompt_tokens"`)
	return prompt, cached, ok
}

// number reads the whole number of the first member of that name.
func number(b []byte, member string) (n int, ok bool) {
	at := bytes.Index(b, []byte(member))
	if at < 0 {
		return 0, false
	}
	b = bytes.TrimLeft(b[at+len(member):], " :\n\r\t")
	for len(b) > 0 && b[0] >= '0' && b[0] <= '9' && n < 1<<31 {
		n = n*10 + int(b[0]-'0')
		b, ok = b[1:], true
	}
	return n, ok
}
