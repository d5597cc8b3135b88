package frontend

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/warmroute/warmroute/frontend/breaker"
	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/openai"
)

// newTransport is for requests to workers. Engines close connections that were idle for 5 s;
// we close them first, or a request would run into it. Encodings are the client's affair.
func newTransport(o Options) *http.Transport {
	return &http.Transport{
		DialContext:            o.Networks.Dial(net.Dialer{Timeout: o.ConnectTimeout, KeepAlive: 15 * time.Second}, o.places()...),
		TLSHandshakeTimeout:    o.ConnectTimeout,
		IdleConnTimeout:        4 * time.Second,
		MaxIdleConnsPerHost:    256,
		MaxResponseHeaderBytes: 1 << 20,
		DisableCompression:     true,
	}
}

type exchangeKey struct{}

func exchangeOf(req *http.Request) *exchange {
	return req.Context().Value(exchangeKey{}).(*exchange)
}

func (f *Frontend) newProxy() *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Transport: roundTripper(f.roundTrip),
		Rewrite: func(r *httputil.ProxyRequest) {
			for _, h := range reservedHeaders {
				r.Out.Header.Del(h)
			}
			for _, h := range []string{"Expect", "Upgrade", "Connection"} {
				r.Out.Header.Del(h)
			}
			if f.authorization(r.In.Header) == "" {
				r.Out.Header.Del("Authorization")
			}
			if token := f.o.WorkerToken(); token != "" {
				r.Out.Header.Set("Authorization", "Bearer "+token)
			}
			// Also where the client names it in its header Connection.
			r.Out.Header.Set(headerRequestID, r.In.Header.Get(headerRequestID))
			r.SetXForwarded()
			// The body is known by now. What a client sends after it are headers that nobody has looked at.
			r.Out.TransferEncoding, r.Out.Trailer = nil, nil
		},
		ModifyResponse: f.answer,
		ErrorHandler:   f.noAnswer,
		BufferPool:     &copyBuffers{},
		ErrorLog:       slog.NewLogLogger(f.o.Logger.Handler(), slog.LevelDebug),
	}
}

// headerDataParallel pins a data-parallel rank inside an engine.
const headerDataParallel = "X-Data-Parallel-Rank"

// proxy serves an OpenAI route.
func (f *Frontend) proxy(e openai.Endpoint) gin.HandlerFunc {
	return func(c *gin.Context) {
		if !f.underWay.take(1) {
			fail(c, errOverloaded) // before the body takes memory
			return
		}
		defer f.underWay.give(1)
		x := &exchange{tenant: f.o.Tenant, path: c.Request.URL.Path, ours: c.Writer.Header()}
		defer x.finish()
		defer f.describe(c.Request.Context(), x)
		err := f.prepare(c, x, e)
		if x.state != "" {
			c.Set(keyIndexState, string(x.state))
		}
		if err != nil {
			fail(c, err)
			return
		}
		out := c.Request.WithContext(context.WithValue(c.Request.Context(), exchangeKey{}, x))
		out.Body, out.ContentLength = http.NoBody, 0 // each attempt brings the body along
		f.reverse.ServeHTTP(&chunkWriter{c.Writer, http.NewResponseController(c.Writer).Flush}, out)
	}
}

// prepare reads all that a choice needs.
func (f *Frontend) prepare(c *gin.Context, x *exchange, e openai.Endpoint) (err error) {
	if x.body, err = f.readBody(c); err != nil {
		return err
	}
	x.start = time.Now()
	if x.parsed, err = openai.Parse(x.body.bytes, e, f.o.MaxPromptTokens); err != nil {
		return err
	}
	s := f.fleet.Snapshot()
	if x.parsed.Model == "" { // only where an engine does not ask for it either
		models := s.Models(f.o.Tenant)
		if len(models) != 1 {
			return refuse(http.StatusBadRequest, "invalid_request", `"model" is missing`)
		}
		x.parsed.Model = models[0].ID
	}
	if x.target, err = f.resolve(s, x.tenant, x.parsed.Model); err != nil {
		return err
	}
	if x.pin, err = headerPin(c.Request.Header); err != nil {
		return err
	}
	x.session = c.GetHeader(headerSession)
	if len(x.session) > maxSession {
		return refuse(http.StatusBadRequest, "invalid_request", "x-session-id is longer than "+strconv.Itoa(maxSession)+" bytes")
	}
	x.inference = e != openai.Plain
	x.explain = c.GetHeader(headerExplain) == "1"
	if len(f.candidates(x.target, x.pin, &x.knowledge, f.o.Tiers, nil)) == 0 {
		return nobody(s, x.target, x.tenant, x.pin)
	}
	return f.learn(c, x, e)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return r(req) }

