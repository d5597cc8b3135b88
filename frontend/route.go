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

// chooser is the policy for one request, its name, and why it is used; the last two are labels.
func (f *Frontend) chooser(p pin, k *knowledge) (pick chooser, policy, reason string) {
	switch f.o.Policy {
	case PolicyLeastLoaded:
		pick, policy, reason = leastLoaded, PolicyLeastLoaded, "policy"
	case PolicyRoundRobin:
		pick, policy, reason = f.roundRobin.pick, PolicyRoundRobin, "policy"
	case PolicyRandom:
		pick, policy, reason = pickRandom, PolicyRandom, "policy"
	default:
		switch {
		case k.known():
			pick, policy, reason = leastCost(k.size()), PolicyKV, "load"
		case k.reason != "":
			pick, policy, reason = fallback, "fallback", k.reason
		default:
			pick, policy, reason = fallback, "fallback", "bypassed"
		}
	}
	if !p.any() {
		reason = "pinned"
	}
	return pick, policy, reason
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
	pick, policy, reason := f.chooser(x.pin, &x.knowledge)
	i, l := f.inFlight.take(list, pick, x.work)
	x.chosen, x.lease = &list[i], l
	if reason == "load" && x.chosen.overlap > 0 {
		reason = "overlap"
	}
	pool := target.Pool.String()
	f.metrics.selected.WithLabelValues(pool, policy, reason).Inc()
	if x.known() && x.blocks > 0 {
		f.metrics.overlapRatio.WithLabelValues(pool).Observe(float64(min(x.chosen.overlap, x.blocks)) / float64(x.blocks))
	}
	return nil
}
