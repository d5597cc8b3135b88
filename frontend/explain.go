package frontend

import (
	"encoding/json"
	"net/http"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
)

// explanation says why a worker was chosen. It holds no part of the prompt.
type explanation struct {
	Policy string             `json:"policy"`
	Reason string             `json:"reason"` // of selected_total
	State  kvcache.IndexState `json:"index_state"`
	// Shared: the loads are those of all frontends, else this one's.
	Shared    bool     `json:"shared_loads"`
	BlockSize int      `json:"block_size"`
	Tokens    int      `json:"prompt_tokens"`     // estimated where the tokens are unknown
	Weights   *weights `json:"weights,omitempty"` // where a cost decided
	// Candidates are the worker ranks that were compared, the one chosen first and the others from the cheapest to the dearest, at the
	// end those that are busy.
	Candidates []explained `json:"candidates"`
	Omitted    int         `json:"omitted,omitempty"` // candidates for which there was no room
}

// weights are those of [choose.Weights].
type weights struct {
	PrefillScale float64 `json:"prefill_scale"`
	Miss         float64 `json:"miss"`
	Decode       float64 `json:"decode"`
	Request      float64 `json:"request"`
	Temperature  float64 `json:"temperature"`
}

type explained struct {
	Worker   string      `json:"worker_id"`
	Rank     int         `json:"dp_rank"`
	Overlap  *tierBlocks `json:"overlap,omitempty"` // absent: unknown
	Requests int         `json:"requests"`
	Prefill  int         `json:"prefill_tokens"` // waiting there
	Decode   int         `json:"decode_blocks"`
	Cost     *float64    `json:"cost,omitempty"` // absent where the policy has none, and for a worker that is busy
}

// tierBlocks are blocks of the prompt, each tier with the faster ones.
type tierBlocks struct {
	Device int `json:"device"`
	Host   int `json:"host"`
	Disk   int `json:"disk"`
	Any    int `json:"any"` // and predicted
}

func explain(w *want, p *placed) *explanation {
	e := &explanation{
		Policy: p.policy, Reason: p.reason, State: w.k.state, Shared: p.shared, BlockSize: w.k.blockSize, Tokens: w.tokens, Candidates: []explained{},
	}
	var costs []float64
	if p.costed {
		used := w.weights
		if p.policy != PolicyKV {
			used = choose.LeastRequests
		}
		e.Weights = (*weights)(&used)
		costs = choose.Choose(choose.Ask{Request: w.request(), Weights: used, Busy: p.busy, Home: -1}, withLoads(p.list, p.loads)).Costs
	}
	order := []int{p.index}
	if costs != nil {
		for _, i := range choose.Rank(costs) {
			if i != p.index {
				order = append(order, i)
			}
		}
		for i, cost := range costs {
			if cost != cost && i != p.index { // busy
				order = append(order, i)
			}
		}
	} else {
		for i := range p.list {
			if i != p.index {
				order = append(order, i)
			}
		}
	}
	for _, i := range order {
		c, l := &p.list[i], p.loads[i]
		x := explained{Worker: c.Worker, Rank: c.Rank, Requests: l.Requests, Prefill: l.PrefillTokens, Decode: l.DecodeBlocks}
		if o := c.overlap; w.k.overlapKnown(o.Any) {
			x.Overlap = &tierBlocks{o.Device, o.Host, o.Disk, o.Any}
		}
		if costs != nil && costs[i] == costs[i] {
			x.Cost = &costs[i]
		}
		e.Candidates = append(e.Candidates, x)
	}
	return e
}

// maxExplainHeader bounds the response header: proxies take few kilobytes of headers.
const maxExplainHeader = 4 << 10

// header is the explanation in one line, with as many candidates as fit.
func (e *explanation) header() string {
	all := e.Candidates
	short := *e
	for n := len(all); ; n /= 2 {
		short.Candidates, short.Omitted = all[:n], len(all)-n
		b, err := json.Marshal(short)
		if err != nil {
			return ""
		}
		if len(b) <= maxExplainHeader || n == 0 {
			return string(b)
		}
	}
}

// explainIn sets the response header, where the request asks for it.
func (x *exchange) explainIn(h http.Header) {
	h.Del(headerExplain)
	if x.explanation != "" {
		h.Set(headerExplain, x.explanation)
	}
}
