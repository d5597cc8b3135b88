package store_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// testLostKeysOfLeases: one of the keys of what is under way is lost, or somebody writes into it. The next renewal finds it: what has a lease
// counts again, what has none counts no more, nothing counts for ever and nothing is below zero.
func testLostKeysOfLeases(t *testing.T, url string) {
	raw, tag := client(t, url), "wr:1:{default:llama %7B3%7D%231}:"
	one, two := rank("a", 0), rank("b", 0)
	full := loadMap{one: {Requests: 1, PrefillTokens: 160, DecodeBlocks: 10}, two: {Requests: 2, PrefillTokens: 160, DecodeBlocks: 21}}
	for _, c := range []struct {
		name string
		lose func() error
		ends []string // the leases that are gone
		want map[kvcache.WorkerRank]store.Load
	}{
		{"sums", func() error { return raw.Del(t.Context(), tag+"load").Err() }, nil, full},
		{"one sum", func() error { return raw.HDel(t.Context(), tag+"load", two.String()).Err() }, nil, full},
		{"sums are nonsense", func() error { return raw.HSet(t.Context(), tag+"load", two.String(), "-1 0 0").Err() }, nil, full},
		{"a sum of nobody", func() error { return raw.HSet(t.Context(), tag+"load", "ghost/0", "3 1 1").Err() }, nil, full},
		{"deadlines", func() error { return raw.Del(t.Context(), tag+"deadlines").Err() }, nil, full},
		{"leases", func() error { return raw.Del(t.Context(), tag+"leases").Err() }, []string{"first", "second", "third"}, loadMap{}},
		{"a lease", func() error { return raw.HDel(t.Context(), tag+"leases", "first").Err() }, []string{"first"}, loadMap{two: full[two]}},
		{"everything", func() error { return raw.Del(t.Context(), tag+"load", tag+"leases", tag+"deadlines").Err() }, []string{"first", "second", "third"}, loadMap{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			flush(t, url)
			s := open(t, url)
			selects(t, s, asking("first", 0))
			for _, id := range []string{"second", "third"} {
				a := asking(id, 0)
				a.Candidates[0].WorkerRank = two
				selects(t, s, a)
			}
			if ok, err := s.PrefillDone(t.Context(), testPool, "third"); !did(t, ok, err) {
				t.Fatal("not prefilled")
			}
			if ok, err := s.OutputBlock(t.Context(), testPool, "third"); !did(t, ok, err) {
				t.Fatal("no output")
			}
			if err := c.lose(); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				ended, err := s.Renew(t.Context(), testPool, "first", "second", "third")
				if err != nil || !slices.Equal(ended, c.ends) {
					t.Fatalf("ended %q, want %q: %v", ended, c.ends, err)
				}
				loads(t, s, c.want)
				if differ := sumsDiffer(t, raw, tag[:len(tag)-1]); differ != "" {
					t.Fatal(differ)
				}
			}
			for _, id := range []string{"first", "second", "third"} {
				ok, err := s.Release(t.Context(), testPool, id)
				if did(t, ok, err) == slices.Contains(c.ends, id) {
					t.Errorf("%s: released %v", id, ok)
				}
			}
			loads(t, s, loadMap{})
			if left := raw.Exists(t.Context(), tag+"load", tag+"leases", tag+"deadlines").Val(); left != 0 {
				t.Errorf("%d keys are left", left)
			}
		})
	}
}

// testManyLostLeases: as many as take several calls inside the script.
func testManyLostLeases(t *testing.T, url string) {
	const n = 1201
	raw, tag := client(t, url), "wr:1:{default:llama %7B3%7D%231}:"
	s := open(t, url)
	for i := range n {
		selects(t, s, asking(fmt.Sprint("r", i), 0))
	}
	full := loadMap{rank("a", 0): {Requests: n, PrefillTokens: 160 * n, DecodeBlocks: 10 * n}}
	if err := raw.Del(t.Context(), tag+"load", tag+"deadlines").Err(); err != nil {
		t.Fatal(err)
	}
	loads(t, s, full)
	if differ := sumsDiffer(t, raw, tag[:len(tag)-1]); differ != "" {
		t.Fatal(differ)
	}
	if err := raw.HDel(t.Context(), tag+"leases", "r5", "r1200").Err(); err != nil {
		t.Fatal(err)
	}
	loads(t, s, loadMap{rank("a", 0): {Requests: n - 2, PrefillTokens: 160 * (n - 2), DecodeBlocks: 10 * (n - 2)}})
	if err := raw.Del(t.Context(), tag+"leases").Err(); err != nil {
		t.Fatal(err)
	}
	loads(t, s, loadMap{})
	if left := raw.Exists(t.Context(), tag+"load", tag+"leases", tag+"deadlines").Val(); left != 0 {
		t.Errorf("%d keys are left", left)
	}
}
