package frontend

import (
	"cmp"
	"context"
	"net/http"
	"slices"

	"github.com/gin-gonic/gin"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// reservation answers the routes that say what happens to a reservation. Ids are unique in a pool, and clients do not
// repeat the pool: all of the fleet's are asked, or that of ?model_name= and ?tenant_id=. A reservation that is not there
// any more is 404; loads that are away are 503, and the reservation ends with its lease.
func (f *Frontend) reservation(change func(ctx context.Context, pool kvcache.PoolID, id string) (bool, error)) gin.HandlerFunc {
	return func(c *gin.Context) {
		id := c.Param("id")
		if f.o.Index == nil || !printable(id, store.MaxLeaseID) {
			fail(c, errNoReservation)
			return
		}
		pools, err := f.poolsOf(c)
		if err != nil {
			fail(c, err)
			return
		}
		var away error
		for _, p := range pools {
			ok, err := change(c.Request.Context(), p, id)
			if ok {
				c.Status(http.StatusNoContent)
				return
			}
			away = cmp.Or(away, err)
		}
		if away != nil {
			fail(c, errLoadsAway)
			return
		}
		fail(c, errNoReservation)
	}
}

var (
	errNoReservation = refuse(http.StatusNotFound, "reservation_not_found", "there is no such reservation; perhaps its lease has ended")
	errLoadsAway     = unavailable("index_unavailable", "the loads cannot be reached; the reservation ends with its lease")
)

// poolsOf are the pools that the query names, or all that the fleet serves.
func (f *Frontend) poolsOf(c *gin.Context) ([]kvcache.PoolID, error) {
	s := f.fleet.Snapshot()
	model, tenant := cmp.Or(c.Query("model_name"), c.Query("model")), c.Query("tenant_id")
	if model != "" {
		t, err := f.resolve(s, cmp.Or(tenant, kvcache.DefaultTenant), model)
		return []kvcache.PoolID{t.Pool}, err
	}
	pools := s.Pools()
	if tenant != "" {
		pools = slices.DeleteFunc(pools, func(p kvcache.PoolID) bool { return p.Tenant != tenant })
	}
	return pools, nil
}

// activeLoad is one line of GET /loads.
type activeLoad struct {
	Model    string `json:"model_name"`
	Tenant   string `json:"tenant_id"`
	Worker   string `json:"worker_id"`
	Rank     int    `json:"dp_rank"`
	Requests int    `json:"active_requests"`
	Prefill  int    `json:"active_prefill_tokens"`
	Decode   int    `json:"active_decode_blocks"`
}

// loads answers GET /loads: what all frontends have under way at every worker rank of the fleet, and at those that left with
// requests under way.
func (f *Frontend) loads(c *gin.Context) {
	pools, err := f.poolsOf(c)
	if err != nil {
		fail(c, err)
		return
	}
	out := []activeLoad{}
	if f.o.Index == nil {
		fail(c, unavailable("index_unavailable", "there is no index, where the loads are kept"))
		return
	}
	s := f.fleet.Snapshot()
	for _, p := range pools {
		loads, err := f.o.Index.Loads(c.Request.Context(), p)
		if err != nil {
			fail(c, unavailable("index_unavailable", "the loads cannot be read"))
			return
		}
		if t, ok := s.Target(p.Tenant, p.Model); ok {
			for _, n := range t.Nodes {
				for _, rank := range n.Ranks {
					w := kvcache.WorkerRank{Worker: n.ID, Rank: rank}
					if _, has := loads[w]; !has {
						loads[w] = store.Load{} // an answer too
					}
				}
			}
		}
		for w, l := range loads {
			out = append(out, activeLoad{p.Model, p.Tenant, w.Worker, w.Rank, l.Requests, l.PrefillTokens, l.DecodeBlocks})
		}
	}
	slices.SortFunc(out, func(a, b activeLoad) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Model, b.Model), cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	c.JSON(http.StatusOK, out)
}

// potentialLoad is one line of POST /potential_loads.
type potentialLoad struct {
	Worker  string `json:"worker_id"`
	Rank    int    `json:"dp_rank"`
	Prefill int    `json:"potential_prefill_tokens"`
	Decode  int    `json:"potential_decode_blocks"`
}

// potentialLoads answers POST /potential_loads: what each worker rank would have to do if it got the request.
func (f *Frontend) potentialLoads(c *gin.Context) {
	r, err := f.readSelect(c)
	if err != nil {
		fail(c, err)
		return
	}
	r.want.policy = PolicyLeastLoaded                            // the loads of all, whatever the policy looks at
	p, err := f.place(c.Request.Context(), &r.want, r.list, nil) // reserves nothing, and brings the loads
	if p.loads == nil {
		fail(c, err)
		return
	}
	out := make([]potentialLoad, 0, len(p.list))
	for i := range p.list {
		w, l := &p.list[i], p.loads[i]
		out = append(out, potentialLoad{w.Worker, w.Rank, l.PrefillTokens + r.want.request().Prefill(w.credit), l.DecodeBlocks + r.want.blocks})
	}
	c.JSON(http.StatusOK, out)
}
