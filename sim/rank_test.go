package sim

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// testProcess is a process that is never started: its ranks work, nothing listens.
func testProcess(t *testing.T, o Options) (*process, func(from, promptLen, outLen int) *sequence) {
	t.Helper()
	o, err := o.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	p, err := newProcess(&o, func(string) (net.Listener, error) { return deaf{}, nil }, addresses{events: make([]string, o.Ranks)}, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p, func(from, promptLen, outLen int) *sequence {
		s := newSequence(&o, 1, numbers(from, promptLen), 0, adapter{}, "")
		s.outLen = outLen
		return s
	}
}

// deaf is a listener to which nobody connects.
type deaf struct{}

func (deaf) Accept() (net.Conn, error) { return nil, net.ErrClosed }
func (deaf) Close() error              { return nil }
func (deaf) Addr() net.Addr            { return &net.TCPAddr{} }

// run starts a sequence and returns where the times of its tokens, since now, will be.
func run(ctx context.Context, wg *sync.WaitGroup, r *rank, s *sequence) (times *[]time.Duration, failed *error) {
	times, failed = new([]time.Duration), new(error)
	start := time.Now()
	wg.Go(func() {
		*failed = r.generate(ctx, s, func(int, uint32) error {
			*times = append(*times, time.Since(start))
			return nil
		})
	})
	return times, failed
}

func ms(n ...int) (out []time.Duration) {
	for _, n := range n {
		out = append(out, time.Duration(n)*time.Millisecond)
	}
	return out
}

// Prefills take turns and cost only what is not cached; answers are decoded side by side.
func TestTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, seq := testProcess(t, Options{BlockSize: 4, PrefillPerToken: time.Millisecond, DecodePerToken: 10 * time.Millisecond, PrefillChunk: 7})
		r := p.ranks[0]
		var wg sync.WaitGroup
		first, _ := run(t.Context(), &wg, r, seq(0, 20, 3))
		synctest.Wait() // so that the first is the first
		second, _ := run(t.Context(), &wg, r, seq(1000, 30, 3))
		synctest.Wait()
		third, _ := run(t.Context(), &wg, r, seq(0, 20, 1)) // 16 of its tokens are in the first's blocks
		wg.Wait()
		if want := ms(20, 30, 40); !slices.Equal(*first, want) {
			t.Errorf("first: %v, want %v", *first, want)
		}
		if want := ms(50, 60, 70); !slices.Equal(*second, want) {
			t.Errorf("second: %v, want %v", *second, want)
		}
		if want := ms(54); !slices.Equal(*third, want) {
			t.Errorf("third: %v, want %v", *third, want)
		}
		again, _ := run(t.Context(), &wg, r, seq(0, 20, 1))
		wg.Wait()
		if want := ms(4); !slices.Equal(*again, want) {
			t.Errorf("again: %v, want %v", *again, want)
		}
	})
}

func TestMaxConcurrentAndGauges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, seq := testProcess(t, Options{BlockSize: 4, Blocks: 10, MaxConcurrent: 2, DecodePerToken: 10 * time.Millisecond})
		r := p.ranks[0]
		var wg sync.WaitGroup
		for i := range 4 {
			run(t.Context(), &wg, r, seq(1000*i, 4, 5))
			synctest.Wait()
		}
		running, waiting, usage := testutil.ToFloat64(r.m.running), testutil.ToFloat64(r.m.waiting), testutil.ToFloat64(r.m.usage)
		if running != 2 || waiting != 2 || usage != 0.2 {
			t.Errorf("running %v, waiting %v, usage %v; want 2, 2, 0.2", running, waiting, usage)
		}
		start := time.Now()
		wg.Wait()
		if took := time.Since(start); took != 80*time.Millisecond {
			t.Errorf("two times two answers of 40 ms took %v", took)
		}
		if running, waiting := testutil.ToFloat64(r.m.running), testutil.ToFloat64(r.m.waiting); running != 0 || waiting != 0 {
			t.Errorf("running %v, waiting %v at the end", running, waiting)
		}
	})
}

