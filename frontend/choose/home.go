package choose

import (
	"github.com/zeebo/xxh3"

	"github.com/warmroute/warmroute/kvcache"
)

// Bounded picks by rendezvous hashing with bounded load: the candidate of the greatest weight for the key among
// those with fewer requests under way than their share, which is factor × the mean, this request included, and
// floor in any case. spilled says that the key's own candidate had its share. It needs no shared state: frontends
// that know the same candidates agree.
func Bounded(key uint64, candidates []kvcache.WorkerRank, requests []int, factor float64, floor int) (i int, spilled bool) {
	all := 1
	for _, n := range requests {
		all += n
	}
	share := max(factor*float64(all)/float64(len(candidates)), float64(floor))
	home, best := -1, -1
	var homeWeight, bestWeight uint64
	for i, c := range candidates {
		w := Rendezvous(key, c)
		if home < 0 || w > homeWeight {
			home, homeWeight = i, w
		}
		if float64(requests[i]) < share && (best < 0 || w > bestWeight) {
			best, bestWeight = i, w
		}
	}
	if best < 0 {
		best = home
	}
	return best, best != home
}

// Rendezvous is the weight of a worker rank for a key. The ranks of a worker differ by the seed.
func Rendezvous(key uint64, w kvcache.WorkerRank) uint64 {
	const golden = 0x9E3779B97F4A7C15 // spreads small numbers over all bits
	return xxh3.HashStringSeed(w.Worker, key+uint64(w.Rank)*golden)
}
