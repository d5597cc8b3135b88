package frontend

import (
	"net/http"

	"github.com/gin-gonic/gin"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// selection is the answer of POST /select. Counts are in tokens but for the blocks.
type selection struct {
	SelectionID *string            `json:"selection_id"` // null: nothing is reserved
	WorkerID    string             `json:"worker_id"`
	Rank        int                `json:"dp_rank"`
	Endpoint    string             `json:"endpoint"`
	BlockSize   int                `json:"block_size"`
	Overlap     *tierOverlap       `json:"overlap"`                  // null: unknown
	Prefill     int                `json:"effective_prefill_tokens"` // at most, where the overlap is unknown
	Decode      int                `json:"potential_decode_blocks"`
	State       kvcache.IndexState `json:"index_state"`
}

type tierOverlap struct {
	Longest int `json:"longest_matched"`
	GPU     int `json:"gpu"`
	CPU     int `json:"cpu"`
	Disk    int `json:"disk"`
}

// selectWorker answers POST /select: the choice that a proxied request would get, without the
// request.
func (f *Frontend) selectWorker(c *gin.Context) {
	s, err := f.selectFor(c)
	if err != nil {
		fail(c, err)
		return
	}
	c.JSON(http.StatusOK, s)
}

func (f *Frontend) selectFor(c *gin.Context) (*selection, error) {
	q, err := f.ask(c)
	if err != nil {
		return nil, err
	}
	if q.target.Pool.Model == "" {
		if !f.fleet.Snapshot().Known() {
			return nil, errNoWorkers
		}
		return nil, unknownModel(q.Model)
	}
	k, err := f.know(c, q, store.LookupOptions{})
	if err != nil {
		return nil, err
	}
	p := pin{rank: -1}
	if q.Pinned != nil {
		p.worker = string(q.Pinned.WorkerID)
		if q.Pinned.Rank != nil {
			p.rank = *q.Pinned.Rank
		}
	}
	if q.Allowed != nil {
		p.allowed = make([]string, len(q.Allowed))
		for i, id := range q.Allowed {
			p.allowed[i] = string(id)
		}
	}
	list := candidates(q.target, p, &k, nil)
	if len(list) == 0 {
		return nil, nobody(f.fleet.Snapshot(), p)
	}
	pick, policy := f.chooser(&k, q.conversation)
	i, reason := f.inFlight.peek(list, pick)
	w := list[i]
	f.selected(q.pool.String(), policy, reason, p)
	o := k.scores.Scores[w.WorkerRank]
	var overlap *tierOverlap
	if k.overlapKnown(o.Any) {
		overlap = &tierOverlap{o.Any * k.blockSize, o.Device * k.blockSize, o.Host * k.blockSize, o.Disk * k.blockSize}
	}
	return &selection{
		WorkerID: w.Worker, Rank: w.Rank, Endpoint: w.node.URL.String(), BlockSize: k.blockSize,
		Overlap: overlap,
		Prefill: max(k.tokens-o.Any*k.blockSize, 0),
		Decode:  (k.tokens+k.blockSize-1)/k.blockSize + w.blocks,
		State:   k.state,
	}, nil
}
