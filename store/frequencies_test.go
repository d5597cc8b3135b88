package store_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

func withWindow(d time.Duration) func(*store.Options) {
	return func(o *store.Options) { o.FrequencyWindow, o.Shards = d, 2 }
}

func frequencies(t testing.TB, s *store.Store, p []kvcache.BlockHash) []int {
	t.Helper()
	got, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{Frequencies: true})
	if err != nil || state != kvcache.Exact {
		t.Fatalf("lookup: %v %v", state, err)
	}
	return got.Frequencies
}

// testFrequencies compares random uses, by several frontends, with a count in plain Go.
func testFrequencies(t *testing.T, url string) {
	frontends := []*store.Store{open(t, url, withWindow(10000*time.Hour)), open(t, url, withWindow(10000*time.Hour))}
	trunk := chain(1, 900)
	st, other := register(t, frontends[0], rank("a", 0)), register(t, frontends[0], rank("b", 0))
	apply(t, frontends[0], &st, 0, store.Applied, storeAll("a", kvcache.Device, trunk...))
	prompts := [][]kvcache.BlockHash{trunk, trunk[:1], trunk[:300], nil}
	for i := range 4 {
		p := append(slices.Clone(trunk[:200*i]), chain(uint32(10+i), 400)...)
		apply(t, frontends[0], &other, int64(i), store.Applied, storeAll("b", kvcache.Host, p...))
		prompts = append(prompts, append(p, chain(99, 7)...)) // nobody holds the end
	}
	uses := map[kvcache.BlockHash]int{}
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 100 {
		p := prompts[r.IntN(len(prompts))]
		got := frequencies(t, frontends[i%2], p)
		held := len(p)
		if held > 7 && slices.Equal(p[held-7:], chain(99, 7)) {
			held -= 7
		}
		var want []int
		for _, b := range p[:held] {
			want = append(want, uses[b])
			uses[b]++
		}
		if !slices.Equal(got, want) {
			t.Fatalf("use %d of %d blocks:\n got %v\nwant %v", i, len(p), got, want)
		}
	}
	// Off by default, and then nothing is counted.
	if got := frequencies(t, open(t, url), trunk); got != nil {
		t.Fatalf("without a window: %v", got)
	}
	if got := frequencies(t, frontends[0], trunk[:1]); got[0] != uses[trunk[0]] {
		t.Fatalf("%v, want %d", got, uses[trunk[0]])
	}
	clean(t, frontends[0])
}

// Uses count for at least three quarters of the window, and no longer than the whole; then nothing is left of them.
func TestFrequenciesForget(t *testing.T) {
	m, url := storetest.Miniredis(t)
	now := time.UnixMilli(1_800_000_000_000)
	m.SetTime(now)
	s := open(t, url, withWindow(40*time.Second))
	st := register(t, s, rank("a", 0))
	p := chain(1, 3)
	apply(t, s, &st, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	var uses []time.Time
	for i := range 400 {
		step := time.Duration(i%7) * 3 * time.Second
		now = now.Add(step)
		m.SetTime(now)
		m.FastForward(step)
		got := frequencies(t, s, p)[1]
		least, most := 0, 0
		for _, u := range uses {
			if now.Sub(u) <= 30*time.Second {
				least++
			}
			if now.Sub(u) < 40*time.Second {
				most++
			}
		}
		if got < least || got > most {
			t.Fatalf("use %d: counted %d, want %d to %d", i, got, least, most)
		}
		uses = append(uses, now)
	}
	m.FastForward(time.Hour)
	for i := range 5 {
		if key := fmt.Sprintf("%suses:%d", shardTag, i); m.Exists(key) {
			t.Errorf("%s is left", key)
		}
	}
}

// A Redis that refuses writes costs the frequencies, not the lookup.
func TestFrequenciesAreNoReasonToFail(t *testing.T) {
	r := storetest.Redis(t)
	s := open(t, r.URL, withWindow(time.Minute))
	st := register(t, s, rank("a", 0))
	p := chain(1, 3)
	apply(t, s, &st, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	if err := client(t, r.URL).ConfigSet(t.Context(), "min-replicas-to-write", "1").Err(); err != nil {
		t.Fatal(err)
	}
	if got := frequencies(t, s, p); got != nil {
		t.Fatalf("%v", got)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{st.WorkerRank: onDevice(3)})
	for _, l := range s.Links() {
		if !l.Up {
			t.Fatalf("%+v", l)
		}
	}
}
