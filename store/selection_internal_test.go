package store

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store/storetest"
)

// countTrips counts round trips: single commands and pipelines.
type countTrips struct{ n atomic.Int64 }

func (*countTrips) DialHook(next redis.DialHook) redis.DialHook { return next }
func (c *countTrips) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { c.n.Add(1); return next(ctx, cmd) }
}
func (c *countTrips) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { c.n.Add(1); return next(ctx, cmds) }
}

func anAsk(id string) Ask {
	return Ask{
		ID: id, Lease: time.Minute, BlockSize: 16, PromptTokens: 160, DecodeBlocks: 10,
		Candidates: []Candidate{{WorkerRank: kvcache.WorkerRank{Worker: "w"}}, {WorkerRank: kvcache.WorkerRank{Worker: "v"}}},
		Weights:    Weights{PrefillScale: 1, Miss: 1}, Session: "s", SessionTTL: time.Minute, SessionSlack: 1e6,
	}
}

// A choice costs two round trips in all: the overlaps, the selection. What both need to know is kept.
func TestAChoiceIsTwoRoundTrips(t *testing.T) {
	s, err := New(Options{URL: storetest.Redis(t).URL, LookupBudget: 10 * time.Second, WriteTimeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	pool := kvcache.PoolID{Model: "m"}
	st, _, err := s.Register(t.Context(), StreamID{Pool: pool, WorkerRank: kvcache.WorkerRank{Worker: "w"}}, Registration{BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	var b Batch
	b.Message(0)
	b.Store(kvcache.Device, 1, 1)
	if _, _, err := s.Apply(t.Context(), st, &b); err != nil {
		t.Fatal(err)
	}
	reads, writes := &countTrips{}, &countTrips{}
	s.read.AddHook(reads)
	s.write.AddHook(writes)
	choice := func(id string) {
		t.Helper()
		if _, ok, err := s.PoolConfig(t.Context(), pool); !ok || err != nil {
			t.Fatal(ok, err)
		}
		scores, state, err := s.Lookup(t.Context(), pool, []kvcache.BlockHash{1, 2, 3}, LookupOptions{})
		if err != nil || state != kvcache.Exact || len(scores.Scores) != 1 {
			t.Fatal(scores, state, err)
		}
		if c, err := s.Select(t.Context(), pool, anAsk(id)); err != nil || !c.Held {
			t.Fatal(c, err)
		}
	}
	choice("first") // learns the slots and the script
	reads.n.Store(0)
	writes.n.Store(0)
	const n = 5
	for i := range n {
		choice("again" + string(rune('a'+i)))
	}
	if r, w := reads.n.Load(), writes.n.Load(); r != 2*n || w != 0 {
		t.Errorf("%d choices cost %d round trips on the way of requests and %d beside it", n, r, w)
	}
}

// Prompts that are held far beyond the first chunk take one round trip, where most are; others cost no more than they did.
func TestFirstChunkFollowsWhatIsHeld(t *testing.T) {
	s, err := New(Options{URL: storetest.Redis(t).URL, LookupBudget: 10 * time.Second, WriteTimeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	pool, w := kvcache.PoolID{Model: "m"}, kvcache.WorkerRank{Worker: "w"}
	st, _, err := s.Register(t.Context(), StreamID{Pool: pool, WorkerRank: w}, Registration{BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	var b Batch
	b.Message(0)
	prompt := make([]kvcache.BlockHash, 1000)
	for i := range prompt {
		prompt[i] = kvcache.BlockHash(i + 1)
		if i < 700 {
			b.Store(kvcache.Device, prompt[i], kvcache.EngineHash(i+1))
		}
	}
	if _, _, err := s.Apply(t.Context(), st, &b); err != nil {
		t.Fatal(err)
	}
	trips := &countTrips{}
	s.read.AddHook(trips)
	look := func(blocks []kvcache.BlockHash, want int) int64 {
		t.Helper()
		before := trips.n.Load()
		scores, _, err := s.Lookup(t.Context(), pool, blocks, LookupOptions{})
		if err != nil || scores.Scores[w].Any != want {
			t.Fatal(scores, err)
		}
		return trips.n.Load() - before
	}
	look(prompt, 700) // learns the configuration and the slots
	if n := look(prompt, 700); n != 3 {
		t.Errorf("64, 512 and the rest took %d round trips", n)
	}
	for range 40 {
		look(prompt, 700)
	}
	if n := look(prompt, 700); n != 1 {
		t.Errorf("a prompt like those before took %d round trips", n)
	}
	for range 40 {
		look(prompt[:600], 600)
		look(prompt[:40], 40) // says nothing: it fits into every chunk
	}
	if n := look(prompt[:600], 600); n != 1 {
		t.Errorf("a prompt that is held as a whole took %d round trips", n)
	}
	sh := s.pool(pool).config.Load().shards[0]
	cold := append([]kvcache.BlockHash{1 << 40}, prompt...)
	for range 40 {
		look(cold, 0)
	}
	if n := sh.reach.chunk(); n != firstChunk {
		t.Errorf("after prompts that nobody holds, %d blocks are asked for first", n)
	}
}

// Whatever was reserved and not heard of is reserved once when it is asked for again, and ends once.
func TestLostRepliesOfLeases(t *testing.T) {
	for name, url := range map[string]string{"redis": storetest.Redis(t).URL, "miniredis": second(storetest.Miniredis(t))} {
		t.Run(name, func(t *testing.T) {
			s, err := New(Options{URL: url, LookupBudget: 10 * time.Second, WriteTimeout: 10 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			pool := kvcache.PoolID{Model: "m"}
			lose := &loseReplies{}
			s.read.AddHook(lose)
			s.write.AddHook(lose)
			lose.on.Store(true)
			if _, err := s.Select(t.Context(), pool, anAsk("r")); err == nil {
				t.Fatal("the reply was not lost")
			}
			lose.on.Store(false)
			for !s.leases(pool).link.up.Load() { // the prober gets through
				select {
				case <-t.Context().Done():
					t.Fatal("the link stays down")
				case <-time.After(time.Millisecond):
				}
			}
			first, err := s.Loads(t.Context(), pool)
			if err != nil || len(first) != 1 {
				t.Fatal(first, err)
			}
			c, err := s.Select(t.Context(), pool, anAsk("r"))
			if err != nil || !c.Held || first[c.WorkerRank].Requests != 1 {
				t.Fatal(c, first, err)
			}
			lost := func(f func() (bool, error)) {
				t.Helper()
				lose.on.Store(true)
				_, err := f()
				lose.on.Store(false)
				if err == nil {
					t.Fatal("the reply was not lost")
				}
			}
			lost(func() (bool, error) { return s.PrefillDone(t.Context(), pool, "r") })
			if ok, err := s.PrefillDone(t.Context(), pool, "r"); !ok || err != nil {
				t.Fatal(ok, err)
			}
			lost(func() (bool, error) { return s.Release(t.Context(), pool, "r") })
			if ok, err := s.Release(t.Context(), pool, "r"); ok || err != nil {
				t.Fatal(ok, err)
			}
			if l, err := s.Loads(t.Context(), pool); err != nil || len(l) > 0 {
				t.Errorf("left: %v %v", l, err)
			}
		})
	}
}

// What has no place any more is chosen for all the same, and not held.
func TestLeasesOfAPoolAreBounded(t *testing.T) {
	m, url := storetest.Miniredis(t)
	s, err := New(Options{URL: url, LookupBudget: time.Minute, WriteTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	pool := kvcache.PoolID{Model: "m"}
	far := float64(time.Now().Add(time.Hour).UnixMilli())
	for i := range MaxLeases {
		if _, err := m.ZAdd(deadlinesKey(pool), far, "x"+string(rune('a'+i%26))+time.Duration(i).String()); err != nil {
			t.Fatal(err)
		}
	}
	c, err := s.Select(t.Context(), pool, anAsk("r"))
	if err != nil || c.Held || c.Worker == "" {
		t.Errorf("%+v %v", c, err)
	}
	if l, err := s.Loads(t.Context(), pool); err != nil || len(l) > 0 {
		t.Errorf("%v %v", l, err)
	}
}

// An error that was taken for one of Redis and turns out to be of this process's making is not one of Redis.
func TestOverloadHidesWhatItWasTakenFor(t *testing.T) {
	err := overload(classify(t.Context(), context.DeadlineExceeded))
	if errors.Is(err, ErrUnavailable) || Reason(err) != ReasonPoolExhausted {
		t.Errorf("%v, reason %s", err, Reason(err))
	}
}