// roundTrip chooses a worker and sends it the request; another one where the first cannot
// have got it.
func (f *Frontend) roundTrip(req *http.Request) (*http.Response, error) {
	x := exchangeOf(req)
	pool := x.target.Pool.String()
	var last error
	for try := 0; ; try++ {
		if err := f.choose(req.Context(), x); err != nil {
			if last != nil {
				return nil, last
			}
			return nil, err
		}
		if try == 0 {
			f.metrics.routeSeconds.WithLabelValues(pool).Observe(time.Since(x.start).Seconds())
		}
		worker := x.chosen.node.Key()
		ctx, part := f.attempted(req.Context(), x)
		a := f.attempts.begin(ctx, worker, f.o.ResponseHeaderTimeout)
		a.span = part
		out := x.outgoing(a.ctx, req)
		inject(a.ctx, out.Header)
		res, err := f.transport.RoundTrip(out)
		if err == nil && res.StatusCode == http.StatusSwitchingProtocols { // nobody asked for it
			_ = res.Body.Close()
			err = errors.New("the worker switches protocols")
		}
		if err == nil {
			f.breakers.Report(worker, outcomeOf(res.StatusCode))
			part.answered(res.StatusCode)
			a.stream(res, f.watch(req.Context(), x, res, pool, part))
			x.body.drop()                                  // no further attempt can follow
			x.body.bytes, x.parsed = nil, openai.Request{} // which shares memory with it
			return res, nil
		}
		reason, retry := a.fault(err, f.o.ConnectTimeout)
		if req.Context().Err() == nil {
			part.fail(reason)
		}
		a.end()
		x.giveBack()
		if req.Context().Err() != nil {
			f.breakers.Report(worker, breaker.Neutral)
			return nil, errClientGone
		}
		outcome := breaker.Failure
		if reason == failStale { // an idle connection that was closed says nothing
			outcome = breaker.Neutral
		}
		f.breakers.Report(worker, outcome)
		if reason == failStale || reason == failLost { // the worker may have died of the request
			x.risked++
			retry = retry && x.risked < maxRisked
		}
		f.workerFailed(x, reason, err)
		switch reason {
		case failDial, failStale, failLost:
			last = errUnreachable
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				last = errUpstreamLate
			}
		case failHeader:
			last = errUpstreamLate
		default:
			last = errBadUpstream
		}
		if !retry || try >= f.o.Retries {
			return nil, last
		}
		x.tried = append(x.tried, x.chosen.Worker)
		f.metrics.retries.WithLabelValues(reason).Inc()
	}
}

func (f *Frontend) workerFailed(x *exchange, reason string, err error) {
	f.metrics.upstreamError.WithLabelValues(reason).Inc()
	f.o.Logger.Debug("worker failed a request", "worker", x.chosen.Worker, "reason", reason, "error", fleet.Cause(err))
}

// maxRisked is how many workers a request may reach that may have begun with it: one that kills engines must not
// go through the fleet.
const maxRisked = 2

// maxSession is the longest x-session-id, in bytes.
const maxSession = 1024

// outcomeOf is what a status says about the worker. 4xx is the client's doing, and 500 may be: one bad request must not
// take the fleet out.
func outcomeOf(status int) breaker.Outcome {
	switch {
	case status == http.StatusBadGateway || status == http.StatusServiceUnavailable || status == http.StatusGatewayTimeout:
		return breaker.Failure
	case status >= 500:
		return breaker.Neutral
	}
	return breaker.Success
}

// outgoing is the request for the worker chosen, with the client's body unchanged.
func (x *exchange) outgoing(ctx context.Context, req *http.Request) *http.Request {
	out := req.Clone(ctx)
	base := x.chosen.node.URL
	out.URL.Scheme, out.URL.Host = base.Scheme, base.Host
	out.URL.Path, out.URL.RawPath = base.Path+x.path, ""
	out.Host = "" // the worker's
	if len(x.chosen.node.Ranks) > 1 {
		out.Header.Set(headerDataParallel, strconv.Itoa(x.chosen.Rank))
	}
	out.ContentLength = 0
	for _, p := range x.parts() {
		out.ContentLength += int64(len(p))
	}
	out.GetBody = func() (io.ReadCloser, error) { return &bodyReader{x.parts()}, nil } // keeps no body: x lets go of it
	out.Body, _ = out.GetBody()
	return out
}

