package wire

import (
	"strings"

	"github.com/warmroute/warmroute/kvcache"
)

// Batch is one decoded payload: what one scheduler step of one engine rank reported.
type Batch struct {
	TS      float64   // publisher's clock, seconds since 1970; only for lag metrics
	TSValid bool      // false where the publisher sent none, or NaN or an infinity
	Rank    *int      // data-parallel rank, 0 to 65535; nil where the producer does not send it
	Events  []Event   // the events that decoded, in the publisher's order
	Skipped []Skipped // the events that did not, in the publisher's order
}

// Skipped is one event that was left out of its batch.
type Skipped struct {
	Index int32 // position in the batch as sent
	Code  Code  // why
	Kind  Kind  // what its tag said that it was; [Unknown] if the tag is not known or missing
}

// Removal reports that what was lost is known to be a removal or a clear: the index may now
// name blocks that are gone.
func (s Skipped) Removal() bool { return s.Kind == Removed || s.Kind == Cleared }

// Kind is what an event says happened.
type Kind uint8

// The kinds of events. Unknown occurs only in [Skipped].
const (
	Unknown Kind = iota
	Stored       // BlockStored: blocks are now held
	Removed      // BlockRemoved: one copy of each block is gone
	Cleared      // AllBlocksCleared: the rank's whole cache is gone
)

// String is stored, removed, cleared or unknown.
func (k Kind) String() string {
	switch k {
	case Stored:
		return "stored"
	case Removed:
		return "removed"
	case Cleared:
		return "cleared"
	}
	return "unknown"
}

// TokenKind says what the elements of token_ids were.
type TokenKind uint8

// The token kinds.
const (
	NoTokens     TokenKind = iota // an empty list: a location update without content
	SingleTokens                  // plain ids, in Event.Tokens
	BigramTokens                  // pairs (EAGLE), in Event.Bigrams
	TextTokens                    // strings (TensorRT-LLM placeholders), in Event.TokenList
	MixedTokens                   // several of these, in Event.TokenList
)

// String is none, single, bigram, text or mixed.
func (k TokenKind) String() string {
	return [...]string{"none", "single", "bigram", "text", "mixed"}[min(k, MixedTokens)]
}

// Opt is a value that a producer may leave out.
type Opt[T any] struct {
	Value T
	Valid bool
}

// Some is a value that is there.
func Some[T any](v T) Opt[T] { return Opt[T]{Value: v, Valid: true} }

// Event is one change of one rank's cache. Which fields matter depends on Kind: a stored
// event may have all, a removed event has Hashes, HashBytes, Medium, Tier, GroupIdx,
// Locality and Ownership, a cleared event has none. Empty strings mean that the producer
// sent nothing.
type Event struct {
	Kind  Kind
	Index int32 // position in the batch as sent

	// Hashes are the engine's ids of consecutive blocks, in their canonical 64 bits: the
	// integer's low 64 bits, or the last 8 bytes of a binary hash, big-endian.
	Hashes []kvcache.EngineHash
	// HashBytes holds the whole binary hashes, aligned with Hashes; nil elements were
	// integers. It is nil where all were. Read-only: it is the payload's memory.
	HashBytes [][]byte
	// Parent is the block before Hashes[0]; nil where Hashes[0] begins a prompt. 0 is a
	// hash like any other.
	Parent *kvcache.EngineHash

	TokenKind TokenKind
	Tokens    []uint32    // of single tokens
	Bigrams   [][2]uint32 // of bigrams
	TokenList Opaque      // of text and mixed tokens: the list as it came
	BlockSize int         // tokens per listed block; 0 in location updates
	// Dense says that the tokens are exactly BlockSize per hash, so that block i has
	// tokens i·BlockSize to (i+1)·BlockSize. Where it is false, tokens must not be sliced.
	Dense bool

	Medium string // storage medium as sent; see Tier
	Tier   Tier   // what Medium means

	LoRAID    Opt[int64] // the engine's number of the adapter, differs per worker
	LoRAName  string     // adapter name
	CacheSalt string     // SGLang's cache salt
	SessionID string     // the request's session, not an owner of the block
	ExtraKeys Opaque     // per block: adapter name, multimodal items, salt; nil where not sent
	MMKeys    Opaque     // TensorRT-LLM's multimodal keys per block; nil where not sent

	GroupIdx      Opt[uint32] // KV-cache group of a hybrid model
	SpecKind      string      // kv_cache_spec_kind, such as full_attention
	SlidingWindow Opt[uint32] // kv_cache_spec_sliding_window, tokens

	Locality  string // LOCAL, REMOTE or ""; see Local
	Ownership string // secondary offload tier that generated the event

	Span *SkippedSpan // vLLM's skipped_* fields; nil where none was sent

	empty uint16 // bits of the string fields that were sent as ""
}

