package indexer

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/indexer/api"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// maxBody bounds a request's body: some 100,000 blocks in POST /events.
const maxBody = 32 << 20

// handler is the admin surface.
func (ix *Indexer) handler() http.Handler {
	r := gin.New()
	r.HandleMethodNotAllowed = true
	// Nothing here depends on the client's address, so no proxy need be trusted.
	if err := r.SetTrustedProxies(nil); err != nil {
		ix.opts.Logger.Error("trusted proxies", "error", err)
	}
	r.Use(requestID, ix.recovery, uncrowded)
	r.NoRoute(func(c *gin.Context) {
		fail(c, http.StatusNotFound, "not_found", "no such endpoint: "+c.Request.Method+" "+c.Request.URL.Path)
	})
	r.NoMethod(func(c *gin.Context) {
		fail(c, http.StatusMethodNotAllowed, "method_not_allowed", c.Request.Method+" is not for "+c.Request.URL.Path)
	})
	changing := r.Group("/", sameOrigin, ix.authorize(guard.Admin))
	changing.POST("/register", ix.postRegister)
	changing.POST("/unregister", ix.postUnregister)
	changing.POST("/events", ix.postEvents)
	reading := r.Group("/", ix.authorize(guard.Query))
	reading.GET("/workers", ix.getWorkers)
	reading.GET("/dump", ix.getDump)
	r.GET("/health", func(c *gin.Context) { c.JSON(http.StatusOK, gin.H{"status": "ok"}) })
	r.GET("/ready", ix.getReady)
	r.GET("/metrics", gin.WrapH(promhttp.HandlerFor(ix.opts.Gatherer, promhttp.HandlerOpts{})))
	r.GET("/openapi.yaml", func(c *gin.Context) { c.Data(http.StatusOK, "application/yaml", api.OpenAPI) })
	return r
}

// fail answers in OpenAI's error shape.
func fail(c *gin.Context, status int, code, message string) {
	kind := "invalid_request_error" // as OpenAI says of keys too
	if status >= 500 {
		kind = "server_error"
	}
	c.AbortWithStatusJSON(status, gin.H{"error": gin.H{"message": message, "type": kind, "code": code}})
}

// failStore answers an error of the index.
func failStore(c *gin.Context, err error) {
	var conflict *store.ConflictError
	switch {
	case errors.As(err, &conflict):
		fail(c, http.StatusConflict, conflict.Field+"_conflict", conflict.Error())
	case errors.Is(err, store.ErrInvalid) && !errors.Is(err, errAgain):
		fail(c, http.StatusBadRequest, "invalid", err.Error())
	case errors.Is(err, store.ErrCorrupt):
		fail(c, http.StatusInternalServerError, "index_corrupt", err.Error())
	default:
		c.Header("Retry-After", "1")
		fail(c, http.StatusServiceUnavailable, "index_unavailable", err.Error())
	}
}

// requestID takes the caller's request id or makes one, and echoes it.
func requestID(c *gin.Context) {
	id := c.GetHeader("X-Request-Id")
	if id == "" || len(id) > 128 || strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r > '~' }) {
		b := make([]byte, 8)
		_, _ = rand.Read(b) // cannot fail
		id = hex.EncodeToString(b)
	}
	c.Header("X-Request-Id", id)
}

// recovery answers a panic of a handler with a 500. Where the answer has begun, the client must see it break.
func (ix *Indexer) recovery(c *gin.Context) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if err, ok := p.(error); !ok || !errors.Is(err, http.ErrAbortHandler) {
			ix.opts.Logger.Error("panic in a request", "path", c.Request.URL.Path, "panic", p, "stack", string(debug.Stack()))
			if !c.Writer.Written() {
				fail(c, http.StatusInternalServerError, "internal", "internal error")
				return
			}
		}
		panic(http.ErrAbortHandler)
	}()
	c.Next()
}

// authorize lets requests pass that have a token for what the route needs.
func (ix *Indexer) authorize(need guard.Role) gin.HandlerFunc {
	return func(c *gin.Context) {
		if r := ix.opts.Tokens.Check(need, c.GetHeader("Authorization")); r != nil {
			c.Header("WWW-Authenticate", r.Challenge)
			fail(c, r.Status, r.Code, r.Message)
		}
	}
}

var crossOrigin = http.NewCrossOriginProtection()

// sameOrigin refuses what a browser sends on behalf of another site: where no token is asked for, any page that somebody looks at on this machine
// could register an engine.
func sameOrigin(c *gin.Context) {
	if err := crossOrigin.Check(c.Request); err != nil {
		fail(c, http.StatusForbidden, "cross_origin", "a web page of another site may not change the index: "+err.Error())
	}
}

