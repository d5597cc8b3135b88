package store_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

func predict(t testing.TB, s *store.Store, w kvcache.WorkerRank, want store.Outcome, o store.PredictOptions, blocks ...kvcache.BlockHash) {
	t.Helper()
	got, err := s.Predict(t.Context(), testPool, w, blocks, o)
	if err != nil || got != want {
		t.Fatalf("predict: %v %v, want %v", got, err, want)
	}
}

// predictedKey also pins the key layout.
func predictedKey(shard int, w kvcache.WorkerRank) string {
	return fmt.Sprintf("wr:1:{default:llama %%7B3%%7D%%231#%d}:blocks:%v:predicted", shard, w)
}

// count is how many predictions of a worker rank there are.
func count(t testing.TB, url string, w kvcache.WorkerRank) int {
	t.Helper()
	n, err := client(t, url).ZCard(t.Context(), predictedKey(0, w)).Result()
	if err != nil {
		t.Fatal(err)
	}
	return int(n)
}

func testPredictions(t *testing.T, url string) {
	s := open(t, url)
	w := rank("a", 1)
	predict(t, s, w, store.Stale, store.PredictOptions{}, 1, 2)
	other := register(t, s, rank("b", 0)) // slot 0, so that w's is an odd one
	a := register(t, s, w)
	p := chain(1, 700)
	predict(t, s, w, store.Applied, store.PredictOptions{})
	predict(t, s, w, store.Applied, store.PredictOptions{}, p...)
	predict(t, s, w, store.Applied, store.PredictOptions{}, p...)
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{w: {Any: 700}})
	apply(t, s, &other, 0, store.Applied, storeAll("b", kvcache.Device, p[:5]...))
	clean(t, s)

	// What the engine stores on the device is known better; what it stores elsewhere says nothing about the device.
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p[:300]...))
	apply(t, s, &a, 1, store.Applied, storeAll("a", kvcache.Host, p[300:302]...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{w: {Device: 300, Host: 302, Disk: 302, Any: 700}, rank("b", 0): onDevice(5)})
	if n := count(t, url, w); n != 400 {
		t.Fatalf("%d predictions, want 400", n)
	}
	predict(t, s, w, store.Applied, store.PredictOptions{}, p...)
	if n := count(t, url, w); n != 400 {
		t.Fatalf("%d predictions after another use, want 400", n)
	}
	clean(t, s)

	// What the engine removes it does not hold: searched for, remembered, and remembered without having been stored.
	apply(t, s, &a, 2, store.Applied, removeAll("a", kvcache.Device, p[299]))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{w: {Device: 299, Host: 299, Disk: 299, Any: 299}, rank("b", 0): onDevice(5)})
	apply(t, s, &a, 3, store.Applied, storeAll("a", kvcache.Device, p[299]))
	apply(t, s, &a, 4, store.Applied, func(b *store.Batch) {
		b.Remove(kvcache.Host, engine("a", p[300]))
		b.RemoveKnown(kvcache.Host, p[301], engine("a", p[301]))
	})
	want(t, s, p[300:], map[kvcache.WorkerRank]kvcache.Overlap{})
	want(t, s, p[301:], map[kvcache.WorkerRank]kvcache.Overlap{})
	want(t, s, p[302:], map[kvcache.WorkerRank]kvcache.Overlap{w: {Any: 398}})
	apply(t, s, &a, 5, store.Applied, func(b *store.Batch) { b.RemoveKnown(kvcache.Device, p[302], engine("a", p[302])) })
	want(t, s, p[302:], map[kvcache.WorkerRank]kvcache.Overlap{})
	if n := count(t, url, w); n != 397 {
		t.Fatalf("%d predictions, want 397", n)
	}
	clean(t, s)

	// Predictions are no blocks: not in a dump, not in the sizes of trees.
	blocks := 0
	err := s.Dump(t.Context(), testPool, func(kvcache.RouterEvent) error { blocks++; return nil })
	if err != nil || blocks != 305 {
		t.Fatalf("%d blocks in the dump, %v", blocks, err)
	}
	got, _, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{TreeSizes: true})
	if err != nil || got.TreeSizes[w] != 300 {
		t.Fatalf("tree sizes %v %v", got.TreeSizes, err)
	}

	// None is credited after the first sweep that begins after its time; until then it may be.
	predict(t, s, w, store.Applied, store.PredictOptions{TTL: time.Millisecond}, p...)
	predict(t, s, w, store.Applied, store.PredictOptions{TTL: time.Hour}, p[300:310]...)
	ended := serverTime(t, url).Add(2 * time.Millisecond)
	for !serverTime(t, url).After(ended) {
	}
	sweepAll(t, s)
	if n := count(t, url, w); n != 10 {
		t.Fatalf("%d predictions left, want 10", n)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{w: {Device: 300, Host: 300, Disk: 300, Any: 310}, rank("b", 0): onDevice(5)})
	clean(t, s)
}

