package indexer

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// A publisher that repeats one batch for ever ends neither the session nor its own turn among the replays.
func TestReplayThatRepeatsItselfEnds(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		go func() { _, _ = io.Copy(io.Discard, c) }()
		b := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0}, "NULL"...)
		b = append(b, make([]byte, 64-len(b))...)
		ready := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00\x06"), "ROUTER"...)
		b = append(append(b, 4, byte(len(ready))), ready...)
		for { // until the session closes the connection
			if _, err := c.Write(b); err != nil {
				return
			}
			b = append([]byte{1, 0, 1, 8}, binary.BigEndian.AppendUint64(nil, 3)...)
			b = append(b, 0, 1, 'x')
		}
	}()
	s := offline(t, newStore(t), 4)
	s.reg.ReplayEndpoint = "tcp://" + l.Addr().String()
	s.ix.timing.replaySilence = 200 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	got, end, err := s.replaySession(ctx, 3)
	if ctx.Err() != nil {
		t.Fatal("the session went on for as long as the publisher repeated itself")
	}
	if len(got) != 1 || got[0].seq != 3 || end || err == nil {
		t.Errorf("got %v, end %v, error %v; want batch 3, no end and an error", got, end, err)
	}
}

// At no time are more replays under way in one process than there may be, however many streams want one.
func TestReplaysAreCapped(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	var mu sync.Mutex
	open, most := 0, 0
	crowd := make(chan struct{})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			if open++; open > most {
				most = open
			}
			if open == 3 {
				close(crowd)
			}
			mu.Unlock()
			go func() {
				select { // long enough for the others to come, if they may
				case <-crowd:
				case <-time.After(100 * time.Millisecond):
				}
				mu.Lock()
				open--
				mu.Unlock()
				_ = c.Close()
			}()
		}
	}()
	ix := newIndexer(t, Options{Store: newStore(t), Replays: 2})
	var replays sync.WaitGroup
	for i := range 5 {
		s := newStream(ix, publisher{id: store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: fmt.Sprint("w", i)}}})
		s.reg.ReplayEndpoint = "tcp://" + l.Addr().String()
		replays.Go(func() {
			if _, err := s.fetch(t.Context(), 0, replayJoin); err == nil {
				t.Error("a replay without an answer has not failed")
			}
		})
	}
	replays.Wait()
	mu.Lock()
	defer mu.Unlock()
	if most != 2 || len(ix.replaySlots) != 0 {
		t.Errorf("%d replays at once and %d places still taken, want 2 and 0", most, len(ix.replaySlots))
	}
}
