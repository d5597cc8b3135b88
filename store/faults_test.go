package store_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// filled opens a store on url with one worker that holds the returned prompt.
func filled(t *testing.T, url string, change ...func(*store.Options)) (*store.Store, store.Stream, []kvcache.BlockHash) {
	t.Helper()
	s := open(t, url, change...)
	a := register(t, s, rank("a", 0))
	p := chain(1, 40)
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(40)})
	return s, a, p
}

func budget(d time.Duration) func(*store.Options) {
	return func(o *store.Options) { o.LookupBudget = d }
}

// exactAgain waits for a lookup that finds the prompt.
func exactAgain(t *testing.T, s *store.Store, p []kvcache.BlockHash) {
	t.Helper()
	eventually(t, "an exact lookup", func() bool {
		got, state, _ := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
		return state == kvcache.Exact && got.Scores[rank("a", 0)].Any == len(p)
	})
}

// A rush of this process on its own few connections is told from a slow Redis: some lookups go without overlaps, the
// link stays up, and nobody reconnects.
func TestRushOnASmallPool(t *testing.T) {
	r := storetest.Redis(t)
	proxy := storetest.Proxy(t, r.Addr)
	s, _, p := filled(t, "redis://"+proxy.Addr, budget(200*time.Millisecond), func(o *store.Options) { o.PoolSize = 5 })
	proxy.Delay(20 * time.Millisecond)
	dials := proxy.Dials()
	var exact, exhausted atomic.Int64
	var wg sync.WaitGroup
	for range 500 {
		wg.Go(func() {
			switch _, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{}); {
			case state == kvcache.Exact && err == nil:
				exact.Add(1)
			case store.Reason(err) == store.ReasonPoolExhausted && !errors.Is(err, store.ErrUnavailable):
				exhausted.Add(1)
			default:
				t.Errorf("%v %v", state, err)
			}
		})
	}
	wg.Wait()
	if exact.Load() == 0 || exhausted.Load() == 0 {
		t.Fatalf("%d exact, %d went without: the rush was no rush", exact.Load(), exhausted.Load())
	}
	if !s.Links()[0].Up {
		t.Fatalf("the link went down: %+v", s.Links())
	}
	if n := proxy.Dials() - dials; n > 5 {
		t.Fatalf("%d dials for a pool of 5", n)
	}
}

// Clients that hang up during the lookup say nothing about Redis and cost no connection.
func TestClientsHangUp(t *testing.T) {
	r := storetest.Redis(t)
	proxy := storetest.Proxy(t, r.Addr)
	s, _, p := filled(t, "redis://"+proxy.Addr, budget(2*time.Second))
	proxy.Delay(5 * time.Millisecond)
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Millisecond, func() { cancel(errors.New("stream closed by the peer")) })
			_, _, _ = s.Lookup(ctx, testPool, p, store.LookupOptions{})
		})
	}
	wg.Wait()
	if !s.Links()[0].Up {
		t.Fatalf("hanging up took the link down: %+v", s.Links())
	}
	if n := proxy.Dials(); n > 40 {
		t.Fatalf("%d connections for a pool of 16", n)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(40)})
}

// Bytes that vanish without a reset: one budget, then nothing, and only the prober dials.
func TestPathThatSwallows(t *testing.T) {
	r := storetest.Redis(t)
	proxy := storetest.Proxy(t, r.Addr)
	s, _, p := filled(t, "redis://"+proxy.Addr, budget(100*time.Millisecond))
	proxy.Set(redisproc.Swallow)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{}); state != kvcache.Degraded || err == nil {
				t.Errorf("%v %v", state, err)
			}
		})
	}
	wg.Wait()
	dials := proxy.Dials()
	for range 10_000 {
		if _, state, _ := s.Lookup(t.Context(), testPool, p, store.LookupOptions{}); state != kvcache.Degraded {
			t.Fatal(state)
		}
	}
	if n := proxy.Dials() - dials; n > 20 {
		t.Fatalf("%d dials for 10,000 lookups while the link was down", n)
	}
	proxy.Set(redisproc.Pass)
	exactAgain(t, s, p)
}

