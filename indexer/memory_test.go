package indexer

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// agreeable is a store that takes everything and keeps of it only where each stream is, so that what memory there is
// belongs to the indexer.
type agreeable struct {
	Store
	mu      *sync.Mutex
	streams map[store.StreamID]store.Stream
}

func newAgreeable() agreeable {
	return agreeable{mu: &sync.Mutex{}, streams: map[store.StreamID]store.Stream{}}
}

func (a agreeable) Register(_ context.Context, id store.StreamID, r store.Registration) (store.Stream, bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.streams[id]; !ok {
		a.streams[id] = store.Stream{StreamID: id, Registration: r, Generation: 1, Seq: -1}
	}
	return a.streams[id], true, nil
}

func (a agreeable) Apply(_ context.Context, st store.Stream, b *store.Batch) (store.Outcome, int64, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	st.Seq = b.Last()
	a.streams[st.StreamID] = st
	return store.Applied, st.Seq, nil
}

func (a agreeable) Restart(_ context.Context, st store.Stream, seq int64, digest uint64) (store.Stream, store.Outcome, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	st.Generation++
	st.Seq, st.Digest = seq, digest
	a.streams[st.StreamID] = st
	return st, store.Applied, nil
}

func (agreeable) Touch(context.Context, store.Stream) (store.Outcome, error) {
	return store.Applied, nil
}

func (agreeable) Resolve(_ context.Context, _ store.Stream, h []kvcache.EngineHash) ([]kvcache.BlockHash, []bool, error) {
	return make([]kvcache.BlockHash, len(h)), make([]bool, len(h)), nil
}

func (a agreeable) Stream(_ context.Context, id store.StreamID) (store.Stream, bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.streams[id], true, nil
}

// churn is one engine of a fleet whose prompts never repeat.
type churn struct {
	s    *stream
	seq  uint64
	next kvcache.EngineHash // of the next block
	held []kvcache.EngineHash
}

// step publishes prompts, evictions, orphans and rubbish, and every so often begins again.
func (c *churn) step(i int) {
	if i%240 == 239 { // a restart, every two hours
		c.seq, c.held = 0, c.held[:0]
	}
	fresh := make([]kvcache.EngineHash, 64)
	for k := range fresh {
		fresh[k] = c.next
		c.next++
	}
	c.held = append(c.held, fresh...)
	events := []wire.Event{stored(nil, fresh...), stored(below(c.next+1<<40), c.next+1<<41, c.next+1<<42)}
	if len(c.held) > 2_000 {
		events = append(events, removed(c.held[:64]...))
		c.held = append(c.held[:0], c.held[64:]...)
	}
	grouped := stored(nil, c.next+1<<43)
	grouped.GroupIdx, grouped.SpecKind = wire.Opt[uint32]{Value: uint32(i), Valid: true}, "mamba"
	events = append(events, grouped)
	if i%500 == 499 {
		events = append(events, cleared)
	}
	c.s.mu.Lock()
	in := c.s.in
	c.s.mu.Unlock()
	for range 1 + i%2 { // every other message twice
		in.put(arrival{at: time.Now(), frames: [][]byte{nil, binary.BigEndian.AppendUint64(nil, c.seq), payload(events...)}})
	}
	c.seq++
	if i%100 == 99 {
		c.seq++ // a lost one
		in.put(arrival{at: time.Now(), frames: [][]byte{nil, {1}, []byte("rubbish")}})
	}
}

