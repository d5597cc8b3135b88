package frontend

import (
	"context"

	"github.com/warmroute/warmroute/kvcache"
)

func (x *fakeIndex) Sizes(context.Context, kvcache.PoolID) (map[kvcache.WorkerRank][kvcache.NumTiers]int, error) {
	out := map[kvcache.WorkerRank][kvcache.NumTiers]int{}
	for w, blocks := range x.hold {
		out[w] = [kvcache.NumTiers]int{len(blocks)}
	}
	return out, x.err
}

func (x *fakeIndex) Holders(_ context.Context, _ kvcache.PoolID, blocks []kvcache.BlockHash) (map[kvcache.WorkerRank][]byte, error) {
	out := map[kvcache.WorkerRank][]byte{}
	for w, held := range x.hold {
		for i, b := range blocks {
			for _, h := range held {
				if h == b {
					if out[w] == nil {
						out[w] = make([]byte, len(blocks))
					}
					out[w][i] = 1
				}
			}
		}
	}
	return out, x.err
}
