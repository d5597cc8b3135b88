package store_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

var testPool = kvcache.PoolID{Tenant: "default", Model: "llama {3}#1"} // braces and # must not reach the hash tag

// TestConformance runs one suite on every kind of server that the index lives on.
func TestConformance(t *testing.T) {
	t.Run("miniredis", func(t *testing.T) {
		_, url := storetest.Miniredis(t)
		conform(t, url)
	})
	t.Run("redis", func(t *testing.T) { conform(t, storetest.Redis(t).URL) })
	t.Run("cluster", func(t *testing.T) {
		conform(t, storetest.Cluster(t, "--cluster-require-full-coverage", "no").URL)
	})
}

func conform(t *testing.T, url string) {
	for _, c := range []struct {
		name string
		f    func(*testing.T, string)
	}{
		{"LifeOfABlock", testLifeOfABlock},
		{"TiersAreCumulative", testTiersAreCumulative},
		{"CopiesAreCounted", testCopiesAreCounted},
		{"ExactlyOnce", testExactlyOnce},
		{"AnEndedGenerationIsGoneAtOnce", testAnEndedGenerationIsGoneAtOnce},
		{"SlotsAreGivenOutAgainAfterTheirRest", testSlotsAreGivenOutAgainAfterTheirRest},
		{"RegisterIsIdempotentAndChecksTheBlockSize", testRegisterIsIdempotentAndChecksTheBlockSize},
		{"LostStream", testLostStream},
		{"LostSlotMap", testLostSlotMap},
		{"LargeBatch", testLargeBatch},
		{"PartsCountNoCopies", testPartsCountNoCopies},
		{"FollowKeepsARegistration", testFollowKeepsARegistration},
		{"Sizes", testSizes},
		{"HashExtremes", testHashExtremes},
		{"Dump", testDump},
		{"DumpLoadDump", testDumpLoadDump},
		{"RestoreIntoALiveIndex", testRestoreIntoALiveIndex},
		{"CheckFindsAndRepairsDamage", testCheckFindsAndRepairsDamage},
		{"UnknownPoolIsEmptyNotAnError", testUnknownPoolIsEmptyNotAnError},
		{"TreeSizes", testTreeSizes},
		{"Predictions", testPredictions},
		{"PredictionsAreBounded", testPredictionsAreBounded},
		{"PredictionsEndWithTheirStream", testPredictionsEndWithTheirStream},
		{"Frequencies", testFrequencies},
		{"ScriptFlush", testScriptFlush},
		{"LifeOfALease", testLifeOfALease},
		{"LostKeysOfLeases", testLostKeysOfLeases},
		{"ManyLostLeases", testManyLostLeases},
		{"TheSameIDReservesOnce", testTheSameIDReservesOnce},
		{"Busy", testBusy},
		{"Session", testSession},
		{"InvalidAsks", testInvalidAsks},
		{"RandomLeases", testRandomLeases},
		{"ScriptFlushedLeases", testScriptFlushedLeases},
		{"DamagedLoads", testDamagedLoads},
		{"RandomHistories/1 shard", func(t *testing.T, url string) { testRandomHistory(t, url, 1) }},
		{"RandomHistories/4 shards", func(t *testing.T, url string) { testRandomHistory(t, url, 4) }},
		{"RandomHistories/16 shards", func(t *testing.T, url string) { testRandomHistory(t, url, 16) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			flush(t, url)
			c.f(t, url)
		})
	}
}

