package replay

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
)

// Where index and loads are.
const (
	Memory = "memory" // in this process
	Redis  = "redis"  // in the real store, on a redis-server that is started for it
)

// States lists them.
var States = []string{Memory, Redis}

// stores is the state in Redis: one real store for each frontend, and one that plays the indexer.
type stores struct {
	frontends []*store.Store
	loadPools []kvcache.PoolID // where each frontend's loads are
	indexer   *store.Store
	streams   []store.Stream
	seq       []int64
	names     []kvcache.WorkerRank
	predict   bool
	closers   []func()
}

var replayPool = kvcache.PoolID{Tenant: kvcache.DefaultTenant, Model: "replay"}

// leaseLength is longer than any trace: a replay releases whatever it reserves.
const leaseLength = store.MaxLease

func openStores(ctx context.Context, o Options, names []kvcache.WorkerRank) (_ *stores, err error) {
	s := &stores{names: names, predict: o.Predict, seq: make([]int64, len(names))}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	url, err := s.serve()
	if err != nil {
		return nil, err
	}
	open := func() (*store.Store, error) {
		st, err := store.New(store.Options{URL: url, LookupBudget: 10 * time.Second, WriteTimeout: 10 * time.Second})
		if err == nil {
			s.closers = append(s.closers, func() { _ = st.Close() })
		}
		return st, err
	}
	if s.indexer, err = open(); err != nil {
		return nil, err
	}
	for i := range o.Frontends {
		st, err := open()
		if err != nil {
			return nil, err
		}
		pool := replayPool
		if o.OwnViews {
			pool.Model = fmt.Sprintf("replay of frontend %d", i)
		}
		s.frontends, s.loadPools = append(s.frontends, st), append(s.loadPools, pool)
	}
	for _, w := range names {
		st, _, err := s.indexer.Register(ctx, store.StreamID{Pool: replayPool, WorkerRank: w}, store.Registration{BlockSize: BlockTokens})
		if err != nil {
			return nil, err
		}
		s.streams = append(s.streams, st)
	}
	return s, nil
}

// serve starts the server.
func (s *stores) serve() (url string, err error) {
	dir, err := os.MkdirTemp("", "warmroute-replay")
	if err != nil {
		return "", err
	}
	s.closers = append(s.closers, func() { _ = os.RemoveAll(dir) })
	server, err := redisproc.Start(dir)
	if err != nil {
		return "", err
	}
	s.closers = append(s.closers, server.Stop)
	return server.URL, nil
}

func (s *stores) close() {
	for i := len(s.closers) - 1; i >= 0; i-- {
		s.closers[i]()
	}
}

// hashOf spreads the small ids of a trace over all bits, as hashes are.
func hashOf(id uint64) uint64 { return (id + 1) * 0x9E3779B97F4A7C15 }

func hashesOf(blocks []uint64) []kvcache.BlockHash {
	hashes := make([]kvcache.BlockHash, len(blocks))
	for i, b := range blocks {
		hashes[i] = kvcache.BlockHash(hashOf(b))
	}
	return hashes
}

func (s *stores) overlaps(ctx context.Context, frontend int, blocks []uint64) ([]int, error) {
	scores, _, err := s.frontends[frontend].Lookup(ctx, replayPool, hashesOf(blocks), store.LookupOptions{})
	if err != nil {
		return nil, err
	}
	out := make([]int, len(s.names))
	for i, w := range s.names {
		out[i] = scores.Scores[w].Any
	}
	return out, nil
}

func (s *stores) loads(ctx context.Context, frontend int) ([]choose.Load, error) {
	all, err := s.frontends[frontend].Loads(ctx, s.loadPools[frontend])
	if err != nil {
		return nil, err
	}
	out := make([]choose.Load, len(s.names))
	for i, w := range s.names {
		out[i] = choose.Load(all[w])
	}
	return out, nil
}

func (s *stores) place(ctx context.Context, frontend int, p placement) (int, error) {
	a := store.Ask{
		ID: p.id, Lease: leaseLength, BlockSize: p.ask.BlockSize, PromptTokens: p.ask.Tokens, DecodeBlocks: len(p.request.Blocks),
		Weights: store.Weights(p.ask.Weights), Random: func() float64 { return p.ask.Random },
		Session: p.session, SessionTTL: leaseLength, SessionSlack: p.ask.Slack,
	}
	for _, w := range p.among {
		c := store.Candidate{WorkerRank: s.names[w]}
		if p.credits != nil {
			c.Credit = float64(p.credits[w])
		}
		a.Candidates = append(a.Candidates, c)
	}
	c, err := s.frontends[frontend].Select(ctx, s.loadPools[frontend], a)
	if err != nil {
		return 0, err
	}
	w := p.among[c.Index]
	if s.predict && p.credits != nil {
		o, err := s.frontends[frontend].Predict(ctx, replayPool, s.names[w], hashesOf(p.request.whole()), store.PredictOptions{TTL: leaseLength})
		if err == nil && o != store.Applied {
			err = fmt.Errorf("predict at %v: %v", s.names[w], o)
		}
		return w, err
	}
	return w, nil
}

func (s *stores) prefilled(ctx context.Context, frontend int, id string) error {
	_, err := s.frontends[frontend].PrefillDone(ctx, s.loadPools[frontend], id)
	return err
}

func (s *stores) finished(ctx context.Context, frontend int, id string) error {
	_, err := s.frontends[frontend].Release(ctx, s.loadPools[frontend], id)
	return err
}

func (s *stores) changed(ctx context.Context, worker int, added, gone []uint64) error {
	var b store.Batch
	b.Message(s.seq[worker])
	for _, id := range gone {
		b.Remove(kvcache.Device, kvcache.EngineHash(hashOf(id)))
	}
	for _, id := range added {
		b.Store(kvcache.Device, kvcache.BlockHash(hashOf(id)), kvcache.EngineHash(hashOf(id)))
	}
	s.seq[worker]++
	o, _, err := s.indexer.Apply(ctx, s.streams[worker], &b)
	if err == nil && o != store.Applied {
		err = fmt.Errorf("events of %v: %v", s.names[worker], o)
	}
	return err
}