// A sequence that finds no room waits until another one ends.
func TestWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, seq := testProcess(t, Options{BlockSize: 4, Blocks: 4, DecodePerToken: 10 * time.Millisecond})
		r := p.ranks[0]
		var wg sync.WaitGroup
		run(t.Context(), &wg, r, seq(0, 8, 5)) // 12 tokens in 3 blocks, for 40 ms
		synctest.Wait()
		second, _ := run(t.Context(), &wg, r, seq(1000, 8, 1))
		wg.Wait()
		if want := ms(40); !slices.Equal(*second, want) {
			t.Errorf("second: %v, want %v", *second, want)
		}
	})
}

// Whatever a sequence waits for when it is cancelled, it leaves nothing behind.
func TestCancelEverywhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, seq := testProcess(t, Options{BlockSize: 4, Blocks: 20, MaxConcurrent: 3, PrefillPerToken: time.Millisecond, PrefillChunk: 4, DecodePerToken: 10 * time.Millisecond})
		r := p.ranks[0]
		for at := time.Duration(0); at < 200*time.Millisecond; at += 3 * time.Millisecond {
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			var failed []*error
			for i := range 5 {
				_, err := run(ctx, &wg, r, seq(1000*i, 30, 4))
				failed = append(failed, err)
			}
			timer := time.AfterFunc(at, cancel)
			wg.Wait()
			timer.Stop()
			cancel()
			for _, err := range failed {
				if *err != nil && !errors.Is(*err, context.Canceled) {
					t.Errorf("at %v: %v", at, *err)
				}
			}
			if r.pool.inUse() != 0 || r.pool.reserved != 0 || len(r.slots) != 0 || len(r.prefill) != 0 {
				t.Fatalf("cancelled at %v: %d blocks in use, %d reserved, %d slots, %d prefills", at, r.pool.inUse(), r.pool.reserved, len(r.slots), len(r.prefill))
			}
			if n := testutil.ToFloat64(r.m.running) + testutil.ToFloat64(r.m.waiting); n != 0 {
				t.Fatalf("cancelled at %v: %v sequences are left", at, n)
			}
			r.clear(false)
		}
	})
}

// A hang stops the clock of what is running; a resumed sequence does not catch up.
func TestHangStopsTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, seq := testProcess(t, Options{DecodePerToken: 10 * time.Millisecond})
		var wg sync.WaitGroup
		times, _ := run(t.Context(), &wg, p.ranks[0], seq(0, 5, 5))
		time.AfterFunc(15*time.Millisecond, func() { p.hung.set(false) })
		time.AfterFunc(100*time.Millisecond, func() { p.hung.set(true) })
		wg.Wait()
		if want := ms(0, 10, 100, 110, 120); !slices.Equal(*times, want) {
			t.Errorf("tokens at %v, want %v", *times, want)
		}
	})
}

// BenchmarkGenerate is what the simulation itself costs per request: a prompt of 4096
// tokens of which all but the last 256 are cached, an answer of 64, blocks of 16, no
// waiting, no subscriber.
func BenchmarkGenerate(b *testing.B) {
	o, err := Options{Blocks: 1 << 14}.withDefaults()
	if err != nil {
		b.Fatal(err)
	}
	p, err := newProcess(&o, func(string) (net.Listener, error) { return deaf{}, nil }, addresses{events: make([]string, 1)}, 0, nil)
	if err != nil {
		b.Fatal(err)
	}
	prompt := numbers(1000, 4096)
	b.ReportAllocs()
	for i := range b.N {
		for j := range 256 {
			prompt[3840+j] = uint32(100000 + i)
		}
		s := newSequence(&o, p.seed, prompt, 0, adapter{}, "")
		s.outLen = 64
		if err := p.ranks[0].generate(b.Context(), s, func(int, uint32) error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
