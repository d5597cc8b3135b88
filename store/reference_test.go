package store_test

import "github.com/warmroute/warmroute/kvcache"

// reference is the index in plain Go: the oracle that every backend is compared with.
type reference map[kvcache.WorkerRank]*[3]map[kvcache.EngineHash]*refBlock

type refBlock struct {
	block  kvcache.BlockHash
	copies int
}

func (r reference) register(w kvcache.WorkerRank) {
	if r[w] == nil {
		r.clear(w)
	}
}

func (r reference) clear(w kvcache.WorkerRank) {
	r[w] = &[3]map[kvcache.EngineHash]*refBlock{{}, {}, {}}
}

func (r reference) store(w kvcache.WorkerRank, t kvcache.Tier, b kvcache.BlockHash, e kvcache.EngineHash) {
	if have := r[w][t][e]; have != nil && have.block == b {
		have.copies++
		return
	}
	for other, have := range r[w][t] { // stored again under another engine hash: the newer one counts
		if have.block == b {
			delete(r[w][t], other)
		}
	}
	r[w][t][e] = &refBlock{b, 1}
}

func (r reference) remove(w kvcache.WorkerRank, t kvcache.Tier, e kvcache.EngineHash) {
	if have := r[w][t][e]; have != nil {
		if have.copies--; have.copies == 0 {
			delete(r[w][t], e)
		}
	}
}

func (r reference) holds(w kvcache.WorkerRank, deepest kvcache.Tier, b kvcache.BlockHash) bool {
	for t := kvcache.Device; t <= min(deepest, kvcache.Disk); t++ {
		for _, have := range r[w][t] {
			if have.block == b {
				return true
			}
		}
	}
	return false
}

func (r reference) lookup(prompt []kvcache.BlockHash) map[kvcache.WorkerRank]kvcache.Overlap {
	out := map[kvcache.WorkerRank]kvcache.Overlap{}
	for w := range r {
		var d [kvcache.NumTiers]int
		for t := range d {
			for d[t] < len(prompt) && r.holds(w, kvcache.Tier(t), prompt[d[t]]) {
				d[t]++
			}
		}
		if d[kvcache.Predicted] > 0 {
			out[w] = kvcache.Overlap{Device: d[0], Host: d[1], Disk: d[2], Any: d[3]}
		}
	}
	return out
}
