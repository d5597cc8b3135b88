package frontend

import (
	"bytes"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"go.opentelemetry.io/otel/trace"

	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/inflight"
	"github.com/warmroute/warmroute/frontend/openai"
	"github.com/warmroute/warmroute/frontend/reserve"
	"github.com/warmroute/warmroute/kvcache"
)

// Reserved request headers. They are for the frontend and go no further.
const (
	headerWorker  = "X-Worker-Instance-Id"
	headerRank    = "X-Dp-Rank"
	headerSession = "X-Session-Id"
	headerRouting = "X-Kv-Routing"
	headerAllowed = "X-Allowed-Worker-Ids" // separated by commas
	headerExplain = "X-Kv-Explain"         // of the answer as well
)

// reservedHeaders are all of them.
var reservedHeaders = []string{headerWorker, headerRank, headerSession, headerRouting, headerAllowed, headerExplain, headerDataParallel}

// Response headers; headerWorker and headerRank name the worker chosen.
const (
	headerOverlap = "X-Kv-Overlap-Blocks"
	headerBlocks  = "X-Kv-Prompt-Blocks"
	headerState   = "X-Kv-Index-State"
)

// Reasons of index_fallbacks_total beside those of the store.
const (
	reasonTokenize = "tokenize"
	reasonDisabled = "disabled"
)

// pin restricts the choice.
type pin struct {
	worker  string   // "" means any
	rank    int      // -1 means any
	allowed []string // nil means all
}

// allows tells whether a rank of the worker may be chosen.
func (p pin) allows(node *fleet.Node) bool {
	return (p.worker == "" || p.worker == node.ID) && (p.allowed == nil || slices.Contains(p.allowed, node.ID))
}

// any tells whether the choice is free.
func (p pin) any() bool { return p.worker == "" && p.rank < 0 && p.allowed == nil }

// knowledge is what is known of a prompt when a worker is chosen.
type knowledge struct {
	blockSize int
	found     bool                // the index has the pool
	tokens    int                 // 0 where unknown
	blocks    int                 // full blocks of the tokens
	hashes    []kvcache.BlockHash // of those blocks, where the index was asked
	scores    kvcache.OverlapScores
	state     kvcache.IndexState
	// reason is why there are no overlaps: of the closed list of index_fallbacks_total, or "" where they are
	// known or nobody wanted them.
	reason string
	// guess estimates the blocks of a prompt whose tokens are unknown.
	guess int
	// spent is what the index has taken of the lookup budget.
	spent time.Duration
}

// known tells overlaps of zero from overlaps unknown.
func (k *knowledge) known() bool {
	return k.state == kvcache.Exact || k.state == kvcache.Partial
}

// overlapKnown tells whether an overlap of n blocks is knowledge. A rank without one may be on a shard that is
// away, and then 0 would be a guess.
func (k *knowledge) overlapKnown(n int) bool {
	return k.state == kvcache.Exact || k.state == kvcache.Partial && n > 0
}

// exchange is one proxied request, from the body to the end of the answer.
type exchange struct {
	start  time.Time
	tenant string
	parsed openai.Request
	target fleet.Target
	pin    pin
	knowledge

	session   string // x-session-id
	name      conversation
	opening   conversation
	bypass    bool // x-kv-routing: off
	inference bool // the body is a request for an engine's model, not for its tokenizer
	explain   bool // the answer says why

	explanation string

	body     heldBody
	path     string
	tried    []string // workers that could not be reached
	risked   int      // workers that may have begun with the request without an answer
	chosen   *candidate
	lease    *inflight.Lease
	reserved *reserve.Reservation
	ours     http.Header // of the answer to the client
}

// giveBack ends what an attempt holds.
func (x *exchange) giveBack() {
	if x.lease != nil {
		x.lease.Release()
	}
	x.reserved.End()
}

// finish gives back whatever the request holds. It may be called at any point, and twice.
func (x *exchange) finish() {
	x.giveBack()
	if x.body.drop != nil {
		x.body.drop()
	}
}

// resolve finds the target of a model name.
func (f *Frontend) resolve(s *fleet.Snapshot, tenant, model string) (fleet.Target, error) {
	if target, ok := s.Target(tenant, model); ok {
		return target, nil
	}
	if !s.Known() {
		return fleet.Target{}, errNoWorkers
	}
	return fleet.Target{}, unknownModel(model)
}

