package store_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// leasesLink is the state of the way to the test pool's leases.
func leasesLink(t *testing.T, s *store.Store) store.LinkStatus {
	t.Helper()
	for _, l := range s.Links() {
		if l.Shard == testPool.String()+" leases" {
			return l
		}
	}
	t.Fatalf("no link to the leases: %+v", s.Links())
	return store.LinkStatus{}
}

func selectsAgain(t *testing.T, s *store.Store) {
	t.Helper()
	eventually(t, "a selection", func() bool {
		_, err := s.Select(t.Context(), testPool, asking("", 0, 0))
		return err == nil
	})
}

// A path that swallows bytes costs one budget; then selections return at once until the one prober gets through.
func TestSelectionsWhileRedisIsAway(t *testing.T) {
	r := storetest.Redis(t)
	proxy := storetest.Proxy(t, r.Addr)
	s, _, p := filled(t, "redis://"+proxy.Addr, budget(100*time.Millisecond))
	selects(t, s, asking("r", 0, 0))
	proxy.Set(redisproc.Swallow)
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() {
			if _, err := s.Select(t.Context(), testPool, asking("", 0, 0)); err == nil {
				t.Error("an answer out of nowhere")
			}
		})
	}
	wg.Wait()
	if l := leasesLink(t, s); l.Up || l.Reason != store.ReasonTimeout {
		t.Fatalf("%+v", l)
	}
	dials := proxy.Dials()
	for range 10_000 {
		if _, err := s.Select(t.Context(), testPool, asking("", 0, 0)); !errors.Is(err, store.ErrUnavailable) {
			t.Fatal(err)
		}
		if _, err := s.Release(t.Context(), testPool, "r"); !errors.Is(err, store.ErrUnavailable) {
			t.Fatal(err)
		}
	}
	if n := proxy.Dials() - dials; n > 20 {
		t.Fatalf("%d dials for 20,000 calls while the link was down", n)
	}
	proxy.Set(redisproc.Pass)
	selectsAgain(t, s)
	exactAgain(t, s, p)
	loads(t, s, loadMap{leaseHolder(t, s): {Requests: 1, PrefillTokens: 160, DecodeBlocks: 10}})
}

func leaseHolder(t *testing.T, s *store.Store) (w kvcache.WorkerRank) {
	t.Helper()
	got, err := s.Loads(t.Context(), testPool)
	if err != nil || len(got) != 1 {
		t.Fatal(got, err)
	}
	for w = range got {
	}
	return w
}

