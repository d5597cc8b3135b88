package indexer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
)

// eventsTimeout bounds the wait of POST /events for Redis.
const eventsTimeout = 5 * time.Second

// postEvents takes the events of an engine without ZMQ and answers when they are in the index.
//
// An event's event_id is its sequence number in the worker rank's stream: it begins at 0 and grows by one. A number
// that was applied before is a repetition and does nothing, so a request can be repeated after a lost
// answer. A number too high means that events were lost, which costs the stream its blocks. Number 0 with another content than before
// is a restarted engine.
func (ix *Indexer) postEvents(c *gin.Context) {
	var req struct {
		Worker   kvcache.WorkerName    `json:"worker"`
		WorkerID kvcache.WorkerName    `json:"worker_id"`
		Instance kvcache.WorkerName    `json:"instance_id"`
		Rank     int                   `json:"dp_rank"`
		Model    string                `json:"model_name"`
		Tenant   string                `json:"tenant_id"`
		Events   []kvcache.RouterEvent `json:"events"`
	}
	if !body(c, &req) {
		return
	}
	worker := req.Worker
	for _, other := range []kvcache.WorkerName{req.WorkerID, req.Instance} {
		if worker == "" {
			worker = other
		}
	}
	if worker == "" || len(req.Events) == 0 {
		fail(c, http.StatusBadRequest, "missing_field", "worker and events are required")
		return
	}
	for i := range req.Events {
		if err := checkEvent(&req.Events[i], worker, req.Rank); err != nil {
			fail(c, http.StatusBadRequest, "invalid_event", fmt.Sprintf("events[%d]: %v", i, err))
			return
		}
	}
	var found []*stream
	for _, s := range ix.all() {
		if s.id.Worker == string(worker) && s.id.Rank == req.Rank &&
			(req.Model == "" || s.id.Pool == poolID(req.Tenant, req.Model)) {
			found = append(found, s)
		}
	}
	switch {
	case len(found) == 0:
		fail(c, http.StatusNotFound, "unknown_worker", fmt.Sprintf("worker %q rank %d is not registered here: POST /register without an endpoint first", worker, req.Rank))
		return
	case len(found) > 1:
		fail(c, http.StatusBadRequest, "ambiguous_worker", fmt.Sprintf("worker %q serves several models: name one as model_name", worker))
		return
	case found[0].reg.Endpoint != "":
		fail(c, http.StatusConflict, "followed_by_zmq", fmt.Sprintf("the events of worker %q come from %s", worker, found[0].reg.Endpoint))
		return
	}
	err := errors.New("the stream ended while it worked on the request")
	request, cancel := context.WithTimeout(c.Request.Context(), eventsTimeout)
	defer cancel()
	if callErr := found[0].call(request, func(ctx context.Context) {
		err = found[0].take(ctx, request, req.Events)
	}); callErr != nil {
		err = callErr
	}
	if err != nil {
		failStore(c, err)
		return
	}
	c.JSON(http.StatusAccepted, gin.H{"accepted": len(req.Events)})
}

// checkEvent refuses what could not be applied, so that a request takes effect as a whole or not at all.
func checkEvent(e *kvcache.RouterEvent, worker kvcache.WorkerName, rank int) error {
	if e.WorkerID != "" && e.WorkerID != worker {
		return fmt.Errorf("worker_id %q in a request about %q", e.WorkerID, worker)
	}
	if e.Event.DPRank != 0 && e.Event.DPRank != rank {
		return fmt.Errorf("dp_rank %d in a request about rank %d", e.Event.DPRank, rank)
	}
	if e.Event.EventID > maxSeq {
		return fmt.Errorf("event_id %d is too large: want 0 to %d", e.Event.EventID, maxSeq)
	}
	d := e.Event.Data
	if d.Stored == nil && d.Removed == nil && !d.Cleared {
		return errors.New("data is missing")
	}
	if d.Stored != nil {
		for i, b := range d.Stored.Blocks {
			if b.TokensHash == nil {
				return fmt.Errorf("block %d has no tokens_hash", i)
			}
		}
	}
	return nil
}