// serverTime is the clock by which predictions expire.
func serverTime(t testing.TB, url string) time.Time {
	t.Helper()
	now, err := client(t, url).Time(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return now
}

func testPredictionsAreBounded(t *testing.T, url string) {
	s := open(t, url)
	w := rank("a", 0)
	register(t, s, w)
	o := store.PredictOptions{MaxBlocks: 1000}
	var chains [][]kvcache.BlockHash
	for i := range 20 {
		chains = append(chains, chain(uint32(i+1), 390))
		predict(t, s, w, store.Applied, o, chains[i]...)
		predict(t, s, w, store.Applied, o, chains[0]...) // in use all the time
		n := count(t, url, w)
		if n > 1000 || i > 1 && n < 800 {
			t.Fatalf("%d predictions after %d chains", n, i+1)
		}
		// The oldest go first, and of a chain its end: what is left is worth something.
		left := 0
		for _, c := range chains {
			left += lookup(t, s, c)[w].Any
		}
		if left != n || lookup(t, s, chains[0])[w].Any != 390 {
			t.Fatalf("of %d predictions %d make a prefix, %d of the chain in use", n, left, lookup(t, s, chains[0])[w].Any)
		}
	}
	o.MaxBlocks = 10 // a bound that was lowered
	predict(t, s, w, store.Applied, o, chains[0]...)
	if n := count(t, url, w); n > 10 || lookup(t, s, chains[0])[w].Any != n {
		t.Fatalf("%d predictions, %v", n, lookup(t, s, chains[0]))
	}
	clean(t, s)
}

func testPredictionsEndWithTheirStream(t *testing.T, url string) {
	s := open(t, url, func(o *store.Options) { o.Shards, o.SlotRest = 3, time.Millisecond })
	p := chain(1, 20)
	r := &store.Registration{BlockSize: 16, URL: "http://a", Endpoint: "tcp://nobody:1"}
	o := store.PredictOptions{Register: r}
	w := rank("a", 0)
	id := store.StreamID{Pool: testPool, WorkerRank: w}
	register(t, s, rank("z", 0)) // another shard
	predict(t, s, w, store.Stale, store.PredictOptions{}, p...)
	predict(t, s, w, store.Applied, o, p...)
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{w: {Any: 20}})
	a, ok, err := s.Stream(t.Context(), id)
	if err != nil || !ok || a.Endpoint != "" || a.URL != "http://a" {
		t.Fatalf("stream %+v %v %v", a, ok, err)
	}
	fresh, outcome, err := s.Restart(t.Context(), a, -1, 0)
	if err != nil || outcome != store.Applied {
		t.Fatal(outcome, err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{})
	o.Generation = a.Generation
	predict(t, s, w, store.Stale, o, p...)
	o.Generation = fresh.Generation
	predict(t, open(t, url), w, store.Applied, o, p...) // by a process that knows nothing yet
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{w: {Any: 20}})
	clean(t, s)
	if n := sweepAll(t, s); n != 20 {
		t.Fatalf("swept %d", n)
	}
	if outcome, err := s.Remove(t.Context(), fresh); err != nil || outcome != store.Applied {
		t.Fatal(outcome, err)
	}
	// Removed on purpose: a prediction does not bring it back.
	o.Generation = 0
	predict(t, s, w, store.Stale, o, p...)
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{})
	sweepAll(t, s)
	if r := clean(t, s); r.Holders != 0 {
		t.Fatalf("%+v", r)
	}
	for _, bad := range []kvcache.WorkerRank{rank("", 0), rank("a/b", 0), rank("a", -1)} {
		if _, err := s.Predict(t.Context(), testPool, bad, p, o); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

// A Redis that refuses writes costs predictions, not lookups.
func TestPredictionsThatAreRefusedDoNoHarm(t *testing.T) {
	r := storetest.Redis(t)
	s := open(t, r.URL)
	w := rank("a", 0)
	st := register(t, s, w)
	p := chain(1, 3)
	apply(t, s, &st, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	if err := client(t, r.URL).ConfigSet(t.Context(), "min-replicas-to-write", "1").Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Predict(t.Context(), testPool, w, chain(2, 3), store.PredictOptions{}); store.Reason(err) != store.ReasonRefused {
		t.Fatalf("predict: %v", err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{w: onDevice(3)})
	for _, l := range s.Links() {
		if !l.Up {
			t.Fatalf("%+v", l)
		}
	}
	// While the link is down nothing is tried.
	r.Stop()
	if _, _, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{}); !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("lookup: %v", err)
	}
	down := s.Links()
	_, err := s.Predict(t.Context(), testPool, w, p, store.PredictOptions{})
	if !errors.Is(err, store.ErrUnavailable) || !slices.ContainsFunc(down, func(l store.LinkStatus) bool { return !l.Up }) {
		t.Fatalf("predict: %v, links %+v", err, down)
	}
}

// Predictions that Redis does not answer do not pile up.
func TestPredictionsDoNotPileUp(t *testing.T) {
	dialing := make(chan struct{}, 8)
	s := open(t, "redis://127.0.0.1:1", func(o *store.Options) {
		o.PoolSize = 4
		o.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) {
			dialing <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		}
	})
	done := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := s.Predict(t.Context(), testPool, rank("a", 0), chain(1, 2), store.PredictOptions{})
			done <- err
		}()
	}
	<-dialing
	<-dialing
	if _, err := s.Predict(t.Context(), testPool, rank("a", 0), chain(1, 2), store.PredictOptions{}); store.Reason(err) != store.ReasonPoolExhausted {
		t.Fatalf("the third at a time: %v", err)
	}
	for range 2 {
		if err := <-done; !errors.Is(err, store.ErrUnavailable) {
			t.Fatal(err)
		}
	}
}
