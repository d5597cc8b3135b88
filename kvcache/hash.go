package kvcache

import (
	"encoding/binary"
	"slices"
	"strconv"

	"github.com/zeebo/xxh3"
)

// chainSeed is Dynamo's seed for block hashes.
const chainSeed = 1337

// BlockHash is the content hash of a whole prefix that ends in one block: the seq[i]
// of the design. It is equal on every worker.
type BlockHash uint64

// LocalHash is the content hash of one block alone, without what precedes it.
type LocalHash uint64

// EngineHash is an engine's own id of a block in its canonical 64-bit form. It means
// something only within one publisher.
type EngineHash uint64

// String is the hash as 16 lower-case hex digits, the form used everywhere.
func (h BlockHash) String() string { return string(h.AppendHex(make([]byte, 0, 16))) }

// String is the hash as 16 lower-case hex digits.
func (h LocalHash) String() string { return BlockHash(h).String() }

// String is the hash as 16 lower-case hex digits.
func (h EngineHash) String() string { return BlockHash(h).String() }

// AppendHex appends the 16 hex digits of h to b.
func (h BlockHash) AppendHex(b []byte) []byte {
	const digits = "0123456789abcdef"
	for s := 60; s >= 0; s -= 4 {
		b = append(b, digits[h>>s&15])
	}
	return b
}

// scoreBits is how many low bits of an engine hash a sorted-set score holds exactly.
const scoreBits = 53

// Score is the low 53 bits of the engine hash: the part that a Redis score, a double,
// holds exactly.
func (h EngineHash) Score() uint64 { return uint64(h) & (1<<scoreBits - 1) }

// ParseBlockHash reads 16 hex digits.
func ParseBlockHash(s string) (BlockHash, error) {
	if len(s) != 16 {
		return 0, strconv.ErrSyntax
	}
	v, err := strconv.ParseUint(s, 16, 64)
	return BlockHash(v), err
}

// HashSpec is what, beside the tokens, decides a block hash.
type HashSpec struct {
	BlockSize int    // tokens per block, at least 1
	LoRA      string // adapter name; "" means the base model
	Salt      string // cache_salt; "" means none
}

// Seed is the seed of the local hashes.
func (s HashSpec) Seed() uint64 {
	seed := uint64(chainSeed)
	if s.LoRA != "" {
		seed += xxh3.HashString(s.LoRA)
	}
	if s.Salt != "" {
		seed += xxh3.HashStringSeed(s.Salt, 1)
	}
	return seed
}

// Hasher turns a growing run of tokens into block hashes. Only full blocks are hashed; a
// partial tail waits for more tokens, so a prompt that grows is never hashed twice.
// A Hasher must not be used by two goroutines at once.
type Hasher struct {
	seed   uint64
	size   int
	tail   []byte // little-endian tokens of the block that is not full yet
	hashes []BlockHash
	parent BlockHash
	rooted bool // the next block is the first of its prompt
}

// NewHasher hashes from the first token of a prompt. A block size below 1 counts as 1.
func NewHasher(s HashSpec) *Hasher {
	size := max(s.BlockSize, 1)
	return &Hasher{seed: s.Seed(), size: size, rooted: true}
}

// NewHasherAfter hashes what follows the block whose hash is parent.
func NewHasherAfter(s HashSpec, parent BlockHash) *Hasher {
	h := NewHasher(s)
	h.parent, h.rooted = parent, false
	return h
}

// Append adds tokens without multimodal content.
func (h *Hasher) Append(tokens []uint32) {
	width := h.size * 4
	if n := (len(h.tail)/4 + len(tokens)) / h.size; cap(h.hashes)-len(h.hashes) < n {
		h.hashes = slices.Grow(h.hashes, n)
	}
	for len(tokens) > 0 {
		n := min(len(tokens), h.size-len(h.tail)/4)
		h.tail = appendTokens(h.tail, tokens[:n])
		tokens = tokens[n:]
		if len(h.tail) == width {
			h.push(LocalHash(xxh3.HashSeed(h.tail, h.seed)))
			h.tail = h.tail[:0]
		}
	}
}

// AppendBlock adds one full block together with the hashes of the multimodal inputs that
// overlap it. It reports false, and adds nothing, where len(tokens) is not the block size
// or a partial block is waiting.
func (h *Hasher) AppendBlock(tokens []uint32, mm []uint64) bool {
	if len(h.tail) != 0 || len(tokens) != h.size {
		return false
	}
	h.push(hashBlock(tokens, mm, h.seed))
	return true
}

func (h *Hasher) push(local LocalHash) {
	if h.rooted {
		h.parent, h.rooted = BlockHash(local), false
	} else {
		h.parent = ChainHash(h.parent, local)
	}
	h.hashes = append(h.hashes, h.parent)
}

// Hashes are the hashes of the full blocks so far. The slice is valid until the next Append.
func (h *Hasher) Hashes() []BlockHash { return h.hashes }

// HashTokens is the whole of [Hasher] in one call.
func HashTokens(s HashSpec, tokens []uint32) []BlockHash {
	h := NewHasher(s)
	h.Append(tokens)
	return h.hashes
}

// HashBlock is the local hash of one block: its tokens and the hashes of the multimodal
// inputs that overlap it, in any order.
func HashBlock(s HashSpec, tokens []uint32, mm []uint64) LocalHash {
	return hashBlock(tokens, mm, s.Seed())
}

func hashBlock(tokens []uint32, mm []uint64, seed uint64) LocalHash {
	b := appendTokens(make([]byte, 0, len(tokens)*4+len(mm)*8), tokens)
	if len(mm) > 0 {
		sorted := slices.Clone(mm)
		slices.Sort(sorted)
		for _, m := range sorted {
			b = binary.LittleEndian.AppendUint64(b, m)
		}
	}
	return LocalHash(xxh3.HashSeed(b, seed))
}

// ChainHash is the block hash of the block that follows parent and has the given local hash.
func ChainHash(parent BlockHash, local LocalHash) BlockHash {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:8], uint64(parent))
	binary.LittleEndian.PutUint64(b[8:], uint64(local))
	return BlockHash(xxh3.HashSeed(b[:], chainSeed))
}

// ChainLocals turns local hashes, as Dynamo's clients send them, into block hashes.
func ChainLocals(locals []LocalHash) []BlockHash {
	out := make([]BlockHash, len(locals))
	for i, l := range locals {
		if i == 0 {
			out[i] = BlockHash(l)
		} else {
			out[i] = ChainHash(out[i-1], l)
		}
	}
	return out
}

// MultimodalHash is the 64-bit form of an engine's multimodal identifier: the first 16 digits
// where it begins with 16 hex digits (engines send a hex digest), else xxh3 of the text.
func MultimodalHash(identifier string) uint64 {
	if len(identifier) >= 16 {
		if v, err := strconv.ParseUint(identifier[:16], 16, 64); err == nil {
			return v
		}
	}
	return xxh3.HashString(identifier)
}

func appendTokens(b []byte, tokens []uint32) []byte {
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return b
}
