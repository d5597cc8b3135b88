package sim

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
)

func TestEncodingOfEveryVersion(t *testing.T) {
	parent := kvcache.EngineHash(1<<64 - 1)
	events := []event{
		{kind: removed, hashes: []kvcache.EngineHash{5}},
		{kind: stored, hashes: []kvcache.EngineHash{0, 200}, parent: &parent, tokens: numbers(0, 8), lora: adapter{"ad", 2}, extra: [][]string{{"ad"}, {"ad"}}},
		{kind: stored, hashes: []kvcache.EngineHash{300}, tokens: numbers(100000, 4), extra: [][]string{nil}},
		{kind: cleared},
	}
	for arity, want := range map[int][4]int{6: {2, 6, 6, 1}, 7: {3, 7, 7, 1}, 8: {3, 8, 8, 1}, 9: {3, 9, 9, 1}, 10: {4, 10, 10, 1}, 12: {4, 12, 12, 1}, 0: {4, 11, 11, 1}} {
		w := eventWriter{encoding: EncodingArray, arity: arity, blockSize: 4, rank: 3}
		if arity == 0 {
			w.encoding = EncodingMap
		}
		payload, err := w.encode(time.UnixMilli(1500), events)
		if err != nil {
			t.Fatal(err)
		}
		b := decode(t, payload)
		if b.ts != 1.5 || b.rank != 3 || len(b.events) != 4 {
			t.Fatalf("arity %d: batch %+v", arity, b)
		}
		for i, e := range b.events {
			if e.fields != want[i] {
				t.Errorf("arity %d: event %d has %d fields, want %d", arity, i, e.fields, want[i])
			}
		}
		s := b.events[1]
		if *s.parent != uint64(parent) || !slices.Equal(s.hashes, []uint64{0, 200}) || !slices.Equal(s.tokens, numbers(0, 8)) || s.blockSize != 4 || *s.loraID != 2 {
			t.Errorf("arity %d: stored event %+v", arity, s)
		}
		if (arity == 0 || arity >= 8) != (s.loraName == "ad") || (arity == 0 || arity >= 7) != (s.medium == "GPU") {
			t.Errorf("arity %d: adapter %q, medium %q", arity, s.loraName, s.medium)
		}
		if (arity == 0 || arity >= 10) != (b.events[0].groupIdx != nil) {
			t.Errorf("arity %d: group of the removal: %v", arity, b.events[0].groupIdx)
		}
	}
}

// The bytes of the annotated example in the wire specification.
func TestEncodingIsMsgspecs(t *testing.T) {
	w := eventWriter{encoding: EncodingMap, blockSize: 4}
	got, err := w.encode(time.Unix(1767225600, 250e6), []event{{kind: removed, hashes: []kvcache.EngineHash{0xdab9f1d3c5a70040}}, {kind: cleared}})
	if err != nil {
		t.Fatal(err)
	}
	want := "\x93\xcb\x41\xda\x55\x6e\x40\x10\x00\x00\x92\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\xcf\xda\xb9\xf1\xd3\xc5\xa7\x00\x40\xa6medium\xa3GPU\xa9group_idx\x00\x81\xa4type\xb0AllBlocksCleared\x00"
	if !bytes.Equal(got, []byte(want)) {
		t.Errorf("got  %x\nwant %x", got, want)
	}
}

// Whatever a busy engine does, its live stream and its replay both lead to what it holds.
func TestStreamReplaysToResidentSet(t *testing.T) {
	for _, o := range []Options{
		{Encoding: EncodingMap},
		{Encoding: EncodingArray, ReplayLayout: 1, Topic: "kv@sim"},
		{Duplicates: true, Ranks: 2},
	} {
		t.Run(fmt.Sprintf("%s dup=%v ranks=%d", o.Encoding, o.Duplicates, o.Ranks), func(t *testing.T) {
			o.Model, o.LoRAs = "base", []string{"ad"}
			o.BlockSize, o.Blocks, o.PrefillChunk = 4, 60, 16
			e := startEngine(t, o)
			var subs []*peer
			for rank := range max(o.Ranks, 1) {
				subs = append(subs, subscribe(t, e, rank, o.Topic))
			}
			var clients sync.WaitGroup
			for c := range 4 {
				clients.Go(func() {
					rng := rand.New(rand.NewPCG(5, uint64(c)))
					for range 40 {
						body := object{
							"prompt": append(numbers(1000*rng.IntN(4), 1+rng.IntN(60)), numbers(rng.IntN(3), 1+rng.IntN(20))...), "max_tokens": 1 + rng.IntN(20),
							"model": []string{"base", "ad"}[rng.IntN(2)],
						}
						if rng.IntN(3) == 0 {
							body["cache_salt"] = "pepper"
						}
						res, err := client.Do(request(t, "POST", e.URL()+"/v1/completions", body))
						if err != nil || res.StatusCode != 200 {
							t.Errorf("request failed: %v, %v", res, err)
							return
						}
						res.Body.Close()
					}
				})
			}
			clients.Wait()
			for rank, sub := range subs {
				resident := e.Resident(rank)
				if len(resident) < 30 {
					t.Errorf("rank %d holds only %d blocks", rank, len(resident))
				}
				live, last := newFollower(), e.LastSeq(rank)
				for n := int64(0); n <= last; n++ {
					seq, b := sub.live()
					if seq != uint64(n) || b.rank != rank {
						t.Fatalf("batch %d of rank %d, want %d of %d", seq, b.rank, n, rank)
					}
					live.apply(t, b)
				}
				live.want(t, resident)

				again := newFollower()
				seqs, batches := replay(t, e, rank, 0)
				for i, b := range batches {
					if seqs[i] != uint64(i) {
						t.Fatalf("replay gives %d at %d", seqs[i], i)
					}
					again.apply(t, b)
				}
				again.want(t, resident)
			}
		})
	}
}

