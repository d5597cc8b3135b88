package store

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store/storetest"
)

// twoShards is a store with a pool of two shards on miniredis, the first of which has a worker.
func twoShards(t *testing.T) (*Store, *miniredis.Miniredis, StreamID, *pool) {
	m, url := storetest.Miniredis(t)
	s, err := New(Options{URL: url, Shards: 2, LookupBudget: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	id := StreamID{Pool: kvcache.PoolID{Tenant: "default", Model: "m"}, WorkerRank: kvcache.WorkerRank{Worker: "a"}}
	if _, _, err := s.Register(t.Context(), id, Registration{BlockSize: 16}); err != nil {
		t.Fatal(err)
	}
	return s, m, id, s.pool(id.Pool)
}

// takeDown takes a link down, which stays so until the returned function lets its prober succeed.
func takeDown(t *testing.T, l *link) (mend func()) {
	away := make(chan struct{})
	l.probe = func(context.Context) error {
		select {
		case <-away:
			return nil
		default:
			return errAway
		}
	}
	_ = l.report(t.Context(), errAway)
	return func() { close(away) }
}

// Where a pool's configuration is in doubt and cannot be read, because the node that has it is away, the known one
// counts: the shards on the other nodes answer.
func TestKnownConfigurationCountsWhileItIsInDoubt(t *testing.T) {
	s, _, id, p := twoShards(t)
	mend := takeDown(t, p.link)
	p.doubt()
	if c, ok, err := s.PoolConfig(t.Context(), id.Pool); err != nil || !ok || c.BlockSize != 16 || c.Shards != 2 {
		t.Errorf("configuration %+v, %v, %v", c, ok, err)
	}
	if _, state, err := s.Lookup(t.Context(), id.Pool, []kvcache.BlockHash{1}, LookupOptions{}); state != kvcache.Exact || err != nil {
		t.Errorf("lookup: %v, %v", state, err)
	}
	mend()
}

// A shard has one link, whatever becomes of the pool's configuration: there is one prober, and nobody asks a shard
// that is known to be away.
func TestShardsKeepTheirLinks(t *testing.T) {
	s, m, id, p := twoShards(t)
	before := p.config.Load().shards
	mend := takeDown(t, before[1].link)
	partial := func(what string) {
		t.Helper()
		_, state, err := s.Lookup(t.Context(), id.Pool, []kvcache.BlockHash{1}, LookupOptions{})
		if state != kvcache.Partial || !errors.Is(err, ErrUnavailable) || before[1].link.up.Load() {
			t.Errorf("%s: %v %v", what, state, err)
		}
	}
	partial("one shard away")
	m.Del(before[0].keys.version()) // the other one's node came back empty
	partial("the other one empty: the configuration is in doubt")
	partial("and read again")

	m.FlushAll()
	p.doubt()
	if _, ok, err := s.PoolConfig(t.Context(), id.Pool); ok || err != nil {
		t.Errorf("a pool that is gone: %v, %v", ok, err)
	}
	if _, _, err := s.Register(t.Context(), id, Registration{BlockSize: 32}); err != nil {
		t.Fatal(err)
	}
	partial("back with another configuration")
	if after := p.config.Load(); after.BlockSize != 32 || !slices.Equal(after.shards, before) {
		t.Errorf("%+v, the shards were %v", after, before)
	}
	mend()
}

// The node that has the places of the workers comes back empty: whoever has a stream on another one stays there, and is
// not put into a second shard, where it would hold blocks twice.
func TestPlacesAreFoundAgain(t *testing.T) {
	s, m, id, p := twoShards(t) // a is in shard 0
	b := StreamID{Pool: id.Pool, WorkerRank: kvcache.WorkerRank{Worker: "b"}}
	first, _, err := s.Register(t.Context(), b, Registration{BlockSize: 16})
	if err != nil || first.Shard != 1 {
		t.Fatalf("%+v %v", first, err)
	}
	for _, fresh := range []bool{false, true} {
		m.Del(configKey(p.id))
		m.Del(placementKey(p.id))
		if fresh { // the pool is gone for this process too
			p.doubt()
			if _, ok, err := s.PoolConfig(t.Context(), id.Pool); ok || err != nil {
				t.Fatal(ok, err)
			}
		}
		again, created, err := s.Register(t.Context(), b, Registration{BlockSize: 16}) // first: shard 0 is as empty as shard 1
		if err != nil || created || again.Shard != 1 || again.Generation != first.Generation {
			t.Errorf("created %v in shard %d, generation %d after %d: %v", created, again.Shard, again.Generation, first.Generation, err)
		}
		if _, _, err := s.Register(t.Context(), id, Registration{BlockSize: 16}); err != nil {
			t.Fatal(err)
		}
		if streams, err := s.Streams(t.Context(), id.Pool); len(streams) != 2 || err != nil {
			t.Errorf("%v %v", streams, err)
		}
	}
}