// parts are the body as the worker gets it.
func (x *exchange) parts() [][]byte {
	if n := x.chosen.node; x.inference && len(n.Ranks) > 1 && strings.EqualFold(n.Engine, "SGLang") {
		return withRank(x.body.bytes, x.chosen.Rank)
	}
	return [][]byte{x.body.bytes}
}

// withRank is a body with the member that tells SGLang the rank, as the last one, which counts. All other bytes stay, and
// none is copied. The body is a JSON object with at least one member.
func withRank(body []byte, rank int) [][]byte {
	end := max(bytes.LastIndexByte(body, '}'), 0) // a body that was let go of has none
	return [][]byte{body[:end], []byte(`,"data_parallel_rank":` + strconv.Itoa(rank)), body[end:]}
}

// bodyReader reads the parts of a body and lets go of each at its end: the request that they belong to lives
// as long as the answer.
type bodyReader struct{ rest [][]byte }

func (b *bodyReader) Read(p []byte) (int, error) {
	for len(b.rest) > 0 && len(b.rest[0]) == 0 {
		b.rest[0] = nil
		b.rest = b.rest[1:]
	}
	if len(b.rest) == 0 {
		b.rest = nil
		return 0, io.EOF
	}
	n := copy(p, b.rest[0])
	b.rest[0] = b.rest[0][n:]
	return n, nil
}

func (b *bodyReader) Close() error { return nil }

// answer adds our headers to a worker's.
func (f *Frontend) answer(res *http.Response) error {
	x := exchangeOf(res.Request)
	// Where an informational answer came first, the proxy has forgotten what was set before.
	x.ours.Del(headerRequestID)
	res.Header.Set(headerRequestID, res.Request.Header.Get(headerRequestID))
	x.headers(res.Header)
	if strings.HasPrefix(res.Header.Get("Content-Type"), "text/event-stream") {
		res.Header.Set("X-Accel-Buffering", "no")
		if res.Header.Get("Cache-Control") == "" {
			res.Header.Set("Cache-Control", "no-cache")
		}
	}
	return nil
}

func (x *exchange) headers(h http.Header) {
	for _, name := range []string{headerWorker, headerRank, headerOverlap, headerBlocks} {
		h.Del(name)
	}
	h.Set(headerState, string(x.state))
	x.explainIn(h)
	if x.tokens > 0 {
		h.Set(headerBlocks, strconv.Itoa(x.blocks))
	}
	if x.chosen == nil {
		return
	}
	h.Set(headerWorker, x.chosen.Worker)
	h.Set(headerRank, strconv.Itoa(x.chosen.Rank))
	if o := x.chosen.overlap.Any; x.overlapKnown(o) { // no header is not 0
		h.Set(headerOverlap, strconv.Itoa(min(o, x.blocks)))
	}
}

// noAnswer is for requests that got no response header of a worker.
func (f *Frontend) noAnswer(w http.ResponseWriter, req *http.Request, err error) {
	x := exchangeOf(req)
	w.Header().Set(headerRequestID, req.Header.Get(headerRequestID))
	x.headers(w.Header())
	writeError(w, err)
}

// chunkWriter sends every chunk of an answer at once. The proxy does that by itself for events and answers of unknown length.
// For others it would send the header ahead, from a goroutine of its own that the answer then waits for.
type chunkWriter struct {
	http.ResponseWriter
	flush func() error
}

func (w *chunkWriter) Write(p []byte) (n int, err error) {
	if n, err = w.ResponseWriter.Write(p); err == nil {
		err = w.flush()
	}
	return n, err
}

// Unwrap is for [http.ResponseController].
func (w *chunkWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// copyBuffers are the buffers that answers are copied through.
type copyBuffers struct{ pool sync.Pool }

func (p *copyBuffers) Get() []byte {
	if b, ok := p.pool.Get().(*[]byte); ok {
		return *b
	}
	return make([]byte, 32<<10)
}

func (p *copyBuffers) Put(b []byte) { p.pool.Put(&b) }
