// Package openai reads from the bodies of OpenAI requests what routing needs, and nothing
// else: the body itself is forwarded as it came. It also renders the body that asks an engine
// to tokenize the same prompt. It does no I/O, copies nothing that is large and never panics
// on input; whatever it refuses is a [*BadRequest].
package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Endpoint says how the body of a route is to be read.
type Endpoint int

// The endpoints.
const (
	Completions Endpoint = iota
	Chat
	Embeddings
	Responses
	Plain // only the model matters: tokenize and detokenize
)

// Request is what routing needs to know of a request. It is good as long as the body is.
type Request struct {
	Model     string
	Stream    bool
	CacheSalt string
	// Tokens are the token ids of the first prompt, where the body gives ids.
	Tokens []uint32
	// Tokenize is the body for an engine's /tokenize that yields the tokens of the first
	// prompt; nil where the body gives ids or the engine offers no way to learn them.
	Tokenize []byte

	opening opening
}

// BadRequest is the caller's fault.
type BadRequest struct {
	Code    string // OpenAI's error code
	Message string
}

func (e *BadRequest) Error() string { return e.Message }

func bad(format string, args ...any) *BadRequest {
	return &BadRequest{Code: "invalid_request", Message: fmt.Sprintf(format, args...)}
}

// CodeTooLong is the code of a prompt that is too long.
const CodeTooLong = "context_length_exceeded"

// TooLong is the refusal of a prompt of more than max tokens.
func TooLong(tokens, limit int) *BadRequest {
	return &BadRequest{
		Code:    CodeTooLong,
		Message: fmt.Sprintf("the prompt has %d tokens, the limit is %d", tokens, limit),
	}
}

// fields are the raw values of the members that matter.
type fields struct {
	model, prompt, promptEmbeds, messages, input, instructions, previous, tools []byte
	salt, stream, truncate                                                      []byte
	passed                                                                      [len(passedFields)][]byte
	ids                                                                         []uint32 // of the last prompt, if that is an array of them
}

// passedFields decide, next to the prompt, what tokens an engine makes of it. They exist under
// the same names in its /tokenize.
var passedFields = [...]string{
	"add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template",
	"chat_template_kwargs", "mm_processor_kwargs",
}

func (r *fields) slot(key string) *[]byte {
	switch key {
	case "model":
		return &r.model
	case "prompt":
		return &r.prompt
	case "prompt_embeds":
		return &r.promptEmbeds
	case "messages":
		return &r.messages
	case "input":
		return &r.input
	case "instructions":
		return &r.instructions
	case "previous_response_id":
		return &r.previous
	case "tools":
		return &r.tools
	case "cache_salt":
		return &r.salt
	case "stream":
		return &r.stream
	case "truncate_prompt_tokens":
		return &r.truncate
	}
	for i, name := range passedFields {
		if key == name {
			return &r.passed[i]
		}
	}
	return nil
}

// Parse reads a body. maxTokens bounds a prompt given as token ids; a longer one is refused
// before it is decoded. The result may share memory with the body.
func Parse(body []byte, e Endpoint, maxTokens int) (Request, error) {
	var f fields
	var promptKey string
	switch e {
	case Completions:
		promptKey = "prompt"
	case Embeddings:
		promptKey = "input"
	}
	read := func(key string, at int) (end int) {
		if key == promptKey && key != "" && at < len(body) && body[at] == '[' {
			f.ids, end = idArray(body, at, maxTokens)
		}
		return end
	}
	err := objectOf(body, read, func(key string, raw []byte) error {
		if p := f.slot(key); p != nil {
			*p = raw
			if isNull(raw) {
				*p = nil
			}
		}
		return nil
	})
	if err != nil {
		return Request{}, bad("%s", err)
	}
	var r Request
	if err := decodeString(f.model, "model", &r.Model); err != nil {
		return Request{}, err
	}
	if r.Model == "" && e != Plain {
		return Request{}, bad(`"model" is missing`)
	}
	if err := decodeString(f.salt, "cache_salt", &r.CacheSalt); err != nil {
		return Request{}, err
	}
	if f.stream != nil {
		if kind(f.stream) != boolean {
			return Request{}, bad(`"stream" must be true or false`)
		}
		r.Stream = f.stream[0] == 't'
	}
	if f.tools != nil && kind(f.tools) != array {
		return Request{}, bad(`"tools" must be an array`)
	}
	switch e {
	case Completions:
		err = f.prompts(&r, f.prompt, "prompt", maxTokens)
	case Embeddings:
		if f.input == nil && f.messages != nil {
			err = f.chat(&r)
		} else {
			err = f.prompts(&r, f.input, "input", maxTokens)
		}
	case Chat:
		err = f.chat(&r)
	case Responses:
		err = f.responses(&r)
	}
	if err != nil {
		return Request{}, err
	}
	if f.truncate != nil {
		// The engine will cut the prompt, at a side that we do not know.
		r.Tokens, r.Tokenize = nil, nil
	}
	return r, nil
}

