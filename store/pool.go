package store

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// PoolConfig is what all users of a pool agree on.
type PoolConfig struct {
	BlockSize int // tokens per block
	Shards    int
}

// pool is what this process knows about one pool.
type pool struct {
	store *Store
	id    kvcache.PoolID
	link  *link // while the configuration is unknown

	config  atomic.Pointer[knownPool]
	doubted atomic.Bool // it may be another one by now

	mu     sync.Mutex
	shards []*shard // all that this process ever knew: a shard has one link, whatever becomes of the configuration
}

type knownPool struct {
	PoolConfig
	shards []*shard
}

// shard is one part of a pool's index.
type shard struct {
	keys   shardKeys
	name   string
	link   *link
	gate   gate
	slots  atomic.Pointer[slotMap]
	reach  reach
	forgot atomic.Int64 // when this process last took expired predictions out, in ms
}

// slotMap says which worker rank has which slot, at one version.
type slotMap struct {
	version string
	owners  []kvcache.WorkerRank // by slot; an empty worker where nobody has it
}

var noSlots = &slotMap{}

func (s *Store) pool(id kvcache.PoolID) *pool {
	if id.Tenant == "" {
		id.Tenant = kvcache.DefaultTenant
	}
	s.mu.RLock()
	p := s.pools[id]
	s.mu.RUnlock()
	if p != nil {
		return p
	}
	return &pool{store: s, id: id, link: s.strangers} // not kept: see keep
}

// keep remembers a pool that Redis knows. Any other is forgotten with the call that named it: whoever
// may ask about a model decides on its name, and neither memory, nor metrics, nor probers may grow with that.
func (s *Store) keep(p *pool) *pool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if kept := s.pools[p.id]; kept != nil {
		return kept
	}
	p.link = newLink(s, p.id.String(), func(ctx context.Context) error {
		_, err := p.load(ctx, s.read)
		return classify(context.WithoutCancel(ctx), err)
	})
	s.pools[p.id] = p
	return p
}

// newStrangers is the link to the configuration of all pools that this process does not know yet. It is
// probed with the one that was asked for last.
func newStrangers(s *Store) *link {
	return newLink(s, "pools", func(ctx context.Context) error {
		_, err := s.stranger.Load().load(ctx, s.read)
		return classify(context.WithoutCancel(ctx), err)
	})
}

// links is the shards whose links matter. Where the configuration is not known, it is all that there ever were: their
// probers go on.
func (p *pool) links() (shards []*shard, known bool) {
	if k := p.config.Load(); k != nil {
		return k.shards, true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.shards), false
}

// load reads the configuration unless it is known for sure. nil, nil means that the pool does not exist.
// The error is not classified yet.
func (p *pool) load(ctx context.Context, c redis.UniversalClient) (*knownPool, error) {
	if k := p.sure(); k != nil {
		return k, nil
	}
	v, err := c.HMGet(ctx, configKey(p.id), "block_size", "shards").Result()
	if err != nil {
		return nil, fmt.Errorf("read pool configuration: %w", err)
	}
	if v[0] == nil && v[1] == nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.config.Store(nil)
		return nil, nil
	}
	size, _ := v[0].(string)
	shards, _ := v[1].(string)
	return p.learn(size, shards)
}

// learn keeps a configuration that Redis named.
func (p *pool) learn(blockSize, shards string) (*knownPool, error) {
	size, err1 := strconv.Atoi(blockSize)
	n, err2 := strconv.Atoi(shards)
	if err1 != nil || err2 != nil || size < 1 || n < 1 || n > 1024 {
		return nil, fmt.Errorf("pool configuration: block_size %q, shards %q: %w", blockSize, shards, ErrCorrupt)
	}
	p = p.store.keep(p)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.doubted.Store(false)
	if k := p.config.Load(); k != nil && k.BlockSize == size && k.Shards == n {
		return k, nil
	}
	k := &knownPool{PoolConfig: PoolConfig{BlockSize: size, Shards: n}}
	for i := len(p.shards); i < n; i++ {
		p.shards = append(p.shards, p.newShard(i))
	}
	k.shards = slices.Clone(p.shards[:n])
	p.config.Store(k)
	return k, nil
}

