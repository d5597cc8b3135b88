package indexer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// infirmary says how workers are, by the host of their URL.
type infirmary struct {
	mu sync.Mutex
	of map[string]health
}

func (i *infirmary) set(host string, h health) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.of[host] = h
}

func (i *infirmary) check(_ context.Context, base string) (health, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch h := i.of[base]; h {
	case healthBad:
		return h, errors.New("status 503")
	case healthSilent:
		return h, errors.New("timeout")
	default:
		return healthOK, nil
	}
}

// ward makes an indexer with short leases whose workers' health a test decides.
func ward(t *testing.T, st Store, grace time.Duration, workers ...Worker) (*Indexer, *infirmary) {
	t.Helper()
	ix := newIndexer(t, Options{
		Store: st, Workers: workers,
		LeaseInterval: 10 * time.Millisecond, LeaseGrace: grace, WatchInterval: 10 * time.Millisecond,
	})
	i := &infirmary{of: map[string]health{}}
	ix.health = i.check
	return ix, i
}

// urlOf is the URL of a worker that only the infirmary knows.
func urlOf(id string) string { return "http://" + id + ".invalid" }

func patient(id string, e *zmtptest.Engine) Worker {
	w := worker(id, e)
	w.URL = urlOf(id)
	return w
}

func wantLease(t *testing.T, ix *Indexer, id, state string) {
	t.Helper()
	eventually(t, func() string {
		if v := workerStatus(t, ix, id, 0); v.Lease != state {
			return fmt.Sprintf("the lease of %s is %q, want %q", id, v.Lease, state)
		}
		return ""
	})
}

// A worker that dies leaves the index after the grace; one that says it is ill does too, though it stays connected. Both come
// back by themselves, with all that they hold.
func TestDeadWorkerLeavesAndReturns(t *testing.T) {
	for _, how := range []string{"killed", "hung, healthy again", "hung, publishes again"} {
		t.Run(how, func(t *testing.T) {
			st := newStore(t)
			dead, other := zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"}), zmtptest.Start(t, zmtptest.Config{XPUB: true, Router: "*"})
			ix, ward := ward(t, st, 50*time.Millisecond, patient("dead", dead), patient("other", other))
			start(t, ix)
			for _, e := range []*zmtptest.Engine{dead, other} {
				e.Subscribed()
				e.Asked()
				e.Publish("", 0, payload(stored(nil, 1)))
				e.Publish("", 1, payload(stored(below(1), 2)))
			}
			both := append(gpu("dead/0", 1, 2), gpu("other/0", 1, 2)...)
			wantHeld(t, st, testPool, both...)
			ward.set(urlOf("dead"), healthBad)
			if how == "killed" {
				dead.Kill()
			}
			wantHeld(t, st, testPool, gpu("other/0", 1, 2)...)
			wantLease(t, ix, "dead", leaseExpired)
			wantLease(t, ix, "other", leaseAlive)
			if n := counter(ix.metrics.resets, resetLease); n != 1 {
				t.Errorf("%d resets", n)
			}
			switch how {
			case "killed":
				again := zmtptest.Start(t, zmtptest.Config{XPUB: true, Pub: dead.Endpoint, Router: dead.ReplayEndpoint})
				again.Publish("", 0, payload(stored(nil, 7)))
				again.Subscribed()
				again.Asked()
				again.Publish("", 1, payload(stored(below(7), 8)))
				both = append(gpu("dead/0", 7, 8), gpu("other/0", 1, 2)...)
				ward.set(urlOf("dead"), healthOK)
			case "hung, healthy again":
				ward.set(urlOf("dead"), healthOK)
			default:
				dead.Publish("", 2, payload(stored(below(2), 3)))
				both = append(both, gpu("dead/0", 3)...)
			}
			if how == "hung, publishes again" {
				// Its events alone keep it only while they come.
				eventually(t, func() string {
					if !slices.Equal(held(t, st, testPool), slices.Sorted(slices.Values(both))) && workerStatus(t, ix, "dead", 0).Resets < 2 {
						return "neither back nor gone again"
					}
					return ""
				})
				ward.set(urlOf("dead"), healthOK)
			}
			wantHeld(t, st, testPool, both...)
			wantLease(t, ix, "dead", leaseAlive)
			wantClean(t, st, testPool)
		})
	}
}