func open(t testing.TB, url string, change ...func(*store.Options)) *store.Store {
	t.Helper()
	o := store.Options{URL: url, LookupBudget: 10 * time.Second, WriteTimeout: 30 * time.Second}
	for _, c := range change {
		c(&o)
	}
	s, err := store.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func rank(worker string, r int) kvcache.WorkerRank {
	return kvcache.WorkerRank{Worker: worker, Rank: r}
}

func register(t testing.TB, s *store.Store, w kvcache.WorkerRank) store.Stream {
	t.Helper()
	st, _, err := s.Register(t.Context(), store.StreamID{Pool: testPool, WorkerRank: w}, store.Registration{BlockSize: 16, URL: "http://" + w.Worker})
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// apply applies one message made by f and expects an outcome.
func apply(t testing.TB, s *store.Store, st *store.Stream, seq int64, want store.Outcome, f func(b *store.Batch)) {
	t.Helper()
	var b store.Batch
	b.Message(seq)
	f(&b)
	applyBatch(t, s, st, &b, want)
}

func applyBatch(t testing.TB, s *store.Store, st *store.Stream, b *store.Batch, want store.Outcome) {
	t.Helper()
	got, seq, err := s.Apply(t.Context(), *st, b)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Fatalf("apply %d..%d: %v, want %v", b.First(), b.Last(), got, want)
	}
	if got != store.Stale {
		st.Seq = seq
	}
}

func lookup(t testing.TB, s *store.Store, blocks []kvcache.BlockHash) map[kvcache.WorkerRank]kvcache.Overlap {
	t.Helper()
	got, state, err := s.Lookup(t.Context(), testPool, blocks, store.LookupOptions{})
	if err != nil || state != kvcache.Exact {
		t.Fatalf("lookup: %v, %v", state, err)
	}
	return got.Scores
}

func want(t testing.TB, s *store.Store, blocks []kvcache.BlockHash, scores map[kvcache.WorkerRank]kvcache.Overlap) {
	t.Helper()
	if got := lookup(t, s, blocks); !maps.Equal(got, scores) {
		t.Fatalf("overlaps of %d blocks:\n got %v\nwant %v", len(blocks), got, scores)
	}
}

func onDevice(n int) kvcache.Overlap { return kvcache.Overlap{Device: n, Host: n, Disk: n, Any: n} }

// chain makes n block hashes that no other seed has.
func chain(seed uint32, n int) []kvcache.BlockHash {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = seed<<16 + uint32(i)
	}
	return kvcache.HashTokens(kvcache.HashSpec{BlockSize: 1}, tokens)
}

// engine makes up a worker's own hash of a block.
func engine(w string, b kvcache.BlockHash) kvcache.EngineHash {
	h := uint64(b)*0x9E3779B97F4A7C15 + uint64(len(w))
	for _, c := range w {
		h = h*31 + uint64(c)
	}
	return kvcache.EngineHash(h)
}

func storeAll(w string, tier kvcache.Tier, blocks ...kvcache.BlockHash) func(*store.Batch) {
	return func(b *store.Batch) {
		for _, h := range blocks {
			b.Store(tier, h, engine(w, h))
		}
	}
}

func removeAll(w string, tier kvcache.Tier, blocks ...kvcache.BlockHash) func(*store.Batch) {
	return func(b *store.Batch) {
		for _, h := range blocks {
			b.Remove(tier, engine(w, h))
		}
	}
}

// clean expects check to find nothing.
func clean(t testing.TB, s *store.Store) store.Report {
	t.Helper()
	r, err := s.Check(t.Context(), testPool, false)
	if err != nil {
		t.Fatal(err)
	}
	if r.Found != 0 {
		t.Fatalf("check: %+v", r)
	}
	return r
}

func sweepAll(t testing.TB, s *store.Store) int {
	t.Helper()
	total := 0
	for {
		n, more, err := s.Sweep(t.Context(), testPool, 100)
		if err != nil {
			t.Fatal(err)
		}
		total += n
		if !more {
			return total
		}
	}
}

func testLifeOfABlock(t *testing.T, url string) {
	s := open(t, url)
	a, b := register(t, s, rank("a", 0)), register(t, s, rank("b", 3))
	p := chain(1, 8)
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{})

	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	apply(t, s, &b, 0, store.Applied, storeAll("b", kvcache.Device, p[:3]...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(8), rank("b", 3): onDevice(3)})

	// A hole ends the prefix, and what lies behind it counts again when the hole is filled.
	apply(t, s, &a, 1, store.Applied, removeAll("a", kvcache.Device, p[2]))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(2), rank("b", 3): onDevice(3)})
	apply(t, s, &a, 2, store.Applied, storeAll("a", kvcache.Device, p[2]))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(8), rank("b", 3): onDevice(3)})

	// The first block gone: nothing is left, not even in the map.
	apply(t, s, &a, 3, store.Applied, removeAll("a", kvcache.Device, p[0]))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("b", 3): onDevice(3)})
	clean(t, s)
}

