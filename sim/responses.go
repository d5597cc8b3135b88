package sim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// responses is the part of OpenAI's Responses API that a plain text client needs.
func (h *handler) responses(w http.ResponseWriter, r *http.Request) {
	var req generateRequest
	err := readJSON(r, &req)
	if err == nil {
		req.Messages, err = inputMessages(req.Instructions, req.Input)
	}
	var text string
	if err == nil {
		text, err = req.render()
	}
	var j *job
	if err == nil {
		j, err = h.newJob(r, &req, [][]uint32{Tokenize(text)}, 0)
	}
	if err == nil && len(j.seqs) > 1 {
		err = badRequest("n", "n is not a parameter of responses")
	}
	if err != nil {
		writeError(w, err)
		return
	}
	created, item := time.Now().Unix(), "msg_"+j.id
	shape := func(status string, output []any, u any) map[string]any {
		return map[string]any{
			"id": "resp_" + j.id, "object": "response", "created_at": created, "status": status, "model": j.model, "output": output, "usage": u,
			"error": nil, "incomplete_details": nil, "instructions": nil, "metadata": map[string]string{}, "parallel_tool_calls": true, "tool_choice": "auto", "tools": []any{},
		}
	}
	complete := func(tokens []uint32) map[string]any {
		part := map[string]any{"type": "output_text", "text": textOf(tokens), "annotations": []any{}}
		message := map[string]any{"type": "message", "id": item, "status": "completed", "role": "assistant", "content": []any{part}}
		u := j.usage()
		return shape("completed", []any{message}, map[string]any{
			"input_tokens": u.PromptTokens, "input_tokens_details": u.Details, "output_tokens": u.CompletionTokens,
			"output_tokens_details": map[string]int{"reasoning_tokens": 0}, "total_tokens": u.TotalTokens,
		})
	}
	if !req.Stream {
		answers, err := h.collect(r.Context(), j)
		if err != nil {
			abort(r)
		}
		writeJSON(w, http.StatusOK, complete(answers[0]))
		return
	}
	s, sequence := h.newSSE(w), 0
	send := func(event string, more map[string]any) error {
		more["type"], more["sequence_number"] = event, sequence
		sequence++
		return s.send(event, more)
	}
	err = send("response.created", map[string]any{"response": shape("in_progress", []any{}, nil)})
	var tokens []uint32
	if err == nil {
		err = h.run(r.Context(), j, func(out output) error {
			tokens = append(tokens, out.token)
			return send("response.output_text.delta", map[string]any{"item_id": item, "output_index": 0, "content_index": 0, "delta": tokenText(out.token)})
		})
	}
	if err == nil {
		err = send("response.output_text.done", map[string]any{"item_id": item, "output_index": 0, "content_index": 0, "text": textOf(tokens)})
	}
	if err == nil {
		err = send("response.completed", map[string]any{"response": complete(tokens)})
	}
	if err != nil {
		abort(r)
	}
}

// inputMessages turns the input of a responses request into a conversation.
func inputMessages(instructions string, input json.RawMessage) ([]chatMessage, error) {
	var messages []chatMessage
	if instructions != "" {
		content, err := json.Marshal(instructions)
		if err != nil {
			return nil, err
		}
		messages = append(messages, chatMessage{Role: "system", Content: content})
	}
	input = bytes.TrimSpace(input)
	if len(input) > 0 && input[0] == '"' {
		return append(messages, chatMessage{Role: "user", Content: input}), nil
	}
	var turns []chatMessage
	if err := json.Unmarshal(input, &turns); err != nil || len(turns) == 0 {
		return nil, badRequest("input", fmt.Sprintf("input: want a string or a list of messages (%v)", err))
	}
	return append(messages, turns...), nil
}