// When all workers fall silent at once it may be the indexer's own network: nothing leaves the index, and it says so. Once others
// are heard again, the one that is not has no excuse.
func TestAllSilentAtOnceAreHeld(t *testing.T) {
	st := newStore(t)
	ids := []string{"a", "b", "c"}
	var workers []Worker
	var want []string
	for _, id := range ids {
		workers = append(workers, Worker{ID: id, Model: "m", URL: urlOf(id), BlockSize: 4})
		want = append(want, gpu(id+"/0", 1)...)
	}
	ix, ward := ward(t, st, time.Second, workers...) // the hold lasts 20 of these
	start(t, ix)
	for _, id := range ids {
		if code, v := request(t, ix, "POST", "/events", `{"worker":"`+id+`","events":[`+storedJSON(0, "null", 1)+`]}`); code != 202 {
			t.Fatalf("%d %v", code, v)
		}
	}
	for _, id := range ids {
		ward.set(urlOf(id), healthSilent)
	}
	for _, id := range ids {
		wantLease(t, ix, id, leaseHeld)
	}
	wantHeld(t, st, testPool, want...)
	if err := testutil.GatherAndCompare(ix.opts.Gatherer, strings.NewReader(`# HELP warmroute_kv_leases Event streams by their lease: alive, failing (no sign of life for less than the grace), held (for longer, but the fault may be this indexer's), expired.
# TYPE warmroute_kv_leases gauge
warmroute_kv_leases{state="alive"} 0
warmroute_kv_leases{state="expired"} 0
warmroute_kv_leases{state="failing"} 0
warmroute_kv_leases{state="held"} 3
`), "warmroute_kv_leases"); err != nil {
		t.Error(err)
	}
	ward.set(urlOf("a"), healthOK)
	ward.set(urlOf("b"), healthOK)
	wantHeld(t, st, testPool, append(gpu("a/0", 1), gpu("b/0", 1)...)...)
	wantLease(t, ix, "c", leaseExpired)
	wantLease(t, ix, "a", leaseAlive)

	// An engine over HTTP comes back with its next event; what it held before has to be stored again.
	if code, v := request(t, ix, "POST", "/events", `{"worker":"c","events":[`+storedJSON(5, "null", 9)+`]}`); code != 202 {
		t.Fatalf("%d %v", code, v)
	}
	ward.set(urlOf("c"), healthOK)
	wantHeld(t, st, testPool, slices.Concat(gpu("a/0", 1), gpu("b/0", 1), gpu("c/0", 9))...)
	wantClean(t, st, testPool)
}

// mortal is a stream that a test feeds by hand and that gives no sign of life.
func mortal(t *testing.T, st Store) *stream {
	t.Helper()
	s := offline(t, st, 4)
	s.followed = time.Time{}
	return s
}

// One indexer that sees the worker alive is enough, whatever its clock says.
func TestAnyIndexerRenews(t *testing.T) {
	st := newStore(t)
	s := mortal(t, st)
	s.say(t, 0, payload(stored(nil, 1)))
	now := time.Now()
	lapse := func() {
		t.Helper()
		now = now.Add(s.ix.opts.LeaseGrace)
		if err := s.lapse(t.Context(), now, true); err != nil {
			t.Fatal(err)
		}
	}
	lapse()
	for range 5 {
		before := s.lease.updated
		eventually(t, func() string {
			if o, err := st.Touch(t.Context(), s.st); err != nil || o != store.Applied {
				t.Fatalf("touch: %v %v", o, err)
			}
			if v, _, err := st.Stream(t.Context(), s.id); err != nil || v.Updated.Equal(before) {
				return fmt.Sprintf("still the same millisecond, %v", err)
			}
			return ""
		})
		lapse()
	}
	if got := held(t, st, testPool); len(got) != 1 || s.status.Lease != leaseFailing {
		t.Fatalf("the index holds %q, the lease is %s", got, s.status.Lease)
	}
	lapse()
	if got := held(t, st, testPool); len(got) != 0 || s.status.Lease != leaseExpired {
		t.Fatalf("the index holds %q, the lease is %s", got, s.status.Lease)
	}
}