func testTiersAreCumulative(t *testing.T, url string) {
	s := open(t, url)
	a := register(t, s, rank("a", 0))
	p := chain(1, 6)
	apply(t, s, &a, 0, store.Applied, func(b *store.Batch) {
		storeAll("a", kvcache.Device, p[0], p[1])(b)
		storeAll("a", kvcache.Host, p[1], p[2])(b)
		storeAll("a", kvcache.Disk, p[3])(b)
		storeAll("a", kvcache.Device, p[4])(b)
	})
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): {Device: 2, Host: 3, Disk: 5, Any: 5}})
	// Gone from the device, still on the host.
	apply(t, s, &a, 1, store.Applied, removeAll("a", kvcache.Device, p[1]))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): {Device: 1, Host: 3, Disk: 5, Any: 5}})
	clean(t, s)
}

func testCopiesAreCounted(t *testing.T, url string) {
	s := open(t, url)
	a := register(t, s, rank("a", 0))
	p := chain(1, 2)
	holds := map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(2)}
	// Twice in one message, once more in another: three copies.
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p[0], p[1], p[0]))
	apply(t, s, &a, 1, store.Applied, storeAll("a", kvcache.Device, p[0]))
	apply(t, s, &a, 2, store.Applied, removeAll("a", kvcache.Device, p[0], p[0]))
	want(t, s, p, holds)
	apply(t, s, &a, 3, store.Applied, removeAll("a", kvcache.Device, p[0]))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{})
	// Below zero there is nothing.
	apply(t, s, &a, 4, store.Applied, removeAll("a", kvcache.Device, p[0], p[0]))
	apply(t, s, &a, 5, store.Applied, storeAll("a", kvcache.Device, p[0]))
	want(t, s, p, holds)

	// In set mode one removal is enough, whatever was counted before.
	apply(t, s, &a, 6, store.Applied, storeAll("a", kvcache.Device, p[0], p[0], p[1]))
	var b store.Batch
	b.Set = true
	b.Message(7)
	storeAll("a", kvcache.Device, p[0])(&b)
	removeAll("a", kvcache.Device, p[0])(&b)
	applyBatch(t, s, &a, &b, store.Applied)
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{})
	clean(t, s)
}

func testExactlyOnce(t *testing.T, url string) {
	s := open(t, url)
	a := register(t, s, rank("a", 0))
	p := chain(1, 9)
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p[0]))
	apply(t, s, &a, 0, store.Duplicate, removeAll("a", kvcache.Device, p[0]))
	apply(t, s, &a, 2, store.Gap, storeAll("a", kvcache.Device, p[2]))
	if a.Seq != 0 {
		t.Fatalf("a gap moved the watermark to %d", a.Seq)
	}

	// Messages 0 and 1, of which 0 was applied: only 1 takes effect, in the middle of a run and after it.
	var b store.Batch
	b.Message(0)
	removeAll("a", kvcache.Device, p[0])(&b)
	storeAll("a", kvcache.Device, p[7])(&b)
	b.Message(1)
	storeAll("a", kvcache.Device, p[1], p[2])(&b)
	b.Message(2) // nothing but its number
	b.Message(3)
	storeAll("a", kvcache.Device, p[3])(&b)
	removeAll("a", kvcache.Device, p[2])(&b)
	applyBatch(t, s, &a, &b, store.Applied)
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(2)})
	if a.Seq != 3 {
		t.Fatalf("watermark %d, want 3", a.Seq)
	}
	want(t, s, p[7:], map[kvcache.WorkerRank]kvcache.Overlap{})
	applyBatch(t, s, &a, &b, store.Duplicate)

	// Only the last message, which has no operations, is news.
	b.Reset()
	b.Message(3)
	storeAll("a", kvcache.Device, p[8])(&b)
	b.Message(4)
	applyBatch(t, s, &a, &b, store.Applied)
	want(t, s, p[8:], map[kvcache.WorkerRank]kvcache.Overlap{})

	b.Reset()
	b.Force = true
	b.Message(9)
	storeAll("a", kvcache.Device, p[8])(&b)
	applyBatch(t, s, &a, &b, store.Applied)
	want(t, s, p[8:], map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(1)})
	clean(t, s)
}

