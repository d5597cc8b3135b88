package fleet

import (
	"cmp"
	"maps"
	"net/url"
	"slices"
	"time"

	"github.com/warmroute/warmroute/kvcache"
)

// Node is a worker as of one snapshot.
type Node struct {
	ID, Engine, Tenant string
	URL                *url.URL // not to be changed
	Ranks              []int    // ascending, at least one
	State              State
	Cause              string // why it is not healthy
	Since              time.Time
	Models             []Model // the last known
	Source             Source
}

// Target is what a model name stands for.
type Target struct {
	Pool kvcache.PoolID
	LoRA string // the adapter; "" for the base model
	// Nodes are the workers that serve the model and take requests, by id: the healthy ones. Where there is none, those whose health is
	// late: it is likelier that this process or the network is slow than that all of them are gone.
	Nodes []*Node
	// MaxLen is the longest prompt that a worker of the model takes, in tokens; 0 where unknown.
	MaxLen int
}

// Snapshot is the fleet at one moment. It never changes.
type Snapshot struct {
	nodes   []*Node                   // by key
	targets map[kvcache.PoolID]Target // by tenant and model name as clients use it
	models  map[string][]Model        // by tenant, by id
	pools   map[kvcache.PoolID]int
	catalog Status
	names   map[string]Status
	updated time.Time
	counts  [3]int // of nodes, by State
	taking  int    // nodes that are in any target
	known   bool
	next    <-chan struct{}

	strained bool // late nodes take requests
}

// newSnapshot copies what f knows; f.mu is held.
func newSnapshot(f *Fleet, next <-chan struct{}) *Snapshot {
	s := &Snapshot{
		targets: map[kvcache.PoolID]Target{}, models: map[string][]Model{}, pools: maps.Clone(f.pools),
		catalog: f.catalog, names: map[string]Status{}, updated: f.updated, next: next,
	}
	for name, r := range f.resolved {
		s.names[name] = r.status
	}
	answered, tried := false, true
	var late []*Node
	for _, k := range slices.SortedFunc(maps.Keys(f.workers), Key.compare) {
		w := f.workers[k]
		n := &Node{
			ID: k.ID, Engine: w.Engine, Tenant: k.Tenant, URL: w.url,
			Ranks: w.allRanks(), State: w.state, Cause: w.cause, Since: w.since, Models: w.models, Source: w.source,
		}
		if w.unregistered && n.State == Healthy {
			n.State, n.Cause = Draining, "unregistered"
		}
		s.nodes = append(s.nodes, n)
		answered, tried = answered || w.polled, tried && w.tried
		s.counts[n.State]++
		bases := s.bases(n)
		for _, m := range n.Models {
			s.add(n, m, bases)
		}
		if w.late && !w.unregistered {
			late = append(late, n)
		}
	}
	s.strain(late)
	s.known = answered && tried
	return s
}

// strain gives the requests for models without a healthy worker to those that are late.
func (s *Snapshot) strain(late []*Node) {
	s.taking = s.counts[Healthy]
	strained := map[kvcache.PoolID]bool{} // model names without a healthy worker
	for _, n := range late {
		takes := false
		for _, m := range n.Models {
			name := kvcache.PoolID{Tenant: n.Tenant, Model: m.ID}
			t := s.targets[name]
			if len(t.Nodes) > 0 && !strained[name] {
				continue
			}
			strained[name], takes = true, true
			t.Nodes = append(t.Nodes, n)
			s.targets[name] = t
		}
		if takes {
			s.taking++
		}
	}
	s.strained = len(strained) > 0
}

// bases maps each name that a worker serves a base model under to the one that names its pool: of names with
// the same root, the one that the catalog has a pool of, or else the first.
func (s *Snapshot) bases(n *Node) map[string]string {
	byRoot, out := map[string]string{}, map[string]string{}
	for _, m := range n.Models {
		if m.Parent != "" || m.Root == "" {
			continue
		}
		named, seen := byRoot[m.Root]
		if !seen || s.pools[kvcache.PoolID{Tenant: n.Tenant, Model: named}] == 0 && s.pools[kvcache.PoolID{Tenant: n.Tenant, Model: m.ID}] != 0 {
			byRoot[m.Root] = m.ID
		}
	}
	for _, m := range n.Models {
		if m.Parent == "" && m.Root != "" {
			out[m.ID] = byRoot[m.Root]
		}
	}
	return out
}

