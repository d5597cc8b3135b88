package frontend

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// selection is the answer of POST /select and POST /select_and_reserve. Counts are in tokens but for the blocks.
type selection struct {
	// SelectionID names the reservation; null where nothing is reserved, also because the loads in Redis are away.
	SelectionID *string            `json:"selection_id"`
	WorkerID    string             `json:"worker_id"`
	Rank        int                `json:"dp_rank"`
	Endpoint    string             `json:"endpoint"`
	BlockSize   int                `json:"block_size"`
	Overlap     *tierOverlap       `json:"overlap"`                  // null: unknown
	Prefill     int                `json:"effective_prefill_tokens"` // what the tiers leave; at most, where the overlap is unknown
	Decode      int                `json:"potential_decode_blocks"`  // with this request
	State       kvcache.IndexState `json:"index_state"`
	Explain     *explanation       `json:"explain,omitempty"`
}

type tierOverlap struct {
	Longest int `json:"longest_matched"`
	GPU     int `json:"gpu"`
	CPU     int `json:"cpu"`
	Disk    int `json:"disk"`
}

// selectWorker answers POST /select, the choice that a proxied request would get, without the
// request; and POST /select_and_reserve, which counts the load until it is freed or its lease ends.
func (f *Frontend) selectWorker(reserves bool) gin.HandlerFunc {
	return func(c *gin.Context) {
		s, err := f.selectFor(c, reserves)
		if err != nil {
			fail(c, err)
			return
		}
		c.JSON(http.StatusOK, s)
	}
}

func (f *Frontend) selectFor(c *gin.Context, reserves bool) (*selection, error) {
	r, err := f.readSelect(c)
	if err != nil {
		return nil, err
	}
	if reserves {
		r.want.id, r.want.lease = r.question.ID, f.o.ReservationLease
		if r.want.id == "" {
			r.want.id = newName()
		}
		if !printable(r.want.id, store.MaxLeaseID) || strings.Contains(r.want.id, "/") || r.want.id == "." || r.want.id == ".." { // it stands in a path
			return nil, refuse(http.StatusBadRequest, "invalid_request",
				"\"selection_id\" must be at most "+strconv.Itoa(store.MaxLeaseID)+" printable bytes without spaces and slashes, and neither . nor ..")
		}
	}
	ctx := c.Request.Context()
	p, err := f.choosing(ctx, &r.want, r.list, 0, nil)
	if err != nil {
		return nil, err
	}
	w := p.chosen()
	if reserves && !p.held && !r.want.local { // a policy that is blind to the loads adds to them all the same
		r.want.made = true
		again := placed{list: []candidate{*w}}
		p.held = f.askLoads(ctx, &r.want, &again, choose.Weights{}) && again.held
	}
	f.selected(r.want.pool.String(), &p)
	f.decided(c.FullPath(), &r.want, &p, 0, time.Time{})
	k, o := r.want.k, w.overlap
	s := &selection{
		WorkerID: w.Worker, Rank: w.Rank, Endpoint: w.node.URL.String(), BlockSize: k.blockSize,
		Prefill: r.want.request().Prefill(w.credit),
		Decode:  r.want.blocks + p.loads[p.index].DecodeBlocks,
		State:   k.state,
	}
	if p.held {
		s.SelectionID = &r.want.id
	}
	if k.overlapKnown(o.Any) {
		s.Overlap = &tierOverlap{o.Any * k.blockSize, o.Device * k.blockSize, o.Host * k.blockSize, o.Disk * k.blockSize}
	}
	if c.Query("explain") == "1" || c.GetHeader(headerExplain) == "1" {
		s.Explain = explain(&r.want, &p)
	}
	return s, nil
}

// selecting is a question of the select routes, ready for a choice.
type selecting struct {
	*question
	know knowledge
	want want
	pin  pin
	list []candidate // at least one
}

// readSelect reads the body of a select route and asks the index.
func (f *Frontend) readSelect(c *gin.Context) (*selecting, error) {
	q, err := f.question(c)
	if err != nil {
		return nil, err
	}
	if q.target.Pool.Model == "" {
		if !f.fleet.Snapshot().Known() {
			return nil, errNoWorkers
		}
		return nil, unknownModel(q.Model)
	}
	if q.Output < 0 || q.Tokens < 0 || q.Output > f.o.MaxPromptTokens || q.Tokens > f.o.MaxPromptTokens {
		return nil, refuse(http.StatusBadRequest, "invalid_request", "numbers of tokens are from 0 to "+strconv.Itoa(f.o.MaxPromptTokens))
	}
	if len(q.session) > maxSession {
		return nil, refuse(http.StatusBadRequest, "invalid_request", "\"session_id\" is longer than "+strconv.Itoa(maxSession)+" bytes")
	}
	weights, tiers, err := q.Override.Apply(f.o.Weights, f.o.Tiers)
	if err != nil {
		return nil, refuse(http.StatusBadRequest, "invalid_request", "\"router_config_override\": "+err.Error())
	}
	r := &selecting{question: q, pin: pin{rank: -1}}
	if r.know, err = f.know(c, q, store.LookupOptions{Frequencies: true}); err != nil {
		return nil, err
	}
	if q.Pinned != nil {
		r.pin.worker = string(q.Pinned.WorkerID)
		if q.Pinned.Rank != nil {
			r.pin.rank = *q.Pinned.Rank
		}
	}
	if q.Allowed != nil {
		r.pin.allowed = []string{}
		s := f.fleet.Snapshot()
		for _, id := range q.Allowed { // a list may be long, a fleet is not
			if s.Node(fleet.KeyOf(q.pool.Tenant, string(id))) != nil && !slices.Contains(r.pin.allowed, string(id)) {
				r.pin.allowed = append(r.pin.allowed, string(id))
			}
		}
	}
	if r.list = f.candidates(q.target, r.pin, &r.know, tiers, nil); len(r.list) == 0 {
		return nil, nobody(f.fleet.Snapshot(), q.target, q.pool.Tenant, r.pin)
	}
	k := &r.know
	tokens := max(k.tokens, q.Tokens)
	r.want = want{
		pool: q.pool, k: k, policy: f.policy(k), weights: weights, session: q.session, tokens: tokens,
		blocks:       (tokens + q.Output + k.blockSize - 1) / k.blockSize,
		conversation: q.conversation, prefix: q.prefix, local: f.o.Index == nil || k.state == kvcache.Degraded, pinned: !r.pin.any(),
	}
	return r, nil
}
