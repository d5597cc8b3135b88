package sim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
)

// generateRequest is what a request for text says beside its prompt.
type generateRequest struct {
	Model               string          `json:"model"`
	Prompt              json.RawMessage `json:"prompt"`
	Input               json.RawMessage `json:"input"` // responses
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MaxOutputTokens     *int            `json:"max_output_tokens"` // responses
	Instructions        string          `json:"instructions"`      // responses
	N                   *int            `json:"n"`
	Stream              bool            `json:"stream"`
	StreamOptions       *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	CacheSalt      *string `json:"cache_salt"`
	ReturnTokenIDs bool    `json:"return_token_ids"`
	chatPrompt
}

// job is a request that has been understood: one sequence per prompt and choice.
type job struct {
	req     *generateRequest
	id      string
	model   string // the name to answer with
	pinned  int    // the rank, or -1
	prompts [][]uint32
	seqs    []*sequence // choice index = prompt · n + choice
}

// output is one token of one choice.
type output struct {
	choice int
	token  uint32
	finish string // "" before the last token
}

// newJob checks a request. defaultLen is how long an answer is without a limit; 0 lets the
// answer end by itself.
func (h *handler) newJob(r *http.Request, req *generateRequest, prompts [][]uint32, defaultLen int) (*job, error) {
	lora, err := h.lora(req.Model)
	if err != nil {
		return nil, err
	}
	j := &job{req: req, model: req.Model, prompts: prompts, id: r.Header.Get("X-Request-Id")}
	if j.model == "" {
		j.model = h.o.Model
	}
	if j.pinned, err = h.pinnedRank(r); err != nil {
		return nil, err
	}
	if req.StreamOptions != nil && !req.Stream {
		return nil, badRequest("stream_options", "Stream options can only be defined when `stream=True`.")
	}
	n := 1
	if req.N != nil {
		n = *req.N
	}
	if n < 1 || n > maxPrompts || n*len(prompts) > maxPrompts {
		return nil, badRequest("n", fmt.Sprintf("n must be at least 1, and n times the prompts at most %d", maxPrompts))
	}
	limit := req.MaxCompletionTokens
	if limit == nil {
		limit = req.MaxTokens
	}
	if limit == nil {
		limit = req.MaxOutputTokens
	}
	if limit != nil && *limit < 1 {
		return nil, badRequest("max_tokens", fmt.Sprintf("max_tokens must be at least 1, got %d.", *limit))
	}
	salt := ""
	if req.CacheSalt != nil {
		if salt = *req.CacheSalt; salt == "" || len(salt) > 1024 {
			return nil, badRequest("cache_salt", "Parameter 'cache_salt' must be a non-empty string of at most 1024 characters if provided.")
		}
	}
	for _, p := range prompts {
		room := h.o.MaxModelLen - len(p)
		asked := 0
		if limit != nil {
			asked = *limit
		}
		if room < 1 || asked > room {
			return nil, badRequest("max_tokens", fmt.Sprintf("This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains %d input tokens. Please reduce the length of the input or the number of output tokens.",
				h.o.MaxModelLen, asked, len(p)))
		}
		for c := range n {
			s := newSequence(h.o, h.p.seed, p, c, lora, salt)
			switch {
			case limit != nil:
				s.outLen, s.finish = asked, "length"
			case defaultLen > 0:
				s.outLen, s.finish = defaultLen, "length"
			default:
				s.outLen, s.finish = s.answer.length(), "stop"
			}
			if s.outLen > room {
				s.outLen, s.finish = room, "length"
			}
			j.seqs = append(j.seqs, s)
		}
	}
	return j, nil
}

// errGone says that an answer was not completed: the client has left, or the process ends.
var errGone = errors.New("request aborted")

// errBroken is the end of a stream that was to break.
var errBroken = errors.New("stream broken on demand")

// run generates all sequences of a job side by side and hands their tokens to each, as
// they come. Where each fails or the request's context ends, everything is cancelled.
func (h *handler) run(ctx context.Context, j *job, each func(output) error) error {
	client := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	total := 0
	for _, s := range j.seqs {
		total += s.outLen
	}
	// The engine does not wait for a client that reads slowly, within reason.
	outputs := make(chan output, min(total, 1<<16))
	var running sync.WaitGroup
	var gone atomic.Bool // the client does not take any more
	for choice, s := range j.seqs {
		r := h.p.pick(j.pinned)
		running.Go(func() {
			defer r.load.Add(-1)
			err := r.generate(ctx, s, func(i int, token uint32) error {
				out := output{choice: choice, token: token}
				if i == s.outLen-1 {
					out.finish = s.finish
				}
				select {
				case outputs <- out:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
			switch {
			case err == nil && s.finish == "stop":
				r.m.stopped.Inc()
			case err == nil:
				r.m.lengthReached.Inc()
			case !h.p.ending() && (gone.Load() || client.Err() != nil):
				r.m.aborted.Inc()
				h.p.cancelled.Add(1)
			default:
				r.m.errored.Inc()
			}
		})
	}
	go func() {
		running.Wait()
		close(outputs)
	}()
	var failed error
	finished := 0
	for out := range outputs {
		if failed != nil {
			continue
		}
		if out.finish != "" {
			finished++
		}
		if failed = each(out); failed != nil {
			gone.Store(!errors.Is(failed, errBroken))
			cancel()
		}
	}
	if failed == nil && finished < len(j.seqs) {
		failed = errGone
	}
	return failed
}

// collect runs a job and returns the tokens of each choice.
func (h *handler) collect(ctx context.Context, j *job) ([][]uint32, error) {
	answers := make([][]uint32, len(j.seqs))
	err := h.run(ctx, j, func(out output) error {
		answers[out.choice] = append(answers[out.choice], out.token)
		return nil
	})
	return answers, err
}

// abort ends the connection without a proper end of the answer.
func abort(r *http.Request) {
	if c, ok := r.Context().Value(connKey{}).(interface{ SetLinger(int) error }); ok {
		_ = c.SetLinger(0) // fails only where the connection is closed already
	}
	panic(http.ErrAbortHandler)
}

type usage struct {
	PromptTokens     int           `json:"prompt_tokens"`
	TotalTokens      int           `json:"total_tokens"`
	CompletionTokens int           `json:"completion_tokens"`
	Details          promptDetails `json:"prompt_tokens_details"`
}

type promptDetails struct {
	CachedTokens int `json:"cached_tokens"`
}

// usage of a job that has run. A prompt counts once, with what its first choice hit.
func (j *job) usage() usage {
	var u usage
	for i, s := range j.seqs {
		if i%(len(j.seqs)/len(j.prompts)) == 0 {
			u.PromptTokens += s.promptLen
			u.Details.CachedTokens += s.hit
		}
		u.CompletionTokens += s.outLen
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return u
}

// prompt is the prompt of a choice.
func (j *job) prompt(choice int) []uint32 {
	return j.prompts[choice/(len(j.seqs)/len(j.prompts))]
}

func textOf(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteString(tokenText(t))
	}
	return b.String()
}
