package wire

import (
	"fmt"
	"testing"
)

// benchBatch is a batch of events of so many blocks of 16 tokens, as vLLM sends them today.
func benchBatch(b *testing.B, kind Kind, events, blocks int) Batch {
	rank := 0
	batch := Batch{TS: 1767225600.25, TSValid: true, Rank: &rank}
	extra, err := ListOf(make([]any, blocks)...)
	if err != nil {
		b.Fatal(err)
	}
	next := uint64(0x9e3779b97f4a7c15)
	for range events {
		e := Event{Kind: kind, Medium: "GPU", GroupIdx: Some(uint32(0))}
		for range blocks {
			next = next*6364136223846793005 + 1442695040888963407
			e.Hashes = append(e.Hashes, engineHash(next|1<<63))
		}
		if kind == Stored {
			parent := engineHash(next)
			e.Parent, e.BlockSize, e.ExtraKeys, e.SpecKind = &parent, 16, extra, "full_attention"
			for i := range blocks * 16 {
				e.Tokens = append(e.Tokens, uint32(i*7919)%150000)
			}
		}
		batch.Events = append(batch.Events, e)
	}
	return batch
}

func BenchmarkDecode(b *testing.B) {
	for _, c := range []struct {
		kind           Kind
		events, blocks int
	}{
		{Stored, 1, 1}, {Stored, 32, 1}, {Stored, 1, 64}, {Stored, 8, 512}, {Removed, 1, 1}, {Removed, 256, 1}, {Removed, 1, 256},
	} {
		batch := benchBatch(b, c.kind, c.events, c.blocks)
		for _, form := range []Form{FormMap, FormArray12} {
			payload := Encode(nil, batch, form)
			name := "map"
			if form != FormMap {
				name = "array"
			}
			b.Run(fmt.Sprintf("%v/events=%d/blocks=%d/%s", c.kind, c.events, c.blocks, name), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(len(payload)))
				for b.Loop() {
					got, err := Decode(payload)
					if err != nil || len(got.Events) != c.events {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(c.events*c.blocks)*float64(b.N)/b.Elapsed().Seconds(), "blocks/s")
			})
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	batch := benchBatch(b, Stored, 1, 64)
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		dst = Encode(dst[:0], batch, FormMap)
	}
	b.SetBytes(int64(len(dst)))
	b.ReportMetric(64*float64(b.N)/b.Elapsed().Seconds(), "blocks/s")
}
