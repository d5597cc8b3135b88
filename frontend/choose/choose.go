package choose

import (
	"cmp"
	"math"
	"slices"
)

// Candidate is a worker rank that could take the request.
type Candidate struct {
	Load   Load
	Credit float64 // blocks of the prompt that need no prefill there
}

// Ask is a request together with how to choose for it.
type Ask struct {
	Request
	Weights Weights
	// Busy: a candidate at or above any member that is not zero is skipped.
	Busy Load
	// Home is the index of the candidate that the request's session is at; negative means none.
	Home int
	// Slack is by how much the session's worker may cost more than the cheapest. See [Weights.Slack].
	Slack float64
	// Random, from 0 up to but without 1, decides between candidates that tie, and the lottery.
	Random float64
}

// Choice is what came out.
type Choice struct {
	Index   int       // of the candidate; -1 where all are busy
	Costs   []float64 // of the candidates, in their order; NaN for one that is busy
	AtHome  bool      // the session decided
	AllBusy bool      // or there is no candidate
}

// Choose picks one of the candidates.
func Choose(a Ask, candidates []Candidate) Choice {
	c := Choice{Index: -1, Costs: make([]float64, len(candidates))}
	cheapest := math.Inf(1)
	for i, x := range candidates {
		if a.Busy.reached(x.Load) {
			c.Costs[i] = math.NaN()
			continue
		}
		c.Costs[i] = a.Weights.Cost(a.Request, x.Load, x.Credit)
		cheapest = min(cheapest, c.Costs[i])
	}
	switch {
	case math.IsInf(cheapest, 1):
		c.AllBusy = true
	case a.Home >= 0 && a.Home < len(candidates) && c.Costs[a.Home] <= cheapest+a.Slack:
		c.Index, c.AtHome = a.Home, true
	case a.Weights.Temperature > 0:
		c.Index = lottery(c.Costs, cheapest, a.Weights.Temperature, a.Random)
	default:
		c.Index = tied(c.Costs, cheapest, a.Random)
	}
	return c
}

// reached says whether a load is at or above a threshold.
func (busy Load) reached(l Load) bool {
	return busy.Requests > 0 && l.Requests >= busy.Requests ||
		busy.PrefillTokens > 0 && l.PrefillTokens >= busy.PrefillTokens ||
		busy.DecodeBlocks > 0 && l.DecodeBlocks >= busy.DecodeBlocks
}

// tied picks one of the cheapest.
func tied(costs []float64, cheapest, random float64) int {
	ties := 0
	for _, c := range costs {
		if c == cheapest {
			ties++
		}
	}
	left := int(random * float64(ties))
	for i, c := range costs {
		if c == cheapest {
			if left == 0 {
				return i
			}
			left--
		}
	}
	return -1
}

// lottery draws one by softmax over the costs, scaled to their range.
func lottery(costs []float64, cheapest, temperature, random float64) int {
	dearest := cheapest
	for _, c := range costs {
		if c > dearest {
			dearest = c
		}
	}
	span := dearest - cheapest
	if span == 0 {
		return tied(costs, cheapest, random)
	}
	chance := func(c float64) float64 { return math.Exp(-(c - cheapest) / span / temperature) }
	sum := 0.0
	for _, c := range costs {
		if c == c {
			sum += chance(c)
		}
	}
	left, last := random*sum, -1
	for i, c := range costs {
		if c == c {
			last = i
			if left -= chance(c); left < 0 {
				break
			}
		}
	}
	return last
}

// Rank lists the candidates from the cheapest to the dearest, ties in their order, without those that are busy.
func Rank(costs []float64) []int {
	var order []int
	for i, c := range costs {
		if c == c {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(costs[a], costs[b]) })
	return order
}