func testAnEndedGenerationIsGoneAtOnce(t *testing.T, url string) {
	s := open(t, url, func(o *store.Options) { o.SlotRest = time.Hour })
	reader := open(t, url)
	a := register(t, s, rank("a", 0))
	p := chain(1, 700)
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	apply(t, s, &a, 1, store.Applied, storeAll("a", kvcache.Host, p[:10]...))
	apply(t, s, &a, 2, store.Applied, storeAll("a", kvcache.Device, p[0])) // a copy: the counts must end too
	want(t, reader, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(700)})

	old := a
	a, o, err := s.Restart(t.Context(), a, -1, 0)
	if err != nil || o != store.Applied || a.Generation <= old.Generation || a.Slot == old.Slot || a.Seq != -1 {
		t.Fatalf("restart: %v %v, from %+v to %+v", o, err, old, a)
	}
	want(t, reader, p, map[kvcache.WorkerRank]kvcache.Overlap{})

	// The dead incarnation writes no more, and ends nothing again.
	apply(t, s, &old, 3, store.Stale, storeAll("a", kvcache.Device, p[0]))
	if again, o, err := s.Restart(t.Context(), old, -1, 0); err != nil || o != store.Stale || again.Generation != a.Generation {
		t.Fatalf("second restart: %v %v %+v", o, err, again)
	}

	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p[:5]...))
	want(t, reader, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(5)})
	clean(t, s)

	if n := sweepAll(t, s); n != 710 {
		t.Fatalf("swept %d blocks, want 710", n)
	}
	want(t, reader, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(5)})
	if r := clean(t, s); r.Holders != 5 || r.Retired != 0 {
		t.Fatalf("after the sweep: %+v", r)
	}
	// The swept slot rests: a new stream does not get it.
	if b := register(t, s, rank("b", 0)); b.Slot == old.Slot || b.Slot == a.Slot {
		t.Fatalf("slot %d is resting or taken", b.Slot)
	}

	// Restart with a watermark that is not the caller's any more does nothing.
	late := a
	apply(t, s, &a, 1, store.Applied, storeAll("a", kvcache.Device, p[5]))
	if _, o, err := s.Restart(t.Context(), late, -1, 0); err != nil || o != store.Stale {
		t.Fatalf("restart behind the watermark: %v %v", o, err)
	}

	if o, err := s.Remove(t.Context(), a); err != nil || o != store.Applied {
		t.Fatalf("remove: %v %v", o, err)
	}
	want(t, reader, p, map[kvcache.WorkerRank]kvcache.Overlap{})
	if _, ok, err := s.Stream(t.Context(), a.StreamID); ok || err != nil {
		t.Fatalf("stream after removal: %v %v", ok, err)
	}
	if o, err := s.Remove(t.Context(), a); err != nil || o != store.Stale {
		t.Fatalf("second removal: %v %v", o, err)
	}
	// A removal is told from lost data: who only follows does not bring it back, who registers does.
	if _, _, err := s.Follow(t.Context(), a.StreamID, store.Registration{BlockSize: 16}); !errors.Is(err, store.ErrRemoved) || !errors.Is(err, store.ErrInvalid) {
		t.Fatalf("follow after the removal: %v", err)
	}
	if streams, err := s.Streams(t.Context(), testPool); err != nil || slices.ContainsFunc(streams, func(x store.Stream) bool { return x.Worker == "a" }) {
		t.Fatalf("streams after the removal: %+v %v", streams, err)
	}
	// Back again: a new generation, which the old incarnation cannot write to.
	again := register(t, s, rank("a", 0))
	if again.Generation <= a.Generation {
		t.Fatalf("generation went from %d to %d", a.Generation, again.Generation)
	}
	apply(t, s, &a, 2, store.Stale, storeAll("a", kvcache.Device, p[0]))
	if same, created, err := s.Follow(t.Context(), a.StreamID, store.Registration{BlockSize: 16}); err != nil || created || same.Generation != again.Generation {
		t.Fatalf("follow: %+v %v %v", same, created, err)
	}
	sweepAll(t, s)
	if r := clean(t, s); r.Holders != 0 {
		t.Fatalf("holders left: %+v", r)
	}
}

