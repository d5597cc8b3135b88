package indexer

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// newStore makes a store on a fresh miniredis.
func newStore(t *testing.T) *store.Store {
	t.Helper()
	_, url := storetest.Miniredis(t)
	return openStore(t, url)
}

func openStore(t *testing.T, url string) *store.Store {
	t.Helper()
	s, err := store.New(store.Options{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// quick shortens the waits that are not what a test is about.
var quick = timing{
	joinDelay: 50 * time.Millisecond, redial: 5 * time.Millisecond, retry: 5 * time.Millisecond,
	replaySilence: 5 * time.Second, replayPause: 5 * time.Millisecond, replayHold: time.Minute, claim: time.Minute,
}

// newIndexer makes an indexer with short waits; it is not running.
func newIndexer(t *testing.T, o Options) *Indexer {
	t.Helper()
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	if o.Registerer == nil {
		r := prometheus.NewRegistry()
		o.Registerer, o.Gatherer = r, r
	}
	ix, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ix.timing = quick
	t.Cleanup(func() { _ = ix.Close() })
	return ix
}

// start runs an indexer until the test ends.
func start(t *testing.T, ix *Indexer) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- ix.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(30 * time.Second):
			t.Error("Run did not end")
		}
	}
	t.Cleanup(stop)
	return stop
}

// eventually waits until ok returns "" and fails with what it last said.
func eventually(t *testing.T, ok func() string) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		said := ok()
		if said == "" {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("after 30 s: %s", said)
		}
	}
}

// held lists what the index holds of a pool, as "worker/rank tier engine-hash", sorted.
func held(t *testing.T, s Store, pool kvcache.PoolID) []string {
	t.Helper()
	out := []string{}
	err := s.Dump(t.Context(), pool, func(e kvcache.RouterEvent) error {
		for _, b := range e.Event.Data.Stored.Blocks {
			tier := map[kvcache.StorageTier]string{"device": "gpu", "host_pinned": "cpu", "disk": "disk"}[e.StorageTier]
			out = append(out, fmt.Sprintf("%s/%d %s %s", e.WorkerID, e.Event.DPRank, tier, b.EngineHash))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

// wantHeld waits until the index holds exactly these.
func wantHeld(t *testing.T, s Store, pool kvcache.PoolID, want ...string) {
	t.Helper()
	slices.Sort(want)
	eventually(t, func() string {
		if got := held(t, s, pool); !slices.Equal(got, want) {
			return fmt.Sprintf("the index holds %q, want %q", got, want)
		}
		return ""
	})
}

// wantClean runs the store's own check of its invariants.
func wantClean(t *testing.T, s *store.Store, pool kvcache.PoolID) {
	t.Helper()
	r, err := s.Check(t.Context(), pool, false)
	if err != nil || len(r.Problems) > 0 {
		t.Errorf("check: %v %v", r.Problems, err)
	}
}

var testPool = kvcache.PoolID{Tenant: "default", Model: "m"}

// stored is a BlockStored of consecutive blocks of 4 tokens; block h holds the token h four times.
func stored(parent *kvcache.EngineHash, hashes ...kvcache.EngineHash) wire.Event {
	e := wire.Event{Kind: wire.Stored, Hashes: hashes, Parent: parent, BlockSize: 4, Medium: "GPU"}
	for _, h := range hashes {
		e.Tokens = append(e.Tokens, uint32(h), uint32(h), uint32(h), uint32(h))
	}
	return e
}

func removed(hashes ...kvcache.EngineHash) wire.Event {
	return wire.Event{Kind: wire.Removed, Hashes: hashes, Medium: "GPU"}
}

var cleared = wire.Event{Kind: wire.Cleared}

func below(h kvcache.EngineHash) *kvcache.EngineHash { return &h }

// payload is a batch of events as an engine writes it.
func payload(events ...wire.Event) []byte {
	return wire.Encode(nil, wire.Batch{TS: float64(time.Now().UnixNano()) / 1e9, TSValid: true, Events: events}, wire.FormMap)
}

func gpu(worker string, hashes ...kvcache.EngineHash) []string {
	var out []string
	for _, h := range hashes {
		out = append(out, worker+" gpu "+h.String())
	}
	return out
}

func counter(c *prometheus.CounterVec, labels ...string) int {
	return int(testutil.ToFloat64(c.WithLabelValues(labels...)))
}

// request calls the admin surface and returns the status and the body.
func request(t *testing.T, ix *Indexer, method, path, body string, header ...string) (int, map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+ix.Addr().String()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var v map[string]any
	if err := json.Unmarshal(b, &v); err != nil {
		v = map[string]any{"text": string(b)}
	}
	return resp.StatusCode, v
}

// workerStatus is one stream's line of GET /workers.
func workerStatus(t *testing.T, ix *Indexer, worker string, rank int) Status {
	t.Helper()
	for _, s := range ix.all() {
		if s.id.Worker == worker && s.id.Rank == rank {
			return s.snapshot()
		}
	}
	return Status{}
}

// wantStatus waits until a stream's status is as wanted: it follows the index by a moment.
func wantStatus(t *testing.T, ix *Indexer, worker string, ok func(Status) bool) {
	t.Helper()
	eventually(t, func() string {
		if v := workerStatus(t, ix, worker, 0); !ok(v) {
			return fmt.Sprintf("status %+v", v)
		}
		return ""
	})
}

// tokens asks for what is given, none for "".
func tokens(t testing.TB, query, admin string) *guard.Tokens {
	t.Helper()
	of := func(s string) guard.Secrets { return guard.Secrets{Values: strings.Fields(s)} }
	k, err := guard.NewTokens(guard.TokenOptions{Query: of(query), Admin: of(admin)})
	if err != nil {
		t.Fatal(err)
	}
	return k
}
