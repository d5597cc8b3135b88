package predict

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

type index struct {
	got  []Route
	err  error
	wait chan struct{}
}

func (x *index) Predict(ctx context.Context, p kvcache.PoolID, w kvcache.WorkerRank, blocks []kvcache.BlockHash, o store.PredictOptions) (store.Outcome, error) {
	select {
	case <-x.wait:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	x.got = append(x.got, Route{p, w, blocks, o})
	return store.Applied, x.err
}

func dropped(t *testing.T, reg *prometheus.Registry) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil || len(families) != 1 {
		t.Fatal(families, err)
	}
	return families[0].GetMetric()[0].GetCounter().GetValue()
}

// Nobody waits for an index that does not answer, the queue keeps its bound, and all that was dropped is counted.
func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := &index{wait: make(chan struct{})}
		reg := prometheus.NewRegistry()
		r := New(Options{Index: x, MaxBlocks: 100, Registerer: reg})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()
		at := kvcache.WorkerRank{Worker: "w1", Rank: 1}
		for range 20 {
			r.Record(Route{Pool: kvcache.PoolID{Model: "m"}, At: at, Blocks: make([]kvcache.BlockHash, 10)})
		}
		r.Record(Route{Blocks: make([]kvcache.BlockHash, 101)})
		r.Record(Route{}) // nothing to record
		synctest.Wait()
		if n := r.blocks.Load(); n != 100 {
			t.Errorf("%d blocks in the queue", n)
		}
		if n := dropped(t, reg); n != 11 {
			t.Errorf("%v dropped", n)
		}
		close(x.wait)
		synctest.Wait()
		if len(x.got) != 10 || x.got[9].At != at || len(x.got[9].Blocks) != 10 || r.blocks.Load() != 0 {
			t.Errorf("%d recorded, %d blocks left", len(x.got), r.blocks.Load())
		}
		x.err = errors.New("no")
		r.Record(Route{Blocks: make([]kvcache.BlockHash, 1)})
		synctest.Wait()
		if n := dropped(t, reg); n != 12 {
			t.Errorf("%v dropped after a failure", n)
		}
		cancel()
		<-done
	})
}
