package fleet

import (
	"context"
	"slices"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// findRemoved asks the catalog which of the workers that a complete reading does not list were taken out on
// purpose. Until they leave, they get no new requests. Where it does not say, it is as it was.
func (f *Fleet) findRemoved(ctx context.Context, pools []kvcache.PoolID, streams []store.Stream) map[Key]bool {
	live := map[Key]bool{}
	for _, st := range streams {
		live[KeyOf(st.Pool.Tenant, st.Worker)] = true
	}
	type suspect struct {
		pools []kvcache.PoolID
		ranks []int
	}
	suspects := map[Key]suspect{}
	f.mu.Lock()
	for k, l := range f.listed {
		if !live[k] {
			suspects[k] = suspect{l.pools, l.ranks}
		}
	}
	for k, w := range f.workers {
		if live[k] || suspects[k].pools != nil || w.source != SourceConfig {
			continue
		}
		var served []kvcache.PoolID
		for _, m := range w.models {
			p := kvcache.PoolID{Tenant: k.Tenant, Model: m.ID}
			if slices.Contains(pools, p) {
				served = append(served, p)
			}
		}
		suspects[k] = suspect{served, w.allRanks()}
	}
	f.mu.Unlock()
	removed := map[Key]bool{}
	for k, s := range suspects {
		for _, p := range s.pools {
			for _, rank := range s.ranks {
				if removed[k] {
					break
				}
				yes, err := f.o.Catalog.Removed(ctx, store.StreamID{Pool: p, WorkerRank: kvcache.WorkerRank{Worker: k.ID, Rank: rank}})
				if err != nil {
					return nil
				}
				removed[k] = yes
			}
		}
	}
	return removed
}

// isNamed tells whether a name in DNS leads to a place; f.mu is held.
func (f *Fleet) isNamed(place string) bool {
	for _, r := range f.resolved {
		for _, w := range r.workers {
			if w.place() == place {
				return true
			}
		}
	}
	return false
}

// reconcile makes workers what the sources add up to, publishes them, and returns which came and which
// left. f.mu is held.
func (f *Fleet) reconcile() (added, gone []Key) {
	want := f.sum()
	before := map[string]*state{}
	for _, s := range f.workers {
		before[s.place()] = s
	}
	for k, s := range want {
		s.unregistered = f.removed[k]
		old := f.workers[k]
		if old != nil && old.url.String() == s.url.String() {
			old.Worker, old.source, old.ranks, old.unregistered = s.Worker, s.source, s.ranks, s.unregistered
			want[k] = old // polls under way are for this one
			continue
		}
		if old := before[s.place()]; old != nil { // known by another name, and known to be well
			s.health, s.models, s.tried, s.polled = old.health, old.models, old.tried, old.polled
		}
		added = append(added, k)
	}
	for k := range f.workers {
		if s := f.workers[k]; want[k] == nil {
			gone = append(gone, k)
			if s.state == Unhealthy && f.o.Lost != nil {
				f.o.Lost(k)
			}
		}
	}
	f.workers = want
	f.publish()
	return added, gone
}

// sum is what the sources add up to, in new states. A place that the catalog lists under another name than
// the configuration or DNS counts once, under the catalog's name, or overlaps would not match; except where
// the catalog lists the configured name as well. f.mu is held.
func (f *Fleet) sum() map[Key]*state {
	want := map[Key]*state{}
	places := map[string]bool{}
	folded := map[Key]Key{}
	take := func(s state) {
		want[s.Key()] = &s
		places[s.place()] = true
	}
	listedAt := map[string]Key{}
	for k, l := range f.listed {
		if l.worker == nil {
			continue
		}
		p := l.worker.place()
		if other, taken := listedAt[p]; !taken || k.compare(other) < 0 {
			listedAt[p] = k
		}
	}
	for _, c := range f.configured {
		s := *c
		if l := f.listed[c.Key()]; l != nil {
			s.ranks = l.ranks
		} else if k, ok := listedAt[c.place()]; ok {
			folded[c.Key()] = k
			s.Worker.ID, s.ranks = k.ID, f.listed[k].ranks
		}
		take(s)
	}
	for k, l := range f.listed {
		if want[k] != nil || l.worker == nil {
			continue
		}
		if p := l.worker.place(); places[p] && f.configuredAt(p) {
			continue
		}
		s := *l.worker
		s.ranks = l.ranks
		take(s)
	}
	for _, r := range f.resolved {
		for _, w := range r.workers {
			if want[w.Key()] == nil && !places[w.place()] {
				take(*w)
			}
		}
	}
	for k, as := range folded {
		if f.folded[k] != as {
			f.o.Logger.Warn("a configured worker is registered under another id, which counts: give both the same",
				"worker", k.String(), "registered", as.String())
		}
	}
	f.folded = folded
	return want
}

func (f *Fleet) configuredAt(place string) bool {
	return slices.ContainsFunc(f.configured, func(c *state) bool { return c.place() == place })
}

// announce tells the log and the owner what reconcile returned.
func (f *Fleet) announce(added, gone []Key) {
	for _, k := range added {
		f.o.Logger.Info("worker discovered", "worker", k.String())
	}
	for _, k := range gone {
		f.o.Logger.Info("worker left", "worker", k.String())
		if f.o.Gone != nil {
			f.o.Gone(k)
		}
	}
}

// publish makes a new snapshot; f.mu is held, or nobody knows f yet.
func (f *Fleet) publish() {
	next := make(chan struct{})
	s := newSnapshot(f, next)
	f.snap.Store(s)
	if s.strained != f.strained {
		if f.strained = s.strained; s.strained {
			f.o.Logger.Warn("no worker of a model answers health checks in time, requests go to them all the same: this process or the network may be slow",
				"healthy", s.Healthy(), "taking", s.Taking())
		} else {
			f.o.Logger.Info("every model has a healthy worker again, or none that is late")
		}
	}
	close(f.changed)
	f.changed = next
}
