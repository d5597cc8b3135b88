package wire

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
)

func engineHash(v uint64) kvcache.EngineHash { return kvcache.EngineHash(v) }

func hashes(v ...uint64) []kvcache.EngineHash {
	out := make([]kvcache.EngineHash, len(v))
	for i := range v {
		out[i] = kvcache.EngineHash(v[i])
	}
	return out
}

// recipe is one engine's way from a block to its digest. extra is nil for none.
type recipe struct {
	seed     func(text string) []byte // preimage of NONE_HASH
	preimage func(parent []byte, tokens []uint32, extra []string) []byte
}

// cborRecipe is canonical CBOR: array(3) of the parent's bytes, the tokens, and null or an
// array of texts.
var cborRecipe = recipe{
	seed: func(text string) []byte { return cborText(nil, text) },
	preimage: func(parent []byte, tokens []uint32, extra []string) []byte {
		b := append(cborHead([]byte{0x83}, 2, uint64(len(parent))), parent...)
		b = cborHead(b, 4, uint64(len(tokens)))
		for _, t := range tokens {
			b = cborHead(b, 0, uint64(t))
		}
		if extra == nil {
			return append(b, 0xf6)
		}
		b = cborHead(b, 4, uint64(len(extra)))
		for _, s := range extra {
			b = cborText(b, s)
		}
		return b
	},
}

func cborHead(b []byte, major byte, n uint64) []byte {
	switch {
	case n < 24:
		return append(b, major<<5|byte(n))
	case n < 1<<8:
		return append(b, major<<5|24, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, major<<5|25), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, major<<5|26), uint32(n))
}

func cborText(b []byte, s string) []byte { return append(cborHead(b, 3, uint64(len(s))), s...) }

// pickleRecipe is Python's pickle, protocol 5, of (parent, (tokens…), None or (texts…)).
var pickleRecipe = recipe{
	seed: func(text string) []byte { return pickled(pickleText(nil, text)) },
	preimage: func(parent []byte, tokens []uint32, extra []string) []byte {
		b := append([]byte{'C', byte(len(parent))}, parent...)
		b = append(b, 0x94) // each object is memoized
		b = pickleTuple(b, len(tokens), func(b []byte, i int) []byte {
			switch t := tokens[i]; {
			case t < 1<<8:
				return append(b, 'K', byte(t))
			case t < 1<<16:
				return binary.LittleEndian.AppendUint16(append(b, 'M'), uint16(t))
			default:
				return binary.LittleEndian.AppendUint32(append(b, 'J'), t)
			}
		})
		if extra == nil {
			b = append(b, 'N')
		} else {
			b = pickleTuple(b, len(extra), func(b []byte, i int) []byte { return pickleText(b, extra[i]) })
		}
		return pickled(append(b, 0x87, 0x94)) // a tuple of 3
	},
}

func pickled(body []byte) []byte {
	body = append(body, '.')
	head := binary.LittleEndian.AppendUint64([]byte{0x80, 5, 0x95}, uint64(len(body)))
	return append(head, body...)
}

func pickleText(b []byte, s string) []byte {
	return append(append(append(b, 0x8c, byte(len(s))), s...), 0x94)
}

func pickleTuple(b []byte, n int, element func(b []byte, i int) []byte) []byte {
	if n > 3 {
		b = append(b, '(')
	}
	for i := range n {
		b = element(b, i)
	}
	if n > 3 {
		return append(b, 't', 0x94)
	}
	return append(b, 0x84+byte(n), 0x94)
}

// sglangDigest is one page of SGLang's chain; previous is empty for the first.
func sglangDigest(previous []byte, tokens []uint32) []byte {
	b := slices.Clone(previous)
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	d := sha256.Sum256(b)
	return d[:]
}

type hashVector struct {
	Algo     string     `json:"algo"`
	Seed     string     `json:"seed"`
	Case     string     `json:"case"`
	Blocks   [][]uint32 `json:"blocks"`
	Extra    [][]string `json:"extra_keys"`
	None     string     `json:"none_hash"`
	Digests  []string   `json:"digests"`
	WireInt  []string   `json:"wire_int"`
	Preimage string     `json:"preimage_hex"`
}

// The recipes give the digests of the vectors, and what the engine puts on the wire for a
// digest, as an integer or as bytes, decodes to its canonical form.
func TestHashVectors(t *testing.T) {
	seen := map[string]int{}
	for _, v := range readVectors[hashVector](t, "kv-hash-vectors.json") {
		seen[v.Algo]++
		name := v.Algo + ", seed " + v.Seed + ", " + v.Case
		if v.Algo == "sglang sha256 page chain" {
			checkSGLang(t, name, v)
			continue
		}
		r := cborRecipe
		if v.Algo == "vllm sha256" {
			r = pickleRecipe
		} else if v.Algo != "vllm sha256_cbor" {
			t.Errorf("%s: no recipe", name)
			continue
		}
		none := sha256.Sum256(r.seed(v.Seed))
		if v.Preimage != "" {
			if got := hex.EncodeToString(r.preimage(none[:], []uint32{1, 2, 3, 4}, nil)); got != v.Preimage {
				t.Errorf("%s: got %s, want %s", name, got, v.Preimage)
			}
			continue
		}
		if got := hex.EncodeToString(none[:]); got != v.None {
			t.Errorf("%s: NONE_HASH: got %s, want %s", name, got, v.None)
		}
		parent := none[:]
		for i, tokens := range v.Blocks {
			d := sha256.Sum256(r.preimage(parent, tokens, v.Extra[i]))
			if got := hex.EncodeToString(d[:]); got != v.Digests[i] {
				t.Errorf("%s: block %d: got %s, want %s", name, i, got, v.Digests[i])
			}
			parent = d[:]
			wireInt, err := strconv.ParseUint(v.WireInt[i], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			checkCanonical(t, name, wireInt, wireInt, d[:])
		}
	}
	if want := []string{"sglang sha256 page chain", "vllm sha256", "vllm sha256_cbor"}; len(seen) != len(want) {
		t.Errorf("algorithms %v, want %v", seen, want)
	}
}

func checkSGLang(t *testing.T, name string, v hashVector) {
	var previous []byte
	if salt, ok := strings.CutPrefix(v.Case, "cache_salt "); ok {
		d := sha256.Sum256([]byte("sglang-cache-salt-v1\x00" + salt))
		previous = d[:]
	}
	for i, tokens := range v.Blocks {
		previous = sglangDigest(previous, tokens)
		if got := hex.EncodeToString(previous); got != v.Digests[i] {
			t.Errorf("%s: page %d: got %s, want %s", name, i, got, v.Digests[i])
		}
		signed, err := strconv.ParseInt(v.WireInt[i], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		// SGLang sends the first 8 bytes, as a signed integer.
		checkCanonical(t, name, signed, binary.BigEndian.Uint64(previous), previous[:8])
	}
}

// checkCanonical decodes a hash sent as wireInt and as digest.
func checkCanonical(t *testing.T, name string, wireInt any, want uint64, digest []byte) {
	t.Helper()
	b := mustDecode(t, encoded(t, batchOf(list(tagRemoved, list(wireInt, digest)))))
	if !slices.Equal(b.Events[0].Hashes, hashes(want, want)) || CanonicalHash(digest) != engineHash(want) {
		t.Errorf("%s: %v decodes to %v, %x to %v, want %x", name, wireInt, b.Events[0].Hashes[0], digest, b.Events[0].Hashes[1], want)
	}
}
