package replay

import (
	"context"
	"slices"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
)

// state is where frontends see what workers hold and have under way.
type state interface {
	// overlaps is how many of the blocks each worker holds, from the first.
	overlaps(ctx context.Context, frontend int, blocks []uint64) ([]int, error)
	// loads is what each worker has under way.
	loads(ctx context.Context, frontend int) ([]choose.Load, error)
	// place chooses a worker and counts the request there.
	place(ctx context.Context, frontend int, p placement) (worker int, err error)
	// prefilled and finished take the request's load off again.
	prefilled(ctx context.Context, frontend int, id string) error
	finished(ctx context.Context, frontend int, id string) error
	// changed tells what a worker's cache gained and lost.
	changed(ctx context.Context, worker int, added, gone []uint64) error
}

// placement is a request that wants a worker.
type placement struct {
	id      string
	session string // "" = none
	request *Request
	ask     choose.Ask
	among   []int // the workers that it may go to
	credits []int // of all workers, in blocks; nil = 0
}

// memory keeps everything in this process.
type memory struct {
	caches []*lru   // those of the workers: an index that is never late
	views  []ledger // of each frontend, or one of all
	// expected are, for each worker, the blocks that are on their way there and not computed: what the index
	// calls predicted. nil = the index knows nothing of them.
	expected []map[uint64]bool
}

// ledger is what one view has placed.
type ledger struct {
	loads    []choose.Load
	leases   map[string]lease
	sessions map[string]int // the workers that they are at
}

type lease struct {
	worker int
	load   choose.Load
}

// newMemory makes a state in memory for that many workers and views.
func newMemory(caches []*lru, views int, predict bool) *memory {
	m := &memory{caches: caches, views: make([]ledger, views)}
	if predict {
		m.expected = make([]map[uint64]bool, len(caches))
		for i := range m.expected {
			m.expected[i] = map[uint64]bool{}
		}
	}
	for i := range m.views {
		m.views[i] = ledger{make([]choose.Load, len(caches)), map[string]lease{}, map[string]int{}}
	}
	return m
}

func (m *memory) overlaps(_ context.Context, _ int, blocks []uint64) ([]int, error) {
	out := make([]int, len(m.caches))
	for i, c := range m.caches {
		for _, b := range blocks {
			if c.blocks[b] == nil && (m.expected == nil || !m.expected[i][b]) {
				break
			}
			out[i]++
		}
	}
	return out, nil
}

func (m *memory) loads(_ context.Context, frontend int) ([]choose.Load, error) {
	return m.view(frontend).loads, nil
}

func (m *memory) place(_ context.Context, frontend int, p placement) (int, error) {
	v := m.view(frontend)
	candidates := make([]choose.Candidate, len(p.among))
	for i, w := range p.among {
		candidates[i].Load = v.loads[w]
		if p.credits != nil {
			candidates[i].Credit = float64(p.credits[w])
		}
	}
	if home, ok := v.sessions[p.session]; ok {
		p.ask.Home = slices.Index(p.among, home)
	}
	c := choose.Choose(p.ask, candidates)
	w := p.among[c.Index]
	if p.session != "" {
		v.sessions[p.session] = w
	}
	l := lease{w, choose.Load{Requests: 1, PrefillTokens: p.ask.Prefill(candidates[c.Index].Credit), DecodeBlocks: len(p.request.Blocks)}}
	v.add(l, 1)
	v.leases[p.id] = l
	if m.expected != nil {
		for _, b := range p.request.whole() {
			if m.caches[w].blocks[b] == nil {
				m.expected[w][b] = true
			}
		}
	}
	return w, nil
}

func (m *memory) view(frontend int) *ledger { return &m.views[min(frontend, len(m.views)-1)] }

func (v *ledger) add(l lease, sign int) {
	to := &v.loads[l.worker]
	to.Requests += sign * l.load.Requests
	to.PrefillTokens += sign * l.load.PrefillTokens
	to.DecodeBlocks += sign * l.load.DecodeBlocks
}

func (m *memory) prefilled(_ context.Context, frontend int, id string) error {
	v := m.view(frontend)
	l := v.leases[id]
	v.loads[l.worker].PrefillTokens -= l.load.PrefillTokens
	l.load.PrefillTokens = 0
	v.leases[id] = l
	return nil
}

func (m *memory) finished(_ context.Context, frontend int, id string) error {
	v := m.view(frontend)
	v.add(v.leases[id], -1)
	delete(v.leases, id)
	return nil
}

func (m *memory) changed(_ context.Context, worker int, added, _ []uint64) error {
	if m.expected != nil {
		for _, b := range added {
			delete(m.expected[worker], b)
		}
	}
	return nil
}

// names are the workers of a fleet.
func names(n int) []kvcache.WorkerRank {
	out := make([]kvcache.WorkerRank, n)
	for i := range out {
		out[i].Worker = "w" + string(rune('0'+i/100)) + string(rune('0'+i/10%10)) + string(rune('0'+i%10))
	}
	return out
}
