// Package tracingtest is a receiver of traces for tests: it speaks OTLP as a collector does, over HTTP or gRPC, and keeps what it gets.
package tracingtest

import (
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	spans "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// Span is a span that was received.
type Span struct {
	*spans.Span
	// Resource is what describes the process that it came from.
	Resource map[string]string
}

// Attr is an attribute as a text, "" where there is none.
func (s Span) Attr(key string) string { return texts(s.Attributes)[key] }

// ID is the span's id, and Parent that of its parent, in hexadecimal.
func (s Span) ID() string { return fmt.Sprintf("%x", s.SpanId) }

// Parent is the id of the parent, "" where there is none.
func (s Span) Parent() string { return fmt.Sprintf("%x", s.ParentSpanId) }

// Trace is the id of the trace.
func (s Span) Trace() string { return fmt.Sprintf("%x", s.TraceId) }

// Failed says whether the span's status is an error.
func (s Span) Failed() bool { return s.Status.GetCode() == spans.Status_STATUS_CODE_ERROR }

func texts(attributes []*common.KeyValue) map[string]string {
	out := map[string]string{}
	for _, kv := range attributes {
		switch v := kv.Value.GetValue().(type) {
		case *common.AnyValue_StringValue:
			out[kv.Key] = v.StringValue
		case *common.AnyValue_IntValue:
			out[kv.Key] = fmt.Sprint(v.IntValue)
		case *common.AnyValue_BoolValue:
			out[kv.Key] = fmt.Sprint(v.BoolValue)
		default:
			out[kv.Key] = kv.Value.String()
		}
	}
	return out
}

// Receiver receives until the test ends.
type Receiver struct {
	// URL is its base URL.
	URL string
	// Answer, if set before the first request, gives the status of each answer over HTTP; other than 200, what came does not count.
	// It may wait for the request's context, which the end of the receiver ends too.
	Answer func(r *http.Request) int

	// Rejected, if set before the first request, is how many spans of each batch the receiver says that it has not taken, and Complaint why;
	// with a complaint alone, it has taken all.
	Rejected  int64
	Complaint string

	close func()
	gone  chan struct{} // closed by close

	mu      sync.Mutex
	spans   []Span
	raw     []string
	changed chan struct{} // closed and replaced with every request
	header  http.Header
}

// HTTP starts a receiver of OTLP over HTTP.
func HTTP(t testing.TB) *Receiver {
	t.Helper()
	r := newReceiver()
	s := httptest.NewServer(http.HandlerFunc(r.serve))
	r.URL, r.close = s.URL, sync.OnceFunc(func() {
		close(r.gone)
		s.CloseClientConnections()
		s.Close()
	})
	t.Cleanup(r.Close)
	return r
}

// GRPC starts a receiver of OTLP over gRPC.
func GRPC(t testing.TB) *Receiver {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := newReceiver()
	s := grpc.NewServer()
	collector.RegisterTraceServiceServer(s, &service{r: r})
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	r.URL, r.close = "http://"+l.Addr().String(), sync.OnceFunc(func() {
		s.Stop()
		if err := <-ended; err != nil {
			t.Errorf("receiver of traces: %v", err)
		}
	})
	t.Cleanup(r.Close)
	return r
}

func newReceiver() *Receiver {
	return &Receiver{changed: make(chan struct{}), gone: make(chan struct{})}
}

// Close takes the receiver away: nobody listens at its URL any more.
func (r *Receiver) Close() { r.close() }

func (r *Receiver) serve(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodPost || !strings.HasSuffix(req.URL.Path, "/v1/traces") || req.Header.Get("Content-Type") != "application/x-protobuf" {
		http.Error(w, "want POST /v1/traces in protobuf", http.StatusNotFound)
		return
	}
	body := req.Body
	if req.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = z
	}
	raw, err := io.ReadAll(body) // only then does the server notice a client that leaves
	var m collector.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(raw, &m)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if r.Answer != nil {
		ctx, cancel := context.WithCancel(req.Context())
		defer cancel()
		go func() {
			select {
			case <-r.gone:
				cancel()
			case <-ctx.Done():
			}
		}()
		if status := r.Answer(req.WithContext(ctx)); status != http.StatusOK {
			w.WriteHeader(status)
			return
		}
	}
	r.take(&m, raw, req.Header)
	w.Header().Set("Content-Type", "application/x-protobuf")
	answer, err := proto.Marshal(r.response())
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	_, _ = w.Write(answer) // a client that left
}

func (r *Receiver) response() *collector.ExportTraceServiceResponse {
	out := &collector.ExportTraceServiceResponse{}
	if r.Rejected != 0 || r.Complaint != "" {
		out.PartialSuccess = &collector.ExportTracePartialSuccess{RejectedSpans: r.Rejected, ErrorMessage: r.Complaint}
	}
	return out
}

type service struct {
	collector.UnimplementedTraceServiceServer
	r *Receiver
}

// Export takes what a client sends over gRPC.
func (s *service) Export(_ context.Context, m *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	raw, err := proto.Marshal(m)
	if err != nil {
		return nil, err
	}
	s.r.take(m, raw, nil)
	return s.r.response(), nil
}

func (r *Receiver) take(m *collector.ExportTraceServiceRequest, raw []byte, h http.Header) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.raw, r.header = append(r.raw, string(raw)), h
	for _, of := range m.ResourceSpans {
		resource := texts(of.Resource.GetAttributes())
		for _, scope := range of.ScopeSpans {
			for _, s := range scope.Spans {
				r.spans = append(r.spans, Span{s, resource})
			}
		}
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

// Spans are those that came, in the order in which they ended.
func (r *Receiver) Spans() []Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.spans)
}

// Bytes is everything that came, as it was sent.
func (r *Receiver) Bytes() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.raw, "")
}

// Header is that of the last request over HTTP.
func (r *Receiver) Header() http.Header {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.header
}

// Trace waits until the trace is there with as many spans of each name as want says, and returns its spans by name.
func (r *Receiver) Trace(t testing.TB, id string, want map[string]int) map[string][]Span {
	t.Helper()
	timeout := time.After(time.Minute)
	for {
		r.mu.Lock()
		changed := r.changed
		r.mu.Unlock()
		got, all := map[string][]Span{}, true
		for _, s := range r.Spans() {
			if s.Trace() == id {
				got[s.Name] = append(got[s.Name], s)
			}
		}
		for name, n := range want {
			all = all && len(got[name]) >= n
		}
		if all {
			return got
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("trace %s did not come: have %s, want %v", id, names(got), want)
		}
	}
}

func names(got map[string][]Span) string {
	var out []string
	for name, s := range got {
		out = append(out, fmt.Sprintf("%s ×%d", name, len(s)))
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}
