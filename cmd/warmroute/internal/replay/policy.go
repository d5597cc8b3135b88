package replay

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
)

// The policies.
const (
	KV               = "kv"                // least cost
	LongestPrefix    = "longest-prefix"    // most cached blocks, ties by load: a trap, see docs/performance.md
	LeastLoaded      = "least-loaded"      // fewest requests under way
	PowerOfTwo       = "power-of-two"      // the less loaded of two at random
	RoundRobin       = "round-robin"       //
	Random           = "random"            //
	ConversationHash = "conversation-hash" // rendezvous hashing of the first two blocks, with bounded load
	PrefixHash       = "prefix-hash"       // the same of the first eight
)

// Policies lists them.
var Policies = []string{KV, ConversationHash, PrefixHash, LeastLoaded, PowerOfTwo, RoundRobin, Random, LongestPrefix}

// Conversations of a trace are told apart by their first blocks: the very first is often common to all.
const (
	conversationBlocks = 2
	prefixBlocks       = 8
	boundedLoad        = 1.25
)

// router is one frontend.
type router struct {
	policy  string
	weights choose.Weights
	random  *rand.Rand
	turns   int // of the round robin
}

// plan says among which workers the choice is, and by which weights. overlaps and loads are asked only where they matter.
func (r *router) plan(q *Request, workers []kvcache.WorkerRank, overlaps func() ([]int, error), loads func() ([]choose.Load, error)) (
	among []int, credits []int, w choose.Weights, err error,
) {
	all := func() []int {
		out := make([]int, len(workers))
		for i := range out {
			out[i] = i
		}
		return out
	}
	one := func(i int) []int { return []int{i} }
	switch r.policy {
	case KV:
		credits, err = overlaps()
		return all(), credits, r.weights, err
	case LongestPrefix:
		credits, err = overlaps()
		return all(), credits, choose.Weights{PrefillScale: 1, Miss: 1e6, Request: 1}, err
	case LeastLoaded:
		return all(), nil, choose.LeastRequests, nil
	case PowerOfTwo:
		among = r.random.Perm(len(workers))[:min(2, len(workers))]
		slices.Sort(among)
		return among, nil, choose.LeastRequests, nil
	case RoundRobin:
		r.turns++
		return one((r.turns - 1) % len(workers)), nil, choose.LeastRequests, nil
	case Random:
		return one(r.random.IntN(len(workers))), nil, choose.LeastRequests, nil
	case ConversationHash, PrefixHash:
		n := conversationBlocks
		if r.policy == PrefixHash {
			n = prefixBlocks
		}
		l, err := loads()
		if err != nil {
			return nil, nil, w, err
		}
		requests := make([]int, len(l))
		for i := range l {
			requests[i] = l[i].Requests
		}
		i, _ := choose.Bounded(opening(q.Blocks, n), workers, requests, boundedLoad, 0)
		return one(i), nil, choose.LeastRequests, nil
	}
	return nil, nil, w, fmt.Errorf("unknown policy %q", r.policy)
}

// opening hashes the first n blocks. The id of a block stands for all before it.
func opening(blocks []uint64, n int) uint64 {
	return xxh3.Hash(binary.LittleEndian.AppendUint64(nil, blocks[min(n, len(blocks))-1]))
}
