package frontend

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/inflight"
	"github.com/warmroute/warmroute/kvcache"
)

// models answers GET /v1/models: what the workers of the tenant serve, alive or last known.
func (f *Frontend) models(c *gin.Context) {
	list := f.fleet.Snapshot().Models(f.o.Tenant)
	if list == nil {
		list = []fleet.Model{}
	}
	c.JSON(http.StatusOK, gin.H{"object": "list", "data": list})
}

// component is one line of /ready.
type component struct {
	Name   string     `json:"name"`
	Status string     `json:"status"` // up, down, draining, open, unused
	Detail string     `json:"detail,omitempty"`
	Since  *time.Time `json:"since,omitempty"`
}

// ready answers GET /ready. It is about this process and its workers: an index that is away shows, and
// changes nothing.
func (f *Frontend) ready(c *gin.Context) {
	s := f.fleet.Snapshot()
	list := []component{}
	for _, n := range s.Nodes() {
		w := component{Name: "worker/" + n.Key().String(), Status: "up", Since: &n.Since}
		switch {
		case n.State == fleet.Draining:
			w.Status, w.Detail = "draining", n.Cause
		case n.State != fleet.Healthy:
			w.Status, w.Detail = "down", n.Cause
		case f.breakers.Open(n.Key()):
			w.Status, w.Detail = "open", "it has failed requests one after the other"
		}
		list = append(list, w)
	}
	for name, at := range s.Names() {
		list = append(list, statusOf("dns/"+name, at))
	}
	index := f.indexHealth(s, &list)
	sources := map[fleet.Source]int{fleet.SourceConfig: 0, fleet.SourceIndex: 0, fleet.SourceDNS: 0, fleet.SourceSaved: 0}
	for _, n := range s.Nodes() {
		sources[n.Source]++
	}
	status, code := "ready", http.StatusOK
	switch {
	case f.draining.Load():
		status, code = "draining", http.StatusServiceUnavailable
	case s.Taking() == 0:
		status, code = "no worker", http.StatusServiceUnavailable
	}
	c.JSON(code, gin.H{
		"status": status, "degraded": index.State == kvcache.Degraded || index.State == kvcache.Partial, "index": index,
		"workers": s.Taking(), "sources": sources, "components": list,
	})
}

// indexHealth is what /ready and /workers say of the index as a whole.
type indexHealth struct {
	State kvcache.IndexState `json:"state"` // what requests can expect; bypassed: there is no index
	// Updated is when any worker's stream last changed or was renewed, as of the last reading, and Age the seconds
	// since. Absent where unknown.
	Updated *time.Time `json:"last_updated,omitempty"`
	Age     *float64   `json:"age_seconds,omitempty"`
}

// indexHealth adds the parts of the index to list.
func (f *Frontend) indexHealth(s *fleet.Snapshot, list *[]component) indexHealth {
	if f.o.Index == nil {
		*list = append(*list, component{Name: "index", Status: "unused"})
		return indexHealth{State: kvcache.Bypassed}
	}
	h := indexHealth{State: kvcache.Exact}
	links := f.o.Index.Links()
	shards, down, poolsDown := 0, 0, false
	for _, l := range links {
		if pool, ok := strings.CutSuffix(l.Shard, linkOfLoads); ok { // no overlaps hang on it
			w := component{Name: "loads/" + pool, Status: "up", Since: &l.Since}
			if !l.Up {
				w.Status, w.Detail = "down", l.Reason
			}
			*list = append(*list, w)
			continue
		}
		w := component{Name: "index/" + l.Shard, Status: "up", Since: &l.Since}
		if !l.Up {
			w.Status, w.Detail = "down", l.Reason
		}
		if l.Shard == linkOfPools {
			poolsDown = !l.Up
		} else {
			shards++
			if !l.Up {
				down++
			}
		}
		*list = append(*list, w)
	}
	if at := s.Catalog(); !at.Since.IsZero() {
		*list = append(*list, statusOf("index/workers", at))
		if !at.Up {
			h.State = kvcache.Degraded // a link goes down with a request that it failed, and there may be none
		}
	}
	switch {
	case down > 0 && down == shards, poolsDown && shards == 0:
		h.State = kvcache.Degraded
	case down > 0 || poolsDown:
		h.State = kvcache.Partial
	}
	if at := s.Updated(); !at.IsZero() {
		age := max(time.Since(at).Seconds(), 0)
		h.Updated, h.Age = &at, &age
	}
	return h
}

