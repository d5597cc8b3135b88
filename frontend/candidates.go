package frontend

import (
	"net/http"
	"slices"
	"strconv"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/inflight"
	"github.com/warmroute/warmroute/kvcache"
)

// candidate is a worker rank that may take the request.
type candidate struct {
	kvcache.WorkerRank
	node    *fleet.Node
	overlap kvcache.Overlap
	credit  float64 // blocks of the prompt that need no prefill there
}

func (c *candidate) place() inflight.Place {
	return inflight.Place{Tenant: c.node.Tenant, WorkerRank: c.WorkerRank}
}

// candidates are the worker ranks of a target that may take the request: the live fleet first, what the
// index knows of each second. A worker that only the index knows is never among them, nor one in excluded or one
// whose breaker is open, unless the request is pinned to it.
func (f *Frontend) candidates(t fleet.Target, p pin, k *knowledge, tiers choose.Tiers, excluded []string) []candidate {
	nodes := make([]*fleet.Node, 0, len(t.Nodes))
	for _, n := range t.Nodes {
		if !slices.Contains(excluded, n.ID) && p.allows(n) {
			nodes = append(nodes, n)
		}
	}
	var barred map[fleet.Key]bool
	if p.worker == "" {
		barred = f.breakers.Barred(keysOf(nodes))
	}
	out := make([]candidate, 0, len(nodes))
	for _, n := range nodes {
		if barred[n.Key()] {
			continue
		}
		for _, rank := range n.Ranks {
			if p.rank >= 0 && p.rank != rank {
				continue
			}
			c := candidate{node: n, WorkerRank: kvcache.WorkerRank{Worker: n.ID, Rank: rank}}
			c.overlap = k.scores.Scores[c.WorkerRank]
			c.credit = tiers.Credit(c.overlap)
			out = append(out, c)
		}
	}
	return out
}

func keysOf(nodes []*fleet.Node) []fleet.Key {
	keys := make([]fleet.Key, len(nodes))
	for i, n := range nodes {
		keys[i] = n.Key()
	}
	return keys
}

// nobody says why there are no candidates. The snapshot tells a pinned worker that is away from one
// that is not there.
func nobody(s *fleet.Snapshot, t fleet.Target, tenant string, p pin) error {
	if p.worker != "" {
		n := s.Node(fleet.KeyOf(tenant, p.worker))
		switch {
		case n == nil:
			return refuse(http.StatusBadRequest, "worker_not_found", "the pinned worker does not exist")
		case p.rank >= 0 && !slices.Contains(n.Ranks, p.rank):
			return refuse(http.StatusBadRequest, "rank_not_found", "the pinned worker has no rank "+strconv.Itoa(p.rank))
		case n.State == fleet.Draining:
			return unavailable("no_workers", "the pinned worker "+n.ID+" is draining and gets no new requests")
		case n.State != fleet.Healthy:
			return unavailable("no_workers", "the pinned worker "+n.ID+" is not answering; try again")
		case !slices.Contains(t.Nodes, n):
			return refuse(http.StatusBadRequest, "worker_not_found", "the pinned worker "+n.ID+" does not serve this model")
		case !p.allows(n):
			return refuse(http.StatusBadRequest, "worker_not_found", "the pinned worker "+n.ID+" is not among those allowed")
		}
		return errNoWorkers
	}
	exists := func(id string) bool { return s.Node(fleet.KeyOf(tenant, id)) != nil }
	if p.allowed != nil && s.Known() && !slices.ContainsFunc(p.allowed, exists) {
		return unavailable("no_workers", "none of the allowed workers is known; try again")
	}
	has := func(n *fleet.Node) bool { return n.Tenant == tenant && slices.Contains(n.Ranks, p.rank) }
	if p.rank >= 0 && s.Known() && !slices.ContainsFunc(s.Nodes(), has) {
		return refuse(http.StatusBadRequest, "rank_not_found", "no worker has a rank "+strconv.Itoa(p.rank))
	}
	return errNoWorkers
}
