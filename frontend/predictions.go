package frontend

import (
	"encoding/binary"
	"slices"

	"github.com/warmroute/warmroute/frontend/predict"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// eventsOff tells whether a pool's engines publish no events.
func (f *Frontend) eventsOff(p kvcache.PoolID) bool {
	return slices.Contains(f.o.EventsOff, p.Model) || slices.Contains(f.o.EventsOff, "*")
}

// predict records where a prompt was routed. It costs the request nothing.
func (f *Frontend) predict(x *exchange, pool kvcache.PoolID) {
	if f.recorder == nil || x.bypass || x.state != kvcache.Exact && x.state != kvcache.Partial || len(x.hashes) == 0 {
		return
	}
	r := predict.Route{Pool: pool, At: x.chosen.WorkerRank, Blocks: x.hashes}
	switch {
	case f.eventsOff(pool):
		r.TTL = f.o.EventsOffTTL
		r.Register = &store.Registration{BlockSize: x.blockSize, URL: x.chosen.node.URL.String(), Engine: x.chosen.node.Engine}
	case f.o.PredictTTL < 0:
		return
	default: // what the worker has, or is about to, needs no words: predictions cost Redis as much as the events do
		r.TTL = f.o.PredictTTL
		r.Blocks = r.Blocks[min(x.chosen.overlap.Any, len(r.Blocks)):]
	}
	f.recorder.Record(r)
}

// textTokens stand for a prompt whose token ids cannot be had: four bytes of its text each, which is about as much text as
// a token of English has. textSalt keeps their hashes apart from those of tokens.
func textTokens(text []byte, limit int) []uint32 {
	n := min(len(text)/4, limit)
	out := make([]uint32, n)
	for i := range out {
		out[i] = binary.LittleEndian.Uint32(text[4*i:])
	}
	return out
}

const textSalt = "warmroute text\x00"