// take applies the events of one request on behalf of its caller, who is told rather than kept waiting when Redis is away.
// It runs in the worker, whose own context is ctx.
func (s *stream) take(ctx, request context.Context, events []kvcache.RouterEvent) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(request, cancel)()
	s.impatient = true
	defer func() { s.impatient = false }()
	err := s.takeAll(ctx, events)
	if err != nil {
		// What was translated and not applied will be sent again. Begin anew from what Redis says.
		zero, known := s.cur.zero, s.cur.zeroKnown
		s.begin()
		s.cur.zero, s.cur.zeroKnown = zero, known
	}
	return err
}

func (s *stream) takeAll(ctx context.Context, events []kvcache.RouterEvent) error {
	if s.st.Generation == 0 {
		if err := s.register(ctx); err != nil {
			return err
		}
		if s.st.Generation == 0 {
			return errors.New("the block size is not known: name it in POST /register")
		}
	}
	s.update(func(v *Status) { v.LastEvent = time.Now() })
	if s.lease.expired {
		if err := s.revive(); err != nil {
			return err
		}
	}
	for i := range events {
		if err := s.takeOne(ctx, &events[i]); err != nil {
			return err
		}
		if err := s.flushFull(ctx); err != nil {
			return err
		}
	}
	return s.flush(ctx)
}

func (s *stream) takeOne(ctx context.Context, e *kvcache.RouterEvent) error {
	seq := int64(e.Event.EventID)
	s.current = content{seq: seq}
	kind := kindOf(e)
	text, err := json.Marshal(e.Event.Data)
	if err != nil {
		return err
	}
	if seq == 0 && s.cur.done >= 0 && !s.cur.isFirst(text) {
		if err := s.restarted(ctx, s.cur.done); err != nil {
			return err
		}
	}
	switch s.cur.place(seq) {
	case duplicate:
		s.ix.metrics.event(kind, resultDuplicate, 1)
		return nil
	case ahead:
		if err := s.closeGap(ctx, seq); err != nil {
			return err
		}
		if s.cur.place(seq) != inOrder {
			s.ix.metrics.event(kind, resultDuplicate, 1)
			return nil
		}
	}
	if st := e.Event.Data.Stored; st != nil && st.ParentHash != nil {
		if _, ok := s.tr.known.get(*st.ParentHash); !ok {
			if err := s.lookUp(ctx, []kvcache.EngineHash{*st.ParentHash}); err != nil {
				return err
			}
		}
	}
	m := newMessage(seq, text)
	if err := s.keep(ctx, m, s.tr.routerEvent(e), 0); err != nil {
		return err
	}
	s.cur.finish(m)
	if seq == 0 {
		s.cur.first(text)
	}
	return nil
}

func kindOf(e *kvcache.RouterEvent) wire.Kind {
	switch {
	case e.Event.Data.Stored != nil:
		return wire.Stored
	case e.Event.Data.Removed != nil:
		return wire.Removed
	}
	return wire.Cleared
}

// routerEvent translates an event of Dynamo's form, which brings local hashes instead of tokens.
func (t *translator) routerEvent(e *kvcache.RouterEvent) (reset string) {
	t.begin()
	kind := kindOf(e)
	tier, ok := e.StorageTier.Tier()
	if !ok && kind != wire.Cleared {
		t.count(kind, resultSkipped)
		return ""
	}
	switch d := e.Event.Data; kind {
	case wire.Stored:
		hashes := make([]kvcache.EngineHash, len(d.Stored.Blocks))
		locals := make([]kvcache.LocalHash, len(d.Stored.Blocks))
		for i, b := range d.Stored.Blocks {
			hashes[i], locals[i] = kvcache.EngineHash(b.BlockHash), *b.TokensHash
		}
		if len(hashes) == 0 || t.selfReferring(d.Stored.ParentHash, hashes) {
			t.count(kind, resultSkipped)
			return ""
		}
		t.count(kind, t.chain(tier, d.Stored.ParentHash, "", hashes, locals))
	case wire.Removed:
		t.remove(tier, d.Removed.BlockHashes)
		t.count(kind, resultApplied)
	default:
		t.orphans.clear()
		t.count(kind, resultApplied)
		return resetClear
	}
	return ""
}
