package fleet

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"syscall"
	"time"

	"github.com/warmroute/warmroute/kvcache"
)

// maxModelList bounds what is read of a worker's model list.
const maxModelList = 4 << 20

// Model is an entry of a worker's model list.
type Model struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	Root        string `json:"root,omitempty"`
	Parent      string `json:"parent,omitempty"` // base model of an adapter
	MaxModelLen int    `json:"max_model_len,omitempty"`
}

// UnmarshalJSON reads an entry. Routing needs the id; what else a server has in a form of its own is left out.
func (m *Model) UnmarshalJSON(b []byte) error {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return err
	}
	*m = Model{}
	for key, to := range map[string]*string{
		"id": &m.ID, "object": &m.Object, "owned_by": &m.OwnedBy, "root": &m.Root, "parent": &m.Parent,
	} {
		var s string
		if json.Unmarshal(raw[key], &s) == nil {
			*to = s
		}
	}
	var created, length float64 // some servers write whole numbers as floats
	if json.Unmarshal(raw["created"], &created) == nil {
		m.Created = int64(created)
	}
	if json.Unmarshal(raw["max_model_len"], &length) == nil && length > 0 && length < 1<<31 {
		m.MaxModelLen = int(length)
	}
	return nil
}

// poll asks one worker how it is and what it serves.
func (f *Fleet) poll(ctx context.Context, k Key) {
	f.mu.Lock()
	s := f.workers[k]
	f.mu.Unlock()
	if s == nil {
		return
	}
	base := s.url.String()
	pollCtx, cancel := context.WithTimeout(ctx, f.o.Timeout)
	defer cancel()
	var models []Model
	_, err := f.get(pollCtx, base+"/health", 1<<10)
	if err == nil {
		models, err = f.models(pollCtx, base)
	}
	if ctx.Err() != nil {
		return // we are going away, not the worker
	}

	f.mu.Lock()
	defer f.mu.Unlock()
	if f.workers[k] != s {
		return // replaced meanwhile
	}
	is, cause := Healthy, ""
	if err != nil {
		is, cause = Unhealthy, err.Error()
		var status *statusError
		if errors.As(err, &status) && status.code == http.StatusServiceUnavailable {
			is = Draining
		}
	}
	var unreachable *unreachableError
	if errors.As(err, &unreachable) {
		s.unanswered++
	} else {
		s.unanswered, s.lost = 0, false
	}
	late, patience := isLate(err), lostAfter
	if late && !f.othersAnswer(s) {
		patience = allLostAfter
	}
	if s.unanswered >= patience && !s.lost {
		s.lost = true
		if f.o.Lost != nil {
			f.o.Lost(k)
		}
	}
	changed := !s.tried || is != s.state || late != s.late || cause != s.cause || is == Healthy && !slices.Equal(models, s.models)
	if !changed {
		return
	}
	if is != s.state || !s.tried && is != Healthy { // a worker that never was up is said once as well
		s.since = time.Now()
		if is == Healthy {
			f.o.Logger.Info("worker up", "worker", k.String(), "url", base)
		} else {
			f.o.Logger.Warn("worker down", "worker", k.String(), "url", base, "state", is.String(), "cause", cause)
		}
	}
	s.state, s.cause, s.late, s.tried = is, cause, late, true
	if is == Healthy {
		s.models, s.polled = models, true
	}
	f.publish()
}

func (f *Fleet) models(ctx context.Context, base string) ([]Model, error) {
	body, err := f.get(ctx, base+"/v1/models", maxModelList)
	if err != nil {
		return nil, err
	}
	var list struct{ Data []Model }
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("model list: %w", err)
	}
	models := slices.DeleteFunc(list.Data, func(m Model) bool { return kvcache.PoolID{Model: m.ID}.Validate() != nil })
	if len(models) == 0 {
		return nil, errors.New("model list: empty")
	}
	return models, nil
}

func (f *Fleet) get(ctx context.Context, url string, limit int64) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	if f.o.Token != nil {
		if token := f.o.Token(); token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
	}
	res, err := f.o.Transport.RoundTrip(req)
	if err != nil {
		return nil, &unreachableError{err}
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, &statusError{req.URL.Path, res.StatusCode}
	}
	return io.ReadAll(io.LimitReader(res.Body, limit))
}

// Cause says why a request got no answer. What a worker has sent, which may be of a prompt, is not in it: net/http repeats what it cannot
// read.
func Cause(err error) string {
	var (
		network     net.Error
		certificate *tls.CertificateVerificationError
		record      tls.RecordHeaderError
		alert       tls.AlertError
	)
	known := errors.As(err, &network) || errors.As(err, &certificate) || errors.As(err, &record) || errors.As(err, &alert)
	for _, e := range []error{io.EOF, io.ErrUnexpectedEOF, context.Canceled, http.ErrSchemeMismatch, syscall.ECONNRESET, syscall.EPIPE} {
		known = known || errors.Is(err, e)
	}
	if known || err.Error() == "http: server closed idle connection" {
		return err.Error()
	}
	return "what it answers is no HTTP"
}

// othersAnswer says whether some other worker's health is not late: then time is not short here. f.mu is held.
func (f *Fleet) othersAnswer(s *state) bool {
	for _, o := range f.workers {
		if o != s && o.tried && !o.late {
			return true
		}
	}
	return false
}

// isLate says whether an error is one of time: a worker that is gone, and one that is slow, look the same then.
func isLate(err error) bool {
	var network net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &network) && network.Timeout()
}

// unreachableError is a request without an answer.
type unreachableError struct{ err error }

func (e *unreachableError) Error() string { return Cause(e.err) }
func (e *unreachableError) Unwrap() error { return e.err }

// statusError is an answer that is not 200.
type statusError struct {
	path string
	code int
}

func (e *statusError) Error() string {
	why := ""
	if e.code == http.StatusUnauthorized || e.code == http.StatusForbidden {
		why = " (does the engine want a key? --worker-token)"
	}
	return fmt.Sprintf("GET %s: status %d%s", e.path, e.code, why)
}
