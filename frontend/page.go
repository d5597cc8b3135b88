package frontend

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/inflight"
	"github.com/warmroute/warmroute/frontend/ui"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// pageRoutes are those of the web page. Its files can be had without a token, because a browser cannot send one with the first
// request; all data needs it.
func (f *Frontend) pageRoutes(open gin.IRoutes, closed gin.IRoutes) {
	file := func(c *gin.Context) {
		if !ui.ServeFile(c.Writer, c.Param("file")) {
			fail(c, refuse(http.StatusNotFound, "not_found", "there is no such route"))
		}
	}
	open.GET("/", func(c *gin.Context) {
		c.Header("Location", "ui") // relative: what is in front may serve this below a path
		c.Status(http.StatusFound)
	})
	open.GET("/ui", file)
	open.GET("/ui/assets/:file", file)
	closed.GET("/ui/events", func(c *gin.Context) {
		if !f.page.ServeFeed(c.Writer, c.Request) {
			fail(c, unavailable("overloaded", "too many pages watch this frontend, or it is draining"))
		}
	})
	closed.GET("/ui/state", func(c *gin.Context) {
		c.Data(http.StatusOK, "application/json", f.page.Snapshot(c.Request.Context()))
	})
	closed.POST("/ui/explore", f.explore)
}

// pageSource is what the page shows of a frontend.
type pageSource struct{ f *Frontend }

// State is the frontend's own view; see [ui.Source].
func (p pageSource) State() ui.State {
	f := p.f
	s := f.fleet.Snapshot()
	out := ui.State{
		Frontend: f.Addr(), Instance: f.instance, Draining: f.draining.Load(), Policy: f.o.Policy, Fallback: f.o.Fallback,
		Budget: f.o.LookupBudget.Seconds(), InFlight: int(f.underWay.used.Load()), Index: f.pageIndex(s), Workers: []ui.Worker{},
	}
	var places []inflight.Place
	for _, n := range s.Nodes() {
		w := ui.Worker{
			ID: n.ID, Tenant: n.Tenant, URL: n.URL.Redacted(), Engine: n.Engine, Source: string(n.Source),
			State: n.State.String(), Cause: n.Cause, Since: n.Since, Models: []string{}, Ranks: make([]ui.Rank, len(n.Ranks)),
		}
		if n.State == fleet.Healthy && f.breakers.Open(n.Key()) {
			w.State, w.Cause = workersOpen, causeOpen
		}
		for _, m := range n.Models {
			w.Models = append(w.Models, m.ID)
		}
		for i, rank := range n.Ranks {
			w.Ranks[i].Rank = rank
			places = append(places, inflight.Place{Tenant: n.Tenant, WorkerRank: kvcache.WorkerRank{Worker: n.ID, Rank: rank}})
		}
		out.Workers = append(out.Workers, w)
	}
	loads := f.inFlight.Loads(places)
	for i := range out.Workers {
		for j := range out.Workers[i].Ranks {
			out.Workers[i].Ranks[j].Load, loads = ui.Load(loads[0]), loads[1:]
		}
	}
	return out
}

const causeOpen = "it has failed requests one after the other"

// pageIndex is /ready's view of the index, and since when and why it is so.
func (f *Frontend) pageIndex(s *fleet.Snapshot) ui.Index {
	var parts []component
	h := f.indexHealth(s, &parts)
	out := ui.Index{State: string(h.State), Updated: h.Updated, Links: []ui.Link{}}
	var down, up *time.Time
	for _, c := range parts {
		out.Links = append(out.Links, ui.Link{Name: c.Name, Up: c.Status == "up", Since: c.Since, Detail: c.Detail})
		overlaps := strings.HasPrefix(c.Name, "index/")
		switch {
		case !overlaps || c.Since == nil:
		case c.Status == "down":
			if out.Reason == "" {
				out.Reason = c.Detail
			}
			if down == nil || c.Since.Before(*down) {
				down = c.Since
			}
		case up == nil || c.Since.After(*up):
			up = c.Since
		}
	}
	switch h.State {
	case kvcache.Bypassed:
		out.Reason = reasonDisabled
	case kvcache.Exact:
		out.Since, out.Reason = up, ""
	default:
		out.Since = down
	}
	return out
}

// Inspect reads what only Redis knows; see [ui.Source].
func (p pageSource) Inspect(ctx context.Context) ([]ui.Pool, error) {
	x := p.f.o.Index
	if x == nil {
		return nil, nil
	}
	pools, err := x.Pools(ctx)
	if err != nil {
		return nil, errors.New(closedReason(store.Reason(err)))
	}
	var out []ui.Pool
	var errs []string
	failed := func(err error) {
		if reason := closedReason(store.Reason(err)); !slices.Contains(errs, reason) {
			errs = append(errs, reason)
		}
	}
	for _, id := range pools {
		ranks := map[kvcache.WorkerRank]*ui.PoolRank{}
		at := func(w kvcache.WorkerRank) *ui.PoolRank {
			if ranks[w] == nil {
				ranks[w] = &ui.PoolRank{Worker: w.Worker, Rank: w.Rank}
			}
			return ranks[w]
		}
		streams, err := x.Streams(ctx, id)
		if err != nil {
			failed(err)
		}
		sizes, unsized := x.Sizes(ctx, id)
		if unsized != nil {
			failed(unsized)
		}
		for _, st := range streams {
			r, n := at(st.WorkerRank), sizes[st.WorkerRank]
			r.URL, r.Engine, r.Followed = st.URL, st.Engine, true
			r.Stream = ui.Stream{
				Model: id.Model, Generation: st.Generation, Epoch: st.Epoch, Watermark: st.Seq, Updated: st.Updated,
				Blocks: ui.Blocks{Device: n[kvcache.Device], Host: n[kvcache.Host], Disk: n[kvcache.Disk], Predicted: n[kvcache.Predicted]},
			}
		}
		loads, err := x.Loads(ctx, id)
		if err != nil {
			failed(err)
		} else {
			for _, st := range streams { // no lease is no load
				at(st.WorkerRank).Shared = &ui.Load{}
			}
		}
		for w, l := range loads {
			at(w).Shared = (*ui.Load)(&l)
		}
		tenant := id.Tenant
		if tenant == "" {
			tenant = kvcache.DefaultTenant
		}
		pool := ui.Pool{Tenant: tenant, Model: id.Model}
		for w, r := range ranks {
			if _, ok := sizes[w]; ok || unsized == nil { // else it stays as it was
				pool.Ranks = append(pool.Ranks, *r)
			}
		}
		out = append(out, pool)
	}
	if len(errs) > 0 {
		return out, errors.New(strings.Join(errs, ", "))
	}
	return out, nil
}

