package store

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// The key layout is an interface: other programs and redis-cli users read it.
func TestKeyLiterals(t *testing.T) {
	p := kvcache.PoolID{Model: "meta/Llama{8B}#%"}
	k, w := newShardKeys(p, 3), kvcache.WorkerRank{Worker: "10.0.0.1:8000", Rank: 2}
	for got, want := range map[string]string{
		keyPools:                     "wr:1:pools",
		configKey(p):                 "wr:1:{default:meta/Llama%7B8B%7D%23%25}:config",
		placementKey(p):              "wr:1:{default:meta/Llama%7B8B%7D%23%25}:workers",
		loadKey(p):                   "wr:1:{default:meta/Llama%7B8B%7D%23%25}:load",
		leasesKey(p):                 "wr:1:{default:meta/Llama%7B8B%7D%23%25}:leases",
		deadlinesKey(p):              "wr:1:{default:meta/Llama%7B8B%7D%23%25}:deadlines",
		sessionKey(p, "s"):           "wr:1:{default:meta/Llama%7B8B%7D%23%25}:session:ddcb22b511c75a0ad6b9d4d14ff6be13",
		k.holders():                  "wr:1:{default:meta/Llama%7B8B%7D%23%25#3}:holders",
		k.slots():                    "wr:1:{default:meta/Llama%7B8B%7D%23%25#3}:slots",
		k.idle():                     "wr:1:{default:meta/Llama%7B8B%7D%23%25#3}:idle",
		k.version():                  "wr:1:{default:meta/Llama%7B8B%7D%23%25#3}:version",
		k.stream(w):                  "wr:1:{default:meta/Llama%7B8B%7D%23%25#3}:stream:10.0.0.1:8000/2",
		k.blocks(w, kvcache.Device):  "wr:1:{default:meta/Llama%7B8B%7D%23%25#3}:blocks:10.0.0.1:8000/2:device",
		k.copies(w, kvcache.Host):    "wr:1:{default:meta/Llama%7B8B%7D%23%25#3}:copies:10.0.0.1:8000/2:host",
		k.retired(7, kvcache.Disk):   "wr:1:{default:meta/Llama%7B8B%7D%23%25#3}:retired:7:disk",
		newShardKeys(p, 0).holders(): "wr:1:{default:meta/Llama%7B8B%7D%23%25#0}:holders",
	} {
		if got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// Only a single server is asked without a watch: the library's other clients have deadlines of their own.
func TestPunctual(t *testing.T) {
	for url, want := range map[string]bool{
		"redis://h:1": true, "rediss://h": true, "redis+sentinel://a,b/m": false, "redis+cluster://a,b": false, "redis+cluster://a": false,
	} {
		s, err := New(Options{URL: url})
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Punctual(); got != want {
			t.Errorf("%s: %v", url, got)
		}
		_ = s.Close()
	}
}

// FuzzPrefixes compares the word-parallel AND with one loop per slot and tier.
func FuzzPrefixes(f *testing.F) {
	f.Add([]byte{1, 0x21, 0, 1, 0x20, 1, 1}, uint8(3))
	f.Add([]byte(strings.Repeat("\xff\x0f\x01", 40)), uint8(20))
	f.Fuzz(func(t *testing.T, data []byte, width uint8) {
		w := int(width)%40 + 1
		var blocks []string
		for c := range slices.Chunk(data, w) {
			blocks = append(blocks, strings.TrimRight(string(c), "\x00"))
		}
		var p prefixes
		for _, b := range blocks {
			if !p.add(b) {
				break
			}
		}
		got := p.finish()
		for slot := range w * 2 {
			for tier := range kvcache.NumTiers {
				want := int32(0)
				for _, b := range blocks {
					held := false
					for faster := 0; faster <= tier; faster++ {
						held = held || slot/2 < len(b) && b[slot/2]>>(slot%2*4+faster)&1 == 1
					}
					if !held {
						break
					}
					want++
				}
				have := int32(0)
				if slot < len(got) {
					have = got[slot][tier]
				}
				if have != want {
					t.Fatalf("slot %d tier %d: depth %d, want %d, of %q", slot, tier, have, want, blocks)
				}
			}
		}
	})
}

type timeoutError struct{}

func (timeoutError) Error() string   { return "i/o timeout" }
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return true }

// replyError is an error reply as go-redis gives it.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

func TestClassify(t *testing.T) {
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	here := context.Background()
	for _, c := range []struct {
		ctx    context.Context
		err    error
		kind   error
		reason string
	}{
		{here, io.EOF, ErrUnavailable, ReasonConnection},
		{here, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", errors.New("connection refused"))}, ErrUnavailable, ReasonConnection},
		{here, &net.DNSError{Err: "no such host"}, ErrUnavailable, ReasonConnection},
		{here, redis.ErrClosed, ErrUnavailable, ReasonConnection},
		{here, timeoutError{}, ErrUnavailable, ReasonTimeout},
		{here, context.DeadlineExceeded, ErrUnavailable, ReasonTimeout},
		{here, fmt.Errorf("wrapped: %w", timeoutError{}), ErrUnavailable, ReasonTimeout},
		{here, &tls.RecordHeaderError{Msg: "first record does not look like a TLS handshake"}, ErrUnavailable, ReasonConnection},
		{here, replyError("LOADING Redis is loading the dataset in memory"), ErrUnavailable, ReasonLoading},
		{here, replyError("CLUSTERDOWN The cluster is down"), ErrUnavailable, ReasonClusterDown},
		{here, replyError("MASTERDOWN Link with MASTER is down"), ErrUnavailable, ReasonClusterDown},
		{here, replyError("READONLY You can't write against a read only replica."), ErrUnavailable, ReasonRefused},
		{here, replyError("MOVED 3999 127.0.0.1:6381"), ErrUnavailable, ReasonClusterDown},
		{here, replyError("BUSY Redis is busy running a script."), ErrUnavailable, ReasonTimeout},
		{here, replyError("OOM command not allowed when used memory > 'maxmemory'."), ErrUnavailable, ReasonRefused},
		{here, replyError("MISCONF Redis is configured to save RDB snapshots"), ErrUnavailable, ReasonRefused},
		{here, replyError("ERR The user executing the script can't run this command or subcommand script: x"), ErrUnavailable, ReasonConnection},
		{here, replyError("EXECABORT Transaction discarded because of previous errors."), ErrUnavailable, ReasonConnection},
		{here, replyError("NOAUTH Authentication required."), ErrUnavailable, ReasonConnection},
		{here, replyError("NOPERM this user has no permissions"), ErrUnavailable, ReasonConnection},
		{here, replyError("ERR max number of clients reached"), ErrUnavailable, ReasonConnection},
		{here, replyError("ERR DB index is out of range"), ErrUnavailable, ReasonConnection},
		{here, replyError("WRONGTYPE Operation against a key holding the wrong kind of value"), ErrCorrupt, ReasonCorrupt},
		{here, replyError("ERR unknown command"), ErrCorrupt, ReasonCorrupt},
		{here, fmt.Errorf("slot map: %w", ErrCorrupt), ErrCorrupt, ReasonCorrupt},
		{here, &ConflictError{"block_size", "16", "32"}, ErrInvalid, ReasonInvalid},
		{here, redis.ErrPoolTimeout, nil, ReasonPoolExhausted},
		{here, redis.ErrPoolExhausted, nil, ReasonPoolExhausted},
		{gone, io.EOF, nil, ReasonCanceled},
		{gone, context.Canceled, nil, ReasonCanceled},
		{gone, timeoutError{}, nil, ReasonCanceled},
	} {
		got := classify(c.ctx, fmt.Errorf("look up: %w", c.err))
		for _, kind := range []error{ErrUnavailable, ErrCorrupt, ErrInvalid} {
			if errors.Is(got, kind) != (kind == c.kind) {
				t.Errorf("%v: errors.Is(%v) = %v", c.err, kind, errors.Is(got, kind))
			}
		}
		if Reason(got) != c.reason {
			t.Errorf("%v: reason %s, want %s", c.err, Reason(got), c.reason)
		}
		if again := classify(here, got); Reason(again) != c.reason {
			t.Errorf("%v: classified twice it is %s", c.err, Reason(again))
		}
	}
	if classify(here, nil) != nil {
		t.Error("nil became an error")
	}
}

func TestParseURL(t *testing.T) {
	for raw, want := range map[string]redis.UniversalOptions{
		"redis://localhost":                            {Addrs: []string{"localhost:6379"}},
		"redis://u:p%40ss@h:7/3":                       {Addrs: []string{"h:7"}, Username: "u", Password: "p@ss", DB: 3},
		"redis://[::1]:6380":                           {Addrs: []string{"[::1]:6380"}},
		"redis+sentinel://a:1,b/main/2":                {Addrs: []string{"a:1", "b:26379"}, MasterName: "main", DB: 2},
		"redis+sentinel://a/m?sentinel_password=x":     {Addrs: []string{"a:26379"}, MasterName: "m", SentinelPassword: "x"},
		"redis+cluster://u:p@a:1,b:2,c:3":              {Addrs: []string{"a:1", "b:2", "c:3"}, Username: "u", Password: "p", IsClusterMode: true},
		"rediss+cluster://a:1?tls_skip_verify=true":    {Addrs: []string{"a:1"}, IsClusterMode: true, TLSConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}},
		"rediss://redis.example.com:6380/0":            {Addrs: []string{"redis.example.com:6380"}, TLSConfig: &tls.Config{ServerName: "redis.example.com", MinVersion: tls.VersionTLS12}},
		"rediss://u@redis.example.com":                 {Addrs: []string{"redis.example.com:6379"}, Username: "u", TLSConfig: &tls.Config{ServerName: "redis.example.com", MinVersion: tls.VersionTLS12}},
		"redis+cluster://10.0.0.1,10.0.0.2:7001/0":     {Addrs: []string{"10.0.0.1:6379", "10.0.0.2:7001"}, IsClusterMode: true},
		"redis+sentinel://u:p@a/m?sentinel_username=z": {Addrs: []string{"a:26379"}, MasterName: "m", Username: "u", Password: "p", SentinelUsername: "z"},
	} {
		got, err := parseURL(raw)
		if err != nil || !reflect.DeepEqual(*got, want) {
			t.Errorf("%s:\n got %+v %v\nwant %+v", raw, got, err, want)
		}
	}
	for _, raw := range []string{
		"", "localhost:6379", "http://h", "redis://", "redis://a,b", "redis+sentinel://a", "redis+cluster://a/1",
		"redis://h/x", "redis://h/-1", "redis+magic://h", "redis://h?nonsense=1", "redis://h?tls_skip_verify=true", "redis+cluster://a,,b",
	} {
		if _, err := parseURL(raw); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", raw, err)
		}
	}
	if _, err := parseURL("redis://user:secret@h/x"); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("the error shows the password: %v", err)
	}
}