// What the caller or this process brings about says nothing about Redis: a client that hangs up, a budget that the lookup
// before has spent, a rush on the connections.
func TestSelectionsThatDoNotBlameRedis(t *testing.T) {
	r := storetest.Redis(t)
	proxy := storetest.Proxy(t, r.Addr)
	s := open(t, "redis://"+proxy.Addr, budget(time.Second), func(o *store.Options) { o.PoolSize = 3 })
	selects(t, s, asking("", 0))
	proxy.Delay(20 * time.Millisecond)

	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if c, err := s.Select(gone, testPool, asking("gone", 0)); err == nil && !c.Held || err != nil && errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a client that hung up: %+v %v", c, err)
	}
	spent, cancel := context.WithTimeout(t.Context(), 2*time.Millisecond)
	defer cancel()
	if _, err := s.Select(spent, testPool, asking("", 0)); err == nil || errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a budget that is spent: %v", err)
	}
	var exhausted atomic.Int64
	var wg sync.WaitGroup
	for range 500 {
		wg.Go(func() {
			if _, err := s.Select(t.Context(), testPool, asking("", 0)); store.Reason(err) == store.ReasonPoolExhausted && err != nil {
				exhausted.Add(1)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if exhausted.Load() == 0 {
		t.Error("the rush was no rush")
	}
	if l := leasesLink(t, s); !l.Up {
		t.Errorf("the link went down: %+v", l)
	}
}

// A Redis that refuses writes cannot be chosen by, but can be read: lookups go on, and the link to the leases stays
// down until a write works.
func TestSelectionsWhileWritesAreRefused(t *testing.T) {
	r := storetest.Redis(t, "--maxmemory-policy", "noeviction")
	s, _, p := filled(t, r.URL)
	raw := client(t, r.URL)
	if err := raw.ConfigSet(t.Context(), "maxmemory", "1mb").Err(); err != nil {
		t.Fatal(err)
	}
	_, err := s.Select(t.Context(), testPool, asking("r", 0))
	if !errors.Is(err, store.ErrUnavailable) || store.Reason(err) != store.ReasonRefused {
		t.Fatalf("in a full Redis: %v", err)
	}
	eventually(t, "a probe", func() bool { return probed(s, store.ReasonRefused) })
	exactAgain(t, s, p)
	if l := leasesLink(t, s); l.Up {
		t.Errorf("%+v", l)
	}
	if err := raw.ConfigSet(t.Context(), "maxmemory", "0").Err(); err != nil {
		t.Fatal(err)
	}
	selectsAgain(t, s)
	loads(t, s, loadMap{})
}

// testScriptFlushedLeases: nothing depends on Redis remembering the scripts.
func testScriptFlushedLeases(t *testing.T, url string) {
	s := open(t, url)
	flushScripts := func() {
		t.Helper()
		if err := client(t, url).ScriptFlush(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
	}
	selects(t, s, asking("a", 0))
	flushScripts()
	selects(t, s, asking("b", 0))
	flushScripts()
	for _, id := range []string{"a", "b"} {
		if ok, err := s.Release(t.Context(), testPool, id); !did(t, ok, err) {
			t.Errorf("%s is not released", id)
		}
	}
	loads(t, s, loadMap{})
}

// testDamagedLoads: what is no load is said to be corrupt, and a lease that is none is dropped.
func testDamagedLoads(t *testing.T, url string) {
	s := open(t, url)
	selects(t, s, asking("r", 0))
	raw := client(t, url)
	tag := "wr:1:{default:llama %7B3%7D%231}"
	raw.HSet(t.Context(), tag+":leases", "bad", "nonsense")
	raw.ZAdd(t.Context(), tag+":deadlines", redis.Z{Score: 1, Member: "bad"})
	loads(t, s, loadMap{rank("a", 0): {Requests: 1, PrefillTokens: 160, DecodeBlocks: 10}})
	if n := raw.HLen(t.Context(), tag+":leases").Val(); n != 1 {
		t.Errorf("%d leases are left", n)
	}
	raw.HSet(t.Context(), tag+":load", "a/0", "1 -5 x")
	if _, err := s.Select(t.Context(), testPool, asking("", 0)); !errors.Is(err, store.ErrCorrupt) {
		t.Errorf("select: %v", err)
	}
	loads(t, s, loadMap{rank("a", 0): {Requests: 1, PrefillTokens: 160, DecodeBlocks: 10}}) // made again from the leases
	raw.Del(t.Context(), tag+":load")                                                       // lost: a release never makes it negative
	if ok, err := s.Release(t.Context(), testPool, "r"); !did(t, ok, err) {
		t.Error("not released")
	}
	loads(t, s, loadMap{})
}

// Many frontends at once, some of which never say that a request has ended: at every moment the sums are those of
// the leases, and when all of them have ended nothing is left.
func TestSumsAreThoseOfTheLeases(t *testing.T) {
	r := storetest.Redis(t)
	raw := client(t, r.URL)
	tag := "wr:1:{default:llama %7B3%7D%231}"
	ctx, stop := context.WithCancel(t.Context())
	var frontends sync.WaitGroup
	for f := range 6 {
		s := open(t, r.URL)
		frontends.Go(func() {
			chance := rand.New(rand.NewPCG(uint64(f), 9))
			for i := 0; i < 250 && ctx.Err() == nil; i++ {
				id := fmt.Sprintf("%d-%d", f, i)
				a := asking(id, 1, 2, 3, 4.25)
				a.PromptTokens, a.Lease = chance.IntN(5000), time.Duration(1+chance.IntN(100))*time.Millisecond
				if _, err := s.Select(t.Context(), testPool, a); err != nil {
					t.Error(err)
					return
				}
				for range chance.IntN(4) {
					id := fmt.Sprintf("%d-%d", chance.IntN(6), i-chance.IntN(3)) // its own, another's, one that has ended
					var err error
					switch chance.IntN(4) {
					case 0:
						_, err = s.PrefillDone(t.Context(), testPool, id)
					case 1:
						_, err = s.OutputBlock(t.Context(), testPool, id)
					case 2:
						_, err = s.Renew(t.Context(), testPool, id, "none")
					case 3:
						_, err = s.Release(t.Context(), testPool, id)
					}
					if err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { frontends.Wait(); close(done) }()
	defer func() { stop(); <-done }()
	looks := 0
	for running := true; running; looks++ {
		select {
		case <-done:
			running = false
		default:
		}
		if err := sumsDiffer(t, raw, tag); err != "" {
			t.Fatal(err)
		}
	}
	if looks < 20 {
		t.Errorf("only %d looks", looks)
	}
	s := open(t, r.URL)
	eventually(t, "all leases to end", func() bool {
		got, err := s.Loads(t.Context(), testPool)
		return err == nil && len(got) == 0
	})
	if left := raw.Keys(t.Context(), tag+":*").Val(); len(left) > 0 {
		t.Errorf("keys are left: %q", left)
	}
}

// sumsDiffer compares the sums with the leases, both read at one moment.
func sumsDiffer(t *testing.T, raw redis.UniversalClient, tag string) string {
	t.Helper()
	v, err := raw.Eval(t.Context(), `return {redis.call('HGETALL', KEYS[1]), redis.call('HVALS', KEYS[2]), {redis.call('ZCARD', KEYS[3])}}`,
		[]string{tag + ":load", tag + ":leases", tag + ":deadlines"}).Slice()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][3]int{}
	for _, x := range v[1].([]any) {
		var who string
		var tokens, blocks, ms, home int
		if _, err := fmt.Sscan(x.(string), &who, &tokens, &blocks, &ms, &home); err != nil {
			return fmt.Sprintf("lease %q: %v", x, err)
		}
		w := want[who]
		want[who] = [3]int{w[0] + 1, w[1] + tokens, w[2] + blocks}
	}
	got := v[0].([]any)
	if len(got) != 2*len(want) {
		return fmt.Sprintf("loads %v, leases %v", got, want)
	}
	for i := 0; i < len(got); i += 2 {
		if w := want[got[i].(string)]; strings.Trim(fmt.Sprint(w), "[]") != got[i+1].(string) {
			return fmt.Sprintf("%v has %v, its leases %v", got[i], got[i+1], w)
		}
	}
	if n := v[2].([]any)[0].(int64); int(n) != len(v[1].([]any)) {
		return fmt.Sprintf("%d deadlines of %d leases", n, len(v[1].([]any)))
	}
	return ""
}
