package kvcache_test

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/zeebo/xxh3"
)

// vector is one line of testdata/block-hashes.json.
type vector struct {
	Name      string     `json:"name"`
	BlockSize int        `json:"block_size"`
	LoRA      string     `json:"lora"`
	Salt      string     `json:"salt"`
	Tokens    []uint32   `json:"tokens"`
	MM        [][]uint64 `json:"mm"` // per block
	Local     []string   `json:"local"`
	Block     []string   `json:"block"`
}

func vectors(t *testing.T) []vector {
	t.Helper()
	b, err := os.ReadFile("testdata/block-hashes.json")
	if err != nil {
		t.Fatal(err)
	}
	var v []vector
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestBlockHashVectors(t *testing.T) {
	for _, v := range vectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			spec := kvcache.HashSpec{BlockSize: v.BlockSize, LoRA: v.LoRA, Salt: v.Salt}
			h := kvcache.NewHasher(spec)
			var locals []kvcache.LocalHash
			for i, block := range slices.Collect(slices.Chunk(v.Tokens, v.BlockSize)) {
				if len(block) < v.BlockSize {
					h.Append(block) // a partial block adds nothing
					break
				}
				var mm []uint64
				if i < len(v.MM) {
					mm = v.MM[i]
				}
				if !h.AppendBlock(block, mm) {
					t.Fatal("a full block was refused")
				}
				locals = append(locals, kvcache.HashBlock(spec, block, mm))
			}
			for i, l := range locals {
				if l.String() != v.Local[i] {
					t.Errorf("local[%d] = %s, want %s", i, l, v.Local[i])
				}
			}
			check(t, "block by block", h.Hashes(), v.Block)
			check(t, "chained locals", kvcache.ChainLocals(locals), v.Block)
			if v.MM == nil {
				check(t, "in one call", kvcache.HashTokens(spec, v.Tokens), v.Block)
			}
		})
	}
}

func check(t *testing.T, how string, got []kvcache.BlockHash, want []string) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d hashes, want %d", how, len(got), len(want))
	}
	for i := range got {
		if got[i].String() != want[i] {
			t.Errorf("%s: block[%d] = %s, want %s", how, i, got[i], want[i])
		}
	}
}

// The golden values of the design, which equal Dynamo's.
func TestDynamoGolden(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	spec := kvcache.HashSpec{BlockSize: 4}
	for i, want := range []uint64{14643705804678351452, 16777012769546811212, 483935686894639516} {
		if got := kvcache.HashBlock(spec, tokens[i*4:i*4+4], nil); uint64(got) != want {
			t.Errorf("local[%d] = %d, want %d", i, uint64(got), want)
		}
	}
	for i, want := range []uint64{14643705804678351452, 4945711292740353085, 12583592247330656132} {
		if got := kvcache.HashTokens(spec, tokens)[i]; uint64(got) != want {
			t.Errorf("block[%d] = %d, want %d", i, uint64(got), want)
		}
	}
}

// The recipe once more, written out: what the vectors were made with.
func TestRecipe(t *testing.T) {
	tokens, mm := []uint32{7, 1 << 31, 0, 4294967295}, []uint64{9, 3}
	seed := 1337 + xxh3.HashStringSeed("adapter", 0) + xxh3.HashStringSeed("salt", 1)
	var b []byte
	for _, tok := range tokens {
		b = binary.LittleEndian.AppendUint32(b, tok)
	}
	b = binary.LittleEndian.AppendUint64(b, 3) // sorted
	b = binary.LittleEndian.AppendUint64(b, 9)
	spec := kvcache.HashSpec{BlockSize: 4, LoRA: "adapter", Salt: "salt"}
	if got, want := uint64(kvcache.HashBlock(spec, tokens, mm)), xxh3.HashSeed(b, seed); got != want {
		t.Fatalf("%x, want %x", got, want)
	}
	if !slices.Equal(mm, []uint64{9, 3}) {
		t.Fatal("the caller's slice was sorted")
	}
}

// FuzzHasher: however a prompt is cut into pieces, the hashes are the same, and they go on from a parent.
func FuzzHasher(f *testing.F) {
	f.Add([]byte("some tokens to be hashed in pieces"), uint8(3), uint8(5), "")
	f.Fuzz(func(t *testing.T, data []byte, size, cut uint8, salt string) {
		spec := kvcache.HashSpec{BlockSize: int(size)%20 + 1, Salt: salt}
		tokens := make([]uint32, len(data))
		for i, b := range data {
			tokens[i] = uint32(b) << (i % 24)
		}
		whole := kvcache.HashTokens(spec, tokens)
		if len(whole) != len(tokens)/spec.BlockSize {
			t.Fatalf("%d hashes of %d tokens", len(whole), len(tokens))
		}
		h := kvcache.NewHasher(spec)
		for piece := range slices.Chunk(tokens, int(cut)%7+1) {
			h.Append(piece)
		}
		if !slices.Equal(h.Hashes(), whole) {
			t.Fatal("in pieces the hashes differ")
		}
		if n := len(whole) / 2; n > 0 {
			h := kvcache.NewHasherAfter(spec, whole[n-1])
			h.Append(tokens[n*spec.BlockSize:])
			if !slices.Equal(h.Hashes(), whole[n:]) {
				t.Fatal("after a parent the hashes differ")
			}
		}
	})
}

func TestMultimodalHash(t *testing.T) {
	if got := kvcache.MultimodalHash("0123456789abcdef" + strings.Repeat("ff", 24)); got != 0x0123456789abcdef {
		t.Errorf("hex digest: %x", got)
	}
	if got := kvcache.MultimodalHash("image-1"); got != xxh3.HashString("image-1") {
		t.Errorf("other text: %x", got)
	}
}

