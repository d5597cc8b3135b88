package store_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// dump is a pool as lines of JSON.
func dump(t testing.TB, s *store.Store, pool kvcache.PoolID) string {
	t.Helper()
	var out strings.Builder
	enc := json.NewEncoder(&out)
	if err := s.Dump(t.Context(), pool, func(e kvcache.RouterEvent) error { return enc.Encode(e) }); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func load(t testing.TB, s *store.Store, pool kvcache.PoolID, blockSize int, lines string) *store.Restorer {
	t.Helper()
	r, err := s.Restore(t.Context(), pool, blockSize)
	if err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(bufio.NewReader(strings.NewReader(lines)))
	for {
		var e kvcache.RouterEvent
		if err := dec.Decode(&e); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if err := r.Add(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

// testDumpLoadDump: several pools, shards, tiers and ranks, engine hashes above 2^53, steps crossed; the second server has other
// shards.
func testDumpLoadDump(t *testing.T, url string) {
	pools := []kvcache.PoolID{testPool, {Tenant: "t", Model: "other"}}
	from := open(t, url, func(o *store.Options) { o.Shards = 3 })
	prompts := [][]kvcache.BlockHash{chain(1, 1300), chain(2, 40)}
	for i, pool := range pools {
		for w := range 4 {
			r := rank(fmt.Sprintf("w%d", w), 10*w)
			st, _, err := from.Register(t.Context(), store.StreamID{Pool: pool, WorkerRank: r}, store.Registration{BlockSize: 16 << i})
			if err != nil {
				t.Fatal(err)
			}
			apply(t, from, &st, 7, store.Gap, storeAll("x", kvcache.Device))
			apply(t, from, &st, 0, store.Applied, func(b *store.Batch) {
				for _, p := range prompts {
					storeAll(r.Worker, kvcache.Device, p[w:]...)(b)
					storeAll(r.Worker, kvcache.Host, p[:10*w]...)(b)
					storeAll(r.Worker, kvcache.Disk, p[30:]...)(b)
				}
				for k, h := range prompts[0][:600] {
					b.Store(kvcache.Host, h, kvcache.EngineHash(1<<53+uint64(k%2))) // one hash for many blocks, and beyond 53 bits
				}
				b.Store(kvcache.Disk, 1<<64-1, 1<<64-1)
				b.Store(kvcache.Disk, 0, 0)
			})
			if _, err := from.Predict(t.Context(), pool, r, chain(3, 20), store.PredictOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, second := storetest.Miniredis(t)
	if strings.Contains(url, "cluster") {
		second = storetest.Redis(t).URL
	}
	to := open(t, second)
	for i, pool := range pools {
		first := dump(t, from, pool)
		r := load(t, to, pool, 16<<i, first)
		if blocks, streams := r.Loaded(); streams != 4 || blocks != strings.Count(first, "\n") {
			t.Fatalf("loaded %d blocks of %d streams, the dump has %d", blocks, streams, strings.Count(first, "\n"))
		}
		load(t, to, pool, 0, first) // once more changes nothing
		if again := dump(t, to, pool); again != first {
			t.Fatalf("pool %s: the dumps differ: %d and %d bytes", pool, len(first), len(again))
		}
		for _, p := range prompts {
			a, _, err := from.Lookup(t.Context(), pool, p, store.LookupOptions{})
			b, _, err2 := to.Lookup(t.Context(), pool, p, store.LookupOptions{})
			if err != nil || err2 != nil || fmt.Sprint(a) != fmt.Sprint(b) || len(a.Scores) == 0 {
				t.Fatalf("lookups differ: %v %v, %v %v", a, err, b, err2)
			}
		}
		rep, err := to.Check(t.Context(), pool, false)
		if err != nil || rep.Found != 0 {
			t.Fatalf("%+v %v", rep, err)
		}
		if i == 1 {
			continue
		}
		// The indexer takes over: the watermark is that of a stream without events, so its first message is of an engine process that
		// need not be the dump's, and what was loaded leaves.
		st, ok, err := to.Stream(t.Context(), store.StreamID{Pool: pool, WorkerRank: rank("w0", 0)})
		if err != nil || !ok || st.Seq != -1 || st.Endpoint != "" {
			t.Fatalf("%+v %v", st, err)
		}
		apply(t, to, &st, 0, store.Gap, storeAll("w0", kvcache.Device, prompts[0][:2]...))
		if st, _, err = to.Restart(t.Context(), st, -1, 0); err != nil {
			t.Fatal(err)
		}
		apply(t, to, &st, 0, store.Applied, storeAll("w0", kvcache.Device, prompts[0][:2]...))
		apply(t, to, &st, 1, store.Applied, removeAll("w0", kvcache.Device, prompts[0][1]))
		if got := lookup(t, to, prompts[0])[st.WorkerRank]; got != onDevice(1) {
			t.Fatalf("after the first messages: %+v", got)
		}
	}
}

// testRestoreIntoALiveIndex: an indexer's watermark stays, and a generation that ends meanwhile is followed.
func testRestoreIntoALiveIndex(t *testing.T, url string) {
	s := open(t, url)
	st := register(t, s, rank("a", 0))
	p := chain(1, 30)
	apply(t, s, &st, 0, store.Applied, storeAll("a", kvcache.Device, p[:10]...))
	lines := dump(t, s, testPool)
	st, _, err := s.Restart(t.Context(), st, 41, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Restore(t.Context(), testPool, 16)
	if err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(strings.NewReader(lines))
	for i := 0; ; i++ {
		var e kvcache.RouterEvent
		if err := dec.Decode(&e); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if err := r.Add(t.Context(), e); err != nil {
			t.Fatal(err)
		}
		if i == 5 {
			if st, _, err = s.Restart(t.Context(), st, 41, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := r.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{st.WorkerRank: onDevice(10)})
	now, _, err := s.Stream(t.Context(), st.StreamID)
	if err != nil || now.Seq != 41 || now.URL == "" {
		t.Fatalf("%+v %v", now, err)
	}
	clean(t, s)

	if _, err := s.Restore(t.Context(), testPool, 32); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("another block size: %v", err)
	}
	if _, err := s.Restore(t.Context(), kvcache.PoolID{Model: "none"}, 0); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("no block size: %v", err)
	}
	before := dump(t, s, testPool)
	for _, bad := range []string{
		`{"worker_id":"a","event":{"data":"cleared"}}`,
		`{"worker_id":"a","event":{"data":{"removed":{"block_hashes":[1]}}}}`,
		`{"worker_id":"a","event":{"data":{"stored":{"blocks":[{"block_hash":1,"tokens_hash":2}]}}}}`,
		`{"worker_id":"a","event":{"data":{"stored":{"blocks":[{"block_hash":1,"engine_hash":1},{"block_hash":1}]}}}}`,
		`{"worker_id":"a","event":{"data":{"stored":{"parent_hash":3,"blocks":[{"block_hash":1,"engine_hash":1}]}}}}`,
		`{"worker_id":"a","storage_tier":"predicted","event":{"data":{"stored":{"blocks":[{"block_hash":1,"engine_hash":1}]}}}}`,
		`{"worker_id":"a/b","event":{"data":{"stored":{"blocks":[{"block_hash":1,"engine_hash":1}]}}}}`,
		`{"worker_id":"a","event":{"dp_rank":-1,"data":{"stored":{"blocks":[{"block_hash":1,"engine_hash":1}]}}}}`,
	} {
		var e kvcache.RouterEvent
		if err := json.Unmarshal([]byte(bad), &e); err != nil {
			t.Fatal(err)
		}
		if err := r.Add(t.Context(), e); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	if err := r.Flush(t.Context()); err != nil || dump(t, s, testPool) != before {
		t.Errorf("bad events changed the index: %v", err)
	}
}
