package frontend

import (
	"math/rand/v2"

	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/kvcache"
)

// candidate is a worker rank that could take a request.
type candidate struct {
	kvcache.WorkerRank
	node     *fleet.Node
	overlap  int // blocks of the prompt that it holds, from the first
	blocks   int // blocks in flight to it from this frontend
	requests int // requests in flight to it from this frontend
}

// chooser picks one of the candidates, of which there is at least one, by index, and says why.
type chooser func(candidates []candidate) (i int, reason string)

// leastCost picks the candidate with the fewest uncached blocks of a prompt of n blocks plus
// blocks in flight. The overlap alone would send everything to one worker: nearly all prompts
// share their first block.
func leastCost(n int) chooser {
	return func(candidates []candidate) (int, string) {
		i := lowest(candidates, func(c *candidate) int { return n - min(c.overlap, n) + c.blocks })
		if candidates[i].overlap > 0 {
			return i, reasonOverlap
		}
		return i, reasonLoad
	}
}

// lowest picks the candidate with the lowest cost; each of those that tie is as likely as the others.
func lowest(candidates []candidate, cost func(*candidate) int) int {
	best, bestCost, ties := 0, cost(&candidates[0]), 1
	for i := 1; i < len(candidates); i++ {
		switch c := cost(&candidates[i]); {
		case c < bestCost:
			best, bestCost, ties = i, c, 1
		case c == bestCost:
			ties++
			if rand.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return best
}
