package frontend

import (
	"context"
	"net/http"

	"github.com/gin-gonic/gin"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/inflight"
	"github.com/warmroute/warmroute/kvcache"
)

// Spans of a request: the request itself, and within it those below. No attribute holds what a client made up: none of the
// prompt, and of the names only those that the fleet knows.
const (
	spanTokenize = "tokenize" // token ids were not given
	spanHash     = "hash"     // token ids to block hashes
	spanLookup   = "lookup"   // one shard, or the configuration of a pool
	spanSelect   = "select"   // one choice; one per attempt
	spanUpstream = "upstream" // one attempt at a worker, to the end of its answer
)

// Attributes of spans. Blocks are those of the prompt.
const (
	attrMethod = attribute.Key("http.request.method")
	attrRoute  = attribute.Key("http.route")
	attrStatus = attribute.Key("http.response.status_code")

	attrPool       = attribute.Key("warmroute.pool")
	attrWorker     = attribute.Key("warmroute.worker")
	attrRank       = attribute.Key("warmroute.rank")
	attrState      = attribute.Key("warmroute.index_state")
	attrFallback   = attribute.Key("warmroute.fallback_reason") // of index_fallbacks_total
	attrTokens     = attribute.Key("warmroute.tokens")
	attrBlocks     = attribute.Key("warmroute.blocks")         // asked for
	attrOverlap    = attribute.Key("warmroute.overlap_blocks") // at the worker chosen; absent where unknown
	attrRetries    = attribute.Key("warmroute.retries")        // workers tried before
	attrShard      = attribute.Key("warmroute.shard")
	attrReason     = attribute.Key("warmroute.reason")   // why the span failed; why the worker was chosen
	attrTokenize   = attribute.Key("warmroute.tokenize") // of tokenize_total
	attrPolicy     = attribute.Key("warmroute.policy")
	attrCandidates = attribute.Key("warmroute.candidates")
	attrShared     = attribute.Key("warmroute.shared_loads") // the loads of all frontends decided
)

// span is a part of a request in a trace. The zero span is none: its methods do nothing, and allocate nothing.
type span struct{ trace.Span }

func (s span) on() bool { return s.Span != nil }

// end ends the span.
func (s span) end() {
	if s.on() {
		s.End()
	}
}

// fail says why the part failed, by a word of a closed list.
func (s span) fail(reason string) {
	if s.on() {
		s.SetAttributes(attrReason.String(reason))
		s.SetStatus(codes.Error, reason)
	}
}

// firstByte notes when the answer began.
func (s span) firstByte() {
	if s.on() {
		s.AddEvent("first byte")
	}
}

// begin begins a part of the request that ctx belongs to. It is none, and ctx as it was, where that request is not traced.
func begin(ctx context.Context, t trace.Tracer, name string, kind trace.SpanKind) (context.Context, span) {
	if t == nil || !trace.SpanFromContext(ctx).IsRecording() {
		return ctx, span{}
	}
	ctx, s := t.Start(ctx, name, trace.WithSpanKind(kind))
	return ctx, span{s}
}

// traced makes the span of a request, joined to the trace of the client's traceparent. It stands behind the check of the token:
// a stranger makes no spans.
func (f *Frontend) traced(c *gin.Context) {
	if f.o.Tracer == nil {
		return
	}
	ctx := propagation.TraceContext{}.Extract(c.Request.Context(), propagation.HeaderCarrier(c.Request.Header))
	ctx, s := f.o.Tracer.Start(ctx, c.Request.Method+" "+c.FullPath(), trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attrMethod.String(c.Request.Method), attrRoute.String(c.FullPath())))
	c.Request = c.Request.WithContext(ctx)
	whole := false
	defer func() {
		status := c.Writer.Status()
		s.SetAttributes(attrStatus.Int(status))
		if status >= 500 || !whole && ctx.Err() == nil { // an answer that breaks off panics; a client may leave
			s.SetStatus(codes.Error, "")
		}
		s.End()
	}()
	c.Next()
	whole = true
}

// inject writes the trace that ctx belongs to into the header of a request that is sent on; none, and the header is as it was.
func inject(ctx context.Context, h http.Header) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return
	}
	h.Del("Tracestate") // one that could not be read, or came without a traceparent, ends here
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(h))
}

// hash is kvcache.HashTokens, as a span.
func (f *Frontend) hash(ctx context.Context, spec kvcache.HashSpec, tokens []uint32) []kvcache.BlockHash {
	_, s := begin(ctx, f.o.Tracer, spanHash, trace.SpanKindInternal)
	hashes := kvcache.HashTokens(spec, tokens)
	if s.on() {
		s.SetAttributes(attrTokens.Int(len(tokens)), attrBlocks.Int(len(hashes)))
		s.End()
	}
	return hashes
}

