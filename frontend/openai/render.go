package openai

import "bytes"

// The forms of a conversation, and how the body of a /tokenize call is put together from raw
// values.

func (f *fields) chat(r *Request) error {
	if f.messages == nil {
		return bad(`"messages" is missing`)
	}
	if kind(f.messages) != array {
		return bad(`"messages" must be an array`)
	}
	n := 0
	err := Array(f.messages, func(v []byte) error {
		if kind(v) != object {
			return bad(`"messages" must be an array of objects`)
		}
		n++
		return nil
	})
	if err != nil {
		return err
	}
	if n == 0 {
		return bad(`"messages" is empty`)
	}
	w := f.startTokenize("messages", f.messages)
	if f.tools != nil {
		w.member("tools", f.tools)
	}
	r.Tokenize = w.end()
	r.opening.messages = f.messages
	return nil
}

// responses knows the plain cases: a string, or messages whose content is a string. Engines
// turn them into a chat. Everything else (stored conversations, tools, files) is rendered in
// ways that /tokenize cannot repeat.
func (f *fields) responses(r *Request) error {
	if f.input == nil {
		return bad(`"input" is missing`)
	}
	var b bytes.Buffer
	b.WriteByte('[')
	message := func(role string, content []byte) {
		if b.Len() > 1 {
			b.WriteByte(',')
		}
		b.WriteString(`{"role":"` + role + `","content":`)
		b.Write(content)
		b.WriteByte('}')
	}
	plain := f.previous == nil && f.tools == nil
	if f.instructions != nil {
		if kind(f.instructions) != text {
			return bad(`"instructions" must be a string`)
		}
		message("system", f.instructions)
	}
	r.opening.instructions = f.instructions
	switch kind(f.input) {
	case text:
		r.opening.text = f.input
		message("user", f.input)
	case array:
		r.opening.messages = f.input
		err := Array(f.input, func(v []byte) error {
			if kind(v) != object {
				return bad(`"input" must be a string or an array of objects`)
			}
			role, content, ok := plainItem(v)
			plain = plain && ok
			message(role, content)
			return nil
		})
		if err != nil {
			return err
		}
	default:
		return bad(`"input" must be a string or an array of objects`)
	}
	b.WriteByte(']')
	if plain && b.Len() > 2 {
		r.Tokenize = f.startTokenize("messages", b.Bytes()).end()
	}
	return nil
}

// plainItem is an item of a response's input that is a message with text content.
func plainItem(item []byte) (role string, content []byte, ok bool) {
	ok = true
	err := Object(item, func(key string, raw []byte) error {
		switch key {
		case "role":
			if kind(raw) == text {
				role = decodeKey(raw)
			}
		case "content":
			content = raw
		case "type":
			ok = ok && string(raw) == `"message"`
		}
		return nil
	})
	switch role {
	case "system", "developer", "user", "assistant":
	default:
		return "", nil, false
	}
	return role, content, ok && err == nil && content != nil && kind(content) == text
}

func (f *fields) tokenizeText(prompt []byte) []byte {
	w := f.startTokenize("prompt", prompt)
	return w.end()
}

// tokenizeWriter renders the body of a tokenize call from raw values.
type tokenizeWriter struct{ b bytes.Buffer }

func (f *fields) startTokenize(name string, raw []byte) *tokenizeWriter {
	w := &tokenizeWriter{}
	size := len(raw) + len(f.model) + len(f.tools) + 64
	for _, p := range f.passed {
		size += len(p) + 32
	}
	w.b.Grow(size)
	w.member("model", f.model)
	w.member(name, raw)
	for i, p := range f.passed {
		if p != nil && (name == "messages" || i == 0) {
			w.member(passedFields[i], p)
		}
	}
	return w
}

func (w *tokenizeWriter) member(name string, raw []byte) {
	if w.b.Len() == 0 {
		w.b.WriteString(`{"`)
	} else {
		w.b.WriteString(`,"`)
	}
	w.b.WriteString(name)
	w.b.WriteString(`":`)
	w.b.Write(raw)
}

func (w *tokenizeWriter) end() []byte {
	w.b.WriteByte('}')
	return w.b.Bytes()
}
