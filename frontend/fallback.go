package frontend

import (
	"math/rand/v2"
	"sync/atomic"
)

// fallback chooses where overlaps are unknown, which is not the same as zero: the index is away, was not
// asked, or the prompt's tokens are not known.
func fallback(candidates []candidate) int { return leastLoaded(candidates) }

// leastLoaded picks the candidate with the fewest requests in flight.
func leastLoaded(candidates []candidate) int {
	return lowest(candidates, func(c *candidate) int { return c.requests })
}

func pickRandom(candidates []candidate) int { return rand.IntN(len(candidates)) }

// roundRobin goes through the candidates in the order of their names.
type roundRobin struct{ next atomic.Uint64 }

func (r *roundRobin) pick(candidates []candidate) int {
	return int((r.next.Add(1) - 1) % uint64(len(candidates)))
}