func (p *pool) newShard(i int) *shard {
	sh := &shard{keys: newShardKeys(p.id, i), name: p.id.String() + "#" + strconv.Itoa(i)}
	sh.slots.Store(noSlots)
	if sh.gate = p.store.gate; sh.gate == nil { // a cluster: each node has connections of its own
		sh.gate = make(gate, p.store.opts.PoolSize)
	}
	sh.link = newLink(p.store, sh.name, func(ctx context.Context) error {
		return sh.probe(ctx, p.store.read)
	})
	return sh
}

// sure is the configuration, nil where it has to be read.
func (p *pool) sure() *knownPool {
	if p.doubted.Load() {
		return nil
	}
	return p.config.Load()
}

// doubt has the configuration read again: Redis may have come back as another one. Where it cannot be read, the known
// one goes on to count.
func (p *pool) doubt() { p.doubted.Store(true) }

// Pools lists the pools that anybody ever registered a worker in. A name that nobody can have registered is left out: [Store.Check]
// reports it.
func (s *Store) Pools(ctx context.Context) ([]kvcache.PoolID, error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	names, err := s.write.SMembers(bounded, keyPools).Result()
	if err != nil {
		return nil, classify(ctx, fmt.Errorf("list pools: %w", err))
	}
	var out []kvcache.PoolID
	for _, n := range names {
		if id, err := kvcache.ParsePoolID(n); err == nil {
			out = append(out, id)
		}
	}
	return out, nil
}

// Announced says whether those who start now would find a pool: whether it is listed and has its configuration. Both are small keys
// that no stream's are lost with, and who knows the pool does not miss them. Registering any of its workers brings them back.
func (s *Store) Announced(ctx context.Context, id kvcache.PoolID) (bool, error) {
	listed, err := s.Pools(ctx)
	if err != nil || !slices.Contains(listed, s.pool(id).id) {
		return false, err
	}
	bounded, cancel := s.bound(ctx)
	defer cancel()
	v, err := s.write.HMGet(bounded, configKey(s.pool(id).id), "block_size", "shards").Result()
	if err != nil {
		return false, classify(ctx, fmt.Errorf("read pool configuration: %w", err))
	}
	return !slices.Contains(v, nil), nil
}

// PoolConfig is a pool's configuration; ok is false for a pool that does not exist. It is on the way of a
// request: kept once known, else read within the lookup budget, and not at all while the link is down.
func (s *Store) PoolConfig(ctx context.Context, id kvcache.PoolID) (c PoolConfig, ok bool, err error) {
	bounded, cancel, _ := s.budgeted(ctx)
	defer cancel()
	k, err := s.pool(id).find(ctx, bounded)
	if err != nil || k == nil {
		return PoolConfig{}, false, err
	}
	return k.PoolConfig, true, nil
}

// find is load on the way of a request: through the link, and classified. A shard that is away takes no other one with
// it: where the configuration cannot be read, the one that was known counts.
func (p *pool) find(caller, bounded context.Context) (*knownPool, error) {
	if k := p.sure(); k != nil {
		return k, nil
	}
	var err error
	if observe := p.store.opts.Observe; observe != nil {
		ended := observe(caller, p.link.shard, 0)
		defer func() { ended(outcome(err)) }()
	}
	known := p.config.Load()
	err = p.link.check()
	if err == nil {
		if p.link == p.store.strangers {
			p.store.stranger.Store(p)
		}
		var k *knownPool
		k, err = p.load(bounded, p.store.read)
		if err = p.link.report(caller, classify(context.WithoutCancel(caller), err)); err == nil {
			return k, nil
		}
	}
	if known != nil {
		return known, nil
	}
	return nil, err
}

