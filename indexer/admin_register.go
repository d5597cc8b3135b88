package indexer

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// target names a stream as the requests of Mooncake's conductor do.
type target struct {
	Instance  kvcache.WorkerName `json:"instance_id"`
	ModelName string             `json:"modelname"`
	Model     string             `json:"model_name"`
	Tenant    string             `json:"tenant_id"`
}

// pool is the pool that is meant; it answers and returns false where that is not clear.
func (t target) pool(c *gin.Context) (kvcache.PoolID, bool) {
	model := t.Model
	if model == "" {
		model = t.ModelName
	}
	if t.Instance == "" || model == "" {
		fail(c, http.StatusBadRequest, "missing_field", "instance_id and model_name are required")
		return kvcache.PoolID{}, false
	}
	if t.Model != "" && t.ModelName != "" && t.Model != t.ModelName {
		fail(c, http.StatusBadRequest, "invalid", fmt.Sprintf("modelname %q and model_name %q differ", t.ModelName, t.Model))
		return kvcache.PoolID{}, false
	}
	return poolID(t.Tenant, model), true
}

// postRegister follows a worker rank. Equal content again changes nothing; a moved engine is followed to its new place.
func (ix *Indexer) postRegister(c *gin.Context) {
	var req struct {
		target
		Endpoint       string `json:"endpoint"`
		ReplayEndpoint string `json:"replay_endpoint"`
		Type           string `json:"type"`
		URL            string `json:"url"`
		LoRA           string `json:"lora_name"`
		BlockSize      int    `json:"block_size"`
		Rank           int    `json:"dp_rank"`
		Salt           string `json:"additionalsalt"`
		Topic          string `json:"topic"` // ours: the subscription prefix
		Mode           string `json:"mode"`  // ours: count or set
	}
	if !body(c, &req) {
		return
	}
	pool, ok := req.pool(c)
	if !ok {
		return
	}
	p := publisher{
		id: store.StreamID{Pool: pool, WorkerRank: kvcache.WorkerRank{Worker: string(req.Instance), Rank: req.Rank}},
		reg: store.Registration{
			BlockSize: req.BlockSize, URL: req.URL, Endpoint: req.Endpoint, ReplayEndpoint: req.ReplayEndpoint,
			Engine: req.Type, Topic: req.Topic, LoRA: req.LoRA, Salt: req.Salt, Set: req.Mode == ModeSet,
		},
	}
	if err := errors.Join(p.check(), checkURL(req.URL), checkMode(req.Mode)); err != nil {
		fail(c, http.StatusBadRequest, "invalid", err.Error())
		return
	}
	if err := ix.mayFollow(c.Request.Context(), &p); err != nil {
		ix.opts.Logger.Warn("registration refused", "worker", p.id.WorkerRank.String(), "error", err)
		fail(c, http.StatusBadRequest, "address_refused", err.Error())
		return
	}
	status, st, err := ix.enroll(c.Request.Context(), &p)
	if err != nil {
		failStore(c, err)
		return
	}
	ix.follow(p)
	if s := ix.stream(p.id); s != nil {
		s.update(func(*Status) { s.signs.registered = time.Now() })
	}
	c.JSON(status, gin.H{
		"instance_id": p.id.Worker, "dp_rank": p.id.Rank, "model_name": pool.Model, "tenant_id": pool.Tenant,
		"block_size": p.reg.BlockSize, "registered": st.Generation != 0, "generation": st.Generation,
	})
}

// enroll makes the stream known to the index at once where it can. Redis may be away, and the block size may be known
// to the first event only: then the stream does it later, and the status is 202.
func (ix *Indexer) enroll(ctx context.Context, p *publisher) (status int, st store.Stream, err error) {
	if p.reg.BlockSize == 0 {
		config, ok, err := ix.opts.Store.PoolConfig(ctx, p.id.Pool)
		if err != nil && !errors.Is(err, store.ErrUnavailable) {
			return 0, st, err
		}
		if !ok {
			return http.StatusAccepted, st, nil
		}
		p.reg.BlockSize = config.BlockSize
	}
	st, _, err = ix.opts.Store.Register(ctx, p.id, p.reg)
	if errors.Is(err, store.ErrUnavailable) {
		return http.StatusAccepted, store.Stream{}, nil
	}
	return http.StatusCreated, st, err
}

// postUnregister ends streams at once. Another indexer that follows the worker finds the mark of it when it next writes or looks.
func (ix *Indexer) postUnregister(c *gin.Context) {
	var req struct {
		target
		Rank *int `json:"dp_rank"` // nil: all ranks
	}
	if !body(c, &req) {
		return
	}
	pool, ok := req.pool(c)
	if !ok {
		return
	}
	ctx := c.Request.Context()
	streams, err := ix.opts.Store.Streams(ctx, pool)
	if err != nil {
		failStore(c, err)
		return
	}
	mine := func(id store.StreamID) bool {
		return id.Pool == pool && id.Worker == string(req.Instance) && (req.Rank == nil || id.Rank == *req.Rank)
	}
	found := map[store.StreamID]bool{}
	for _, st := range streams {
		if id := (store.StreamID{Pool: pool, WorkerRank: st.WorkerRank}); mine(id) {
			found[id] = true
		}
	}
	for _, s := range ix.all() {
		if mine(s.id) {
			found[s.id] = true
		}
	}
	if len(found) == 0 {
		fail(c, http.StatusNotFound, "unknown_worker", fmt.Sprintf("worker %q is not registered for model %q", req.Instance, pool.Model))
		return
	}
	for id := range found {
		ix.unfollow(id) // first, or its next event would register it again
		if err := ix.remove(ctx, id); err != nil {
			failStore(c, err)
			return
		}
	}
	c.JSON(http.StatusOK, gin.H{"instance_id": string(req.Instance), "model_name": pool.Model, "tenant_id": pool.Tenant, "removed": len(found)})
}

// remove ends a stream in the index, whatever generation it is in.
func (ix *Indexer) remove(ctx context.Context, id store.StreamID) error {
	for {
		st, ok, err := ix.opts.Store.Stream(ctx, id)
		if err != nil || !ok {
			return err
		}
		if o, err := ix.opts.Store.Remove(ctx, st); err != nil || o != store.Stale {
			return err
		}
	}
}
