package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// maxPrompts bounds the prompts, and the choices per prompt, of one request.
const maxPrompts = 1024

// chatPrompt is the part of a request that becomes a prompt through the chat template.
type chatPrompt struct {
	Messages             []chatMessage   `json:"messages"`
	Tools                json.RawMessage `json:"tools"`
	AddGenerationPrompt  *bool           `json:"add_generation_prompt"` // default true
	ContinueFinalMessage bool            `json:"continue_final_message"`
}

type chatMessage struct {
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	ToolCalls json.RawMessage `json:"tool_calls"`
}

// render applies the chat template.
func (c *chatPrompt) render() (string, error) {
	if len(c.Messages) == 0 {
		return "", badRequest("messages", "messages must not be empty")
	}
	generation := c.AddGenerationPrompt == nil || *c.AddGenerationPrompt
	if c.AddGenerationPrompt != nil && generation && c.ContinueFinalMessage {
		return "", badRequest("continue_final_message", "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
	}
	messages := make([]message, len(c.Messages))
	for i, m := range c.Messages {
		if m.Role == "" {
			return "", badRequest("messages", fmt.Sprintf("messages[%d]: role is missing", i))
		}
		content, err := contentText(m.Content)
		if err != nil {
			return "", badRequest("messages", fmt.Sprintf("messages[%d]: %s", i, err))
		}
		messages[i] = message{role: m.Role, content: content + compact(m.ToolCalls)}
	}
	return renderChat(compact(c.Tools), messages, generation, c.ContinueFinalMessage), nil
}

// contentText is a message's text: a string, null, or a list of text parts.
func contentText(raw json.RawMessage) (string, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return "", nil
	}
	if raw[0] == '"' {
		var s string
		err := json.Unmarshal(raw, &s)
		return s, err
	}
	var parts []struct {
		Type string  `json:"type"`
		Text *string `json:"text"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return "", fmt.Errorf("content: want a string or a list of parts: %w", err)
	}
	var b strings.Builder
	for _, p := range parts {
		if p.Text == nil {
			return "", fmt.Errorf("content part of type %.40q: this model takes text only", p.Type)
		}
		b.WriteString(*p.Text)
	}
	return b.String(), nil
}

// compact is a JSON value without insignificant spaces; "" for none, null and [].
func compact(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil || b.String() == "null" || b.String() == "[]" {
		return ""
	}
	return b.String()
}

// parsePrompts reads the four forms of a prompt: a string, strings, token ids, lists of
// token ids. Every prompt has at least one token.
func parsePrompts(param string, raw json.RawMessage) ([][]uint32, error) {
	prompts, err := promptForms(raw)
	if err != nil {
		return nil, badRequest(param, param+": "+err.Error())
	}
	if len(prompts) == 0 || len(prompts) > maxPrompts {
		return nil, badRequest(param, fmt.Sprintf("%s: want 1 to %d prompts", param, maxPrompts))
	}
	for _, p := range prompts {
		if len(p) == 0 {
			return nil, badRequest(param, "The decoder prompt cannot be empty")
		}
		for _, t := range p {
			if t >= vocab {
				return nil, badRequest(param, fmt.Sprintf("Token id %d is out of vocabulary", t))
			}
		}
	}
	return prompts, nil
}

func promptForms(raw json.RawMessage) ([][]uint32, error) {
	raw = bytes.TrimSpace(raw)
	first := byte(0) // of the first element, where the prompt is a list
	if len(raw) > 1 && raw[0] == '[' {
		first = bytes.TrimSpace(raw[1:])[0]
	}
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, errors.New("a prompt is required")
	case raw[0] == '"':
		var s string
		err := json.Unmarshal(raw, &s)
		return [][]uint32{Tokenize(s)}, err
	case first == '"':
		var list []string
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, err
		}
		var prompts [][]uint32
		for _, s := range list[:min(len(list), maxPrompts+1)] {
			prompts = append(prompts, Tokenize(s))
		}
		return prompts, nil
	case first == '[':
		var prompts [][]uint32
		err := json.Unmarshal(raw, &prompts)
		return prompts, err
	case first == ']':
		return nil, errors.New("the list is empty")
	case first != 0:
		var prompt []uint32
		err := json.Unmarshal(raw, &prompt)
		return [][]uint32{prompt}, err
	}
	return nil, errors.New("want a string, a list of strings, a list of token ids or a list of such lists")
}