// What one indexer has ended the others take for that, not for a Redis that lost data: else they would replay the dead.
func TestExpiryByAnotherIndexer(t *testing.T) {
	st := newStore(t)
	a, b := mortal(t, st), mortal(t, st)
	a.say(t, 0, payload(stored(nil, 1)))
	b.say(t, 0, payload(stored(nil, 1)))
	now := time.Now()
	for range 2 {
		now = now.Add(a.ix.opts.LeaseGrace)
		if err := a.lapse(t.Context(), now, true); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.compare(t.Context()); err != nil || !b.lease.expired {
		t.Fatalf("compare: %v, expired %v", err, b.lease.expired)
	}
	if got := held(t, st, testPool); len(got) != 0 {
		t.Fatalf("the index holds %q", got)
	}
}

// unreachable is a store whose answers about a stream a test can withhold.
type unreachable struct {
	*store.Store
	away bool
}

func (u *unreachable) Stream(ctx context.Context, id store.StreamID) (store.Stream, bool, error) {
	if u.away {
		return store.Stream{}, false, store.ErrUnavailable
	}
	return u.Store.Stream(ctx, id)
}

// While Redis is away nobody can renew a lease, so that time does not count.
func TestRedisAwayExpiresNothing(t *testing.T) {
	st := &unreachable{Store: newStore(t)}
	s := mortal(t, st)
	s.say(t, 0, payload(stored(nil, 1)))
	now := time.Now()
	lapse := func(after time.Duration) {
		t.Helper()
		now = now.Add(after)
		if err := s.lapse(t.Context(), now, true); err != nil {
			t.Fatal(err)
		}
	}
	grace := s.ix.opts.LeaseGrace
	lapse(0)
	lapse(grace - time.Second)
	st.away = true
	lapse(time.Hour)
	st.away = false
	lapse(time.Second)
	lapse(grace - time.Second)
	if got := held(t, st, testPool); len(got) != 1 {
		t.Fatalf("the index holds %q", got)
	}
	lapse(2 * time.Second)
	if got := held(t, st, testPool); len(got) != 0 || !s.lease.expired {
		t.Fatalf("the index holds %q after the grace", got)
	}

	// Alive again, it goes on after what it missed, in the new generation.
	s.say(t, 7, payload(stored(nil, 3)))
	if got := held(t, st, testPool); !slices.Equal(got, gpu("w/0", 3)) || s.cur.done != 7 {
		t.Fatalf("the index holds %q", got)
	}
}

// A worker that nobody has seen for long is forgotten, unless it is configured here.
func TestLongDeadWorkerIsForgotten(t *testing.T) {
	for _, configured := range []bool{false, true} {
		t.Run(fmt.Sprint(configured), func(t *testing.T) {
			st := newStore(t)
			s := mortal(t, st)
			s.configured = configured
			s.say(t, 0, payload(stored(nil, 1)))
			now := time.Now()
			var err error
			for range 4 {
				now = now.Add(s.ix.opts.LeaseGrace)
				if err = s.lapse(t.Context(), now, true); err != nil {
					t.Fatal(err)
				}
			}
			err = s.lapse(t.Context(), now.Add(s.ix.opts.LeaseForget+time.Hour), true)
			if errors.Is(err, store.ErrRemoved) == configured {
				t.Fatalf("lapse: %v", err)
			}
			streams, err := st.Streams(t.Context(), testPool)
			if err != nil || len(streams) != map[bool]int{false: 0, true: 1}[configured] {
				t.Fatalf("%+v %v", streams, err)
			}
		})
	}
}

// How long a worker was away is told by one clock: an indexer whose clock is hours ahead of the others' forgets no worker
// earlier, nor one that another indexer sees alive.
func TestClockAheadForgetsNobody(t *testing.T) {
	for _, renewed := range []bool{false, true} {
		t.Run(fmt.Sprint(renewed), func(t *testing.T) {
			st := newStore(t)
			s := mortal(t, st)
			s.say(t, 0, payload(stored(nil, 1)))
			now := time.Now().Add(3 * s.ix.opts.LeaseForget)
			lapse := func(after time.Duration) error {
				now = now.Add(after)
				return s.lapse(t.Context(), now, true)
			}
			for range 5 {
				if err := lapse(s.ix.opts.LeaseGrace); err != nil {
					t.Fatal(err)
				}
			}
			if !s.lease.expired {
				t.Fatal("the lease has not expired")
			}
			var err error
			for range 4 {
				if renewed {
					eventually(t, func() string { // its clock has to have moved on
						if o, err := st.Touch(t.Context(), s.st); o != store.Applied || err != nil {
							t.Fatal(o, err)
						}
						if now, _, err := st.Stream(t.Context(), s.id); err != nil || now.Updated.Equal(s.lease.updated) {
							return fmt.Sprint("not renewed ", err)
						}
						return ""
					})
				}
				if err = lapse(s.ix.opts.LeaseForget / 2); err != nil {
					break
				}
			}
			if errors.Is(err, store.ErrRemoved) == renewed {
				t.Fatalf("lapse: %v", err)
			}
		})
	}
}

// Held leases end after all when the silence lasts: an index without news for that long is a guess.
func TestHoldEnds(t *testing.T) {
	st := newStore(t)
	s := mortal(t, st)
	s.say(t, 0, payload(stored(nil, 1)))
	s.ix.suspicion.Store(int32(suspectAll))
	now := time.Now()
	for _, after := range []time.Duration{0, s.ix.opts.LeaseGrace, (holdFactor - 2) * s.ix.opts.LeaseGrace} {
		now = now.Add(after)
		if err := s.lapse(t.Context(), now, false); err != nil {
			t.Fatal(err)
		}
	}
	if got := held(t, st, testPool); len(got) != 1 || s.status.Lease != leaseHeld {
		t.Fatalf("the index holds %q, the lease is %s", got, s.status.Lease)
	}
	if err := s.lapse(t.Context(), now.Add(s.ix.opts.LeaseGrace), false); err != nil {
		t.Fatal(err)
	}
	if got := held(t, st, testPool); len(got) != 0 {
		t.Fatalf("the index holds %q", got)
	}
}

func TestSuspicion(t *testing.T) {
	const alive, ill, silent = healthOK, healthBad, healthSilent
	for _, c := range []struct {
		of   []health
		want suspicion
	}{
		{nil, suspectNone},
		{[]health{alive}, suspectNone},
		{[]health{ill}, suspectNone}, // its host says so
		{[]health{silent}, suspectMost},
		{[]health{ill, ill}, suspectAll},
		{[]health{silent, silent}, suspectAll},
		{[]health{alive, silent}, suspectNone},
		{[]health{alive, silent, silent}, suspectMost},
		{[]health{alive, ill, ill, ill}, suspectNone},
		{[]health{alive, ill, silent, silent}, suspectNone},
	} {
		ix := newIndexer(t, Options{Store: newStore(t)})
		for i, h := range c.of {
			id := store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: fmt.Sprint("w", i)}}
			s := newStream(ix, publisher{id: id, reg: store.Registration{URL: urlOf("w"), BlockSize: 4}})
			s.checked(h, nil)
			ix.streams[id] = s
		}
		ix.judge(time.Now())
		if got := suspicion(ix.suspicion.Load()); got != c.want {
			t.Errorf("%v: suspicion %d, want %d", c.of, got, c.want)
		}
	}
}

