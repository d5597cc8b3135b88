package fleet

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// memory answers for every worker without a network, so that a test can own the clock.
type memory struct {
	mu   sync.Mutex
	down map[string]bool // by host:port
	hang bool
}

func (m *memory) RoundTrip(req *http.Request) (*http.Response, error) {
	m.mu.Lock()
	down, hang := m.down[req.URL.Host], m.hang
	m.mu.Unlock()
	switch {
	case hang:
		<-req.Context().Done()
		return nil, req.Context().Err()
	case down:
		return nil, errors.New("connection refused")
	}
	return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(llama))}, nil
}

func (m *memory) set(host string, down bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down == nil {
		m.down = map[string]bool{}
	}
	m.down[host] = down
}

// switchable is a catalog whose answer the test changes while the fleet runs.
type switchable struct {
	mu    sync.Mutex
	now   catalog
	hang  bool
	reads int
}

func (c *switchable) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

func (c *switchable) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reads
}

func (c *switchable) Pools(ctx context.Context) ([]kvcache.PoolID, error) {
	c.mu.Lock()
	c.reads++
	now, hang := c.now, c.hang
	c.mu.Unlock()
	if hang {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return now.Pools(ctx)
}

func (c *switchable) Streams(ctx context.Context, p kvcache.PoolID) ([]store.Stream, error) {
	c.mu.Lock()
	now := c.now
	c.mu.Unlock()
	return now.Streams(ctx, p)
}

func (c *switchable) Removed(ctx context.Context, id store.StreamID) (bool, error) {
	c.mu.Lock()
	now := c.now
	c.mu.Unlock()
	return now.Removed(ctx, id)
}

// names is a resolver.
type names struct {
	mu    sync.Mutex
	hosts map[string][]string
	hang  bool
	asked int
}

func (n *names) LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error) {
	n.mu.Lock()
	n.asked++
	hang, texts := n.hang, n.hosts[host]
	n.mu.Unlock()
	if hang {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if texts == nil || network != "ip" {
		return nil, errors.New("no such host")
	}
	var out []netip.Addr
	for _, a := range texts {
		out = append(out, netip.MustParseAddr(a))
	}
	return out, nil
}

func (n *names) set(host string, addrs ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.hosts == nil {
		n.hosts = map[string][]string{}
	}
	n.hosts[host] = addrs
}

// journal is a log that can be read while it is written.
type journal struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.b.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.b.String()
}

// running runs a fleet in a bubble, where time passes only by waiting.
func running(t *testing.T, o Options) (*Fleet, *journal) {
	t.Helper()
	log := &journal{}
	o.Logger = slog.New(slog.NewTextHandler(log, nil))
	if o.Transport == nil {
		o.Transport = &memory{}
	}
	f := newFleet(t, o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	synctest.Wait()
	return f, log
}

func pass(d time.Duration) {
	time.Sleep(d) // inside a bubble: no real time passes
	synctest.Wait()
}

func wantNodes(t *testing.T, f *Fleet, healthy bool, want ...string) {
	t.Helper()
	s := f.Snapshot()
	if got := ids(s.Nodes()); !slices.Equal(got, want) {
		t.Errorf("workers %v, want %v", got, want)
	}
	if healthy && s.Healthy() != len(want) {
		t.Errorf("%d of %d workers are healthy", s.Healthy(), len(want))
	}
}

func listed(streams ...store.Stream) catalog {
	return catalog{pools: []kvcache.PoolID{llamaPool}, streams: streams}
}

// A catalog that hangs delays no poll, is asked more and more seldom, and costs one line when it goes and one
// when it comes back.
func TestCatalogThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &switchable{hang: true}
		f, log := running(t, Options{Catalog: c, Workers: []Worker{{ID: "w1", URL: "http://one"}}})
		wantNodes(t, f, true, "w1") // polled while the first reading hangs
		pass(10 * time.Minute)
		if n := c.count(); n < 10 || n > 100 {
			t.Errorf("%d readings in ten minutes of outage, each of 3 s with growing pauses", n)
		}
		if s := f.Snapshot().Catalog(); s.Up || s.Cause != store.ReasonTimeout || time.Since(s.Since) < 9*time.Minute {
			t.Errorf("status %+v", s)
		}
		if n := strings.Count(log.String(), "does not list"); n != 1 {
			t.Errorf("%d lines of the outage:\n%s", n, log)
		}
		c.change(func() { c.hang, c.now = false, listed(stream("w2", 0, "http://two")) })
		pass(20 * time.Second)
		wantNodes(t, f, true, "w1", "w2")
		if s := f.Snapshot().Catalog(); !s.Up || s.Cause != "" {
			t.Errorf("status %+v", s)
		}
		if n := strings.Count(log.String(), "lists the workers again"); n != 1 {
			t.Errorf("%d lines of the recovery:\n%s", n, log)
		}
		before := c.count()
		pass(20 * time.Second)
		if n := c.count() - before; n != 10 {
			t.Errorf("%d readings in 20 s, want one every 2 s again", n)
		}
	})
}

