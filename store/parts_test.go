package store_test

import (
	"fmt"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// testLargeBatch: a batch too large for one call is applied in parts, with the same outcome as that of its messages one by one,
// and exactly once whoever has applied which of its messages before.
func testLargeBatch(t *testing.T, url string) {
	const blocks, left = 2800, 2000
	a, b := chain(1, blocks), chain(2, 700)
	message := func(x *store.Batch, i int64) {
		x.Message(i)
		switch i {
		case 0:
			storeAll("w", kvcache.Device, b...)(x)
		case 1:
			storeAll("w", kvcache.Device, a...)(x)
			storeAll("w", kvcache.Host, a[:300]...)(x)
		case 2:
			removeAll("w", kvcache.Device, a[left:]...)(x)
		case 3: // nothing
		case 4:
			storeAll("w", kvcache.Device, a[left+100:]...)(x)
			removeAll("w", kvcache.Device, b[10:]...)(x)
		}
	}
	for before := range int64(6) { // messages that another indexer has applied
		t.Run(fmt.Sprint(before), func(t *testing.T) {
			flush(t, url)
			s := open(t, url)
			st := register(t, s, rank("w", 0))
			seen := st
			for i := range before {
				var one store.Batch
				message(&one, i)
				applyBatch(t, s, &seen, &one, store.Applied)
			}
			var all store.Batch
			for i := range int64(5) {
				message(&all, i)
			}
			want1 := store.Applied
			if before == 5 {
				want1 = store.Duplicate
			}
			applyBatch(t, s, &st, &all, want1)
			applyBatch(t, s, &st, &all, store.Duplicate)
			of, err := client(t, url).HGet(t.Context(), shardTag+"stream:w/0", "part").Result()
			if before < 4 && (err != nil || of != fmt.Sprintf("%d:4", st.Generation)) {
				t.Errorf("applied in one: %q %v", of, err)
			}
			if st.Seq != 4 {
				t.Errorf("watermark %d", st.Seq)
			}
			for _, c := range []struct {
				blocks []kvcache.BlockHash
				want   kvcache.Overlap
			}{
				{a, kvcache.Overlap{Device: left, Host: left, Disk: left, Any: left}},
				{b, kvcache.Overlap{Device: 10, Host: 10, Disk: 10, Any: 10}},
				{a[left+100:], kvcache.Overlap{Device: blocks - left - 100, Host: blocks - left - 100, Disk: blocks - left - 100, Any: blocks - left - 100}},
			} {
				if got := lookup(t, s, c.blocks)[st.WorkerRank]; got != c.want {
					t.Errorf("%v, want %v", got, c.want)
				}
			}
			clean(t, s)
		})
	}
}

// testPartsCountNoCopies: an indexer dies between the parts of a batch, and another one, which has cut the same messages in another
// way, or not at all, applies them again: no block has a copy more than the engine.
func testPartsCountNoCopies(t *testing.T, url string) {
	s := open(t, url)
	st := register(t, s, rank("w", 0))
	p := chain(1, 40)
	c := client(t, url)
	// What the first part of a batch of messages 0 to 7 leaves.
	var batch store.Batch
	batch.Message(7)
	batch.Force = true
	storeAll("w", kvcache.Device, p...)(&batch)
	if o, _, err := s.Apply(t.Context(), st, &batch); err != nil || o != store.Applied {
		t.Fatal(o, err)
	}
	key := shardTag + "stream:w/0"
	if err := c.HSet(t.Context(), key, "seq", "-1", "part", fmt.Sprintf("%d:7", st.Generation)).Err(); err != nil {
		t.Fatal(err)
	}
	apply(t, s, &st, 0, store.Applied, storeAll("w", kvcache.Device, p...))
	apply(t, s, &st, 1, store.Applied, removeAll("w", kvcache.Device, p[20:]...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{st.WorkerRank: onDevice(20)})
	// After them copies count again, and in another generation they always did.
	for i := int64(2); i <= 7; i++ {
		apply(t, s, &st, i, store.Applied, func(*store.Batch) {})
	}
	apply(t, s, &st, 8, store.Applied, storeAll("w", kvcache.Device, p[:20]...))
	apply(t, s, &st, 9, store.Applied, removeAll("w", kvcache.Device, p[:20]...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{st.WorkerRank: onDevice(20)})
	clean(t, s)
}
