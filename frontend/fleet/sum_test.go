package fleet

import (
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// states is "id state, …" of a fleet.
func states(f *Fleet) string {
	var out []string
	for _, n := range f.Snapshot().Nodes() {
		out = append(out, n.Key().String()+" "+n.State.String())
	}
	return strings.Join(out, ", ")
}

// A worker that was unregistered gets nothing new from the next reading on, wherever it is known from, and
// serves again when it is registered again. Its name in DNS does not bring it back.
func TestUnregisteredWorkerDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{}
		n.set("engines", "10.0.0.3")
		full := listed(stream("w1", 0, "http://one"), stream("w2", 0, "http://two"), stream("w3", 0, "http://10.0.0.3"))
		c := &switchable{now: full}
		f, _ := running(t, Options{Catalog: c, Workers: []Worker{{ID: "w1", URL: "http://one"}}, Names: []string{"engines:80"}, Resolver: n})
		pass(10e9)
		if got := states(f); got != "w1 healthy, w2 healthy, w3 healthy" {
			t.Fatal(got)
		}
		gone := listed()
		gone.removed = map[string]bool{"w1": true, "w2": true, "w3": true}
		c.change(func() { c.now = gone })
		pass(3e9)
		if got := states(f); got != "w1 draining, w2 draining, w3 draining" {
			t.Errorf("after /unregister: %s", got)
		}
		if target, _ := f.Snapshot().Target("", "llama"); len(target.Nodes) != 0 {
			t.Errorf("%d workers are still offered", len(target.Nodes))
		}
		pass(60e9)
		if got := states(f); got != "w1 draining, w3 draining" {
			t.Errorf("a minute later: %s", got)
		}
		c.change(func() { c.now = full })
		pass(3e9)
		if got := states(f); got != "w1 healthy, w2 healthy, w3 healthy" {
			t.Errorf("registered again: %s", got)
		}
	})
}

// 503 on /health is not an engine that is broken, but one that takes no more.
func TestHealthOf503Drains(t *testing.T) {
	e := newEngine(t, llama)
	f := newFleet(t, Options{Workers: []Worker{{ID: "w1", URL: e.URL}}})
	for code, want := range map[int]string{503: "w1 draining", 500: "w1 unhealthy", 200: "w1 healthy"} {
		e.health.Store(int32(code))
		f.Refresh(t.Context())
		if got := states(f); got != want {
			t.Errorf("status %d: %s", code, got)
		}
	}
	e.health.Store(http.StatusServiceUnavailable)
	f.Refresh(t.Context())
	if s := f.Snapshot(); s.Count(Draining) != 1 || s.Healthy() != 0 {
		t.Errorf("%d draining, %d healthy", s.Count(Draining), s.Healthy())
	}
}

// One URL that is configured under one id and registered under another is one worker. The registered id counts,
// because overlaps come under it; the configured one where both are registered.
func TestOneURLUnderTwoIDs(t *testing.T) {
	e := newEngine(t, llama)
	log := &journal{}
	c := &catalog{pools: []kvcache.PoolID{llamaPool}}
	f := newFleet(t, Options{Catalog: c, Workers: []Worker{{ID: "w1", URL: e.URL, Ranks: 2}}, Grace: -1, Logger: slog.New(slog.NewTextHandler(log, nil))})
	f.Refresh(t.Context())
	if got := states(f); got != "w1 healthy" {
		t.Errorf("alone: %s", got)
	}
	for range 2 {
		c.streams = []store.Stream{stream("engine-a", 0, e.URL+"/")}
		f.Refresh(t.Context())
		if got := states(f); got != "engine-a healthy" || !slices.Equal(f.Snapshot().Nodes()[0].Ranks, []int{0, 1}) {
			t.Errorf("registered as well: %s %v", got, f.Snapshot().Nodes()[0].Ranks)
		}
	}
	if n := strings.Count(log.String(), "registered under another id"); n != 1 {
		t.Errorf("%d lines:\n%s", n, log)
	}
	c.streams = append(c.streams, stream("w1", 0, e.URL))
	f.Refresh(t.Context())
	if got := states(f); got != "w1 healthy" {
		t.Errorf("registered under both: %s", got)
	}
	c.streams = nil
	f.Refresh(t.Context())
	if got := states(f); got != "w1 healthy" {
		t.Errorf("not registered any more: %s", got)
	}
}