func TestReplayWindow(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4, BufferSteps: 5})
	for i := range 12 {
		complete(t, e, numbers(1000*i, 4), 1)
	}
	for _, c := range []struct {
		start       uint64
		first, last uint64
		n           int
	}{{0, 7, 11, 5}, {7, 7, 11, 5}, {9, 9, 11, 3}, {12, 0, 0, 0}, {1<<64 - 2, 0, 0, 0}} {
		seqs, _ := replay(t, e, 0, c.start)
		if len(seqs) != c.n || c.n > 0 && (seqs[0] != c.first || seqs[c.n-1] != c.last) {
			t.Errorf("replay from %d: %v", c.start, seqs)
		}
	}
}

func TestDroppedBatches(t *testing.T) {
	for _, burnt := range []bool{false, true} {
		t.Run(fmt.Sprint(burnt), func(t *testing.T) {
			e := startEngine(t, Options{BlockSize: 4})
			sub := subscribe(t, e, 0, "")
			complete(t, e, numbers(0, 4), 1)
			if err := e.DropEvents(0, 2, burnt); err != nil {
				t.Fatal(err)
			}
			for i := range 3 {
				complete(t, e, numbers(1000+100*i, 4), 1)
			}
			first, _ := sub.live()
			second, _ := sub.live()
			if first != 0 || second != 3 {
				t.Errorf("live batches %d and %d, want 0 and 3", first, second)
			}
			want := []uint64{0, 1, 2, 3}
			if burnt {
				want = []uint64{0, 3}
			}
			if got, _ := replay(t, e, 0, 0); !slices.Equal(got, want) {
				t.Errorf("replay gives %v, want %v", got, want)
			}
		})
	}
	e := startEngine(t, Options{})
	if e.DropEvents(1, 1, false) == nil || e.DropEvents(-2, 1, false) == nil {
		t.Error("a rank that is not there was taken")
	}
}

// reset_prefix_cache leaves its event to the next step; ClearCache does not.
func TestClearedEvents(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4})
	sub := subscribe(t, e, 0, "")
	complete(t, e, numbers(0, 8), 1)
	sub.live()
	if status, _, _ := call(t, "POST", e.URL()+"/reset_prefix_cache", nil); status != 200 {
		t.Fatalf("status %d", status)
	}
	if len(e.Resident(0)) != 0 || e.LastSeq(0) != 0 {
		t.Fatalf("%d blocks, last batch %d; want an empty cache and no batch yet", len(e.Resident(0)), e.LastSeq(0))
	}
	if cached := complete(t, e, numbers(0, 9), 1); cached != 0 {
		t.Errorf("%d tokens cached after the reset", cached)
	}
	if _, b := sub.live(); len(b.events) != 2 || b.events[0].tag != "AllBlocksCleared" || b.events[1].tag != "BlockStored" {
		t.Errorf("the next step's batch: %+v", b.events)
	}
	if err := e.ClearCache(-1); err != nil {
		t.Fatal(err)
	}
	if seq, b := sub.live(); seq != 2 || len(b.events) != 1 || b.events[0].tag != "AllBlocksCleared" {
		t.Errorf("batch %d: %+v", seq, b.events)
	}
}

// One step gives one batch: a chunk of the prompt, or a token that fills a block.
func TestBatchPerStep(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4, PrefillChunk: 10})
	complete(t, e, numbers(0, 25), 9) // chunks end at 10, 20, 25; decode fills blocks at 28 and 32
	var stored []int
	_, batches := replay(t, e, 0, 0)
	for _, b := range batches {
		if len(b.events) != 1 {
			t.Fatalf("a batch of %d events", len(b.events))
		}
		stored = append(stored, len(b.events[0].hashes))
	}
	if want := []int{2, 3, 1, 1, 1}; !slices.Equal(stored, want) {
		t.Errorf("blocks stored per batch %v, want %v", stored, want)
	}
}