// Redis that comes back empty must not take the workers away, nor while it is being filled again.
func TestCatalogThatComesBackEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := listed(stream("w1", 0, "http://one"), stream("w2", 0, "http://two"))
		c := &switchable{now: full}
		f, _ := running(t, Options{Catalog: c})
		wantNodes(t, f, true, "w1", "w2")
		c.change(func() { c.now = catalog{pools: []kvcache.PoolID{}} })
		pass(time.Hour)
		wantNodes(t, f, true, "w1", "w2")
		c.change(func() { c.now = listed(stream("w2", 0, "http://two")) })
		pass(5 * time.Second)
		wantNodes(t, f, true, "w1", "w2")
		c.change(func() { c.now = full })
		pass(time.Hour)
		wantNodes(t, f, true, "w1", "w2")
	})
}

func TestUnregisteredWorkerLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{}
		c := &switchable{now: listed(stream("w1", 0, "http://one"), stream("w2", 0, "http://two"), stream("w3", 0, "http://three"))}
		var mu sync.Mutex
		var gone []string
		f, _ := running(t, Options{Catalog: c, Transport: m, Gone: func(k Key) {
			mu.Lock()
			defer mu.Unlock()
			gone = append(gone, k.String())
		}})
		wantNodes(t, f, true, "w1", "w2", "w3")
		c.change(func() { c.now = listed(stream("w1", 0, "http://one")) })
		m.set("three", true)
		pass(5 * time.Second)
		wantNodes(t, f, true, "w1", "w2") // w3 does not answer any more: at once
		pass(10 * time.Second)
		wantNodes(t, f, true, "w1")
		mu.Lock()
		if !slices.Equal(gone, []string{"w3", "w2"}) {
			t.Errorf("gone %v", gone)
		}
		mu.Unlock()
		c.change(func() { c.now = listed() }) // the pool is known: its last worker has left
		pass(15 * time.Second)
		wantNodes(t, f, true)
	})
}

func TestWorkersOfAName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{}
		n.set("engines", "10.0.0.1", "::ffff:10.0.0.2", "fd00::3")
		f, log := running(t, Options{Names: []string{"engines:8000"}, Resolver: n})
		wantNodes(t, f, true, "10.0.0.1:8000", "10.0.0.2:8000", "fd00:0000:0000:0000:0000:0000:0000:0003:8000")
		for i, want := range []string{"http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::3]:8000"} {
			if node := f.Snapshot().Nodes()[i]; node.URL.String() != want || node.Source != SourceDNS {
				t.Errorf("%s: %s from %s", node.ID, node.URL, node.Source)
			}
		}
		n.set("engines", "10.0.0.1", "10.0.0.4")
		pass(10 * time.Second)
		wantNodes(t, f, true, "10.0.0.1:8000", "10.0.0.4:8000")

		n.set("engines")
		n.mu.Lock()
		n.hosts = nil
		n.mu.Unlock()
		pass(time.Hour)
		wantNodes(t, f, true, "10.0.0.1:8000", "10.0.0.4:8000") // no answer is not the answer that there are none
		if s := f.Snapshot().Names()["engines:8000"]; s.Up || s.Cause == "" {
			t.Errorf("status %+v", s)
		}
		n.mu.Lock()
		asked := n.asked
		n.hang = true
		n.mu.Unlock()
		pass(time.Hour)
		n.mu.Lock()
		if got := n.asked - asked; got > 400 {
			t.Errorf("%d look-ups in an hour in which each hangs", got)
		}
		n.hang = false
		n.mu.Unlock()
		n.set("engines", "10.0.0.4")
		pass(20 * time.Second)
		wantNodes(t, f, true, "10.0.0.4:8000")
		if a, b := strings.Count(log.String(), "does not resolve"), strings.Count(log.String(), "resolves again"); a != 1 || b != 1 {
			t.Errorf("%d and %d lines of one outage", a, b)
		}
	})
}

