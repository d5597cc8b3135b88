package frontend

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
)

// The policies.
const (
	// PolicyKV takes the worker rank at which the request costs least: what it would have to compute of the
	// prompt, what waits there already, and what it decodes. See package choose.
	PolicyKV = "kv"
	// PolicyLeastLoaded takes the fewest requests under way, of all frontends where Redis tells.
	PolicyLeastLoaded = "least-loaded"
	// PolicyPowerOfTwo takes the one of two at random that has fewer.
	PolicyPowerOfTwo = "power-of-two"
	PolicyRoundRobin = "round-robin"
	PolicyRandom     = "random"
	// PolicyConversationHash keeps every conversation on one worker without knowing what that holds:
	// rendezvous hashing with bounded load. A worker rank with more than 1.25 × the mean of this frontend's
	// requests in flight, and more than a few, is skipped. The conversation is named by x-session-id, or else by the messages up to the
	// first of a user, or else by the beginning of the prompt; without any of them least-loaded chooses.
	PolicyConversationHash = "conversation-hash"
	// PolicyPrefixHash is the same by the beginning of the prompt alone, 1,024 tokens or 4 KiB: requests with the same
	// long system prompt meet, whoever sends them.
	PolicyPrefixHash = "prefix-hash"
)

// blindPolicies need to know nothing of the prompt's blocks, so that they can be the fallback.
var blindPolicies = []string{
	PolicyConversationHash, PolicyPrefixHash, PolicyLeastLoaded, PolicyPowerOfTwo, PolicyRoundRobin, PolicyRandom,
}

// Reasons of selected_total. The first three say what named the conversation.
const (
	reasonSession      = "session"      // x-session-id
	reasonConversation = "conversation" // messages up to the first of a user
	reasonPrompt       = "prompt"       // the beginning of the prompt
	reasonSpilled      = "spilled"      // the conversation's own worker has more than its share
	reasonUnnamed      = "unnamed"      // nothing names the conversation: least-loaded chose
	reasonOverlap      = "overlap"      // the worker chosen holds a part of the prompt
	reasonLoad         = "load"         // it does not: it has the least to do
	reasonPinned       = "pinned"       // the request restricts the choice
	reasonPolicy       = "policy"       // the policy knows only one reason
)

// policy is the one that chooses, given what is known. Overlaps that are unknown are not overlaps of zero.
func (f *Frontend) policy(k *knowledge) string {
	if f.o.Policy == PolicyKV && !k.known() {
		return f.o.Fallback
	}
	return f.o.Policy
}

// blind picks without a cost, by names and requests under way.
type blind func(list []kvcache.WorkerRank, requests []int) (i int, reason string)

// blind is the picker of a policy that has no cost. It is nil where nothing names the request; reason is why the choice
// is then by load.
func (f *Frontend) blind(w *want) (pick blind, reason string) {
	switch w.policy {
	case PolicyRoundRobin:
		return f.roundRobin.pick, ""
	case PolicyRandom:
		return pickRandom, ""
	case PolicyPrefixHash:
		if n := w.prefix(); n.by != reasonUnnamed {
			return hashed(n), ""
		}
	default:
		if n := w.conversation(); n.by != reasonUnnamed {
			return hashed(n), ""
		}
	}
	return nil, reasonUnnamed
}

// pickBlind picks among those that are not busy; negative where all are.
func (f *Frontend) pickBlind(p *placed, pick blind) int {
	var free []int
	for i, cost := range choose.Choose(choose.Ask{Request: choose.Request{BlockSize: 1}, Busy: choose.Load(f.o.Busy), Home: -1}, withLoads(p.list, p.loads)).Costs {
		if cost == cost { // NaN: busy
			free = append(free, i)
		}
	}
	if len(free) == 0 {
		return -1
	}
	ranks, requests := make([]kvcache.WorkerRank, len(free)), make([]int, len(free))
	for n, i := range free {
		ranks[n], requests[n] = p.list[i].WorkerRank, p.loads[i].Requests
	}
	n, reason := pick(ranks, requests)
	p.reason = reason
	return free[n]
}

// conversation is what a request belongs to.
type conversation struct {
	key uint64
	by  string // a reason, [reasonUnnamed] where key means nothing
}

// The bounds of the hash: a rank is skipped that has 1.25 × the mean of this frontend's requests, and at least noLoad.
//
// noLoad is how many requests of one frontend are no load to a rank. Without it chance decides where the
// mean is about one, the more so the more frontends share the requests. On the demo's conversations (mean
// 2) it raises the hit ratio from 0.75 to 0.79 and lowers the mean TTFT from 43 to 33 ms; see
// BenchmarkOutage.
const (
	shareOfMean = 1.25
	noLoad      = 4
)

// hashed picks by rendezvous hashing with bounded load. It needs no state, so that all frontends agree, and a rank that
// comes or goes moves only the conversations that it gets or had. A burst of one conversation spills in a fixed order.
func hashed(c conversation) blind {
	return func(list []kvcache.WorkerRank, requests []int) (int, string) {
		i, spilled := choose.Bounded(c.key, list, requests, shareOfMean, noLoad)
		if spilled {
			return i, reasonSpilled
		}
		return i, c.by
	}
}

func pickRandom(list []kvcache.WorkerRank, _ []int) (int, string) {
	return rand.IntN(len(list)), reasonPolicy
}

// roundRobin goes through the candidates in the order of their names.
type roundRobin struct{ next atomic.Uint64 }

func (r *roundRobin) pick(list []kvcache.WorkerRank, _ []int) (int, string) {
	return int((r.next.Add(1) - 1) % uint64(len(list))), reasonPolicy
}

// twoOf is two of the candidates at random, or all if there are no more. For a session they are always the same two, or it could
// not stay where it is.
func (f *Frontend) twoOf(w *want, list []candidate) []candidate {
	if len(list) <= 2 {
		return list
	}
	if w.session != "" && f.o.SessionTTL > 0 {
		key := w.conversation().key
		list = slices.Clone(list)
		slices.SortFunc(list, func(a, b candidate) int {
			return cmp.Compare(choose.Rendezvous(key, b.WorkerRank), choose.Rendezvous(key, a.WorkerRank))
		})
		return list[:2]
	}
	a := rand.IntN(len(list))
	b := (a + 1 + rand.IntN(len(list)-1)) % len(list)
	return []candidate{list[a], list[b]}
}
