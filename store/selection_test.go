package store_test

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// asking makes an ask of 10 blocks of 16 tokens for candidates named a, b, … with those credits.
func asking(id string, credits ...float64) store.Ask {
	a := store.Ask{
		ID: id, Lease: time.Hour, BlockSize: 16, PromptTokens: 160, DecodeBlocks: 10, Weights: store.Weights(choose.Default),
	}
	for i, c := range credits {
		a.Candidates = append(a.Candidates, store.Candidate{WorkerRank: rank(string(rune('a'+i)), 0), Credit: c})
	}
	return a
}

func selects(t testing.TB, s *store.Store, a store.Ask) store.Choice {
	t.Helper()
	c, err := s.Select(t.Context(), testPool, a)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func loads(t testing.TB, s *store.Store, want map[kvcache.WorkerRank]store.Load) {
	t.Helper()
	got, err := s.Loads(t.Context(), testPool)
	if err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(got, want) {
		t.Fatalf("loads:\n got %v\nwant %v", got, want)
	}
}

type loadMap = map[kvcache.WorkerRank]store.Load

func did(t testing.TB, ok bool, err error) bool {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return ok
}

func testLifeOfALease(t *testing.T, url string) {
	s := open(t, url)
	c := selects(t, s, asking("r1", 2, 8, 0))
	if c.WorkerRank != rank("b", 0) || c.Index != 1 || !c.Held || c.Session || c.AllBusy || c.Cost != choose.Default.PrefillScale*choose.Default.Miss*2 {
		t.Fatalf("the first choice is %+v", c)
	}
	loads(t, s, loadMap{rank("b", 0): {1, 32, 10}})

	c = selects(t, s, asking("", 2, 8, 0)) // chooses and holds nothing
	if c.Held || c.Loads[1] != (store.Load{Requests: 1, PrefillTokens: 32, DecodeBlocks: 10}) || c.Loads[0] != (store.Load{}) {
		t.Fatalf("a choice without an id: %+v", c)
	}
	loads(t, s, loadMap{rank("b", 0): {1, 32, 10}})

	for range 2 { // the second time changes nothing
		if ok, err := s.PrefillDone(t.Context(), testPool, "r1"); !did(t, ok, err) {
			t.Fatal("the lease is not found")
		}
		loads(t, s, loadMap{rank("b", 0): {1, 0, 10}})
	}
	if ok, err := s.OutputBlock(t.Context(), testPool, "r1"); !did(t, ok, err) {
		t.Fatal("the lease is not found")
	}
	loads(t, s, loadMap{rank("b", 0): {1, 0, 11}})
	if ended, err := s.Renew(t.Context(), testPool, "r1", "r2"); err != nil || fmt.Sprint(ended) != "[r2]" {
		t.Fatalf("renewed but for %v, %v", ended, err)
	}
	for _, want := range []bool{true, false, false} {
		if ok, err := s.Release(t.Context(), testPool, "r1"); did(t, ok, err) != want {
			t.Fatalf("released: %v, want %v", ok, want)
		}
		loads(t, s, loadMap{})
	}
	for name, f := range map[string]func() (bool, error){
		"prefilled": func() (bool, error) { return s.PrefillDone(t.Context(), testPool, "r1") },
		"output":    func() (bool, error) { return s.OutputBlock(t.Context(), testPool, "r1") },
	} {
		if ok, err := f(); did(t, ok, err) {
			t.Errorf("%s of a lease that has ended", name)
		}
	}
	loads(t, s, loadMap{})
	many := make([]string, 1500)
	for i := range many {
		if many[i] = fmt.Sprint("m", i); i%300 == 0 {
			selects(t, s, asking(many[i], 2, 8, 0))
		}
	}
	for range 2 {
		if err := s.ReleaseAll(t.Context(), testPool, append(many, "m0", "a b")...); err != nil {
			t.Fatal(err)
		}
		loads(t, s, loadMap{})
	}
	c2 := client(t, url)
	if left := c2.Keys(t.Context(), "wr:1:{*}:l*").Val(); len(left) != 0 {
		t.Errorf("keys are left: %q", left)
	}
}

func testTheSameIDReservesOnce(t *testing.T, url string) {
	s := open(t, url)
	a := asking("r", 0, 0, 0, 0, 0, 0, 0, 0)
	first := selects(t, s, a)
	for range 20 {
		again := selects(t, s, a)
		if again.WorkerRank != first.WorkerRank || !again.Held {
			t.Fatalf("first %v, then %v, held %v", first.WorkerRank, again.WorkerRank, again.Held)
		}
	}
	loads(t, s, loadMap{first.WorkerRank: {1, 160, 10}})

	// The worker has refused: the reservation moves.
	a.Candidates = append(a.Candidates[:first.Index:first.Index], a.Candidates[first.Index+1:]...)
	second := selects(t, s, a)
	if second.WorkerRank == first.WorkerRank {
		t.Fatal("it stays at a worker that is no candidate")
	}
	loads(t, s, loadMap{second.WorkerRank: {1, 160, 10}})
}

func testBusy(t *testing.T, url string) {
	s := open(t, url)
	selects(t, s, asking("r1", 10))
	for name, busy := range map[string]store.Load{"requests": {Requests: 1}, "blocks": {DecodeBlocks: 10}} {
		a := asking("", 10, 0)
		if c := selects(t, s, a); c.WorkerRank != rank("a", 0) {
			t.Fatalf("without a threshold: %v", c.WorkerRank)
		}
		a.Busy = busy
		if c := selects(t, s, a); c.WorkerRank != rank("b", 0) || c.AllBusy {
			t.Errorf("%s: %+v", name, c)
		}
		a = asking("r2", 10)
		a.Busy = busy
		if c := selects(t, s, a); !c.AllBusy || c.Held || c.Worker != "" || c.Loads[0].Requests != 1 {
			t.Errorf("%s, all busy: %+v", name, c)
		}
	}
	selects(t, s, asking("r3", 0))
	a := asking("", 10, 0)
	a.Busy = store.Load{PrefillTokens: 160}
	if c := selects(t, s, a); c.WorkerRank != rank("b", 0) {
		t.Errorf("tokens: %+v", c)
	}
	loads(t, s, loadMap{rank("a", 0): {2, 160, 20}})
}

func testSession(t *testing.T, url string) {
	s := open(t, url)
	ask := func(id string, credits ...float64) store.Ask {
		a := asking(id, credits...)
		a.Session, a.SessionTTL, a.SessionSlack = "the \x00 name's of a client's making {x}", time.Hour, 1000
		a.Weights.Decode = 0
		return a
	}
	if c := selects(t, s, ask("", 0, 10)); c.Session || c.WorkerRank != rank("b", 0) {
		t.Fatalf("a session that is nowhere: %+v", c)
	}
	if c := selects(t, s, ask("", 10, 0)); c.Session || c.WorkerRank != rank("a", 0) {
		t.Fatalf("what reserves nothing must not place the session: %+v", c)
	}
	if c := selects(t, s, ask("r1", 0, 10)); c.WorkerRank != rank("b", 0) {
		t.Fatal(c)
	}
	for _, id := range []string{"r2", "r2", "r3"} {
		if c := selects(t, s, ask(id, 10, 0)); !c.Session || c.WorkerRank != rank("b", 0) {
			t.Fatalf("%s leaves its worker: %+v", id, c)
		}
	}
	a := ask("", 10, 0)
	a.SessionSlack = 1
	if c := selects(t, s, a); c.Session || c.WorkerRank != rank("a", 0) {
		t.Errorf("a much busier worker keeps the session: %+v", c)
	}
	a = ask("", 10, 0)
	a.Busy.Requests = 3
	if c := selects(t, s, a); c.Session || c.WorkerRank != rank("a", 0) {
		t.Errorf("a worker over its threshold keeps the session: %+v", c)
	}
	if c := selects(t, s, ask("r4", 10)); c.Session || c.WorkerRank != rank("a", 0) { // b is gone
		t.Errorf("a worker that is gone: %+v", c)
	}
	if c := selects(t, s, ask("", 0, 10)); !c.Session || c.WorkerRank != rank("a", 0) {
		t.Errorf("the session has not moved: %+v", c)
	}
}

func testInvalidAsks(t *testing.T, url string) {
	s := open(t, url)
	for name, change := range map[string]func(*store.Ask){
		"no candidates":     func(a *store.Ask) { a.Candidates = nil },
		"too many":          func(a *store.Ask) { a.Candidates = make([]store.Candidate, store.MaxCandidates+1) },
		"bad worker":        func(a *store.Ask) { a.Candidates[0].Worker = "a b" },
		"credit NaN":        func(a *store.Ask) { a.Candidates[0].Credit = math.NaN() },
		"credit below zero": func(a *store.Ask) { a.Candidates[0].Credit = -1 },
		"weight infinite":   func(a *store.Ask) { a.Weights.Miss = math.Inf(1) },
		"no block size":     func(a *store.Ask) { a.BlockSize = 0 },
		"tokens":            func(a *store.Ask) { a.PromptTokens = -1 },
		"blocks":            func(a *store.Ask) { a.DecodeBlocks = 2_000_000_000 },
		"id too long":       func(a *store.Ask) { a.ID = strings.Repeat("x", 129) },
		"id with a space":   func(a *store.Ask) { a.ID = "a b" },
		"no lease":          func(a *store.Ask) { a.Lease = 0 },
		"lease too long":    func(a *store.Ask) { a.Lease = 25 * time.Hour },
		"slack":             func(a *store.Ask) { a.SessionSlack = -1 },
		"busy":              func(a *store.Ask) { a.Busy.Requests = -1 },
	} {
		a := asking("r", 0, 0)
		change(&a)
		if _, err := s.Select(t.Context(), testPool, a); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	loads(t, s, loadMap{})
	if ok, err := s.Release(t.Context(), testPool, "a b"); ok || err != nil {
		t.Errorf("releasing what cannot be: %v %v", ok, err)
	}
	// As many as there may be.
	a := asking("r")
	for i := range store.MaxCandidates {
		credit := 0.0
		if i == 4000 {
			credit = 3
		}
		a.Candidates = append(a.Candidates, store.Candidate{WorkerRank: rank("w", i), Credit: credit})
	}
	if c := selects(t, s, a); c.Rank != 4000 {
		t.Errorf("of 4096 candidates %v is chosen", c.WorkerRank)
	}
}

// Leases end by the server's clock: those of a frontend that died, and of one that came late; one that is renewed does not.
func TestLeasesEnd(t *testing.T) {
	m, url := storetest.Miniredis(t)
	s := open(t, url)
	now := time.Unix(1_800_000_000, 0)
	m.SetTime(now)
	for i := range 100 { // more than one call frees
		a := asking(fmt.Sprint("dead", i), 0, 0)
		a.Lease = 10 * time.Second
		selects(t, s, a)
	}
	long := asking("long", 0)
	long.Lease = 10 * time.Second
	selects(t, s, long)
	m.SetTime(now.Add(9 * time.Second))
	if ended, err := s.Renew(t.Context(), testPool, "long"); err != nil || len(ended) > 0 {
		t.Fatal(ended, err)
	}
	m.SetTime(now.Add(10 * time.Second))
	// The last of those that have ended says something: it is as ended as the others, though no call has freed it yet.
	for name, f := range map[string]func() (bool, error){
		"prefilled": func() (bool, error) { return s.PrefillDone(t.Context(), testPool, "dead99") },
		"output":    func() (bool, error) { return s.OutputBlock(t.Context(), testPool, "dead98") },
		"released":  func() (bool, error) { return s.Release(t.Context(), testPool, "dead97") },
	} {
		if ok, err := f(); did(t, ok, err) {
			t.Errorf("%s after its end", name)
		}
	}
	loads(t, s, loadMap{rank("a", 0): {1, 160, 10}})
	a := asking("dead0", 0, 0) // an id that was used before is as good as any
	a.Lease = time.Second
	if c := selects(t, s, a); c.WorkerRank != rank("b", 0) || !c.Held {
		t.Fatalf("%+v", c)
	}
	m.SetTime(now.Add(19 * time.Second))
	loads(t, s, loadMap{})
}

// A selection frees what has ended, so that a dead frontend's load misleads nobody.
func TestSelectionFreesWhatHasEnded(t *testing.T) {
	m, url := storetest.Miniredis(t)
	s := open(t, url)
	now := time.Unix(1_800_000_000, 0)
	m.SetTime(now)
	for i := range 40 {
		a := asking(fmt.Sprint("dead", i), 10)
		a.Lease = time.Second
		selects(t, s, a)
	}
	if c := selects(t, s, asking("", 10, 0)); c.WorkerRank != rank("b", 0) {
		t.Fatalf("%+v", c)
	}
	m.SetTime(now.Add(time.Second))
	if c := selects(t, s, asking("", 10, 0)); c.WorkerRank != rank("a", 0) || c.Loads[0] != (store.Load{}) {
		t.Fatalf("%+v", c)
	}
}

// TestBurst: requests of equal cost through eight frontends at once spread evenly.
func TestBurst(t *testing.T) {
	for name, url := range map[string]string{"redis": storetest.Redis(t).URL, "miniredis": miniURL(t)} {
		t.Run(name, func(t *testing.T) {
			const frontends, requests, workers = 8, 256, 16
			var all sync.WaitGroup
			start := make(chan struct{})
			for f := range frontends {
				s := open(t, url)
				for i := range requests / frontends {
					all.Add(1)
					go func() {
						defer all.Done()
						<-start
						if _, err := s.Select(t.Context(), testPool, asking(fmt.Sprintf("%d-%d", f, i), make([]float64, workers)...)); err != nil {
							t.Error(err)
						}
					}()
				}
			}
			close(start)
			all.Wait()
			got, err := open(t, url).Loads(t.Context(), testPool)
			if err != nil || len(got) != workers {
				t.Fatal(got, err)
			}
			for w, l := range got {
				if l != (store.Load{Requests: requests / workers, PrefillTokens: requests / workers * 160, DecodeBlocks: requests / workers * 10}) {
					t.Errorf("%v has %+v", w, l)
				}
			}
		})
	}
}

func miniURL(t *testing.T) string { _, url := storetest.Miniredis(t); return url }

// Ties go to each candidate alike, whatever its place.
func TestTiesAreRandom(t *testing.T) {
	s := open(t, miniURL(t))
	const n = 1200
	var got [4]int
	for range n {
		got[selects(t, s, asking("", 0, 0, 0, 0)).Index]++
	}
	for i, k := range got {
		if k < n/4-100 || k > n/4+100 { // 6.7 standard deviations
			t.Errorf("candidate %d of 4 was chosen %d times of %d", i, k, n)
		}
	}
}