// maxKept bounds the candidates of a decision that the page keeps.
const maxKept = 128

// decided tells the page of a choice. Explaining it is left to whoever looks, so that what is kept must hold no part of
// the request.
func (f *Frontend) decided(endpoint string, w *want, p *placed, retry int, since time.Time) {
	k := &knowledge{blockSize: w.k.blockSize, state: w.k.state, reason: w.k.reason, tokens: w.k.tokens, blocks: w.k.blocks}
	c := p.chosen()
	d := &ui.Decision{
		Time: time.Now(), Endpoint: endpoint, Tenant: w.pool.Tenant, Model: w.pool.Model, Worker: c.Worker, Rank: c.Rank, Retry: retry,
		State: string(k.state), Cause: k.reason, Known: k.overlapKnown(c.overlap.Any), Overlap: min(c.overlap.Any, k.blocks), Blocks: k.blocks,
		Index: w.k.spent,
	}
	if !since.IsZero() {
		d.Route = d.Time.Sub(since)
	}
	asked := want{k: k, weights: w.weights, tokens: w.tokens}
	kept, omitted := p.firstOf(maxKept)
	d.Explain = func() any {
		e := explain(&asked, &kept)
		if n := len(e.Candidates); n > shownCandidates {
			e.Candidates, e.Omitted = e.Candidates[:shownCandidates], n-shownCandidates
		}
		e.Omitted += omitted
		return e
	}
	f.page.Record(d)
}

// shownCandidates are as many as the page shows of a decision.
const shownCandidates = 16

// firstOf is the choice among at most n candidates, the one chosen and the first others.
func (p *placed) firstOf(n int) (placed, int) {
	if len(p.list) <= n {
		return *p, 0
	}
	out := *p
	out.list, out.loads, out.index = make([]candidate, 0, n), make([]choose.Load, 0, n), 0
	out.list, out.loads = append(out.list, *p.chosen()), append(out.loads, p.loads[p.index])
	for i := 0; len(out.list) < n; i++ {
		if i != p.index {
			out.list, out.loads = append(out.list, p.list[i]), append(out.loads, p.loads[i])
		}
	}
	return out, len(p.list) - n
}

// explored is the answer of POST /ui/explore.
type explored struct {
	*explanation
	Cause   string `json:"cause,omitempty"` // why overlaps are unknown, of index_fallbacks_total
	Model   string `json:"model"`           // that names the pool
	Blocks  int    `json:"prompt_blocks"`   // full ones
	Shown   int    `json:"shown_blocks"`    // those that holders is about
	Holders []held `json:"holders"`         // worker ranks that hold any of them, also such as cannot be chosen
	Problem string `json:"holders_problem,omitempty"`
}

// held is one worker rank's share of a prompt: a hexadecimal digit per block, bit t of which is set where it holds the block on tier
// t (1 device, 2 host, 4 disk, 8 predicted).
type held struct {
	Worker string `json:"worker_id"`
	Rank   int    `json:"dp_rank"`
	Tiers  string `json:"tiers"`
}

// maxExplored bounds the blocks of a prompt that are looked at one by one.
const maxExplored = 8192

// exploreLimit bounds the reading of single blocks.
const exploreLimit = 2 * time.Second

// explore answers POST /ui/explore: where would this prompt go, why, and who holds which block of it? It takes what /select takes,
// and counts in none of the metrics of choices.
func (f *Frontend) explore(c *gin.Context) {
	r, err := f.readSelect(c)
	if err != nil {
		fail(c, err)
		return
	}
	p, err := f.place(c.Request.Context(), &r.want, r.list, nil)
	if err != nil {
		fail(c, err)
		return
	}
	k := r.want.k
	out := explored{
		explanation: explain(&r.want, &p), Cause: k.reason, Model: r.want.pool.Model, Blocks: k.blocks, Holders: []held{},
	}
	hashes := k.hashes[:min(len(k.hashes), maxExplored)]
	out.Shown = len(hashes)
	if k.known() && len(hashes) > 0 {
		ctx, cancel := context.WithTimeout(c.Request.Context(), exploreLimit)
		defer cancel()
		holders, err := f.o.Index.Holders(ctx, r.want.pool, hashes)
		if err != nil {
			out.Problem = closedReason(store.Reason(err))
		}
		for w, tiers := range holders {
			digits := make([]byte, len(tiers))
			for i, t := range tiers {
				digits[i] = "0123456789abcdef"[t&0xF]
			}
			out.Holders = append(out.Holders, held{w.Worker, w.Rank, string(digits)})
		}
		slices.SortFunc(out.Holders, func(a, b held) int {
			return cmp.Or(cmp.Compare(a.Worker, b.Worker), a.Rank-b.Rank)
		})
	}
	c.JSON(http.StatusOK, out)
}
