package frontend

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/gin-gonic/gin"

	"github.com/warmroute/warmroute/frontend/openai"
)

// statusClientGone is what is counted for a client that left before it got an answer. Nobody
// receives it.
const statusClientGone = 499

// apiError is an answer in OpenAI's error shape.
type apiError struct {
	status     int
	kind       string // OpenAI's "type"
	code       string
	message    string
	retryAfter int // seconds; 0 means no such header
}

func (e *apiError) Error() string { return e.message }

func refuse(status int, code, message string) *apiError {
	return &apiError{status: status, kind: "invalid_request_error", code: code, message: message}
}

func unavailable(code, message string) *apiError {
	return &apiError{status: http.StatusServiceUnavailable, kind: "server_error", code: code, message: message, retryAfter: 1}
}

// The refusals that do not depend on the request.
var (
	errInternal     = &apiError{status: 500, kind: "server_error", code: "internal_error", message: "internal error"}
	errClientGone   = &apiError{status: statusClientGone, kind: "server_error", code: "client_gone", message: "the client left"}
	errNoWorkers    = unavailable("no_workers", "no worker that serves this model is answering; try again")
	errOverloaded   = unavailable("overloaded", "too many requests are in flight; try again")
	errCrowded      = unavailable("overloaded", "too many connections are open; try again")
	errBuffersFull  = unavailable("overloaded", "too many request bodies are in memory; try again")
	errUnreachable  = &apiError{status: http.StatusBadGateway, kind: "server_error", code: "upstream_unreachable", message: "the workers that serve this model cannot be reached"}
	errBadUpstream  = &apiError{status: http.StatusBadGateway, kind: "server_error", code: "upstream_error", message: "the worker broke off without an answer"}
	errUpstreamLate = &apiError{status: http.StatusGatewayTimeout, kind: "server_error", code: "upstream_timeout", message: "the worker did not answer in time"}
)

// asAPIError turns whatever stopped a request into its answer.
func asAPIError(err error) *apiError {
	var api *apiError
	if errors.As(err, &api) {
		return api
	}
	var bad *openai.BadRequest
	if errors.As(err, &bad) {
		return refuse(http.StatusBadRequest, bad.Code, bad.Message)
	}
	return errInternal
}

type errorBody struct {
	Error errorDetail `json:"error"`
}

type errorDetail struct {
	Message string `json:"message"`
	Type    string `json:"type"`
	Code    string `json:"code"`
}

// fail answers with err and ends the handling of the request.
func fail(c *gin.Context, err error) {
	c.Abort()
	if c.Request.ContentLength != 0 && !c.GetBool(keyBodyRead) {
		// Else the server waits for the rest of the body before it sends the answer.
		c.Header("Connection", "close")
	}
	writeError(c.Writer, err)
}

// writeError answers with err. A client that left gets nothing.
func writeError(w http.ResponseWriter, err error) {
	e := asAPIError(err)
	if e.status == statusClientGone {
		w.WriteHeader(statusClientGone)
		return
	}
	if e.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.retryAfter))
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.status)
	_ = json.NewEncoder(w).Encode(errorBody{errorDetail{e.message, e.kind, e.code}}) // a client that left
}
