package store

import (
	"context"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store/storetest"
)

// loseReplies lets scripts take effect and loses what they answer.
type loseReplies struct{ on atomic.Bool } // probers ask too

func (l *loseReplies) DialHook(next redis.DialHook) redis.DialHook { return next }
func (l *loseReplies) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (l *loseReplies) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if l.on.Load() && err == nil && strings.HasPrefix(cmd.Name(), "eval") {
			cmd.SetErr(&net.OpError{Op: "read", Err: io.ErrUnexpectedEOF})
			return cmd.Err()
		}
		return err
	}
}

// Whatever took effect and was not heard of is a duplicate, or stale, when it is said again; nothing happens twice.
func TestLostReplies(t *testing.T) {
	for name, url := range map[string]string{"redis": storetest.Redis(t).URL, "miniredis": second(storetest.Miniredis(t))} {
		t.Run(name, func(t *testing.T) {
			s, err := New(Options{URL: url, LookupBudget: 10 * time.Second, WriteTimeout: 10 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			lose := &loseReplies{}
			s.write.AddHook(lose)
			lost := func(f func() error) {
				t.Helper()
				lose.on.Store(true)
				err := f()
				lose.on.Store(false)
				if err == nil {
					t.Fatal("the reply was not lost")
				}
			}
			id := StreamID{Pool: kvcache.PoolID{Model: "m"}, WorkerRank: kvcache.WorkerRank{Worker: "w"}}
			reg := Registration{BlockSize: 16}

			lost(func() error { _, _, err := s.Register(t.Context(), id, reg); return err })
			st, created, err := s.Register(t.Context(), id, reg)
			if err != nil {
				t.Fatal(err)
			}
			if !created { // the placement's reply was lost before the registration, so this one made the stream
				t.Log("the stream had been made")
			}
			var b Batch
			b.Message(0)
			b.Store(kvcache.Device, 1, 10)
			b.Message(1)
			b.Store(kvcache.Device, 1, 10) // a second copy: applied twice there would be four
			lost(func() error { _, _, err := s.Apply(t.Context(), st, &b); return err })
			if o, seq, err := s.Apply(t.Context(), st, &b); err != nil || o != Duplicate || seq != 1 {
				t.Fatalf("%v %d %v", o, seq, err)
			}
			st.Seq = 1
			for i, want := range []int{1, 0} {
				b.Reset()
				b.Message(int64(2 + i))
				b.Remove(kvcache.Device, 10)
				if o, seq, err := s.Apply(t.Context(), st, &b); err != nil || o != Applied {
					t.Fatalf("%v %v", o, err)
				} else {
					st.Seq = seq
				}
				got, _, err := s.Lookup(t.Context(), id.Pool, []kvcache.BlockHash{1}, LookupOptions{})
				if err != nil || got.Scores[id.WorkerRank].Any != want {
					t.Fatalf("after %d removals: %+v %v", i+1, got, err)
				}
			}

			lost(func() error { _, _, err := s.Restart(t.Context(), st, -1, 0); return err })
			now, o, err := s.Restart(t.Context(), st, -1, 0)
			if err != nil || o != Stale || now.Generation <= st.Generation || now.Seq != -1 {
				t.Fatalf("%+v %v %v", now, o, err)
			}
			lost(func() error { _, err := s.Remove(t.Context(), now); return err })
			if o, err := s.Remove(t.Context(), now); err != nil || o != Stale {
				t.Fatalf("%v %v", o, err)
			}
			lost(func() error { _, _, err := s.Sweep(t.Context(), id.Pool, 10); return err })
			for more := true; more; {
				if _, more, err = s.Sweep(t.Context(), id.Pool, 10); err != nil {
					t.Fatal(err)
				}
			}
			if r, err := s.Check(t.Context(), id.Pool, false); err != nil || r.Found != 0 || r.Holders != 0 || r.Retired != 0 {
				t.Fatalf("%+v %v", r, err)
			}
		})
	}
}

func second[A, B any](_ A, b B) B { return b }
