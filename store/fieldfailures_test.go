package store_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// Cases from the field that no other test of this package has; docs/reliability.md lists where each kind is tested.

// R02: a connection that cannot be made is tried once for a lookup, and then only by the prober.
func TestDialsDoNotMultiply(t *testing.T) {
	var dials atomic.Int64
	reg := prometheus.NewRegistry()
	s := open(t, "redis://192.0.2.1:6379", budget(100*time.Millisecond), func(o *store.Options) {
		o.Registerer = reg
		o.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) {
			dials.Add(1)
			<-ctx.Done()
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.ErrDeadlineExceeded}
		}
	})
	if _, state, err := s.Lookup(t.Context(), testPool, chain(1, 5), store.LookupOptions{}); state != kvcache.Degraded || store.Reason(err) != store.ReasonTimeout {
		t.Fatalf("%v %v", state, err)
	}
	for range 1000 {
		_, _, _ = s.Lookup(t.Context(), testPool, chain(1, 5), store.LookupOptions{})
	}
	eventually(t, "five probes", func() bool { return counted(t, reg, "warmroute_index_probes_total") >= 5 })
	if err := s.Close(); err != nil { // no probe is under way
		t.Fatal(err)
	}
	if n, probes := float64(dials.Load()), counted(t, reg, "warmroute_index_probes_total"); n > probes+2 {
		t.Errorf("%v dials for one lookup and %v probes", n, probes)
	}
}

// R08: Redis has refused connections for a long time, many more than there may be. The first probe after it is back finds
// it: nothing of the library's own waits any longer. A probe that finds Redis is the only one that may.
func TestFirstProbeAfterALongOutageFindsRedis(t *testing.T) {
	var back atomic.Bool
	var late atomic.Int64
	r := storetest.Redis(t)
	_, _, p := filled(t, r.URL)
	reg := prometheus.NewRegistry()
	s := open(t, r.URL, func(o *store.Options) {
		o.Registerer, o.PoolSize = reg, 2
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if !back.Load() {
				return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
			}
			late.Add(1)
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}
	})
	if _, _, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{}); store.Reason(err) != store.ReasonConnection ||
		!errors.Is(err, syscall.ECONNREFUSED) || !strings.Contains(err.Error(), "dial tcp") {
		t.Fatal(err)
	}
	failed := func() float64 { return counted(t, reg, "warmroute_index_probes_total", "result", "failed") }
	eventually(t, "ten probes", func() bool { return failed() >= 10 })
	before := failed()
	back.Store(true)
	exactAgain(t, s, p)
	if n := failed() - before; n > 1 { // one may have been under way
		t.Errorf("%v probes failed although Redis was back", n)
	}
	if late.Load() == 0 {
		t.Error("nobody dialled")
	}
}

// R05: one node of a cluster forgets all scripts. What needs one is done there, once, and elsewhere as before.
func TestOneNodeForgetsItsScripts(t *testing.T) {
	c := storetest.Cluster(t)
	s := open(t, c.URL, func(o *store.Options) { o.Shards = 12 })
	streams := make([]store.Stream, 12)
	p := chain(1, 4)
	for i := range streams {
		streams[i] = register(t, s, rank(string(rune('a'+i)), 0))
	}
	for seq, b := range p {
		if err := client(t, c.Nodes[seq%3].URL).ScriptFlush(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		for i := range streams {
			apply(t, s, &streams[i], int64(seq), store.Applied, storeAll(streams[i].Worker, kvcache.Device, b))
		}
	}
	if n, state, err := lookupAll(t, s, p); n != len(streams) || state != kvcache.Exact || err != nil {
		t.Fatalf("%d workers, %v, %v", n, state, err)
	}
	clean(t, s)
}

// R10: the first sentinel of the list accepts connections and says nothing.
func TestFirstSentinelIsSilent(t *testing.T) {
	sentinel := storetest.Sentinel(t)
	silent := storetest.Proxy(t, sentinel.Watcher.Addr)
	silent.Set(redisproc.Swallow)
	url := strings.Replace(sentinel.URL, "://", "://"+silent.Addr+",", 1)
	s := open(t, url, budget(250*time.Millisecond))
	eventually(t, "a lookup that finds the master by the second sentinel", func() bool {
		_, state, _ := s.Lookup(t.Context(), testPool, chain(1, 5), store.LookupOptions{})
		return state == kvcache.Exact
	})
}

// R11: the master hangs, and its port goes on to accept connections. The next one is used, and the old one gets no write
// of ours when it goes on.
func TestSentinelMasterHangs(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for a failover: not in short mode")
	}
	sentinel := storetest.Sentinel(t)
	s, a, p := filled(t, sentinel.URL, budget(250*time.Millisecond))
	old := client(t, sentinel.Master.URL)
	if err := old.Do(t.Context(), "wait", 1, 0).Err(); err != nil {
		t.Fatal(err)
	}
	scripts := func() string {
		for line := range strings.Lines(old.Info(t.Context(), "commandstats").Val()) {
			if strings.HasPrefix(line, "cmdstat_eval") {
				return line
			}
		}
		return ""
	}
	before := scripts()
	if before == "" {
		t.Fatal("the master has run no script")
	}
	sentinel.Master.Pause()
	resume := sync.OnceFunc(sentinel.Master.Resume)
	defer resume()
	if _, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{}); state != kvcache.Degraded || !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("%v %v", state, err)
	}
	exactAgain(t, s, p)
	for seq, b := range chain(2, 5) {
		var batch store.Batch
		batch.Message(int64(seq + 1))
		storeAll("a", kvcache.Device, b)(&batch)
		eventually(t, "a write to the new master", func() bool {
			o, _, err := s.Apply(t.Context(), a, &batch)
			return err == nil && (o == store.Applied || o == store.Duplicate)
		})
		if seq == 2 {
			resume()
			_ = scripts()
			before = scripts() // with what it was sent before anybody knew that it hung
		}
	}
	if after := scripts(); after != before {
		t.Errorf("the old master ran scripts: %q, as it came back %q", after, before)
	}
}