// The index's name for an address of DNS wins, and the worker does not stop serving over it.
func TestIndexNamesAnAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, c, m := &names{}, &switchable{now: catalog{err: store.ErrUnavailable}}, &memory{}
		n.set("engines", "10.0.0.1", "10.0.0.2")
		f, _ := running(t, Options{Names: []string{"engines:80"}, Resolver: n, Catalog: c, Transport: m})
		wantNodes(t, f, true, "10.0.0.1:80", "10.0.0.2:80")
		c.change(func() { c.now = listed(stream("w1", 0, "http://10.0.0.1/"), stream("w1", 1, "http://10.0.0.1/")) })
		m.mu.Lock()
		m.hang = true // the new name must not need a poll
		m.mu.Unlock()
		for f.Snapshot().HasID("10.0.0.1:80") {
			<-f.Snapshot().Changed()
		}
		node := f.Snapshot().Nodes()[1]
		if node.ID != "w1" || node.State != Healthy || node.Source != SourceIndex || !slices.Equal(node.Ranks, []int{0, 1}) {
			t.Errorf("node %+v", node)
		}
		wantNodes(t, f, false, "10.0.0.2:80", "w1")
	})
}

func TestBadNamesAreRefused(t *testing.T) {
	for _, name := range []string{"engines", ":80", "engines:http", "engines:0", "engines:70000", "http://engines:80"} {
		if _, err := New(Options{Names: []string{name}}); err == nil {
			t.Errorf("%q: accepted", name)
		}
	}
}

// A fleet that starts while the index is away has the workers that another one saw.
func TestSnapshotFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "workers.json")
	two := stream("w2", 0, "https://two/base")
	two.Pool = kvcache.PoolID{Tenant: "acme", Model: "llama"}
	two.Engine, two.BlockSize = "SGLang", 64
	synctest.Test(t, func(t *testing.T) {
		c := &switchable{now: listed(stream("w1", 1, "http://one"), stream("w1", 0, "http://one"), stream("w3", 0, ""), two)}
		f, log := running(t, Options{Catalog: c, File: file})
		wantNodes(t, f, true, "w1", "w2")
		before, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		if before.Mode().Perm() != 0o600 { // it tells of the fleet
			t.Errorf("mode %v", before.Mode())
		}
		pass(time.Minute)
		if after, err := os.Stat(file); err != nil || !os.SameFile(before, after) {
			t.Errorf("the file was written again without a change: %v", err)
		}
		if strings.Contains(log.String(), "WARN") {
			t.Errorf("log:\n%s", log)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		c := &switchable{hang: true}
		f, _ := running(t, Options{Catalog: c, File: file})
		wantNodes(t, f, true, "w1", "w2")
		nodes := f.Snapshot().Nodes()
		if n := nodes[0]; n.Source != SourceSaved || !slices.Equal(n.Ranks, []int{0, 1}) || n.URL.String() != "http://one" {
			t.Errorf("node %+v", n)
		}
		if n := nodes[1]; n.Tenant != "acme" || n.Engine != "SGLang" || n.URL.String() != "https://two/base" {
			t.Errorf("node %+v", n)
		}
		if a, b := f.Snapshot().BlockSize(llamaPool), f.Snapshot().BlockSize(two.Pool); a != 16 || b != 64 {
			t.Errorf("block sizes %d and %d", a, b)
		}
		c.change(func() { c.hang, c.now = false, listed(stream("w1", 0, "http://one")) })
		pass(time.Minute)
		if n := f.Snapshot().Nodes()[0]; n.Source != SourceIndex || n.State != Healthy || !slices.Equal(n.Ranks, []int{0}) {
			t.Errorf("node %+v", n)
		}
	})
	if left, _ := filepath.Glob(file + "*.tmp"); left != nil {
		t.Errorf("left behind: %v", left)
	}
}

