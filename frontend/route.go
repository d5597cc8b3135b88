package frontend

import (
	"net/http"
	"slices"

	"github.com/warmroute/warmroute/frontend/fleet"
)

// candidates are the worker ranks of a target that may take the request: the live fleet first, what the
// index knows of each second. A worker that only the index knows is never among them.
func candidates(t fleet.Target, p pin, k *knowledge, tried []string) []candidate {
	out := make([]candidate, 0, len(t.Nodes))
	for _, node := range t.Nodes {
		if slices.Contains(tried, node.ID) {
			continue
		}
		for _, rank := range node.Ranks {
			if !p.allows(node, rank) {
				continue
			}
			c := candidate{node: node}
			c.Worker, c.Rank = node.ID, rank
			c.overlap = k.scores.Scores[c.WorkerRank].Any
			out = append(out, c)
		}
	}
	return out
}

// nobody says why there are no candidates. snapshot tells a pinned worker that is away from one
// that is not there.
func nobody(s *fleet.Snapshot, p pin) error {
	if p.worker != "" && !s.Has(p.worker) {
		return refuse(http.StatusBadRequest, "worker_not_found", "the pinned worker does not exist")
	}
	return errNoWorkers
}

// chooser is the policy for one request, and its name. name is called only where the name matters.
func (f *Frontend) chooser(k *knowledge, name func() conversation) (pick chooser, policy string) {
	policy = f.o.Policy
	if policy == PolicyKV {
		if k.known() {
			return leastCost(k.size()), policy
		}
		policy = f.o.Fallback
	}
	switch policy {
	case PolicyRoundRobin:
		return f.roundRobin.pick, policy
	case PolicyRandom:
		return pickRandom, policy
	case PolicyConversationHash:
		if n := name(); n.by != reasonUnnamed {
			return conversationHash(n), policy
		}
		return unnamed, PolicyLeastLoaded
	}
	return leastLoaded, PolicyLeastLoaded
}

// work is how many blocks a request costs at a candidate.
func (k *knowledge) work(c *candidate) int {
	return max(k.size()-c.overlap, 0)
}

// choose picks a worker for one attempt and counts the request there.
func (f *Frontend) choose(x *exchange) error {
	s := f.fleet.Snapshot()
	target, err := f.resolve(s, x.tenant, x.parsed.Model)
	if err != nil {
		return err
	}
	list := candidates(target, x.pin, &x.knowledge, x.tried)
	if len(list) == 0 {
		return nobody(s, x.pin)
	}
	pick, policy := f.chooser(&x.knowledge, x.conversation)
	i, reason, l := f.inFlight.take(list, pick, x.work)
	x.chosen, x.lease = &list[i], l
	pool := target.Pool.String()
	f.selected(pool, policy, reason, x.pin)
	if x.blocks > 0 && x.overlapKnown(x.chosen.overlap) {
		f.metrics.overlapRatio.WithLabelValues(pool).Observe(float64(min(x.chosen.overlap, x.blocks)) / float64(x.blocks))
	}
	return nil
}

// selected counts a choice.
func (f *Frontend) selected(pool, policy, reason string, p pin) {
	if !p.any() {
		reason = reasonPinned
	}
	f.metrics.selected.WithLabelValues(pool, policy, reason).Inc()
}