func testSlotsAreGivenOutAgainAfterTheirRest(t *testing.T, url string) {
	s := open(t, url, func(o *store.Options) { o.SlotRest = time.Millisecond })
	a := register(t, s, rank("a", 0))
	seen := map[int]bool{}
	for i := range 50 {
		apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, chain(uint32(i), 3)...))
		seen[a.Slot] = true
		var err error
		if a, _, err = s.Restart(t.Context(), a, -1, 0); err != nil {
			t.Fatal(err)
		}
		sweepAll(t, s)
	}
	// On a fast machine a few incarnations pass within a millisecond, no more.
	if len(seen) > 10 {
		t.Fatalf("50 incarnations took %d slots", len(seen))
	}
	clean(t, s)
}

func testRegisterIsIdempotentAndChecksTheBlockSize(t *testing.T, url string) {
	s := open(t, url)
	a := register(t, s, rank("a", 0))
	again, created, err := s.Register(t.Context(), a.StreamID, store.Registration{BlockSize: 16, URL: "http://elsewhere", Endpoint: "tcp://x:1"})
	if err != nil || created || again.Generation != a.Generation || again.Slot != a.Slot {
		t.Fatalf("again: %+v %v %v", again, created, err)
	}
	st, ok, err := s.Stream(t.Context(), a.StreamID)
	if err != nil || !ok || st.URL != "http://elsewhere" || st.Endpoint != "tcp://x:1" || st.BlockSize != 16 {
		t.Fatalf("stream: %+v %v %v", st, ok, err)
	}
	var conflict *store.ConflictError
	_, _, err = open(t, url).Register(t.Context(), store.StreamID{Pool: testPool, WorkerRank: rank("b", 0)}, store.Registration{BlockSize: 32})
	if !errors.As(err, &conflict) || !errors.Is(err, store.ErrInvalid) || conflict.Have != "16" || conflict.Want != "32" {
		t.Fatalf("conflict: %v", err)
	}
	for _, bad := range []store.StreamID{
		{Pool: testPool, WorkerRank: rank("", 0)}, {Pool: testPool, WorkerRank: rank("a/b", 0)},
		{Pool: testPool, WorkerRank: rank("a", -1)}, {Pool: kvcache.PoolID{}, WorkerRank: rank("a", 0)},
	} {
		if _, _, err := s.Register(t.Context(), bad, store.Registration{BlockSize: 16}); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	pools, err := s.Pools(t.Context())
	if err != nil || !slices.Equal(pools, []kvcache.PoolID{testPool}) {
		t.Fatalf("pools: %v %v", pools, err)
	}
	streams, err := s.Streams(t.Context(), testPool)
	if err != nil || len(streams) != 1 || streams[0].Generation != a.Generation {
		t.Fatalf("streams: %+v %v", streams, err)
	}
}

// testSizes crosses the limits of unpack, of a lookup's chunks and of one command's fields.
func testSizes(t *testing.T, url string) {
	s := open(t, url)
	for i, n := range []int{1, 63, 64, 65, 499, 500, 501, 576, 577, 1000, 1001, 4097, 8001, 20000} {
		name := fmt.Sprintf("w%d", n)
		st := register(t, s, rank(name, 0))
		p := chain(uint32(i+1), n)
		apply(t, s, &st, 0, store.Applied, storeAll(name, kvcache.Device, p...))
		want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank(name, 0): onDevice(n)})
		want(t, s, append(slices.Clone(p), 1, 2, 3), map[kvcache.WorkerRank]kvcache.Overlap{rank(name, 0): onDevice(n)})
		apply(t, s, &st, 1, store.Applied, func(b *store.Batch) {
			for i, h := range p[n/2:] {
				switch {
				case i < 20: // searched for
					b.Remove(kvcache.Device, engine(name, h))
				case i < 25: // remembered wrongly
					b.RemoveKnown(kvcache.Device, h+1, engine(name, h))
				default:
					b.RemoveKnown(kvcache.Device, h, engine(name, h))
				}
			}
		})
		if n > 1 {
			want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank(name, 0): onDevice(n / 2)})
		}
	}
	want(t, s, nil, map[kvcache.WorkerRank]kvcache.Overlap{})
	clean(t, s)
}

