package store_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// testLostStream: a stream's hash is lost, and nothing else. What it held leaves as it registers again: nothing stays credited for
// ever in a slot that nobody retires.
func testLostStream(t *testing.T, url string) {
	s := open(t, url)
	p := chain(1, 20)
	other := register(t, s, rank("other", 0))
	apply(t, s, &other, 0, store.Applied, storeAll("other", kvcache.Device, p[:5]...))
	old := register(t, s, rank("w", 0))
	apply(t, s, &old, 0, store.Applied, storeAll("w", kvcache.Device, p...))
	if n, err := client(t, url).Del(t.Context(), shardTag+"stream:w/0").Result(); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	st, created, err := s.Register(t.Context(), old.StreamID, store.Registration{BlockSize: 16})
	if err != nil || !created || st.Slot == old.Slot || st.Generation == old.Generation || st.Seq != -1 {
		t.Fatalf("registered again as %+v, was %+v: %v", st, old, err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("other", 0): onDevice(5)})
	apply(t, s, &st, 0, store.Applied, storeAll("w", kvcache.Device, p[:2]...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("w", 0): onDevice(2), rank("other", 0): onDevice(5)})
	clean(t, s)
}

// testFollowKeepsARegistration: who only goes on following a worker may know an older place of it, or none.
func testFollowKeepsARegistration(t *testing.T, url string) {
	s := open(t, url)
	id := store.StreamID{Pool: testPool, WorkerRank: rank("w", 0)}
	at := func(endpoint string) store.Registration {
		return store.Registration{BlockSize: 16, Endpoint: endpoint, URL: "http://" + endpoint}
	}
	for i, c := range []struct {
		follow bool
		with   string
		want   string
	}{
		{true, "", ""}, {true, "a:1", "a:1"}, {true, "b:1", "a:1"}, {true, "", "a:1"},
		{false, "b:1", "b:1"}, {true, "a:1", "b:1"}, {false, "", ""}, {true, "c:1", "c:1"},
	} {
		register := s.Register
		if c.follow {
			register = s.Follow
		}
		if _, _, err := register(t.Context(), id, at(c.with)); err != nil {
			t.Fatal(err)
		}
		st, _, err := s.Stream(t.Context(), id)
		if err != nil || st.Endpoint != c.want || st.URL != "http://"+c.want {
			t.Errorf("step %d: at %q, %q, want %q: %v", i, st.Endpoint, st.URL, c.want, err)
		}
	}
	// A prediction that makes streams changes none, also where it has to look for the shard.
	o := store.PredictOptions{Register: &store.Registration{BlockSize: 16}}
	if _, err := s.Predict(t.Context(), testPool, id.WorkerRank, chain(1, 2), o); err != nil {
		t.Fatal(err)
	}
	if st, _, err := s.Stream(t.Context(), id); err != nil || st.Endpoint != "c:1" {
		t.Errorf("after a prediction: %+v, %v", st, err)
	}
}

// The places of a pool's workers are lost while no process knows the pool: they are found again where the streams are.
func TestLostPlacesAreFoundByANewProcess(t *testing.T) {
	_, url := storetest.Miniredis(t)
	s := open(t, url, func(o *store.Options) { o.Shards = 4 })
	p := chain(1, 10)
	var st store.Stream
	for i := range 4 {
		st = register(t, s, rank(fmt.Sprint("w", i), 0))
	}
	apply(t, s, &st, 0, store.Applied, storeAll("w3", kvcache.Device, p...))
	if n, err := client(t, url).Del(t.Context(), poolTag+"workers").Result(); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	next := open(t, url)
	for i := 3; i >= 0; i-- {
		again := register(t, next, rank(fmt.Sprint("w", i), 0))
		if i == 3 && (again.Shard != st.Shard || again.Generation != st.Generation) {
			t.Errorf("registered again as %+v, was %+v", again, st)
		}
	}
	clean(t, s)
}

// A pool's configuration is lost, and the next process to register would make another number of shards: the shards that
// have workers are there again.
func TestLostConfigurationKeepsTheShards(t *testing.T) {
	_, url := storetest.Miniredis(t)
	s := open(t, url, func(o *store.Options) { o.Shards = 4 })
	streams := make([]store.Stream, 4)
	for i := range streams {
		streams[i] = register(t, s, rank(fmt.Sprint("w", i), 0))
	}
	c := client(t, url)
	if n, err := c.Del(t.Context(), poolTag+"config").Result(); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	if err := c.HSet(t.Context(), poolTag+"workers", "damaged", "1000000").Err(); err != nil {
		t.Fatal(err)
	}
	next := open(t, url)
	for i, was := range streams {
		if st := register(t, next, rank(fmt.Sprint("w", i), 0)); st.Shard != was.Shard || st.Generation != was.Generation {
			t.Errorf("registered again as %+v, was %+v", st, was)
		}
	}
	if k, ok, err := next.PoolConfig(t.Context(), testPool); err != nil || !ok || k.Shards != 4 {
		t.Errorf("configuration %+v %v %v", k, ok, err)
	}
	var conflict *store.ConflictError
	if _, _, err := next.Register(t.Context(), streams[0].StreamID, store.Registration{BlockSize: 32}); !errors.As(err, &conflict) {
		t.Errorf("another block size: %v", err)
	}
}

// testLostSlotMap: the slot map is lost, and nothing else. A stream's next renewal brings it back into answers; one that is
// retired first needs none; nobody takes another one's slot from it.
func testLostSlotMap(t *testing.T, url string) {
	s := open(t, url)
	p := chain(1, 20)
	a, b := register(t, s, rank("a", 0)), register(t, s, rank("b", 0))
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	apply(t, s, &b, 0, store.Applied, storeAll("b", kvcache.Device, p[:7]...))
	c := client(t, url)
	if n, err := c.Del(t.Context(), shardTag+"slots").Result(); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	if o, err := s.Touch(t.Context(), a); err != nil || o != store.Applied {
		t.Fatal(o, err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(20)})
	if n, err := c.Del(t.Context(), shardTag+"version").Result(); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{})
	if o, err := s.Touch(t.Context(), a); err != nil || o != store.Applied {
		t.Fatal(o, err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(20)})
	b, o, err := s.Restart(t.Context(), b, 5, 0)
	if err != nil || o != store.Applied {
		t.Fatal(o, err)
	}
	apply(t, s, &b, 6, store.Applied, storeAll("b", kvcache.Device, p[:3]...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(20), rank("b", 0): onDevice(3)})
	clean(t, s)

	// Somebody else has the slot: it stays theirs, whatever the stream that has lost it does.
	if err := c.HSet(t.Context(), shardTag+"slots", fmt.Sprint(b.Slot), "a/0").Err(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Restart(t.Context(), b, 9, 0); !errors.Is(err, store.ErrCorrupt) {
		t.Errorf("retired from another one's slot: %v", err)
	}
	if o, err := s.Touch(t.Context(), b); err != nil || o != store.Applied {
		t.Error(o, err)
	}
	if owner, err := c.HGet(t.Context(), shardTag+"slots", fmt.Sprint(b.Slot)).Result(); err != nil || owner != "a/0" {
		t.Errorf("slot of %q: %v", owner, err)
	}
	if r, err := s.Check(t.Context(), testPool, true); err != nil || r.Found == 0 || r.Found != r.Repaired {
		t.Errorf("%+v %v", r, err)
	}
	clean(t, s)
}