// prompts reads the prompt forms string, array of strings, token array and array of token
// arrays. The first prompt routes; the others are only checked.
func (f *fields) prompts(r *Request, raw []byte, name string, maxTokens int) error {
	if raw == nil {
		if f.promptEmbeds != nil {
			return nil
		}
		return bad("%q is missing", name)
	}
	if f.ids != nil && kind(raw) == array {
		r.Tokens, r.opening.tokens = f.ids, f.ids
		return nil
	}
	wrong := bad("%q must be a string, an array of strings, an array of token ids or an array of arrays of token ids", name)
	switch kind(raw) {
	case text:
		r.opening.text = raw
		r.Tokenize = f.tokenizeText(raw)
		return nil
	case array:
	default:
		return wrong
	}
	first, ok := firstElement(raw)
	if !ok {
		return bad("%q is empty", name)
	}
	element := kind(first)
	switch element {
	case number:
		var err error
		r.Tokens, err = Tokens(raw, name, maxTokens)
		r.opening.tokens = r.Tokens
		return err
	case text, array:
	default:
		return wrong
	}
	err := Array(raw, func(v []byte) error {
		if kind(v) != element {
			return wrong
		}
		if element == text {
			return nil
		}
		return Array(v, func(id []byte) error {
			if kind(id) != number {
				return wrong
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	if element == text {
		r.opening.text = first
		r.Tokenize = f.tokenizeText(first)
		return nil
	}
	r.Tokens, err = Tokens(first, name, maxTokens)
	r.opening.tokens = r.Tokens
	return err
}

// Tokens decodes raw, a value handed out by [Object], as an array of token ids; name is the
// field's, for the error.
func Tokens(raw []byte, name string, limit int) ([]uint32, error) {
	if kind(raw) != array {
		return nil, bad("%q must be an array of token ids", name)
	}
	n := bytes.Count(raw, []byte{','}) + 1
	if n > limit {
		return nil, TooLong(n, limit)
	}
	if raw[space(raw, 1)] == ']' {
		return nil, bad("%q is empty", name)
	}
	ids, end := idArray(raw, 0, limit)
	if end == 0 {
		return nil, bad("%q must hold token ids: whole numbers from 0 to 4294967295", name)
	}
	return ids, nil
}

type kindOf int

const (
	null kindOf = iota
	boolean
	number
	text
	array
	object
)

// kind is the type of a checked value.
func kind(raw []byte) kindOf {
	switch raw[0] {
	case '"':
		return text
	case '[':
		return array
	case '{':
		return object
	case 't', 'f':
		return boolean
	case 'n':
		return null
	}
	return number
}

func isNull(raw []byte) bool { return raw[0] == 'n' }

func decodeString(raw []byte, name string, to *string) error {
	if raw == nil {
		return nil
	}
	if kind(raw) != text || json.Unmarshal(raw, to) != nil {
		return bad("%q must be a string", name)
	}
	return nil
}