func TestHashJSON(t *testing.T) {
	for text, want := range map[string]uint64{
		`"00000000000000ff"`: 255, `255`: 255, `-1`: 1<<64 - 1, `18446744073709551615`: 1<<64 - 1,
		`9007199254740993`: 9007199254740993, `"FFFFFFFFFFFFFFFF"`: 1<<64 - 1, `-9223372036854775808`: 1 << 63,
	} {
		var h kvcache.BlockHash
		if err := json.Unmarshal([]byte(text), &h); err != nil || uint64(h) != want {
			t.Errorf("%s: %d %v", text, uint64(h), err)
		}
	}
	for _, text := range []string{`"ff"`, `1.5`, `1e3`, `18446744073709551616`, `-9223372036854775809`, `"zzzzzzzzzzzzzzzz"`, `null`, `true`, `[]`} {
		var h kvcache.EngineHash
		if err := json.Unmarshal([]byte(text), &h); err == nil {
			t.Errorf("%s was taken as %d", text, uint64(h))
		}
	}
}

func TestRouterEventJSON(t *testing.T) {
	for _, text := range []string{
		`{"worker_id":"w1","event":{"event_id":3,"dp_rank":1,"data":{"stored":{"parent_hash":"0000000000000007","blocks":[{"block_hash":"0000000000000001","tokens_hash":"0000000000000002"}]}}}}`,
		`{"worker_id":"w1","storage_tier":"host_pinned","event":{"event_id":4,"dp_rank":0,"data":{"removed":{"block_hashes":["00000000000000ff"]}}}}`,
		`{"worker_id":"w1","event":{"event_id":5,"dp_rank":0,"data":"cleared"}}`,
	} {
		var e kvcache.RouterEvent
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		back, err := json.Marshal(e)
		if err != nil || string(back) != text {
			t.Errorf("%s\nbecame %s (%v)", text, back, err)
		}
	}
	var e kvcache.RouterEvent // as Dynamo writes it: numbers
	err := json.Unmarshal([]byte(`{"worker_id":17,"event":{"event_id":0,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":18446744073709551615,"tokens_hash":5}]}}}}`), &e)
	if err != nil || e.WorkerID != "17" || e.Event.Data.Stored.ParentHash != nil || uint64(e.Event.Data.Stored.Blocks[0].BlockHash) != 1<<64-1 {
		t.Errorf("%+v %v", e, err)
	}
	for _, bad := range []string{`{}`, `"other"`, `{"stored":{"blocks":[]},"removed":{"block_hashes":[]}}`, `[]`, `7`} {
		var d kvcache.EventData
		if err := json.Unmarshal([]byte(bad), &d); err == nil {
			t.Errorf("%s was taken as %+v", bad, d)
		}
	}
	if _, err := json.Marshal(kvcache.EventData{}); err == nil {
		t.Error("empty event data was written")
	}
}

func TestNames(t *testing.T) {
	for _, p := range []kvcache.PoolID{{Tenant: "default", Model: "meta-llama/Llama-3.1-8B:chat"}, {Tenant: "t", Model: "m"}} {
		if got, err := kvcache.ParsePoolID(p.String()); err != nil || got != p {
			t.Errorf("%+v became %+v, %v", p, got, err)
		}
	}
	if (kvcache.PoolID{Model: "m"}).String() != "default:m" {
		t.Error("the default tenant is not named")
	}
	for _, bad := range []string{"", "m", "t:", ":\n", "t:a\x00b", "t:" + strings.Repeat("x", 257)} {
		if _, err := kvcache.ParsePoolID(bad); err == nil {
			t.Errorf("pool %q was taken", bad)
		}
	}
	w := kvcache.WorkerRank{Worker: "10.0.0.1:8000", Rank: 7}
	if got, err := kvcache.ParseWorkerRank(w.String()); err != nil || got != w {
		t.Errorf("%v %v", got, err)
	}
	for _, bad := range []string{"", "a", "a/", "/1", "a b/1", "a/-1", "a/65536", "a/x", "a{b}/1", strings.Repeat("a", 129) + "/1"} {
		if _, err := kvcache.ParseWorkerRank(bad); err == nil {
			t.Errorf("worker rank %q was taken", bad)
		}
	}
	for tier := range kvcache.Tier(kvcache.NumTiers) {
		if got, err := kvcache.ParseTier(tier.String()); err != nil || got != tier {
			t.Errorf("tier %v: %v %v", tier, got, err)
		}
		if tier != kvcache.Predicted {
			if got, ok := kvcache.StorageTierOf(tier).Tier(); !ok || got != tier {
				t.Errorf("storage tier of %v: %v %v", tier, got, ok)
			}
		}
	}
	if _, ok := kvcache.StorageTier("External").Tier(); ok {
		t.Error("an external tier is indexed")
	}
	if _, err := kvcache.ParseTier("gpu"); err == nil {
		t.Error("tier gpu was taken")
	}
}

// BenchmarkHasher reports tokens/s for an 8k prompt and for one more turn of it.
func BenchmarkHasher(b *testing.B) {
	tokens := make([]uint32, 8192)
	for i := range tokens {
		tokens[i] = uint32(i * 7919)
	}
	spec := kvcache.HashSpec{BlockSize: 16}
	b.Run("tokens=8192/block=16", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			kvcache.HashTokens(spec, tokens)
		}
		b.ReportMetric(float64(len(tokens))*float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
	})
}