// uncrowded turns away what comes over a connection too many, but for probes.
func uncrowded(c *gin.Context) {
	switch c.FullPath() {
	case "/health", "/ready", "/metrics":
		return
	}
	if guard.Crowded(c.Request.Context()) {
		c.Header("Connection", "close")
		c.Header("Retry-After", "1")
		fail(c, http.StatusServiceUnavailable, "overloaded", "too many connections are open; try again")
	}
}

// body reads a JSON object. It answers and returns false where there is none.
func body(c *gin.Context, v any) bool {
	var b []byte
	var err error
	if c.Request.ContentLength <= maxBody { // else nobody need wait for it
		b, err = io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, maxBody))
	}
	var tooLarge *http.MaxBytesError
	switch {
	case c.Request.ContentLength > maxBody || errors.As(err, &tooLarge):
		c.Header("Connection", "close")
		fail(c, http.StatusRequestEntityTooLarge, "too_large", fmt.Sprintf("the body is larger than %d bytes", maxBody))
		return false
	case err != nil:
		fail(c, http.StatusBadRequest, "bad_body", "the body could not be read: "+err.Error())
		return false
	}
	if trimmed := strings.TrimSpace(string(b[:min(len(b), 512)])); !strings.HasPrefix(trimmed, "{") {
		fail(c, http.StatusBadRequest, "bad_json", "the body must be a JSON object")
		return false
	}
	if err := json.Unmarshal(b, v); err != nil {
		fail(c, http.StatusBadRequest, "bad_json", "the body is not what this endpoint takes: "+err.Error())
		return false
	}
	return true
}

func (ix *Indexer) getWorkers(c *gin.Context) {
	workers := []Status{}
	for _, s := range ix.all() {
		workers = append(workers, s.snapshot())
	}
	slices.SortFunc(workers, func(a, b Status) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Model, b.Model), cmp.Compare(a.Worker, b.Worker), a.Rank-b.Rank)
	})
	c.JSON(http.StatusOK, gin.H{"workers": workers})
}

// getReady says whether requests are served; it does not hang on Redis, whose absence the indexer rides out.
func (ix *Indexer) getReady(c *gin.Context) {
	ix.mu.Lock()
	draining := ix.draining
	ix.mu.Unlock()
	streams, connected, registered := 0, 0, 0
	for _, s := range ix.all() {
		v := s.snapshot()
		streams++
		if v.Connected {
			connected++
		}
		if v.Registered {
			registered++
		}
	}
	index := "ok"
	ctx, cancel := context.WithTimeout(c.Request.Context(), time.Second)
	defer cancel()
	if _, err := ix.opts.Store.Pools(ctx); err != nil {
		index = store.Reason(err)
	}
	status, word := http.StatusOK, "ready"
	if draining {
		status, word = http.StatusServiceUnavailable, "draining"
	}
	c.JSON(status, gin.H{
		"status": word, "index": index,
		"streams": gin.H{"followed": streams, "connected": connected, "registered": registered},
	})
}

// getDump streams every stored block, one RouterEvent per line. ?model= and ?tenant= choose pools.
func (ix *Indexer) getDump(c *gin.Context) {
	ctx := c.Request.Context()
	pools, err := ix.opts.Store.Pools(ctx)
	if err != nil {
		failStore(c, err)
		return
	}
	slices.SortFunc(pools, func(a, b kvcache.PoolID) int { return cmp.Compare(a.String(), b.String()) })
	model, tenant := c.Query("model"), c.Query("tenant")
	pools = slices.DeleteFunc(pools, func(p kvcache.PoolID) bool {
		return model != "" && p.Model != model || tenant != "" && p.Tenant != tenant
	})
	if model != "" && len(pools) == 0 {
		fail(c, http.StatusNotFound, "unknown_model", fmt.Sprintf("no pool of model %q", model))
		return
	}
	begin := func() {
		if !c.Writer.Written() {
			c.Header("Content-Type", "application/x-ndjson")
			c.Status(http.StatusOK)
			c.Writer.WriteHeaderNow()
		}
	}
	enc := json.NewEncoder(c.Writer)
	for _, p := range pools {
		err := ix.opts.Store.Dump(ctx, p, func(e kvcache.RouterEvent) error {
			begin()
			return enc.Encode(e)
		})
		if err != nil {
			if !c.Writer.Written() {
				failStore(c, err)
				return
			}
			panic(http.ErrAbortHandler) // a dump that ends early must not look complete
		}
	}
	begin()
}