// While Redis loads its data it answers LOADING, to PING too: that is away, not empty.
func TestLoading(t *testing.T) {
	r := storetest.Redis(t, "--save", "3600 1", "--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
	s, _, p := filled(t, r.URL, budget(250*time.Millisecond))
	raw := client(t, r.URL)
	pipe := raw.Pipeline()
	for i := range 2000 {
		pipe.Set(t.Context(), fmt.Sprintf("ballast:%d", i), strings.Repeat("x", 64), 0)
	}
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := raw.Save(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	r.Stop()
	if err := r.StartLoading(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a lookup that is told LOADING", func() bool {
		_, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
		if state == kvcache.Exact {
			t.Fatal("an exact answer before LOADING was seen")
		}
		return store.Reason(err) == store.ReasonLoading || probed(s, store.ReasonLoading)
	})
	exactAgain(t, s, p)
}

// probed says whether the link is down for that reason.
func probed(s *store.Store, reason string) bool {
	for _, l := range s.Links() {
		if !l.Up && l.Reason == reason {
			return true
		}
	}
	return false
}

// A full Redis refuses writes and answers reads; an eviction policy that would drop workers is reported.
func TestMemoryLimits(t *testing.T) {
	r := storetest.Redis(t, "--maxmemory-policy", "noeviction")
	s, a, p := filled(t, r.URL)
	raw := client(t, r.URL)
	if problems, err := s.Settings(t.Context()); err != nil || len(problems) != 0 {
		t.Fatalf("settings: %v %v", problems, err)
	}
	if err := raw.ConfigSet(t.Context(), "maxmemory", "1mb").Err(); err != nil {
		t.Fatal(err)
	}
	var b store.Batch
	b.Message(1)
	storeAll("a", kvcache.Device, chain(2, 100)...)(&b)
	if _, _, err := s.Apply(t.Context(), a, &b); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "OOM") {
		t.Fatalf("apply in a full Redis: %v", err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(40)})
	want(t, s, chain(2, 100), map[kvcache.WorkerRank]kvcache.Overlap{})
	if err := raw.ConfigSet(t.Context(), "maxmemory", "0").Err(); err != nil {
		t.Fatal(err)
	}
	applyBatch(t, s, &a, &b, store.Applied)
	clean(t, s)

	if err := raw.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru").Err(); err != nil {
		t.Fatal(err)
	}
	if problems, err := s.Settings(t.Context()); err != nil || len(problems) != 1 || !strings.Contains(problems[0], "noeviction") {
		t.Fatalf("settings: %v %v", problems, err)
	}
}

// A server that became a replica refuses writes, goes on answering reads, and says MASTERDOWN where it is told to when its
// master is away.
func TestRoleChange(t *testing.T) {
	r, other := storetest.Redis(t, "--replica-serve-stale-data", "no"), storetest.Redis(t)
	s, a, p := filled(t, r.URL, budget(250*time.Millisecond))
	raw := client(t, r.URL)
	host, port, _ := strings.Cut(other.Addr, ":")
	other.Stop()
	if err := raw.Do(t.Context(), "replicaof", host, port).Err(); err != nil {
		t.Fatal(err)
	}
	_, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
	if state != kvcache.Degraded || store.Reason(err) != store.ReasonClusterDown {
		t.Fatalf("%v %v", state, err)
	}
	if err := raw.ConfigSet(t.Context(), "replica-serve-stale-data", "yes").Err(); err != nil {
		t.Fatal(err)
	}
	exactAgain(t, s, p)
	var b store.Batch
	b.Message(1)
	removeAll("a", kvcache.Device, p[0])(&b)
	if _, _, err := s.Apply(t.Context(), a, &b); !errors.Is(err, store.ErrUnavailable) || store.Reason(err) != store.ReasonRefused {
		t.Fatalf("a write on a replica: %v", err)
	}
	if err := raw.Do(t.Context(), "replicaof", "no", "one").Err(); err != nil {
		t.Fatal(err)
	}
	applyBatch(t, s, &a, &b, store.Applied)
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{})
}

// A server without a free connection is away, and comes back by itself.
func TestMaxClients(t *testing.T) {
	r := storetest.Redis(t)
	_, _, p := filled(t, r.URL)
	raw := client(t, r.URL)
	if err := raw.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	if err := raw.ConfigSet(t.Context(), "maxclients", "1").Err(); err != nil {
		t.Fatal(err)
	}
	late := open(t, r.URL, budget(250*time.Millisecond))
	if _, state, err := late.Lookup(t.Context(), testPool, p, store.LookupOptions{}); state != kvcache.Degraded || !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("%v %v", state, err)
	}
	if err := raw.ConfigSet(t.Context(), "maxclients", "1000").Err(); err != nil {
		t.Fatal(err)
	}
	exactAgain(t, late, p)
}

