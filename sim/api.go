package sim

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// maxBody bounds a request body in bytes.
const maxBody = 64 << 20

// handler answers the HTTP requests of one process lifetime.
type handler struct {
	e *Engine
	p *process
	o *Options
}

func newHandler(e *Engine, p *process) http.Handler {
	h := &handler{e: e, p: p, o: &e.o}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", h.generation(h.completions))
	mux.HandleFunc("POST /v1/chat/completions", h.generation(h.chat))
	mux.HandleFunc("POST /v1/responses", h.generation(h.responses))
	mux.HandleFunc("POST /v1/embeddings", h.generation(h.embeddings))
	mux.HandleFunc("POST /tokenize", h.tokenize)
	mux.HandleFunc("POST /detokenize", h.detokenize)
	mux.HandleFunc("GET /v1/models", h.models)
	for _, pattern := range []string{"GET /health", "GET /ping", "POST /ping"} {
		mux.HandleFunc(pattern, h.health)
	}
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"version": h.o.version()})
	})
	mux.HandleFunc("GET /load", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]int64{"server_load": p.inFlight.Load()})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(p.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("POST /reset_prefix_cache", func(http.ResponseWriter, *http.Request) {
		for _, r := range p.ranks { // 200 whether it succeeds or not, as in vLLM
			r.clear(false)
		}
	})
	mux.HandleFunc("POST /sleep", h.engineDo(e.Sleep))
	mux.HandleFunc("POST /wake_up", h.engineDo(e.WakeUp))
	mux.HandleFunc("GET /is_sleeping", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]bool{"is_sleeping": !p.asleep.isOpen()})
	})
	h.control(mux)
	return h.outermost(mux)
}

// outermost holds everything but the controls while the engine hangs, bounds bodies and
// echoes the request id, which it makes up where there is none.
func (h *handler) outermost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.URL.Path, "/sim/") {
			if _, err := h.p.hung.wait(r.Context()); err != nil {
				panic(http.ErrAbortHandler)
			}
		}
		id := r.Header.Get("X-Request-Id")
		if id == "" {
			id = rand.Text()
			r.Header.Set("X-Request-Id", id)
		}
		w.Header().Set("X-Request-Id", id)
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		next.ServeHTTP(w, r)
	})
}

// generation wraps the endpoints that count as load.
func (h *handler) generation(f http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		h.p.inFlight.Add(1)
		defer h.p.inFlight.Add(-1)
		f(w, r)
	}
}

func (h *handler) health(w http.ResponseWriter, _ *http.Request) {
	if h.p.unhealthy.Load() {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
}

func (h *handler) models(w http.ResponseWriter, _ *http.Request) {
	type model struct {
		ID          string  `json:"id"`
		Object      string  `json:"object"`
		Created     int64   `json:"created"`
		OwnedBy     string  `json:"owned_by"`
		Root        string  `json:"root"`
		Parent      *string `json:"parent"`
		MaxModelLen *int    `json:"max_model_len"`
		Permission  []any   `json:"permission"`
	}
	created := h.p.started.Unix()
	data := []model{{ID: h.o.Model, Object: "model", Created: created, OwnedBy: "vllm", Root: h.o.Model, MaxModelLen: &h.o.MaxModelLen, Permission: []any{}}}
	for _, l := range h.o.LoRAs {
		data = append(data, model{ID: l, Object: "model", Created: created, OwnedBy: "vllm", Root: l, Parent: &h.o.Model, Permission: []any{}})
	}
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": data})
}

type tokenizeRequest struct {
	Model  string  `json:"model"`
	Prompt *string `json:"prompt"`
	chatPrompt
	ReturnTokenStrs bool `json:"return_token_strs"`
}

func (h *handler) tokenize(w http.ResponseWriter, r *http.Request) {
	var req tokenizeRequest
	if err := readJSON(r, &req); err != nil {
		writeError(w, err)
		return
	}
	if _, err := h.lora(req.Model); err != nil {
		writeError(w, err)
		return
	}
	var ids []uint32
	switch {
	case req.Prompt != nil:
		ids = Tokenize(*req.Prompt)
	case req.Messages != nil:
		text, err := req.render()
		if err != nil {
			writeError(w, err)
			return
		}
		ids = Tokenize(text)
	default:
		writeError(w, badRequest("prompt", "either prompt or messages is required"))
		return
	}
	var strs []string
	if req.ReturnTokenStrs {
		strs = make([]string, len(ids))
		for i, t := range ids {
			strs[i] = tokenText(t)
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{"count": len(ids), "max_model_len": h.o.MaxModelLen, "tokens": ids, "token_strs": strs})
}

func (h *handler) detokenize(w http.ResponseWriter, r *http.Request) {
	var req struct {
		Model  string   `json:"model"`
		Tokens []uint32 `json:"tokens"`
	}
	err := readJSON(r, &req)
	if err == nil {
		_, err = h.lora(req.Model)
	}
	if err == nil && req.Tokens == nil {
		err = badRequest("tokens", "tokens is required")
	}
	if err != nil {
		writeError(w, err)
		return
	}
	text, err := Detokenize(req.Tokens)
	if err != nil {
		writeError(w, badRequest("tokens", err.Error()))
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"prompt": text})
}

// lora finds the adapter that a request's model names.
func (h *handler) lora(model string) (adapter, error) {
	a, ok := h.p.lora(model)
	if !ok {
		return a, &apiError{status: http.StatusNotFound, Message: fmt.Sprintf("The model `%s` does not exist.", model), Type: "NotFoundError", Param: "model"}
	}
	return a, nil
}

// pinnedRank reads the header that chooses a rank; -1 where there is none.
func (h *handler) pinnedRank(r *http.Request) (int, error) {
	v := r.Header.Get("X-Data-Parallel-Rank")
	if v == "" {
		return -1, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 0 || n >= len(h.p.ranks) {
		return 0, badRequest("X-data-parallel-rank", fmt.Sprintf("data_parallel_rank %.20q is out of range [0, %d)", v, len(h.p.ranks)))
	}
	return n, nil
}

// apiError is an error in OpenAI's shape.
type apiError struct {
	status  int
	Message string
	Type    string
	Param   string
}

func (e *apiError) Error() string { return e.Message }

func badRequest(param, message string) *apiError {
	return &apiError{status: http.StatusBadRequest, Message: message, Type: "BadRequestError", Param: param}
}

func writeError(w http.ResponseWriter, err error) {
	var e *apiError
	if !errors.As(err, &e) {
		e = badRequest("", err.Error())
	}
	var param any
	if e.Param != "" {
		param = e.Param
	}
	writeJSON(w, e.status, map[string]any{"error": map[string]any{"message": e.Message, "type": e.Type, "param": param, "code": e.status}})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b) // the client has gone; nobody is left to be told
}

// readJSON reads the whole body, which also lets the server notice a client that leaves.
func readJSON(r *http.Request, v any) error {
	b, err := io.ReadAll(r.Body)
	if tooBig := (*http.MaxBytesError)(nil); errors.As(err, &tooBig) {
		return &apiError{status: http.StatusRequestEntityTooLarge, Message: fmt.Sprintf("The request body is larger than %d bytes.", tooBig.Limit), Type: "BadRequestError"}
	}
	if err != nil {
		return badRequest("", "The request body could not be read: "+err.Error())
	}
	if err := json.Unmarshal(b, v); err != nil {
		if e := (*apiError)(nil); errors.As(err, &e) {
			return e
		}
		return badRequest("", "The request body is not the JSON that is expected: "+err.Error())
	}
	return nil
}
