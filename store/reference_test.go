package store_test

import "github.com/warmroute/warmroute/kvcache"

// reference is the index in plain Go: the oracle that every backend is compared with.
type reference map[kvcache.WorkerRank]*[kvcache.NumTiers]refTier

// refTier is what one rank holds on one tier.
type refTier struct {
	blocks map[kvcache.BlockHash]kvcache.EngineHash // under the newest engine hash
	copies map[kvcache.EngineHash]int               // further physical copies
}

func (r reference) register(w kvcache.WorkerRank) {
	if r[w] == nil {
		r.clear(w)
	}
}

func (r reference) clear(w kvcache.WorkerRank) {
	r[w] = &[kvcache.NumTiers]refTier{}
	for t := range r[w] {
		r[w][t] = refTier{map[kvcache.BlockHash]kvcache.EngineHash{}, map[kvcache.EngineHash]int{}}
	}
}

func (r reference) store(w kvcache.WorkerRank, t kvcache.Tier, b kvcache.BlockHash, e kvcache.EngineHash) {
	tier := r[w][t]
	if old, held := tier.blocks[b]; held && old == e {
		tier.copies[e] = min(tier.copies[e]+1, 64)
	} else {
		delete(tier.copies, old)
		tier.blocks[b] = e
	}
	if t == kvcache.Device {
		delete(r[w][kvcache.Predicted].blocks, b)
	}
}

// predict notes what was routed to w.
func (r reference) predict(w kvcache.WorkerRank, blocks []kvcache.BlockHash) {
	for _, b := range blocks {
		if !r.holds(w, kvcache.Device, b) {
			r[w][kvcache.Predicted].blocks[b] = 0
		}
	}
}

func (r reference) remove(w kvcache.WorkerRank, t kvcache.Tier, e kvcache.EngineHash) {
	tier := r[w][t]
	if tier.copies[e] > 0 {
		tier.copies[e]--
		return
	}
	for b, under := range tier.blocks {
		if under == e {
			delete(tier.blocks, b)
			delete(r[w][kvcache.Predicted].blocks, b)
		}
	}
}

func (r reference) removeKnown(w kvcache.WorkerRank, t kvcache.Tier, b kvcache.BlockHash, e kvcache.EngineHash) {
	tier := r[w][t]
	if tier.copies[e] == 0 {
		_, held := tier.blocks[b]
		delete(tier.blocks, b)
		delete(r[w][kvcache.Predicted].blocks, b)
		if held {
			return
		}
	}
	r.remove(w, t, e)
}

func (r reference) holds(w kvcache.WorkerRank, deepest kvcache.Tier, b kvcache.BlockHash) bool {
	held := false
	for t := kvcache.Device; t <= deepest; t++ {
		_, here := r[w][t].blocks[b]
		held = held || here
	}
	return held
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

// sizes counts the blocks of the ranks in an answer, tier by tier.
func (r reference) sizes(scores map[kvcache.WorkerRank]kvcache.Overlap) map[kvcache.WorkerRank]int {
	out := map[kvcache.WorkerRank]int{}
	for w := range scores {
		for t := range kvcache.Predicted {
			out[w] += len(r[w][t].blocks)
		}
	}
	return out
}