func (s *Snapshot) add(n *Node, m Model, bases map[string]string) {
	name := kvcache.PoolID{Tenant: n.Tenant, Model: m.ID}
	t, seen := s.targets[name]
	if !seen {
		t.Pool = kvcache.PoolID{Tenant: n.Tenant, Model: cmp.Or(bases[m.ID], m.ID)}
		if m.Parent != "" {
			t.Pool.Model, t.LoRA = cmp.Or(bases[m.Parent], m.Parent), m.ID
		}
		s.models[n.Tenant] = append(s.models[n.Tenant], m)
	}
	if n.State == Healthy {
		t.Nodes = append(t.Nodes, n)
	}
	t.MaxLen = max(t.MaxLen, m.MaxModelLen)
	s.targets[name] = t
}

// allRanks are the configured ranks, or else those of the streams, or else rank 0.
func (w *state) allRanks() []int {
	if w.Ranks == 0 && len(w.ranks) > 0 {
		return w.ranks
	}
	ranks := make([]int, max(w.Ranks, 1))
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

// Target finds what a model name stands for; false where no worker, alive or last known,
// serves it.
func (s *Snapshot) Target(tenant, model string) (Target, bool) {
	t, ok := s.targets[kvcache.PoolID{Tenant: cmp.Or(tenant, kvcache.DefaultTenant), Model: model}]
	return t, ok
}

// Pools lists the pools that the fleet serves, alive or last known.
func (s *Snapshot) Pools() []kvcache.PoolID {
	seen := map[kvcache.PoolID]bool{}
	var out []kvcache.PoolID
	for _, t := range s.targets {
		if !seen[t.Pool] {
			seen[t.Pool] = true
			out = append(out, t.Pool)
		}
	}
	slices.SortFunc(out, func(a, b kvcache.PoolID) int { return cmp.Compare(a.String(), b.String()) })
	return out
}

// Models lists every model of a tenant once, in the order of the workers' ids.
func (s *Snapshot) Models(tenant string) []Model {
	return s.models[cmp.Or(tenant, kvcache.DefaultTenant)]
}

// Nodes lists all workers by id.
func (s *Snapshot) Nodes() []*Node { return s.nodes }

// Node finds a worker; nil where the fleet has none of this key.
func (s *Snapshot) Node(k Key) *Node {
	i, ok := slices.BinarySearchFunc(s.nodes, k, func(n *Node, k Key) int { return n.Key().compare(k) })
	if !ok {
		return nil
	}
	return s.nodes[i]
}

// HasID tells whether any tenant has a worker of this id.
func (s *Snapshot) HasID(id string) bool {
	_, ok := slices.BinarySearchFunc(s.nodes, id, func(n *Node, id string) int { return cmp.Compare(n.ID, id) })
	return ok
}

// Healthy is how many workers answer as they should.
func (s *Snapshot) Healthy() int { return s.counts[Healthy] }

// Taking is how many workers take requests: the healthy ones, and late ones that serve a model that no healthy one does.
func (s *Snapshot) Taking() int { return s.taking }

// Count is how many workers are in a state.
func (s *Snapshot) Count(st State) int { return s.counts[st] }

// Known tells whether every worker was asked at least once what it serves, and one has said it. Until
// then no model name can be called unknown.
func (s *Snapshot) Known() bool { return s.known }

// Changed is closed when a newer snapshot is there.
func (s *Snapshot) Changed() <-chan struct{} { return s.next }

// BlockSize is that of a pool, in tokens, as the catalog or the file has it; 0 where unknown.
func (s *Snapshot) BlockSize(p kvcache.PoolID) int { return s.pools[p] }

// Catalog is how it stands with the catalog. A zero Since means that it has not been read yet, or that
// there is none.
func (s *Snapshot) Catalog() Status { return s.catalog }

// Names is how it stands with the look-ups of names.
func (s *Snapshot) Names() map[string]Status { return s.names }

// Updated is when any stream of the catalog last changed or was renewed, by the writer's clock;
// zero where unknown.
func (s *Snapshot) Updated() time.Time { return s.updated }
