package frontend

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"runtime/debug"
	"strconv"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/warmroute/warmroute/frontend/api"
	"github.com/warmroute/warmroute/frontend/openai"
	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/kvcache"
)

const (
	headerRequestID = "X-Request-Id"
	keyIndexState   = "index_state" // in a gin.Context: what the index contributed, for metrics
	keyBodyRead     = "body_read"   // in a gin.Context: true once the body was read to its end
)

func (f *Frontend) routes() http.Handler {
	gin.SetMode(gin.ReleaseMode)
	r := gin.New()
	r.HandleMethodNotAllowed = true
	r.ForwardedByClientIP = false
	_ = r.SetTrustedProxies(nil) // nil cannot fail
	r.Use(f.observe, f.recoverPanic, requestID, uncrowded)
	r.NoRoute(func(c *gin.Context) {
		fail(c, refuse(http.StatusNotFound, "not_found", "there is no such route (GET /openapi.yaml has those that there are)"))
	})
	r.NoMethod(func(c *gin.Context) {
		fail(c, refuse(http.StatusMethodNotAllowed, "method_not_allowed", "the route does not take this method"))
	})

	r.GET("/health", func(c *gin.Context) { c.JSON(http.StatusOK, gin.H{"status": "ok"}) })
	r.GET("/ready", f.ready)
	r.GET("/metrics", gin.WrapH(promhttp.HandlerFor(f.o.Gatherer, promhttp.HandlerOpts{})))
	r.GET("/openapi.yaml", func(c *gin.Context) { c.Data(http.StatusOK, "application/yaml", api.OpenAPI) })

	served := r.Group("/", f.authorize(guard.Client), f.traced)
	served.POST("/v1/chat/completions", f.proxy(openai.Chat))
	served.POST("/v1/completions", f.proxy(openai.Completions))
	served.POST("/v1/embeddings", f.proxy(openai.Embeddings))
	served.POST("/v1/responses", f.proxy(openai.Responses))
	// Who asks the index about a text needs these as well.
	either := r.Group("/", f.authorize(guard.Client|guard.Query))
	either.GET("/v1/models", f.models)
	either.POST("/tokenize", f.traced, f.proxy(openai.Plain))
	either.POST("/detokenize", f.traced, f.proxy(openai.Plain))

	g := r.Group("/", f.authorize(guard.Query))
	traced := g.Group("/", f.traced)
	traced.POST("/query", f.query)
	traced.POST("/query_by_hash", f.queryByHash)
	traced.POST("/select", f.selectWorker(false))
	traced.POST("/select_and_reserve", f.selectWorker(true))
	g.POST("/reservations/:id/prefill_complete", f.reservation(func(ctx context.Context, p kvcache.PoolID, id string) (bool, error) {
		return f.o.Index.PrefillDone(ctx, p, id)
	}))
	g.POST("/reservations/:id/output_block", f.reservation(func(ctx context.Context, p kvcache.PoolID, id string) (bool, error) {
		return f.o.Index.OutputBlocks(ctx, p, id, 1)
	}))
	g.DELETE("/reservations/:id", f.reservation(func(ctx context.Context, p kvcache.PoolID, id string) (bool, error) {
		return f.o.Index.Release(ctx, p, id)
	}))
	g.GET("/loads", f.loads)
	g.POST("/potential_loads", f.potentialLoads)
	g.GET("/workers", f.workers)
	g.GET("/dump", f.dump)
	f.pageRoutes(r, g)
	return r
}

// observe counts every request once, also one that panics.
func (f *Frontend) observe(c *gin.Context) {
	defer func() {
		endpoint := c.FullPath()
		if endpoint == "" {
			endpoint = "unmatched"
		}
		state := c.GetString(keyIndexState)
		if state == "" {
			state = "none"
		}
		f.metrics.requests.WithLabelValues(endpoint, strconv.Itoa(c.Writer.Status()), state).Inc()
	}()
	c.Next()
}

// recoverPanic answers 500 where it still can. [http.ErrAbortHandler] goes on to the server:
// only it can break the connection, and a broken answer must not look complete.
func (f *Frontend) recoverPanic(c *gin.Context) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if p == http.ErrAbortHandler {
			panic(p)
		}
		f.o.Logger.Error("panic in a handler", "panic", p, "stack", string(debug.Stack()))
		if c.Writer.Written() {
			panic(http.ErrAbortHandler)
		}
		fail(c, errInternal)
	}()
	c.Next()
}

// requestID takes or makes the request's id, passes it on and echoes it.
func requestID(c *gin.Context) {
	id := c.GetHeader(headerRequestID)
	if !printable(id, 128) {
		var b [16]byte
		_, _ = rand.Read(b[:]) // never fails
		id = hex.EncodeToString(b[:])
		c.Request.Header.Set(headerRequestID, id)
	}
	c.Header(headerRequestID, id)
	c.Next()
}

func printable(s string, limit int) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return s != "" && len(s) <= limit
}

// authorize lets requests pass that have a token for what the route needs.
func (f *Frontend) authorize(need guard.Role) gin.HandlerFunc {
	return func(c *gin.Context) {
		if r := f.o.Tokens.Check(need, c.GetHeader("Authorization")); r != nil {
			c.Header("WWW-Authenticate", r.Challenge)
			fail(c, refuse(r.Status, r.Code, r.Message))
		}
	}
}

// authorization is what a worker may see of a client's header: nothing of a token that is this frontend's. Of several headers, which
// no protocol has a meaning for, it is nothing either.
func (f *Frontend) authorization(h http.Header) string {
	v := h.Values("Authorization")
	if len(v) != 1 || f.o.Tokens.Asks(guard.Client) || f.o.Tokens.Known(v[0]) {
		return ""
	}
	return v[0]
}

// uncrowded turns away what comes over a connection too many, but for probes.
func uncrowded(c *gin.Context) {
	switch c.FullPath() {
	case "/health", "/ready", "/metrics":
		return
	}
	if guard.Crowded(c.Request.Context()) {
		c.Header("Connection", "close")
		fail(c, errCrowded)
	}
}
