package sim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/zeebo/xxh3"
)

// completionTokens is how long a completion is where the request does not say, by
// OpenAI's API. A chat answer ends by itself.
const completionTokens = 16

type choice struct {
	Index          int      `json:"index"`
	Text           *string  `json:"text,omitempty"`
	Message        *turn    `json:"message,omitempty"`
	Delta          *turn    `json:"delta,omitempty"`
	Logprobs       any      `json:"logprobs"`
	FinishReason   *string  `json:"finish_reason"`
	StopReason     any      `json:"stop_reason"`
	PromptTokenIDs []uint32 `json:"prompt_token_ids,omitempty"`
	TokenIDs       []uint32 `json:"token_ids,omitempty"`
}

type turn struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

type response struct {
	ID             string   `json:"id"`
	Object         string   `json:"object"`
	Created        int64    `json:"created"`
	Model          string   `json:"model"`
	Fingerprint    string   `json:"system_fingerprint,omitempty"`
	Choices        []choice `json:"choices"`
	Usage          *usage   `json:"usage,omitempty"`
	PromptTokenIDs []uint32 `json:"prompt_token_ids,omitempty"`
}

func (h *handler) completions(w http.ResponseWriter, r *http.Request) {
	var req generateRequest
	err := readJSON(r, &req)
	var prompts [][]uint32
	if err == nil {
		prompts, err = parsePrompts("prompt", req.Prompt)
	}
	var j *job
	if err == nil {
		j, err = h.newJob(r, &req, prompts, completionTokens)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	res := response{ID: "cmpl-" + j.id, Object: "text_completion", Created: time.Now().Unix(), Model: j.model, Fingerprint: h.o.Fingerprint, Choices: []choice{}}
	if req.Stream {
		h.stream(w, r, j, res, func(c *choice, text string) { c.Text = &text })
		return
	}
	answers, err := h.collect(r.Context(), j)
	if err != nil {
		abort(r)
	}
	for i, tokens := range answers {
		text := textOf(tokens)
		c := choice{Index: i, Text: &text, FinishReason: &j.seqs[i].finish}
		if req.ReturnTokenIDs {
			c.PromptTokenIDs, c.TokenIDs = j.prompt(i), tokens
		}
		res.Choices = append(res.Choices, c)
	}
	u := j.usage()
	res.Usage = &u
	writeJSON(w, http.StatusOK, res)
}

func (h *handler) chat(w http.ResponseWriter, r *http.Request) {
	var req generateRequest
	err := readJSON(r, &req)
	var text string
	if err == nil {
		text, err = req.render()
	}
	var j *job
	if err == nil {
		j, err = h.newJob(r, &req, [][]uint32{Tokenize(text)}, 0)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	res := response{ID: "chatcmpl-" + j.id, Object: "chat.completion", Created: time.Now().Unix(), Model: j.model, Fingerprint: h.o.Fingerprint, Choices: []choice{}}
	if req.Stream {
		res.Object = "chat.completion.chunk"
		h.stream(w, r, j, res, func(c *choice, text string) { c.Delta = &turn{Content: text} })
		return
	}
	answers, err := h.collect(r.Context(), j)
	if err != nil {
		abort(r)
	}
	for i, tokens := range answers {
		c := choice{Index: i, Message: &turn{Role: "assistant", Content: textOf(tokens)}, FinishReason: &j.seqs[i].finish}
		if req.ReturnTokenIDs {
			c.TokenIDs = tokens
			res.PromptTokenIDs = j.prompt(0)
		}
		res.Choices = append(res.Choices, c)
	}
	u := j.usage()
	res.Usage = &u
	writeJSON(w, http.StatusOK, res)
}

// stream answers with server-sent events, one chunk per token. What put does is to give a
// chunk its text.
func (h *handler) stream(w http.ResponseWriter, r *http.Request, j *job, res response, put func(*choice, string)) {
	s := h.newSSE(w)
	chat := res.Object == "chat.completion.chunk"
	begun := make([]bool, len(j.seqs))
	send := func(c choice) error {
		res.Choices = []choice{c}
		return s.send("", res)
	}
	err := h.run(r.Context(), j, func(out output) error {
		c := choice{Index: out.choice}
		first := !begun[out.choice]
		begun[out.choice] = true
		if chat && first {
			if err := send(choice{Index: out.choice, Delta: &turn{Role: "assistant"}}); err != nil {
				return err
			}
		}
		put(&c, tokenText(out.token))
		if out.finish != "" {
			c.FinishReason = &out.finish
		}
		if j.req.ReturnTokenIDs {
			c.TokenIDs = []uint32{out.token}
			if first {
				c.PromptTokenIDs = j.prompt(out.choice)
			}
		}
		return send(c)
	})
	if err == nil && j.req.StreamOptions != nil && j.req.StreamOptions.IncludeUsage {
		u := j.usage()
		res.Choices, res.Usage = []choice{}, &u
		err = s.send("", res)
	}
	if err == nil {
		err = s.write("data: [DONE]\n\n")
	}
	if err != nil {
		abort(r)
	}
}

// sse writes server-sent events.
type sse struct {
	w       http.ResponseWriter
	control *http.ResponseController
	left    int // chunks before the stream breaks; negative: it does not
}

func (h *handler) newSSE(w http.ResponseWriter) *sse {
	s := &sse{w: w, control: http.NewResponseController(w), left: h.p.breakAfter()}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.Header().Set("Cache-Control", "no-cache")
	return s
}

// breakAfter says after how many chunks the stream that begins now is to break; -1: never.
func (p *process) breakAfter() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.breaks.streams <= 0 {
		return -1
	}
	p.breaks.streams--
	return p.breaks.chunks
}

func (s *sse) send(event string, v any) error {
	if s.left == 0 {
		return errBroken
	}
	s.left--
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if event != "" {
		event = "event: " + event + "\n"
	}
	return s.write(event + "data: " + string(b) + "\n\n")
}

func (s *sse) write(text string) error {
	if _, err := s.w.Write([]byte(text)); err != nil {
		return err
	}
	return s.control.Flush()
}

func (h *handler) embeddings(w http.ResponseWriter, r *http.Request) {
	var req struct {
		Model          string          `json:"model"`
		Input          json.RawMessage `json:"input"`
		EncodingFormat string          `json:"encoding_format"`
	}
	err := readJSON(r, &req)
	if err == nil {
		_, err = h.lora(req.Model)
	}
	if err == nil && req.EncodingFormat != "" && req.EncodingFormat != "float" {
		err = badRequest("encoding_format", fmt.Sprintf("encoding_format %.20q: this engine gives floats only", req.EncodingFormat))
	}
	var inputs [][]uint32
	if err == nil {
		inputs, err = parsePrompts("input", req.Input)
	}
	pinned := -1
	if err == nil {
		pinned, err = h.pinnedRank(r)
	}
	total := 0
	for _, in := range inputs {
		total += len(in)
		if err == nil && len(in) > h.o.MaxModelLen {
			err = badRequest("input", fmt.Sprintf("This model's maximum context length is %d tokens. However, your request has %d input tokens.", h.o.MaxModelLen, len(in)))
		}
	}
	if err != nil {
		writeError(w, err)
		return
	}
	rank := h.p.pick(pinned)
	defer rank.load.Add(-1)
	if rank.embed(r.Context(), total) != nil {
		abort(r)
	}
	type embedding struct {
		Object    string    `json:"object"`
		Index     int       `json:"index"`
		Embedding []float64 `json:"embedding"`
	}
	data := make([]embedding, len(inputs))
	for i, in := range inputs {
		data[i] = embedding{Object: "embedding", Index: i, Embedding: embed(in)}
	}
	model := req.Model
	if model == "" {
		model = h.o.Model
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"id": "embd-" + r.Header.Get("X-Request-Id"), "object": "list", "created": time.Now().Unix(), "model": model, "data": data,
		"usage": map[string]int{"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0},
	})
}

// embed makes up a vector that depends on nothing but the tokens.
func embed(tokens []uint32) []float64 {
	seed := xxh3.HashString(textOf(tokens))
	v := make([]float64, 32)
	for i := range v {
		v[i] = float64(int64(xxh3.HashSeed([]byte{byte(i)}, seed))) / (1 << 63)
	}
	return v
}