// A dump that was loaded into another pool lists the workers again, without a URL. That takes nobody away.
func TestStreamWithoutURLHidesNoWorker(t *testing.T) {
	e := newEngine(t, llama)
	loaded, known := stream("w1", 0, ""), stream("w1", 0, e.URL)
	loaded.Pool.Model = "a-loaded-one"
	for _, order := range [][]store.Stream{{loaded, known}, {known, loaded}} {
		f := newFleet(t, Options{Catalog: &catalog{pools: []kvcache.PoolID{llamaPool}, streams: order}, Grace: -1})
		f.Refresh(t.Context())
		if got := states(f); got != "w1 healthy" {
			t.Errorf("with the stream of %s first: %q", order[0].Pool, got)
		}
	}
}

// Two tenants may give their workers the same id.
func TestSameIDInTwoTenants(t *testing.T) {
	e1, e2, e3 := newEngine(t, llama), newEngine(t, llama), newEngine(t, llama)
	acme := stream("w1", 0, e2.URL)
	acme.Pool.Tenant = "acme"
	other := stream("w1", 0, e3.URL)
	other.Pool.Tenant = "other"
	c := &catalog{pools: []kvcache.PoolID{llamaPool}, streams: []store.Stream{acme, other}}
	f := newFleet(t, Options{Catalog: c, Workers: []Worker{{ID: "w1", URL: e1.URL}}})
	f.Refresh(t.Context())
	if got := states(f); got != "acme/w1 healthy, w1 healthy, other/w1 healthy" {
		t.Fatal(got)
	}
	for tenant, url := range map[string]string{"": e1.URL, "acme": e2.URL, "other": e3.URL} {
		target, _ := f.Snapshot().Target(tenant, "llama")
		if len(target.Nodes) != 1 || target.Nodes[0].URL.String() != url {
			t.Errorf("tenant %q: %+v", tenant, target)
		}
		if n := f.Snapshot().Node(KeyOf(tenant, "w1")); n == nil || n.URL.String() != url {
			t.Errorf("tenant %q: node %+v", tenant, n)
		}
	}
	if f.Snapshot().Node(KeyOf("nobody", "w1")) != nil || !f.Snapshot().HasID("w1") || f.Snapshot().HasID("w2") {
		t.Error("keys and ids are mixed up")
	}
}

// Names that one worker serves the same weights under are one pool: the one that the index has, or else the first.
func TestAliasesShareAPool(t *testing.T) {
	const list = `{"data":[{"id":"big","root":"meta/llama"},{"id":"llama","root":"meta/llama"},{"id":"gpt-4","root":"meta/llama"},
		{"id":"sql","root":"/lora/sql","parent":"gpt-4"},{"id":"rootless"},{"id":"other","root":"x/y"}]}`
	e := newEngine(t, list)
	for name, test := range map[string]struct {
		streams []store.Stream
		want    string
	}{
		"not in the index": {nil, "big=big llama=big gpt-4=big sql=big/sql rootless=rootless other=other "},
		"in the index":     {[]store.Stream{stream("w1", 0, e.URL)}, "big=llama llama=llama gpt-4=llama sql=llama/sql rootless=rootless other=other "},
	} {
		f := newFleet(t, Options{Catalog: &catalog{pools: []kvcache.PoolID{llamaPool}, streams: test.streams}, Workers: []Worker{{ID: "w1", URL: e.URL}}})
		f.Refresh(t.Context())
		got := ""
		for _, m := range f.Snapshot().Models("") {
			target, _ := f.Snapshot().Target("", m.ID)
			got += fmt.Sprintf("%s=%s", m.ID, target.Pool.Model)
			if target.LoRA != "" {
				got += "/" + target.LoRA
			}
			got += " "
		}
		if got != test.want {
			t.Errorf("%s: %s", name, got)
		}
	}
}