func statusOf(name string, at fleet.Status) component {
	c := component{Name: name, Status: "up", Detail: at.Cause}
	if !at.Up {
		c.Status = "down"
	}
	if at.Since.IsZero() {
		c.Detail = "not looked at yet"
	} else {
		c.Since = &at.Since
	}
	return c
}

type workerInfo struct {
	ID       string         `json:"id"`
	URL      string         `json:"url"`
	Engine   string         `json:"engine,omitempty"`
	Tenant   string         `json:"tenant_id"`
	Source   fleet.Source   `json:"source"`
	Healthy  bool           `json:"healthy"`
	State    string         `json:"state"` // of warmroute_workers
	Cause    string         `json:"cause,omitempty"`
	Since    time.Time      `json:"since"`
	Models   []string       `json:"models"`
	InFlight []rankInFlight `json:"in_flight"`
}

type rankInFlight struct {
	Rank          int `json:"dp_rank"`
	Requests      int `json:"requests"`
	PrefillTokens int `json:"prefill_tokens"`
	DecodeBlocks  int `json:"decode_blocks"`
}

// workers answers GET /workers.
func (f *Frontend) workers(c *gin.Context) {
	list := []workerInfo{}
	s := f.fleet.Snapshot()
	for _, n := range s.Nodes() {
		w := workerInfo{
			ID: n.ID, URL: n.URL.Redacted(), Engine: n.Engine, Tenant: n.Tenant, Source: n.Source,
			Healthy: n.State == fleet.Healthy, State: n.State.String(), Cause: n.Cause, Since: n.Since, Models: []string{},
		}
		if w.Healthy && f.breakers.Open(n.Key()) {
			w.State = workersOpen
		}
		for _, m := range n.Models {
			w.Models = append(w.Models, m.ID)
		}
		for _, rank := range n.Ranks {
			at := inflight.Place{Tenant: n.Tenant, WorkerRank: kvcache.WorkerRank{Worker: n.ID, Rank: rank}}
			l := f.inFlight.Loads([]inflight.Place{at})[0]
			w.InFlight = append(w.InFlight, rankInFlight{rank, l.Requests, l.PrefillTokens, l.DecodeBlocks})
		}
		list = append(list, w)
	}
	c.JSON(http.StatusOK, gin.H{"workers": list, "index": f.indexHealth(s, &[]component{})})
}

// dump answers GET /dump: every stored block of all pools, or of those of ?model= and ?tenant_id=, one
// RouterEvent per line. A dump that breaks off does not end cleanly.
func (f *Frontend) dump(c *gin.Context) {
	if f.o.Index == nil {
		fail(c, unavailable("index_unavailable", "there is no index"))
		return
	}
	ctx := c.Request.Context()
	pools, err := f.o.Index.Pools(ctx)
	if err != nil {
		f.o.Logger.Warn("dump failed", "error", err)
		fail(c, unavailable("index_unavailable", "the index cannot be read"))
		return
	}
	model, tenant := c.Query("model"), c.Query("tenant_id")
	c.Header("Content-Type", "application/x-ndjson")
	lines := json.NewEncoder(c.Writer)
	n := 0
	for _, p := range pools {
		if p.Tenant == "" {
			p.Tenant = kvcache.DefaultTenant
		}
		if model != "" && model != p.Model || tenant != "" && tenant != p.Tenant {
			continue
		}
		err := f.o.Index.Dump(ctx, p, func(e kvcache.RouterEvent) error {
			n++
			return lines.Encode(e)
		})
		switch {
		case err == nil:
		case !c.Writer.Written():
			f.o.Logger.Warn("dump failed", "error", err)
			fail(c, unavailable("index_unavailable", "the index cannot be read"))
			return
		default:
			f.o.Logger.Warn("dump broke off", "lines", n, "error", err)
			panic(http.ErrAbortHandler)
		}
	}
	c.Status(http.StatusOK)
}