// testHashExtremes: 64-bit hashes survive text, scores and scripts.
func testHashExtremes(t *testing.T, url string) {
	s := open(t, url)
	a := register(t, s, rank("a", 0))
	values := []uint64{0, 1, 100, 200, 1<<31 - 1, 1 << 53, 1<<53 + 1, 1<<53 - 1, 1 << 63, 1<<64 - 1, 9007199254740993}
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		values = append(values, r.Uint64())
	}
	var b store.Batch
	b.Message(0)
	seen := map[uint64]bool{}
	for _, v := range values {
		e := kvcache.EngineHash(v)
		if !seen[e.Score()] {
			seen[e.Score()] = true
			b.Store(kvcache.Device, kvcache.BlockHash(v), e)
		}
	}
	applyBatch(t, s, &a, &b, store.Applied)
	for i, v := range values {
		if i < 11 && v != 1<<53-1 && v != 1<<64-1 && v != 1<<53 && v != 1<<63 && v != 1<<53+1 {
			blocks, ok, err := s.Resolve(t.Context(), a, []kvcache.EngineHash{kvcache.EngineHash(v)})
			if err != nil || !ok[0] || uint64(blocks[0]) != v && v != 9007199254740993 {
				t.Fatalf("resolve %d: %v %v %v", v, blocks, ok, err)
			}
		}
	}
	if _, ok, err := s.Resolve(t.Context(), a, []kvcache.EngineHash{424242}); err != nil || ok[0] {
		t.Fatalf("resolve an unknown hash: %v %v", ok, err)
	}
	b.Reset()
	b.Message(1)
	for _, v := range values {
		b.Remove(kvcache.Device, kvcache.EngineHash(v))
	}
	applyBatch(t, s, &a, &b, store.Applied)
	if r := clean(t, s); r.Blocks != 0 || r.Holders != 0 {
		t.Fatalf("left over: %+v", r)
	}
}

func testDump(t *testing.T, url string) {
	s := open(t, url, func(o *store.Options) { o.Shards = 4 })
	type line struct {
		worker string
		rank   int
		tier   kvcache.StorageTier
		block  kvcache.BlockHash
		engine uint64
	}
	expect := map[line]bool{}
	for i := range 6 {
		name := fmt.Sprintf("w%d", i)
		st := register(t, s, rank(name, i))
		p := chain(uint32(i), 1200)
		apply(t, s, &st, 0, store.Applied, func(b *store.Batch) {
			storeAll(name, kvcache.Device, p...)(b)
			storeAll(name, kvcache.Disk, p[:3]...)(b)
			for k := range 600 { // one engine hash for many blocks: the steps must get past it
				b.Store(kvcache.Host, p[k], 7)
			}
		})
		for k, b := range p {
			expect[line{name, i, "device", b, engine(name, b).Score()}] = true
			if k < 3 {
				expect[line{name, i, "disk", b, engine(name, b).Score()}] = true
			}
			if k < 600 {
				expect[line{name, i, "host_pinned", b, 7}] = true
			}
		}
	}
	err := s.Dump(t.Context(), testPool, func(e kvcache.RouterEvent) error {
		b := e.Event.Data.Stored.Blocks[0]
		l := line{string(e.WorkerID), e.Event.DPRank, e.StorageTier, b.BlockHash, uint64(*b.EngineHash)}
		if !expect[l] {
			return fmt.Errorf("not stored, or twice in the dump: %+v", l)
		}
		delete(expect, l)
		return nil
	})
	if err != nil || len(expect) != 0 {
		t.Fatalf("%v; missing %d", err, len(expect))
	}
}