// lookupAll counts the workers that a lookup finds.
func lookupAll(t *testing.T, s *store.Store, p []kvcache.BlockHash) (workers int, state kvcache.IndexState, err error) {
	t.Helper()
	got, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
	return len(got.Scores), state, err
}

// spread registers workers on all shards of a pool, all of them holding the same prompt.
func spread(t *testing.T, s *store.Store, workers int) []kvcache.BlockHash {
	t.Helper()
	p := chain(1, 20)
	for i := range workers {
		name := fmt.Sprintf("w%d", i)
		st := register(t, s, rank(name, 0))
		apply(t, s, &st, 0, store.Applied, storeAll(name, kvcache.Device, p...))
	}
	if n, state, err := lookupAll(t, s, p); n != workers || state != kvcache.Exact {
		t.Fatalf("%d workers, %v, %v", n, state, err)
	}
	return p
}

// One of three masters stops: its shards cost their workers, the others answer (partial), and all is exact when it goes on.
func TestOneClusterMasterStops(t *testing.T) {
	c := storetest.Cluster(t, "--cluster-require-full-coverage", "no")
	s := open(t, c.URL, budget(250*time.Millisecond), func(o *store.Options) { o.Shards = 12 })
	p := spread(t, s, 12)
	c.Nodes[1].Pause()
	var n int
	eventually(t, "a partial answer", func() bool {
		var state kvcache.IndexState
		var err error
		n, state, err = lookupAll(t, s, p)
		if state == kvcache.Degraded {
			t.Fatalf("one node of three took everything: %v", err)
		}
		return state == kvcache.Partial && err != nil
	})
	if n == 0 || n == 12 {
		t.Fatalf("%d of 12 workers in a partial answer", n)
	}
	up := 0
	for _, l := range s.Links() {
		if l.Up {
			up++
		}
	}
	if up != n {
		t.Fatalf("%d links up, %d workers known", up, n)
	}
	c.Nodes[1].Resume()
	eventually(t, "exact again", func() bool {
		n, state, _ := lookupAll(t, s, p)
		return state == kvcache.Exact && n == 12
	})
}

// With full coverage required, one killed master makes the whole cluster refuse: degraded, reason cluster_down, and back
// when the node is.
func TestClusterDown(t *testing.T) {
	c := storetest.Cluster(t, "--cluster-require-full-coverage", "yes")
	s := open(t, c.URL, budget(250*time.Millisecond), func(o *store.Options) { o.Shards = 6 })
	p := spread(t, s, 6)
	c.Nodes[2].Stop()
	eventually(t, "CLUSTERDOWN", func() bool {
		_, state, _ := lookupAll(t, s, p)
		if state != kvcache.Degraded {
			return false
		}
		down := 0
		for _, l := range s.Links() {
			if !l.Up {
				down++
			}
		}
		return down == 6
	})
	if err := c.Nodes[2].Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "exact again", func() bool {
		_, state, _ := lookupAll(t, s, p)
		return state == kvcache.Exact
	})
}

// A user that may not do what is needed gets an error that names the command; nothing is retried as if it would pass by itself
// quickly, and the grant heals it.
func TestACL(t *testing.T) {
	r := storetest.Redis(t)
	_, _, p := filled(t, r.URL)
	raw := client(t, r.URL)
	acl := func(rules ...any) {
		t.Helper()
		if err := raw.Do(t.Context(), append([]any{"acl", "setuser", "reader", "on", ">pw", "~wr:1:*"}, rules...)...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	acl("+get", "+hgetall", "+hmget", "-hmget")
	s := open(t, "redis://reader:pw@"+r.Addr, budget(250*time.Millisecond))
	_, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
	if state != kvcache.Degraded || !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "NOPERM") || !strings.Contains(err.Error(), "hmget") {
		t.Fatalf("%v %v", state, err)
	}
	acl("+hmget")
	exactAgain(t, s, p)
	if _, _, err := s.Register(t.Context(), store.StreamID{Pool: testPool, WorkerRank: rank("b", 0)}, store.Registration{BlockSize: 16}); err == nil || !strings.Contains(err.Error(), "NOPERM") {
		t.Fatalf("a reader wrote: %v", err)
	}
}
