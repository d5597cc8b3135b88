package store_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// eventually waits, on the test's own deadline, until f holds.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(30 * time.Second)
	for !f() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("never happened: %s", what)
		}
	}
}

// TestRedisKilledAndBack: lookups go on, degraded, and are exact again after the restart; an index that
// came back empty is empty, not an error, and can be filled again under new generations.
func TestRedisKilledAndBack(t *testing.T) {
	r := storetest.Redis(t)
	s := open(t, r.URL, func(o *store.Options) { o.LookupBudget = 250 * time.Millisecond })
	a := register(t, s, rank("a", 0))
	p := chain(1, 100)
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	full := map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(100)}
	want(t, s, p, full)

	r.Stop()
	for range 20 {
		got, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
		if state != kvcache.Degraded || !errors.Is(err, store.ErrUnavailable) || len(got.Scores) != 0 || got.Scores == nil {
			t.Fatalf("%v %v %v", got, state, err)
		}
	}
	if links := s.Links(); len(links) != 1 || links[0].Up || links[0].Reason != store.ReasonConnection || links[0].Error == "" {
		t.Fatalf("links: %+v", links)
	}

	r.Start()
	eventually(t, "exact again", func() bool {
		_, state, _ := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
		return state == kvcache.Exact
	})
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{})
	apply(t, s, &a, 1, store.Stale, storeAll("a", kvcache.Device, p...))
	if o, err := s.Touch(t.Context(), a); err != nil || o != store.Stale {
		t.Fatalf("touch: %v %v", o, err)
	}
	if _, o, err := s.Restart(t.Context(), a, -1, 0); err != nil || o != store.Stale {
		t.Fatalf("restart: %v %v", o, err)
	}
	again := register(t, s, rank("a", 0))
	if o, err := s.Touch(t.Context(), again); err != nil || o != store.Applied {
		t.Fatalf("touch: %v %v", o, err)
	}
	if again.Generation <= a.Generation {
		t.Fatalf("generation went from %d to %d", a.Generation, again.Generation)
	}
	apply(t, s, &again, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	want(t, s, p, full)
	clean(t, s)
}

// TestRedisHungAndBack: a server that accepts and says nothing costs one budget, then nothing.
func TestRedisHungAndBack(t *testing.T) {
	r := storetest.Redis(t)
	s := open(t, r.URL, func(o *store.Options) { o.LookupBudget = 250 * time.Millisecond })
	a := register(t, s, rank("a", 0))
	p := chain(1, 10)
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(10)})

	r.Pause()
	_, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
	if state != kvcache.Degraded || store.Reason(err) != store.ReasonTimeout {
		t.Fatalf("%v %v", state, err)
	}
	for range 1000 { // a thousand budgets would be four minutes
		if _, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{}); state != kvcache.Degraded || store.Reason(err) != store.ReasonTimeout {
			t.Fatalf("%v %v", state, err)
		}
	}
	r.Resume()
	eventually(t, "exact again", func() bool {
		got, state, _ := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
		return state == kvcache.Exact && got.Scores[rank("a", 0)].Any == 10
	})
}

// TestStartWithRedisAway: New and the first lookup work without Redis, and a corrupt index is told from one that is away.
func TestStartWithRedisAway(t *testing.T) {
	r := storetest.Redis(t)
	r.Stop()
	s := open(t, r.URL, func(o *store.Options) { o.LookupBudget = 250 * time.Millisecond })
	if _, state, err := s.Lookup(t.Context(), testPool, chain(1, 5), store.LookupOptions{}); state != kvcache.Degraded || !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("%v %v", state, err)
	}
	if _, _, err := s.Register(t.Context(), store.StreamID{Pool: testPool, WorkerRank: rank("a", 0)}, store.Registration{BlockSize: 16}); !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("register: %v", err)
	}
	r.Start()
	eventually(t, "exact", func() bool {
		_, state, _ := s.Lookup(t.Context(), testPool, chain(1, 5), store.LookupOptions{})
		return state == kvcache.Exact
	})
	register(t, s, rank("a", 0))
	if err := client(t, r.URL).Set(t.Context(), "wr:1:{default:llama %7B3%7D%231#0}:holders", "x", 0).Err(); err != nil {
		t.Fatal(err)
	}
	_, state, err := s.Lookup(t.Context(), testPool, chain(1, 5), store.LookupOptions{})
	if state != kvcache.Degraded || !errors.Is(err, store.ErrCorrupt) || errors.Is(err, store.ErrUnavailable) || store.Reason(err) != store.ReasonCorrupt {
		t.Fatalf("%v %v", state, err)
	}
	if !s.Links()[0].Up {
		t.Fatal("a corrupt key took the link down")
	}
}

// testScriptFlush: nothing depends on scripts that Redis remembers.
func testScriptFlush(t *testing.T, url string) {
	s := open(t, url)
	a := register(t, s, rank("a", 0))
	p := chain(1, 20)
	raw := client(t, url)
	for i, h := range p {
		if err := raw.ScriptFlush(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		apply(t, s, &a, int64(i), store.Applied, storeAll("a", kvcache.Device, h))
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(20)})
}

// TestSentinel: the store finds the master, and after a failover the new one.
func TestSentinel(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for a failover: not in short mode")
	}
	sentinel := storetest.Sentinel(t)
	master := sentinel.Master
	s := open(t, sentinel.URL)
	a := register(t, s, rank("a", 0))
	p := chain(1, 50)
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	full := map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(50)}
	want(t, s, p, full)
	if err := client(t, master.URL).Do(t.Context(), "wait", 1, 0).Err(); err != nil {
		t.Fatal(err)
	}
	master.Stop()
	eventually(t, "exact on the new master", func() bool {
		got, state, _ := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
		return state == kvcache.Exact && len(got.Scores) == 1
	})
	want(t, s, p, full)
	var b store.Batch
	b.Message(1)
	removeAll("a", kvcache.Device, p[10:]...)(&b)
	eventually(t, "writes go to the new master", func() bool {
		o, _, err := s.Apply(t.Context(), a, &b)
		return err == nil && (o == store.Applied || o == store.Duplicate)
	})
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(10)})
	clean(t, s)
}

// TestTLSAndPassword: rediss:// with a server that wants both.
func TestTLSAndPassword(t *testing.T) {
	dir := t.TempDir()
	cert, key := storetest.Certificate(t, dir)
	plain := storetest.Redis(t) // its port is free again after Stop, and stays ours for the TLS server
	plain.Stop()
	_, port, _ := strings.Cut(plain.Addr, ":")
	storetest.Redis(t, "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert, "--tls-auth-clients", "no", "--requirepass", "secret")
	url := "rediss://:secret@" + plain.Addr + "?tls_skip_verify=true"
	s := open(t, url)
	a := register(t, s, rank("a", 0))
	p := chain(1, 5)
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(5)})

	wrong := open(t, strings.Replace(url, "secret", "wrong", 1))
	if _, state, err := wrong.Lookup(t.Context(), testPool, p, store.LookupOptions{}); state != kvcache.Degraded || !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("a wrong password: %v %v", state, err)
	}
	strict := open(t, strings.TrimSuffix(url, "?tls_skip_verify=true"))
	if _, state, err := strict.Lookup(t.Context(), testPool, p, store.LookupOptions{}); state != kvcache.Degraded || !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("an unknown certificate: %v %v", state, err)
	}
}