// probeScript is a shard whose probes a test answers.
type probeScript struct {
	mu    sync.Mutex
	err   error
	times []time.Time
}

func (p *probeScript) probe(context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.times = append(p.times, time.Now())
	return p.err
}

func (p *probeScript) answer(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

// at is when the n-th probe came.
func (p *probeScript) at(n int) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.times[n]
}

func (p *probeScript) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.times)
}

func testLink(t *testing.T, p *probeScript) (*link, *prometheus.Registry) {
	reg := prometheus.NewRegistry()
	s := &Store{opts: Options{LookupBudget: 20 * time.Millisecond}, log: slog.New(slog.DiscardHandler), metrics: newMetrics(reg), stop: make(chan struct{})}
	l := newLink(s, "p#0", p.probe)
	t.Cleanup(func() {
		s.stopOnce.Do(func() { close(s.stop) })
		s.background.Wait()
	})
	return l, reg
}

var errAway = classify(context.Background(), io.EOF)

func TestLinkGoesDownAndComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &probeScript{err: errAway}
		l, _ := testLink(t, p)
		for _, harmless := range []error{
			nil, classify(context.Background(), redis.ErrPoolTimeout), fmt.Errorf("x: %w", ErrCorrupt), fmt.Errorf("x: %w", ErrInvalid),
		} {
			if got := l.report(t.Context(), harmless); got != harmless || l.check() != nil {
				t.Fatalf("%v took the link down", harmless)
			}
		}
		down := time.Now()
		for range 10 { // many callers fail at once: one transition, one prober
			_ = l.report(t.Context(), errAway)
		}
		if err := l.check(); !errors.Is(err, ErrUnavailable) || Reason(err) != ReasonConnection {
			t.Fatalf("check while down: %v", err)
		}
		time.Sleep(16 * time.Minute) // longer than the library's default patience; the bubble's clock
		n := p.count()
		if pauseMean := 16 * time.Minute / time.Duration(n); pauseMean < 200*time.Millisecond || pauseMean > 800*time.Millisecond {
			t.Fatalf("%d probes in 16 minutes", n)
		}
		if first := p.at(0).Sub(down); first > 50*time.Millisecond {
			t.Fatalf("first probe after %v", first)
		}
		p.answer(nil)
		time.Sleep(time.Second)
		if l.check() != nil {
			t.Fatal("still down a second after the shard answered")
		}
		n = p.count()
		time.Sleep(time.Minute)
		if p.count() != n {
			t.Fatal("it goes on probing while up")
		}
		if got := testutil.ToFloat64(l.metrics.linkTransitions.WithLabelValues("p#0", "down")); got != 1 {
			t.Fatalf("%v transitions down", got)
		}
		if testutil.ToFloat64(l.metrics.linkUp.WithLabelValues("p#0")) != 1 {
			t.Fatal("the gauge says down")
		}
	})
}