// SkippedSpan is the context of blocks that vLLM left out between Parent and the event's
// first block.
type SkippedSpan struct {
	Parent    *kvcache.EngineHash // skipped_parent_block_hash
	Tokens    Opaque              // skipped_token_ids
	ExtraKeys Opaque              // skipped_extra_keys
}

// NumTokens is the length of token_ids, whatever its kind.
func (e *Event) NumTokens() int {
	switch {
	case e.TokenList != nil:
		n, _, _ := arrayLen(e.TokenList, 0)
		return n
	case e.Bigrams != nil:
		return len(e.Bigrams)
	}
	return len(e.Tokens)
}

// BlockTokens appends the token ids of block i to dst, for a dense event of single tokens
// or of bigrams (the first element of each pair: the token at that position). For any other
// event it appends nothing.
func (e *Event) BlockTokens(dst []uint32, i int) []uint32 {
	if !e.Dense || i < 0 || i >= len(e.Hashes) {
		return dst
	}
	from, to := i*e.BlockSize, (i+1)*e.BlockSize
	switch e.TokenKind {
	case SingleTokens:
		return append(dst, e.Tokens[from:to]...)
	case BigramTokens:
		for _, p := range e.Bigrams[from:to] {
			dst = append(dst, p[0])
		}
	}
	return dst
}

// Local reports that the event is about this worker's own cache. One with any other
// locality than LOCAL or none must be dropped.
func (e *Event) Local() bool {
	return e.Locality == "LOCAL" || e.Locality == "" && e.empty&(1<<fieldLocality) == 0
}

// PrefixIndexable reports that the event's KV-cache group can be indexed by prefix: full,
// MLA or sink attention, or, where the producer names no kind, group 0 or none. A removal
// names no kind: the kind that a stored event of the same group named decides there.
func (e *Event) PrefixIndexable() bool {
	switch e.SpecKind {
	case "full_attention", "mla_attention", "sink_full_attention":
		return true
	case "":
		return !e.GroupIdx.Valid || e.GroupIdx.Value == 0
	}
	return false
}

// Tier is the class of storage that an event's medium names.
type Tier uint8

// The tiers of the wire. Blocks of the external and the unknown tier are not indexed.
const (
	TierGPU Tier = iota
	TierCPU
	TierDisk
	TierExternal
	TierUnknown
)

// String is gpu, cpu, disk, external or unknown.
func (t Tier) String() string {
	return [...]string{"gpu", "cpu", "disk", "external", "unknown"}[min(t, TierUnknown)]
}

// Cache is the tier of the index; false where blocks there are not indexed.
func (t Tier) Cache() (kvcache.Tier, bool) {
	switch t {
	case TierGPU:
		return kvcache.Device, true
	case TierCPU:
		return kvcache.Host, true
	case TierDisk:
		return kvcache.Disk, true
	}
	return 0, false
}

// TierOf is the tier that a medium names, in any case of letters. A name that is not known
// is [TierUnknown], never the GPU.
func TierOf(medium string) Tier {
	switch strings.ToUpper(medium) {
	case "GPU":
		return TierGPU
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		return TierCPU
	case "CPU_TIER2", "DISK", "STORAGE":
		return TierDisk
	case "EXTERNAL":
		return TierExternal
	}
	return TierUnknown
}