func unknownModel(model string) error {
	const shown = 256
	if len(model) > shown {
		model = model[:shown] + "…"
	}
	return refuse(http.StatusNotFound, "model_not_found", "the model "+strconv.Quote(model)+" does not exist")
}

// headerPin reads the headers that pin a worker.
func headerPin(h http.Header) (pin, error) {
	p := pin{worker: h.Get(headerWorker), rank: -1}
	if v := h.Get(headerRank); v != "" {
		rank, err := strconv.Atoi(v)
		if err != nil || rank < 0 || rank > kvcache.MaxRank {
			return p, refuse(http.StatusBadRequest, "invalid_request", "x-dp-rank must be a whole number from 0 to "+strconv.Itoa(kvcache.MaxRank))
		}
		p.rank = rank
	}
	if v := strings.Join(h.Values(headerAllowed), ","); v != "" {
		for id := range strings.SplitSeq(v, ",") {
			if id = strings.TrimSpace(id); id != "" {
				p.allowed = append(p.allowed, id)
			}
		}
		if p.allowed == nil { // which would be all
			return p, refuse(http.StatusBadRequest, "invalid_request", "x-allowed-worker-ids names no worker")
		}
	}
	return p, nil
}

// maxTokens is the longest prompt that a target takes.
func (f *Frontend) maxTokens(t fleet.Target) int {
	if t.MaxLen > 0 {
		return min(f.o.MaxPromptTokens, t.MaxLen)
	}
	return f.o.MaxPromptTokens
}

// learn fills in the request's knowledge: tokens, then overlaps. Its error is one for the client; the
// index never causes one.
func (f *Frontend) learn(c *gin.Context, x *exchange, e openai.Endpoint) error {
	x.blockSize = f.o.BlockSize
	x.state = kvcache.Bypassed
	if e != openai.Plain {
		x.guess = len(x.body.bytes) / (4 * x.blockSize)
	}
	limit := f.maxTokens(x.target)
	if len(x.parsed.Tokens) > limit {
		return openai.TooLong(len(x.parsed.Tokens), limit)
	}
	x.tokens = len(x.parsed.Tokens)
	x.blocks = x.tokens / x.blockSize
	x.bypass = e == openai.Plain || strings.EqualFold(c.GetHeader(headerRouting), "off")
	switch {
	case x.bypass || f.o.Policy != PolicyKV:
		return nil
	case f.o.Index == nil:
		f.fellBack(&x.knowledge, reasonDisabled)
		return nil
	}
	if x.parsed.Tokens == nil {
		// Tokens cost a call to a worker: not for an index that cannot use them.
		if reason, away := f.away(x.target.Pool); away {
			x.state = kvcache.Degraded
			f.fellBack(&x.knowledge, reason)
			return nil
		}
	}
	q := inquiry{pool: x.target.Pool, spec: kvcache.HashSpec{LoRA: x.target.LoRA, Salt: x.parsed.CacheSalt}}
	var err error
	q.tokens, err = f.promptTokens(c, x, limit)
	switch {
	case err == nil:
	case c.Request.Context().Err() != nil:
		return errClientGone
	case !errors.Is(err, errNoTokens):
		return err
	case f.eventsOff(q.pool):
		var text bytes.Buffer
		x.parsed.Text(&text)
		if q.tokens = textTokens(text.Bytes(), limit); len(q.tokens) > 0 {
			q.spec.Salt = textSalt + q.spec.Salt
			break
		}
		fallthrough
	default:
		f.fellBack(&x.knowledge, reasonTokenize)
		return nil
	}
	return f.consult(c.Request.Context(), &x.knowledge, q)
}

// promptTokens are given, or else asked of a worker; [errNoTokens] where there is no way.
func (f *Frontend) promptTokens(c *gin.Context, x *exchange, limit int) ([]uint32, error) {
	if x.parsed.Tokens != nil {
		return x.parsed.Tokens, nil
	}
	if x.parsed.Tokenize == nil {
		return nil, errNoTokens
	}
	ctx, s := begin(c.Request.Context(), f.o.Tracer, spanTokenize, trace.SpanKindInternal)
	tokens, err := f.tokenizer.tokens(ctx, x.target, x.parsed.Tokenize, f.authorization(c.Request.Header))
	s.tokenized(len(tokens), err)
	if err == nil && len(tokens) > limit {
		return nil, openai.TooLong(len(tokens), limit)
	}
	return tokens, err
}