func TestSignsOfLife(t *testing.T) {
	now := time.Now()
	for name, c := range map[string]struct {
		reg                   store.Registration
		connected, everWell   bool
		health                health
		event                 time.Duration // ago; 0 = never
		wantAlive, wantCertai bool
	}{
		"healthy":                               {reg: store.Registration{URL: "u"}, health: healthOK, wantAlive: true},
		"ill":                                   {reg: store.Registration{URL: "u"}, health: healthBad, wantCertai: true},
		"ill with events":                       {reg: store.Registration{URL: "u", Endpoint: "e"}, health: healthBad, event: time.Second, wantAlive: true},
		"ill, connected, was well":              {reg: store.Registration{URL: "u", Endpoint: "e"}, connected: true, everWell: true, health: healthBad, wantCertai: true},
		"connected, its URL never led anywhere": {reg: store.Registration{URL: "u", Endpoint: "e"}, connected: true, health: healthSilent, wantAlive: true},
		"no URL, connected":                     {reg: store.Registration{Endpoint: "e"}, connected: true, wantAlive: true},
		"no URL, not connected":                 {reg: store.Registration{Endpoint: "e"}},
		"events over HTTP, quiet for less than ten": {event: 4 * time.Minute, wantAlive: true},
		"events over HTTP, quiet for longer":        {event: 6 * time.Minute, wantCertai: true},
	} {
		ix := newIndexer(t, Options{Store: newStore(t)})
		s := newStream(ix, publisher{reg: c.reg})
		s.followed = now.Add(-time.Hour)
		s.status.Connected, s.signs.everWell, s.signs.health = c.connected, c.everWell, c.health
		if c.event > 0 {
			s.status.LastEvent = now.Add(-c.event)
		}
		if alive, certain := s.alive(now); alive != c.wantAlive || !alive && certain != c.wantCertai {
			t.Errorf("%s: alive %v, certain %v", name, alive, certain)
		}
	}
}

func TestHealthCheck(t *testing.T) {
	check := newHealthCheck(newWorkerClient(nil, nil))
	status := http.StatusOK
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/base/health" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		w.WriteHeader(status)
	}))
	defer srv.Close()
	for s, want := range map[int]health{200: healthOK, 404: healthOK, 302: healthOK, 500: healthBad, 503: healthBad} {
		status = s
		if got, err := check(t.Context(), srv.URL+"/base/"); got != want || (err == nil) != (want == healthOK) {
			t.Errorf("status %d: %v %v", s, got, err)
		}
	}
	srv.Close()
	if got, err := check(t.Context(), srv.URL+"/base"); got != healthBad || err == nil {
		t.Errorf("nobody listens: %v %v", got, err)
	}
	hang, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = hang.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if got, err := check(ctx, "http://"+hang.Addr().String()); got != healthSilent || err == nil {
		t.Errorf("no answer: %v %v", got, err)
	}
}