// tokenized ends the span of a search for token ids; results are counted on the way, see countTokenize.
func (s span) tokenized(tokens int, err error) {
	if !s.on() {
		return
	}
	s.SetAttributes(attrTokens.Int(tokens))
	if err != nil {
		s.SetStatus(codes.Error, "")
	}
	s.End()
}

// countTokenize counts a result of tokenize_total, and notes it in the span.
func (f *Frontend) countTokenize(ctx context.Context, result string) {
	f.metrics.tokenize.WithLabelValues(result).Inc()
	if f.o.Tracer != nil {
		trace.SpanFromContext(ctx).SetAttributes(attrTokenize.String(result))
	}
}

// choosing is place, as a span.
func (f *Frontend) choosing(ctx context.Context, w *want, list []candidate, tried int,
	take func([]candidate, []inflight.Place, func([]choose.Load) int)) (placed, error) {
	ctx, s := begin(ctx, f.o.Tracer, spanSelect, trace.SpanKindInternal)
	p, err := f.place(ctx, w, list, take)
	if !s.on() {
		return p, err
	}
	defer s.End()
	s.SetAttributes(attrPolicy.String(p.policy), attrCandidates.Int(len(list)), attrShared.Bool(p.shared), attrRetries.Int(tried))
	if err != nil {
		s.SetStatus(codes.Error, asAPIError(err).code)
		return p, err
	}
	s.SetAttributes(attrReason.String(p.reason))
	s.chosen(w.k, p.chosen())
	return p, err
}

// chosen notes a worker rank and what of the prompt is known to be there.
func (s span) chosen(k *knowledge, c *candidate) {
	if !s.on() || c == nil {
		return
	}
	s.SetAttributes(attrWorker.String(c.Worker), attrRank.Int(c.Rank))
	if o := c.overlap.Any; k.tokens > 0 && k.overlapKnown(o) {
		s.SetAttributes(attrOverlap.Int(min(o, k.blocks)))
	}
}

// attempted begins the span of an attempt at the worker chosen.
func (f *Frontend) attempted(ctx context.Context, x *exchange) (context.Context, span) {
	ctx, s := begin(ctx, f.o.Tracer, spanUpstream, trace.SpanKindClient)
	if s.on() {
		s.chosen(&x.knowledge, x.chosen)
		s.SetAttributes(attrRetries.Int(len(x.tried)))
	}
	return ctx, s
}

// answered notes the status of a worker's answer.
func (s span) answered(status int) {
	if s.on() {
		s.SetAttributes(attrStatus.Int(status))
		if status >= 500 {
			s.SetStatus(codes.Error, "")
		}
	}
}

// describe notes in the request's span what became of a proxied one.
func (f *Frontend) describe(ctx context.Context, x *exchange) {
	if f.o.Tracer == nil {
		return
	}
	s := span{trace.SpanFromContext(ctx)}
	if !s.IsRecording() {
		return
	}
	s.known(x.target.Pool, &x.knowledge)
	s.chosen(&x.knowledge, x.chosen)
	s.SetAttributes(attrRetries.Int(len(x.tried)))
}

// learnt notes in a question's span what the index has said.
func (f *Frontend) learnt(ctx context.Context, q *question, k *knowledge) {
	if f.o.Tracer == nil {
		return
	}
	pool := q.target.Pool
	if k.found {
		pool = q.pool // until then, it may be any text
	}
	if s := (span{trace.SpanFromContext(ctx)}); s.IsRecording() {
		s.known(pool, k)
	}
}

func (s span) known(pool kvcache.PoolID, k *knowledge) {
	if pool.Model != "" {
		s.SetAttributes(attrPool.String(pool.String()))
	}
	if k.state != "" {
		s.SetAttributes(attrState.String(string(k.state)))
	}
	if k.tokens > 0 {
		s.SetAttributes(attrTokens.Int(k.tokens), attrBlocks.Int(k.blocks))
	}
	if k.reason != "" {
		s.SetAttributes(attrFallback.String(k.reason))
	}
}

// ObserveLookups makes spans of what requests ask of Redis: it is the Observe of the store that a frontend with that tracer uses.
func ObserveLookups(t trace.Tracer) func(ctx context.Context, link string, blocks int) func(reason string) {
	return func(ctx context.Context, link string, blocks int) func(string) {
		_, s := begin(ctx, t, spanLookup, trace.SpanKindClient)
		if !s.on() {
			return func(string) {}
		}
		s.SetAttributes(attrShard.String(link), attrBlocks.Int(blocks))
		return func(reason string) {
			if reason != "" {
				s.fail(reason)
			}
			s.End()
		}
	}
}
