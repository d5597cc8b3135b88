package indexer

import (
	"context"
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// absorbing applies everything at no cost, so that what remains is the indexer's own work.
type absorbing struct{ *store.Store }

func (absorbing) Register(_ context.Context, id store.StreamID, r store.Registration) (store.Stream, bool, error) {
	return store.Stream{StreamID: id, Registration: r, Generation: 1, Seq: -1}, true, nil
}

func (absorbing) Apply(_ context.Context, _ store.Stream, b *store.Batch) (store.Outcome, int64, error) {
	return store.Applied, b.Last(), nil
}

// BenchmarkConsume is decoding, hashing and batching of prompts' blocks of 16 tokens, stored and later removed.
func BenchmarkConsume(b *testing.B) {
	for _, blocks := range []int{1, 8, 32, 128} {
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			r := prometheus.NewRegistry()
			ix, err := New(Options{Store: absorbing{}, Listen: "127.0.0.1:0", Registerer: r, Gatherer: r})
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = ix.Close() }()
			s := newStream(ix, publisher{id: store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}}, reg: store.Registration{BlockSize: 16}})
			if err := s.register(b.Context()); err != nil {
				b.Fatal(err)
			}
			e := wire.Event{Kind: wire.Stored, BlockSize: 16, Medium: "GPU"}
			for i := range blocks {
				e.Hashes = append(e.Hashes, kvcache.EngineHash(0x9e3779b97f4a7c15*uint64(i+1)))
				for j := range 16 {
					e.Tokens = append(e.Tokens, uint32(i*16+j)*97%128_000)
				}
			}
			gone := wire.Event{Kind: wire.Removed, Hashes: e.Hashes, Medium: "GPU"}
			messages := [2][]byte{payload(e), payload(gone)}
			b.ReportAllocs()
			seq := int64(0)
			for b.Loop() {
				if err := s.live(b.Context(), newMessage(seq, messages[seq%2])); err != nil {
					b.Fatal(err)
				}
				if err := s.flushFull(b.Context()); err != nil {
					b.Fatal(err)
				}
				seq++
			}
			b.ReportMetric(float64(blocks)*float64(b.N)/b.Elapsed().Seconds(), "blocks/s")
		})
	}
}
