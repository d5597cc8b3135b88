package store_test

import (
	"bytes"
	"maps"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

func TestInspect(t *testing.T) {
	t.Run("miniredis", func(t *testing.T) {
		_, url := storetest.Miniredis(t)
		testInspect(t, url, 1)
	})
	t.Run("redis, 4 shards", func(t *testing.T) { testInspect(t, storetest.Redis(t).URL, 4) })
}

func testInspect(t *testing.T, url string, shards int) {
	s := open(t, url, func(o *store.Options) { o.Shards = shards })
	if h, err := s.Holders(t.Context(), testPool, chain(1, 3)); err != nil || len(h) != 0 {
		t.Fatalf("holders in a pool that does not exist: %v, %v", h, err)
	}
	if n, err := s.Sizes(t.Context(), testPool); err != nil || len(n) != 0 {
		t.Fatalf("sizes of a pool that does not exist: %v, %v", n, err)
	}
	// Nine ranks: the nibbles of one shard or several take more than a byte.
	ranks := map[kvcache.WorkerRank]*store.Stream{}
	for i := range 9 {
		st := register(t, s, rank("w", i))
		ranks[rank("w", i)] = &st
	}
	p := chain(7, 5000) // more than one HMGET
	apply(t, s, ranks[rank("w", 0)], 0, store.Applied, func(b *store.Batch) {
		storeAll("w", kvcache.Device, p[:3]...)(b)
		storeAll("w", kvcache.Disk, p[2:4]...)(b)
		storeAll("w", kvcache.Host, p[4999])(b) // after a hole
	})
	apply(t, s, ranks[rank("w", 8)], 0, store.Applied, storeAll("w", kvcache.Device, p[1]))
	predict(t, s, rank("w", 8), store.Applied, store.PredictOptions{TTL: time.Hour}, p[:1]...)
	apply(t, s, ranks[rank("w", 3)], 0, store.Applied, storeAll("w", kvcache.Device, p[0]))
	if _, out, err := s.Restart(t.Context(), *ranks[rank("w", 3)], -1, 0); err != nil || out != store.Applied {
		t.Fatalf("restart: %v, %v", out, err)
	}

	w0, w8 := make([]byte, len(p)), make([]byte, len(p))
	copy(w0, []byte{1, 1, 5, 4})
	w0[4999] = 2
	copy(w8, []byte{8, 1})
	got, err := s.Holders(t.Context(), testPool, p)
	if err != nil || !maps.EqualFunc(got, map[kvcache.WorkerRank][]byte{rank("w", 0): w0, rank("w", 8): w8}, bytes.Equal) {
		t.Errorf("holders: %v, %v", got, err)
	}
	sizes, err := s.Sizes(t.Context(), testPool)
	if err != nil || len(sizes) != 9 || sizes[rank("w", 0)] != [4]int{3, 1, 2, 0} || sizes[rank("w", 8)] != [4]int{1, 0, 0, 1} || sizes[rank("w", 3)] != [4]int{} {
		t.Errorf("sizes: %v, %v", sizes, err)
	}
}

func TestInspectWhileRedisIsAway(t *testing.T) {
	r := storetest.Redis(t)
	s := open(t, r.URL)
	st := register(t, s, rank("w", 0))
	apply(t, s, &st, 0, store.Applied, storeAll("w", kvcache.Device, chain(1, 3)...))
	if h, err := s.Holders(t.Context(), testPool, chain(1, 3)); err != nil || len(h) != 1 {
		t.Fatalf("%v, %v", h, err)
	}
	r.Stop()
	if h, err := s.Holders(t.Context(), testPool, chain(1, 3)); err == nil || len(h) != 0 || store.Reason(err) != store.ReasonConnection {
		t.Errorf("holders: %v, %v", h, err)
	}
	if n, err := s.Sizes(t.Context(), testPool); err == nil || len(n) != 0 || store.Reason(err) != store.ReasonConnection {
		t.Errorf("sizes: %v, %v", n, err)
	}
}
