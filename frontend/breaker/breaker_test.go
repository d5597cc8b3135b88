package breaker

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func newSet(t *testing.T) (s *Set[string], changes *[]string) {
	t.Helper()
	changes = &[]string{}
	return New(Options[string]{Changed: func(k string, open bool) { *changes = append(*changes, fmt.Sprint(k, open)) }}), changes
}

func fail(s *Set[string], k string, n int) {
	for range n {
		s.Report(k, Failure)
	}
}

func TestOpensAfterFailuresInARow(t *testing.T) {
	s, changes := newSet(t)
	two := []string{"a", "b"}
	fail(s, "a", 4)
	s.Report("a", Success)
	fail(s, "a", 4)
	s.Report("a", Neutral) // neither one more nor the end of the row
	if s.Barred(two) != nil || s.Open("a") {
		t.Fatal("open after 4 in a row")
	}
	s.Report("a", Failure)
	if !s.Barred(two)["a"] || s.Barred(two)["b"] || !s.Open("a") {
		t.Error("not open after 5")
	}
	s.Report("a", Success) // of a request that began before
	if s.Barred(two) != nil {
		t.Error("still open after a success")
	}
	if !slices.Equal(*changes, []string{"atrue", "afalse"}) {
		t.Errorf("changes %v", *changes)
	}
}

// When the pause is over one request may try, whatever many want to.
func TestSingleTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := newSet(t)
		two := []string{"a", "b"}
		fail(s, "a", 5)
		for _, pause := range []time.Duration{5, 10, 20, 40, 60, 60} {
			time.Sleep(pause*time.Second - time.Nanosecond)
			if !s.Barred(two)["a"] {
				t.Fatalf("a trial before the pause of %d s is over", pause)
			}
			time.Sleep(time.Nanosecond)
			if s.Barred(two)["a"] {
				t.Fatalf("no trial after %d s", pause)
			}
			var mu sync.Mutex
			var all sync.WaitGroup
			trials := 0
			for range 50 {
				all.Go(func() {
					if s.Begin("a") {
						mu.Lock()
						trials++
						mu.Unlock()
					}
				})
			}
			all.Wait()
			if trials != 1 || !s.Barred(two)["a"] {
				t.Fatalf("%d trials at a time", trials)
			}
			s.Report("a", Failure)
		}
		time.Sleep(time.Minute)
		if !s.Begin("a") {
			t.Fatal("no trial")
		}
		s.Report("a", Neutral) // the client left: another may try at once
		if s.Barred(two)["a"] || !s.Begin("a") {
			t.Fatal("a trial that said nothing was the last")
		}
		time.Sleep(time.Minute + 1) // one that is never heard of again neither
		if !s.Begin("a") {
			t.Fatal("a trial that was lost was the last")
		}
		s.Report("a", Success)
		if s.Open("a") || !s.Begin("a") {
			t.Error("a trial that went well did not close it")
		}
	})
}

// Where more than half would be barred, the newest are let through.
func TestHalfStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := newSet(t)
		for _, k := range []string{"c", "a", "b"} {
			fail(s, k, 5)
			time.Sleep(time.Millisecond)
		}
		for _, test := range []struct{ keys, barred []string }{
			{[]string{"a"}, nil},
			{[]string{"a", "b"}, []string{"a"}},
			{[]string{"a", "b", "c"}, []string{"c"}},
			{[]string{"a", "b", "c", "d"}, []string{"a", "c"}},
			{[]string{"a", "b", "c", "d", "e", "f"}, []string{"a", "b", "c"}},
		} {
			got := s.Barred(test.keys)
			for _, k := range test.keys {
				if got[k] != slices.Contains(test.barred, k) {
					t.Errorf("of %v barred %v, want %v", test.keys, got, test.barred)
				}
			}
			if !s.Begin("b") { // let through although it is open, and its pause is not over
				t.Error("one that is let through must be let in")
			}
		}
	})
}

func TestForget(t *testing.T) {
	s, _ := newSet(t)
	fail(s, "a", 5)
	s.Forget("a")
	s.Forget("a")
	if s.Open("a") || s.Barred([]string{"a", "b"}) != nil || len(s.state) != 0 {
		t.Error("not forgotten")
	}
	here := true
	s = New(Options[string]{Known: func(string) bool { return here }})
	fail(s, "a", 2)
	s.Forget("a")
	here = false // its last streams break
	if fail(s, "a", 5); len(s.state) != 0 || s.Open("a") || s.opened.Load() != 0 {
		t.Errorf("%d breakers are kept of a worker that left", len(s.state))
	}
	never := New(Options[string]{Failures: -1})
	fail(never, "a", 100)
	if never.Open("a") {
		t.Error("it opened though it was turned off")
	}
}