// R19: all nodes of a cluster are silent from the start: every lookup ends, and the questions about its topology are few.
func TestSilentClusterFromTheStart(t *testing.T) {
	r := storetest.Redis(t)
	var hosts []string
	var proxies []*redisproc.Proxy
	for range 3 {
		p := storetest.Proxy(t, r.Addr)
		p.Set(redisproc.Swallow)
		proxies, hosts = append(proxies, p), append(hosts, p.Addr)
	}
	s := open(t, "redis+cluster://"+strings.Join(hosts, ","), budget(100*time.Millisecond))
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if _, state, err := s.Lookup(t.Context(), testPool, chain(1, 5), store.LookupOptions{}); state != kvcache.Degraded || err == nil {
				t.Errorf("%v %v", state, err)
			}
		})
	}
	wg.Wait()
	dials := 0
	for _, p := range proxies {
		dials += p.Dials()
	}
	if dials > 3*100 {
		t.Errorf("%d dials for 100 lookups", dials)
	}
}

// R22: nothing needs the SCRIPT commands, which proxies and managed services refuse.
func TestWithoutTheScriptCommand(t *testing.T) {
	r := storetest.Redis(t)
	if err := client(t, r.URL).Do(t.Context(), "acl", "setuser", "plain", "on", ">pw", "~*", "+@all", "-script").Err(); err != nil {
		t.Fatal(err)
	}
	s, a, p := filled(t, "redis://plain:pw@"+r.Addr)
	if _, _, err := s.Restart(t.Context(), a, -1, 0); err != nil {
		t.Fatal(err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{})
	if _, _, err := s.Sweep(t.Context(), testPool, 1000); err != nil {
		t.Fatal(err)
	}
	clean(t, s)
}

// R32: the first lookups of a process, all at once, share the few connections that they may have.
func TestFirstLookupsAtOnce(t *testing.T) {
	r := storetest.Redis(t)
	_, _, p := filled(t, r.URL)
	proxy := storetest.Proxy(t, r.Addr)
	s := open(t, "redis://"+proxy.Addr, func(o *store.Options) { o.PoolSize = 5 })
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			got, state, err := s.Lookup(t.Context(), testPool, p, store.LookupOptions{})
			if state != kvcache.Exact || got.Scores[rank("a", 0)] != onDevice(len(p)) || err != nil {
				t.Errorf("%v %v %v", got, state, err)
			}
		})
	}
	wg.Wait()
	if n := proxy.Dials(); n > 5 {
		t.Errorf("%d connections, want at most 5", n)
	}
}

// L12: Redis that could not save refuses writes. That has a reason of its own, reads go on, and the same batch passes
// later.
func TestFailedSave(t *testing.T) {
	r := storetest.Redis(t, "--save", "3600 1", "--stop-writes-on-bgsave-error", "yes")
	s, a, p := filled(t, r.URL)
	raw := client(t, r.URL)
	dir, err := raw.ConfigGet(t.Context(), "dir").Result()
	if err != nil {
		t.Fatal(err)
	}
	dump := filepath.Join(dir["dir"], "dump.rdb")
	if err := os.Mkdir(dump, 0o700); err != nil { // a directory cannot be replaced by a file
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dump, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := raw.BgSave(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the save to fail", func() bool {
		return strings.Contains(raw.Info(t.Context(), "persistence").Val(), "rdb_last_bgsave_status:err")
	})
	var b store.Batch
	b.Message(1)
	storeAll("a", kvcache.Device, chain(2, 3)...)(&b)
	if _, _, err := s.Apply(t.Context(), a, &b); store.Reason(err) != store.ReasonRefused || !strings.Contains(err.Error(), "MISCONF") {
		t.Fatalf("apply: %v", err)
	}
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(40)})
	if err := raw.ConfigSet(t.Context(), "stop-writes-on-bgsave-error", "no").Err(); err != nil {
		t.Fatal(err)
	}
	applyBatch(t, s, &a, &b, store.Applied)
	clean(t, s)
}

// L02: a message without a block is no error, moves the watermark, and what comes after it is applied.
func TestMessageWithoutBlocks(t *testing.T) {
	for name, url := range map[string]string{"redis": storetest.Redis(t).URL, "miniredis": miniredisURL(t)} {
		t.Run(name, func(t *testing.T) {
			s, a, p := filled(t, url)
			apply(t, s, &a, 1, store.Applied, func(*store.Batch) {})
			apply(t, s, &a, 2, store.Applied, func(b *store.Batch) {
				removeAll("a", kvcache.Device, p[39])(b)
				b.Message(3)
				b.Message(4)
				removeAll("a", kvcache.Device, p[38])(b)
			})
			want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 0): onDevice(38)})
			if st, ok, err := s.Stream(t.Context(), a.StreamID); !ok || err != nil || st.Seq != 4 {
				t.Errorf("%+v %v %v", st, ok, err)
			}
			clean(t, s)
		})
	}
}

func miniredisURL(t *testing.T) string {
	_, url := storetest.Miniredis(t)
	return url
}