// place finds or makes a worker's shard.
func (s *Store) place(ctx context.Context, id StreamID, blockSize int) (*shard, int, error) {
	p := s.pool(id.Pool)
	before, err := s.placedBefore(ctx, p, id)
	if err != nil {
		return nil, 0, fmt.Errorf("place worker: %w", err)
	}
	v, err := scripts.assign.run(ctx, s.write,
		[]string{configKey(p.id), placementKey(p.id)}, strconv.Itoa(blockSize), strconv.Itoa(s.opts.Shards), id.Worker, before)
	if err != nil {
		return nil, 0, fmt.Errorf("place worker: %w", err)
	}
	if len(v) != 4 {
		return nil, 0, fmt.Errorf("place worker: %w", errShortReply)
	}
	if v[0] == "1" {
		return nil, 0, &ConflictError{Field: "block_size", Have: v[1], Want: strconv.Itoa(blockSize)}
	}
	k, err := p.learn(v[1], v[2])
	if err != nil {
		return nil, 0, err
	}
	n, err := strconv.Atoi(v[3])
	if err != nil || n < 0 || n >= len(k.shards) {
		return nil, 0, fmt.Errorf("place worker: shard %q: %w", v[3], ErrCorrupt)
	}
	return k.shards[n], n, nil
}

// placedBefore is the shard where a worker without a place has its stream, "" where there is none. The places are on one node of a cluster: if that has
// come back empty, the streams on the others are still there, and a second one elsewhere would leave the first as it is.
func (s *Store) placedBefore(ctx context.Context, p *pool, id StreamID) (shard string, err error) {
	known, err := p.load(ctx, s.write)
	if err != nil {
		return "", err
	}
	if known == nil {
		p.mu.Lock()
		known = &knownPool{shards: p.shards}
		p.mu.Unlock()
	}
	if len(known.shards) < 2 {
		return "", nil
	}
	if err := s.write.HGet(ctx, placementKey(p.id), id.Worker).Err(); err != redis.Nil {
		return "", err
	}
	bounded, cancel := context.WithTimeout(ctx, s.opts.WriteTimeout/4)
	defer cancel()
	has := make([]bool, len(known.shards))
	var asked sync.WaitGroup
	for i, sh := range known.shards {
		asked.Go(func() { // a shard that is away keeps no new worker out of the others
			has[i] = s.write.HGet(bounded, sh.keys.stream(id.WorkerRank), "gen").Err() == nil
		})
	}
	asked.Wait()
	if i := slices.Index(has, true); i >= 0 {
		return strconv.Itoa(i), nil
	}
	return "", nil
}

// stays says whether a stream is on the shard that its worker is placed on. Placing and registering are two steps, since they may be
// on two nodes; Redis may be emptied in between, and another caller may place the worker anew.
func (s *Store) stays(ctx context.Context, st Stream) (here, placed bool, err error) {
	p := s.pool(st.Pool)
	if k := p.config.Load(); k != nil && len(k.shards) < 2 {
		return true, true, nil
	}
	n, err := s.write.HGet(ctx, placementKey(p.id), st.Worker).Int()
	if err == redis.Nil {
		return false, false, nil
	}
	return n == st.Shard, true, err
}

// locate is the pool and the number of the shard of a worker that was placed before; nil where it was not.
func (s *Store) locate(ctx context.Context, id StreamID) (k *knownPool, n int, err error) {
	p := s.pool(id.Pool)
	if k, err = p.load(ctx, s.write); err != nil || k == nil {
		return nil, 0, err
	}
	v, err := s.write.HGet(ctx, placementKey(p.id), id.Worker).Result()
	if err == redis.Nil {
		return nil, 0, nil
	} else if err != nil {
		return nil, 0, fmt.Errorf("find worker's shard: %w", err)
	}
	n, err = strconv.Atoi(v)
	if err != nil || n < 0 || n >= len(k.shards) {
		return nil, 0, fmt.Errorf("find worker's shard: %q: %w", v, ErrCorrupt)
	}
	return k, n, nil
}

// shard is the shard that a stream's state names; nil where the pool has none such, because Redis came
// back empty or as another one.
func (s *Store) shard(ctx context.Context, st Stream) (*shard, error) {
	k, err := s.pool(st.Pool).load(ctx, s.write)
	if err != nil || k == nil || st.Shard < 0 || st.Shard >= len(k.shards) {
		return nil, err
	}
	return k.shards[st.Shard], nil
}

// millis reads a time in ms as Redis keeps it.
func millis(s string) time.Time {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.UnixMilli(n)
}