func client(t testing.TB, url string) redis.UniversalClient {
	t.Helper()
	_, hosts, _ := strings.Cut(url, "://")
	c := redis.NewUniversalClient(&redis.UniversalOptions{Addrs: strings.Split(hosts, ","), IsClusterMode: strings.Contains(url, "cluster"), Protocol: 2})
	t.Cleanup(func() { c.Close() })
	return c
}

// flush empties every node.
func flush(t *testing.T, url string) {
	t.Helper()
	var err error
	switch c := client(t, url).(type) {
	case *redis.ClusterClient:
		err = c.ForEachMaster(t.Context(), func(ctx context.Context, n *redis.Client) error { return n.FlushAll(ctx).Err() })
	default:
		err = c.FlushAll(t.Context()).Err()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func testUnknownPoolIsEmptyNotAnError(t *testing.T, url string) {
	s := open(t, url)
	want(t, s, chain(1, 3), map[kvcache.WorkerRank]kvcache.Overlap{})
	if _, ok, err := s.PoolConfig(t.Context(), testPool); ok || err != nil {
		t.Fatalf("config: %v %v", ok, err)
	}
	st := register(t, open(t, url), rank("a", 0)) // another process makes the pool
	p := chain(1, 3)
	apply(t, s, &st, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(3)})
	if c, ok, err := s.PoolConfig(t.Context(), testPool); !ok || err != nil || c.BlockSize != 16 || c.Shards != 1 {
		t.Fatalf("config: %+v %v %v", c, ok, err)
	}
}

func testTreeSizes(t *testing.T, url string) {
	s := open(t, url, func(o *store.Options) { o.Shards = 2 })
	a, b := register(t, s, rank("a", 0)), register(t, s, rank("b", 1))
	p := chain(1, 10)
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	apply(t, s, &b, 0, store.Applied, storeAll("b", kvcache.Device, p[1:]...))
	got, _, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{TreeSizes: true})
	if err != nil || !maps.Equal(got.TreeSizes, map[kvcache.WorkerRank]int{rank("a", 0): 10}) {
		t.Fatalf("%+v %v", got, err)
	}
}

// testRandomHistory compares every lookup with the reference index.
func testRandomHistory(t *testing.T, url string, shards int) {
	steps := 1500
	if testing.Short() {
		steps = 300
	}
	randomHistory(t, open(t, url, func(o *store.Options) { o.Shards, o.SlotRest = shards, time.Millisecond }), steps, uint64(shards))
}