func TestSnapshotFileThatIsUnusable(t *testing.T) {
	for name, content := range map[string]string{
		"empty":             "",
		"cut off":           `{"version":1,"workers":[{"id":"w1"`,
		"not ours":          `[1,2]`,
		"another version":   `{"version":2,"workers":[]}`,
		"no url":            `{"version":1,"workers":[{"id":"w1"}]}`,
		"bad id":            `{"version":1,"workers":[{"id":"w 1","url":"http://x"}]}`,
		"bad rank":          `{"version":1,"workers":[{"id":"w1","url":"http://x","ranks":[-1]}]}`,
		"bad pool":          `{"version":1,"workers":[{"id":"w1","url":"http://x","pools":["x"]}]}`,
		"bad size":          `{"version":1,"pools":[{"pool":"a:b","block_size":0}]}`,
		"bad name of sizes": `{"version":1,"pools":[{"pool":"b","block_size":1}]}`,
		"endless":           strings.Repeat(" ", savedMaxBytes+1),
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "workers.json")
			if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				c := &switchable{hang: true}
				f, log := running(t, Options{Catalog: c, File: file, Workers: []Worker{{ID: "w0", URL: "http://zero"}}})
				wantNodes(t, f, true, "w0")
				if n := strings.Count(log.String(), "cannot be used"); n != 1 {
					t.Errorf("%d warnings:\n%s", n, log)
				}
				c.change(func() { c.hang, c.now = false, listed(stream("w1", 0, "http://one")) })
				pass(time.Minute)
				wantNodes(t, f, true, "w0", "w1")
			})
			if written, err := os.ReadFile(file); err != nil || !strings.Contains(string(written), `"w1"`) {
				t.Errorf("not replaced: %v", err)
			}
		})
	}
}

func TestSnapshotFileThatCannotBeWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not there yet")
	synctest.Test(t, func(t *testing.T) {
		f, log := running(t, Options{Catalog: &switchable{now: listed(stream("w1", 0, "http://one"))}, File: filepath.Join(dir, "f")})
		pass(time.Minute)
		wantNodes(t, f, true, "w1")
		if n := strings.Count(log.String(), "cannot be written"); n != 1 {
			t.Errorf("%d warnings:\n%s", n, log)
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		pass(time.Minute)
		if n := strings.Count(log.String(), "is written again"); n != 1 {
			t.Errorf("%d lines:\n%s", n, log)
		}
	})
	if _, err := os.Stat(filepath.Join(dir, "f")); err != nil {
		t.Error(err)
	}
}

// While workers have not been asked yet, a model that nobody has named may still exist.
func TestModelsAreNotUnknownBeforeAllAreAsked(t *testing.T) {
	e := newEngine(t, llama)
	f := newFleet(t, Options{Workers: []Worker{{ID: "w1", URL: e.URL}, {ID: "w2", URL: e.URL}}})
	f.poll(t.Context(), KeyOf("", "w1"))
	if f.Snapshot().Known() {
		t.Error("the models count as known with one worker of two asked")
	}
	e.Close()
	f.poll(t.Context(), KeyOf("", "w2"))
	if !f.Snapshot().Known() {
		t.Error("a worker that is down keeps the models unknown")
	}
}