// A link that flaps goes on with the long pauses; one that was stable begins anew with short ones.
func TestLinkBackoffResetsOnlyWhenStable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &probeScript{err: errAway}
		l, _ := testLink(t, p)
		_ = l.report(t.Context(), errAway)
		time.Sleep(time.Minute)
		p.answer(nil)
		time.Sleep(2 * time.Second)
		if l.check() != nil {
			t.Fatal("not back")
		}
		// Flapping: forty short outages. Starting anew each time would probe after 25 ms on average.
		var waited time.Duration
		for range 40 {
			start, n := time.Now(), p.count()
			_ = l.report(t.Context(), errAway)
			time.Sleep(time.Second)
			waited += p.at(n).Sub(start)
		}
		if mean := waited / 40; mean < 200*time.Millisecond {
			t.Fatalf("a flapping link is probed after %v on average", mean)
		}
		time.Sleep(time.Minute)
		start := time.Now()
		before := p.count()
		_ = l.report(t.Context(), errAway)
		time.Sleep(2 * time.Second)
		if p.count() == before {
			t.Fatal("no probe")
		}
		if d := p.at(before).Sub(start); d > 50*time.Millisecond {
			t.Fatalf("first probe after a stable time came after %v", d)
		}
	})
}

func TestLinkStopsWithTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &probeScript{err: errAway}
		l, _ := testLink(t, p)
		_ = l.report(t.Context(), errAway)
		time.Sleep(time.Second)
	}) // the bubble ends only when the prober has
}
