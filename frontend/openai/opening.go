package openai

import (
	"encoding/binary"
	"io"
	"math/bits"
)

// The part of a prompt that names its conversation is at most this long. Both are about as much
// prompt: an English token has four letters.
const (
	openingBytes  = 4 << 10
	openingTokens = openingBytes / 4
)

// opening is where a prompt begins, in one of its forms. The raw values share memory with the body.
type opening struct {
	tokens       []uint32
	text         []byte // a string
	instructions []byte // a string, ahead of text or messages
	messages     []byte // an array of objects with "role" and "content"
}

// Naming says what names a request's conversation.
type Naming int

// The namings.
const (
	Unnamed    Naming = iota // there is no prompt that could be named
	ByMessages               // up to the first of a user
	ByPrompt                 // its beginning
)

// Opening writes to w, which must not fail, what names the conversation of the request: the messages up to
// and including the first of a user, which every turn of a conversation repeats; or else the beginning
// of the first prompt: 4 KiB of text or 1,024 tokens, or as many as the largest power of two that the
// prompt has, so that a short one that grows from turn to turn seldom changes its name.
func (r *Request) Opening(w io.Writer) Naming {
	o := &r.opening
	switch {
	case o.tokens != nil:
		TokenOpening(w, o.tokens)
		return ByPrompt
	case o.text == nil && o.messages == nil:
		return Unnamed
	}
	if o.instructions != nil {
		write(w, `"system"`, o.instructions)
	}
	if o.text != nil {
		write(w, `"user"`, o.text[:Beginning(len(o.text), openingBytes)])
		return ByPrompt
	}
	_ = Array(o.messages, func(message []byte) error {
		var role, content []byte
		_ = Object(message, func(key string, raw []byte) error { // checked when the body was parsed
			switch key {
			case "role":
				role = raw
			case "content":
				content = raw
			}
			return nil
		})
		write(w, string(role), content)
		if string(role) == `"user"` {
			return io.EOF // no error: it ends the walk
		}
		return nil
	})
	return ByMessages
}

// Beginning writes to w, which must not fail, how the request's first prompt begins: the same measure of it as
// [Request.Opening], but of a conversation all messages, until it is full. False where there is no prompt.
func (r *Request) Beginning(w io.Writer) bool {
	o := &r.opening
	if o.messages == nil {
		return r.Opening(w) != Unnamed
	}
	if o.instructions != nil {
		write(w, `"system"`, o.instructions)
	}
	_, _ = w.Write(o.messages[:Beginning(len(o.messages), openingBytes)])
	return true
}

// Text writes to w, which must not fail, the text of the request's first prompt as it stands in the body: what begins alike in
// two requests begins alike here. Nothing is written where the prompt is not text.
func (r *Request) Text(w io.Writer) {
	o := &r.opening
	if o.text == nil && o.messages == nil {
		return
	}
	_, _ = w.Write(o.instructions)
	for _, part := range [][]byte{o.text, o.messages} {
		if len(part) > 1 {
			_, _ = w.Write(part[:len(part)-1]) // a conversation that goes on has something else in place of the last byte
		}
	}
}

// TokenOpening is [Request.Opening] for a prompt of token ids.
func TokenOpening(w io.Writer, ids []uint32) {
	b := make([]byte, 0, openingBytes)
	for _, id := range ids[:Beginning(len(ids), openingTokens)] {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	_, _ = w.Write(b)
}

// Beginning is how much of n the name of a prompt covers: limit, or the largest power of two in n.
func Beginning(n, limit int) int {
	if n < 1 {
		return 0
	}
	return min(1<<(bits.Len(uint(n))-1), limit)
}

// write adds a role and a content, kept apart by a byte that JSON cannot contain.
func write(w io.Writer, role string, content []byte) {
	_, _ = io.WriteString(w, role)
	_, _ = w.Write([]byte{0})
	_, _ = w.Write(content)
	_, _ = w.Write([]byte{0})
}
