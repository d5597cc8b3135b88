package fleet

import (
	"context"
	"errors"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// resolver answers for every host.
type resolver struct {
	addrs []netip.Addr
	err   error
}

func (r *resolver) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	return r.addrs, r.err
}

func portOf(t *testing.T, e *engine) string {
	t.Helper()
	u, err := url.Parse(e.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u.Port()
}

func names(f *Fleet) []string {
	out := ids(f.Snapshot().Nodes())
	slices.Sort(out)
	return out
}

// Every address of a name is a worker; a name that stops resolving keeps its last addresses.
func TestWorkersOfAName(t *testing.T) {
	e := newEngine(t, llama)
	port := portOf(t, e)
	r := &resolver{addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.7")}}
	f := newFleet(t, Options{Names: []string{"vllm.example:" + port}, Resolver: r})
	if _, err := f.resolve(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"127.0.0.1:" + port, "127.0.0.7:" + port}
	if got := names(f); !slices.Equal(got, want) {
		t.Fatalf("workers %v, want %v", got, want)
	}
	r.addrs, r.err = nil, errors.New("SERVFAIL")
	if _, err := f.resolve(t.Context()); err == nil {
		t.Fatal("the failure is not reported")
	}
	if got := names(f); !slices.Equal(got, want) {
		t.Fatalf("after a failure: %v", got)
	}
	r.addrs, r.err = []netip.Addr{netip.MustParseAddr("127.0.0.7")}, nil
	if _, err := f.resolve(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := names(f); !slices.Equal(got, want[1:]) {
		t.Fatalf("after one left: %v", got)
	}
	for _, bad := range []string{"", "host", ":8000", "host:0", "host:x", "host:70000"} {
		if _, err := New(Options{Names: []string{bad}}); err == nil {
			t.Errorf("name %q was taken", bad)
		}
	}
}

// Where the index knows the same place, its name counts: overlaps are by that name.
func TestTheIndexNamesWorkersOfAName(t *testing.T) {
	e := newEngine(t, llama)
	port := portOf(t, e)
	c := &catalog{pools: []kvcache.PoolID{llamaPool}, streams: []store.Stream{stream("w0", 0, e.URL)}}
	f := newFleet(t, Options{Names: []string{"vllm.example:" + port}, Catalog: c, Resolver: &resolver{addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}})
	if _, err := f.resolve(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := names(f); !slices.Equal(got, []string{"127.0.0.1:" + port}) {
		t.Fatalf("before the index answers: %v", got)
	}
	if _, err := f.discover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := names(f); !slices.Equal(got, []string{"w0"}) {
		t.Fatalf("the index's name does not win: %v", got)
	}
}

// A fleet that starts while the catalog is away begins with what an earlier one saw.
func TestStartFromASnapshot(t *testing.T) {
	e := newEngine(t, llama)
	file := filepath.Join(t.TempDir(), "workers.json")
	c := &catalog{pools: []kvcache.PoolID{llamaPool}, streams: []store.Stream{stream("w0", 0, e.URL), stream("w0", 1, e.URL)}}
	first := newFleet(t, Options{Catalog: c, File: file})
	if _, err := first.discover(t.Context()); err != nil {
		t.Fatal(err)
	}
	first.save(t.Context())

	away := &catalog{err: store.ErrUnavailable}
	second := newFleet(t, Options{Catalog: away, File: file})
	second.load(t.Context())
	if _, err := second.discover(t.Context()); err == nil {
		t.Fatal("the catalog is not away")
	}
	second.Refresh(t.Context())
	target, ok := second.Snapshot().Target("default", "llama")
	if !ok || !slices.Equal(ids(target.Nodes), []string{"w0"}) || !slices.Equal(target.Nodes[0].Ranks, []int{0, 1}) || second.Snapshot().BlockSize(llamaPool) != 16 {
		t.Fatalf("%+v %v", target, ok)
	}
	if target.Nodes[0].Source != SourceSaved {
		t.Errorf("source %v", target.Nodes[0].Source)
	}

	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]string{
		"empty": "", "half": string(content[:len(content)/2]), "other": `{"version":99}`, "no JSON": "workers", "wrong worker": strings.Replace(string(content), `"w0"`, `"w 0"`, 1),
	} {
		if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		f := newFleet(t, Options{Catalog: away, File: file})
		f.load(t.Context())
		if n := len(f.Snapshot().Nodes()); n != 0 {
			t.Errorf("%s: %d workers", name, n)
		}
	}
	left, err := filepath.Glob(filepath.Dir(file) + "/*.tmp")
	if err != nil || len(left) != 0 {
		t.Errorf("left over: %v %v", left, err)
	}
}