// sizes is what the indexer keeps, by container: every map and slice of it that events make grow.
func (ix *Indexer) sizes() map[string]int {
	n := map[string]int{"streams": len(ix.streams), "replays": len(ix.replaySlots)}
	for _, s := range ix.streams {
		n["known"] = max(n["known"], len(s.tr.known.young)+len(s.tr.known.old))
		n["orphan blocks"] = max(n["orphan blocks"], s.tr.orphans.blocks)
		n["orphans by parent"] = max(n["orphans by parent"], len(s.tr.orphans.byParent))
		n["orphans by hash"] = max(n["orphans by hash"], len(s.tr.orphans.byHash))
		n["groups"] = max(n["groups"], len(s.tr.groups))
		n["seen in a message"] = max(n["seen in a message"], len(s.tr.seen))
		n["adoptions"] = max(n["adoptions"], len(s.tr.ready))
		n["ops of a message"] = max(n["ops of a message"], len(s.tr.ops))
		n["ops of a batch"] = max(n["ops of a batch"], s.batch.Ops())
		s.mu.Lock()
		waiting, _ := s.in.size()
		s.mu.Unlock()
		n["inbox"] = max(n["inbox"], waiting)
	}
	return n
}

// 24 simulated hours of eight engines with unique prompts, evictions, orphans, gaps, restarts and clears, each engine replaced by
// one of another name every eight hours: the indexer's memory after the last hour is that after the third.
func TestMemoryIsFlatOver24Hours(t *testing.T) {
	const engines, stepTime = 8, 30 * time.Second
	synctest.Test(t, func(t *testing.T) {
		r := prometheus.NewRegistry()
		ix, err := New(Options{Store: newAgreeable(), Listen: "127.0.0.1:0", Registerer: r, Gatherer: r, Remember: 4096})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = ix.Close() }()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ix.ctx = ctx
		names := 0
		launch := func() *churn {
			id := store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: fmt.Sprint("w", names)}}
			names++
			ix.follow(publisher{id: id, reg: store.Registration{BlockSize: 4}})
			return &churn{s: ix.stream(id), next: kvcache.EngineHash(names) << 50}
		}
		var fleet [engines]*churn
		for i := range fleet {
			fleet[i] = launch()
		}
		heap := func() float64 {
			synctest.Wait()
			runtime.GC()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return float64(m.HeapAlloc) / 1e6
		}
		steps := int(24 * time.Hour / stepTime)
		var heaps []float64
		var sizes map[string]int
		begun := time.Now()
		for i := range steps {
			if i%(steps/3/engines) == steps/3/engines-1 { // one engine an hour
				at := i / (steps / 3 / engines) % engines
				ix.unfollow(fleet[at].s.id)
				fleet[at] = launch()
			}
			for _, c := range fleet {
				c.step(i)
			}
			synctest.Wait()
			time.Sleep(stepTime) // in the bubble
			if i%240 == 120 {    // an hour after the last restarts, and before the next
				heaps, sizes = append(heaps, heap()), ix.sizes()
			}
		}
		first, last := heaps[1], heaps[len(heaps)-1]
		t.Logf("heap after %v and %d workers: %.1f MB; after the third hour: %.1f MB", time.Since(begun), names, last, first)
		if last > 1.15*first+0.5 {
			t.Errorf("the heap grew: %.1f MB", heaps)
		}
		o := ix.opts
		bounds := map[string]int{
			"streams": engines, "replays": o.Replays, "known": o.Remember, "orphan blocks": o.Orphans, "orphans by parent": o.Orphans,
			"orphans by hash": o.Orphans, "groups": maxGroups, "seen in a message": 256, "adoptions": 0, "ops of a message": 256,
			"ops of a batch": 0, "inbox": 0,
		}
		for what, n := range sizes {
			if bound, ok := bounds[what]; !ok || n > bound {
				t.Errorf("%s: %d, bound %d", what, n, bound)
			}
		}
		for _, what := range []string{"known", "orphan blocks", "groups"} {
			if sizes[what] == 0 {
				t.Errorf("%s: the test fills it not at all", what)
			}
		}
		if n := counter(ix.metrics.resets, resetRestart); n == 0 {
			t.Error("no engine has restarted")
		}
		cancel()
		for _, c := range fleet {
			<-c.s.done
		}
	})
}