func randomHistory(t *testing.T, s *store.Store, steps int, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 7))
	prompts := make([][]kvcache.BlockHash, 6)
	for i := range prompts {
		trunk := chain(uint32(i%2), 1+r.IntN(90)) // prompts share prefixes
		prompts[i] = append(trunk, chain(uint32(100+i), 1+r.IntN(60))...)
	}
	ref := reference{}
	streams := map[kvcache.WorkerRank]*store.Stream{}
	var names []kvcache.WorkerRank
	for step := range steps {
		switch n := r.IntN(100); {
		case n < 4 || len(names) == 0:
			w := rank(fmt.Sprintf("w%d", r.IntN(24)), r.IntN(2))
			st := register(t, s, w)
			if streams[w] == nil {
				names = append(names, w)
				streams[w] = &st
			}
			ref.register(w)
		case n < 70:
			w := names[r.IntN(len(names))]
			var b store.Batch
			first := streams[w].Seq + 1 - int64(r.IntN(2)) // now and then from a message that was applied before
			for seq := max(first, 0); seq <= streams[w].Seq+1+int64(r.IntN(3)); seq++ {
				b.Message(seq)
				news := seq > streams[w].Seq
				for range r.IntN(4) {
					tier := kvcache.Tier([]int{0, 0, 0, 1, 2}[r.IntN(5)])
					p := prompts[r.IntN(len(prompts))]
					from := r.IntN(len(p))
					for _, h := range p[from:min(len(p), from+1+r.IntN(40))] {
						e := engine(w.Worker, h)
						if r.IntN(3) > 0 {
							if r.IntN(50) == 0 {
								e++ // the same block under another engine hash
							}
							b.Store(tier, h, e)
							if news {
								ref.store(w, tier, h, e)
							}
						} else {
							known := r.IntN(2) == 0
							if known {
								b.RemoveKnown(tier, h, e)
							} else {
								b.Remove(tier, e)
							}
							switch {
							case news && known:
								ref.removeKnown(w, tier, h, e)
							case news:
								ref.remove(w, tier, e)
							}
						}
					}
				}
			}
			applyBatch(t, s, streams[w], &b, store.Applied)
			if r.IntN(4) == 0 { // the reply was lost
				applyBatch(t, s, streams[w], &b, store.Duplicate)
			}
		case n < 74:
			w := names[r.IntN(len(names))]
			st, o, err := s.Restart(t.Context(), *streams[w], -1, 0)
			if err != nil || o != store.Applied {
				t.Fatalf("restart: %v %v", o, err)
			}
			*streams[w] = st
			ref.clear(w)
		case n < 77:
			i := r.IntN(len(names))
			if o, err := s.Remove(t.Context(), *streams[names[i]]); err != nil || o != store.Applied {
				t.Fatalf("remove: %v %v", o, err)
			}
			delete(ref, names[i])
			delete(streams, names[i])
			names = slices.Delete(names, i, i+1)
		case n < 80:
			w := names[r.IntN(len(names))]
			p := prompts[r.IntN(len(prompts))]
			p = p[:r.IntN(len(p)+1)]
			if o, err := s.Predict(t.Context(), testPool, w, p, store.PredictOptions{TTL: 24 * time.Hour}); err != nil || o != store.Applied {
				t.Fatalf("predict: %v %v", o, err)
			}
			ref.predict(w, p)
		case n < 84:
			if _, _, err := s.Sweep(t.Context(), testPool, 1+r.IntN(60)); err != nil {
				t.Fatal(err)
			}
		default:
			p := prompts[r.IntN(len(prompts))]
			p = p[:r.IntN(len(p)+1)]
			answer, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{TreeSizes: true})
			if err != nil || state != kvcache.Exact {
				t.Fatalf("lookup: %v, %v", state, err)
			}
			got, expect := answer.Scores, ref.lookup(p)
			if !maps.Equal(got, expect) {
				t.Fatalf("step %d, %d blocks:\n got %v\nwant %v", step, len(p), got, expect)
			}
			if sizes := ref.sizes(expect); len(sizes)+len(answer.TreeSizes) > 0 && !maps.Equal(answer.TreeSizes, sizes) {
				t.Fatalf("step %d: tree sizes %v, want %v", step, answer.TreeSizes, sizes)
			}
		}
	}
	if r := clean(t, s); r.Streams != len(names) {
		t.Fatalf("%d streams, want %d", r.Streams, len(names))
	}
	sweepAll(t, s)
	if r := clean(t, s); r.Retired != 0 {
		t.Fatalf("after the sweep: %+v", r)
	}
}

func TestALateCallerIsToldSo(t *testing.T) {
	_, url := storetest.Miniredis(t)
	s := open(t, url)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := s.Register(ctx, store.StreamID{Pool: testPool, WorkerRank: rank("a", 0)}, store.Registration{BlockSize: 16})
	if errors.Is(err, store.ErrUnavailable) || store.Reason(err) != store.ReasonCanceled {
		t.Fatalf("a caller that left was reported as %v", err)
	}
}
