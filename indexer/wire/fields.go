package wire

import (
	"encoding/binary"
	"math"
	"unicode/utf8"

	"github.com/warmroute/warmroute/kvcache"
)

// maxHashBytes is the longest binary hash that is accepted.
const maxHashBytes = 4096

func (d *decoder) removed(e *Event, at *spans) Code {
	if at[fieldHashes] == 0 {
		return fieldHashes.code(missingField)
	}
	if code := d.blockHashes(e, int(at[fieldHashes])); code != 0 {
		return code
	}
	if code := d.placement(e, at); code != 0 {
		return code
	}
	return d.optUint32(&e.GroupIdx, at, fieldGroupIdx)
}

// placement reads what stored and removed events say about where their blocks are.
func (d *decoder) placement(e *Event, at *spans) Code {
	if code := d.optString(e, &e.Medium, at, fieldMedium); code != 0 {
		return code
	}
	if e.Medium != "" || e.empty&(1<<fieldMedium) != 0 {
		e.Tier = TierOf(e.Medium)
	}
	if code := d.optString(e, &e.Locality, at, fieldLocality); code != 0 {
		return code
	}
	return d.optString(e, &e.Ownership, at, fieldOwnership)
}

func (d *decoder) stored(e *Event, at *spans) Code {
	for _, f := range [...]field{fieldHashes, fieldTokens, fieldBlockSize} {
		if at[f] == 0 {
			return f.code(missingField)
		}
	}
	if code := d.blockHashes(e, int(at[fieldHashes])); code != 0 {
		return code
	}
	if code := d.tokenIDs(e, int(at[fieldTokens])); code != 0 {
		return code
	}
	size, ok := uintAt(d.b, int(at[fieldBlockSize]), math.MaxInt32)
	if !ok {
		return fieldBlockSize.code(fieldType)
	}
	e.BlockSize = int(size)
	if n := e.NumTokens(); n > 0 && size > 0 {
		e.Dense = uint64(n) == size*uint64(len(e.Hashes))
	}
	if code := d.optHash(&e.Parent, at, fieldParent); code != 0 {
		return code
	}
	if code := d.placement(e, at); code != 0 {
		return code
	}
	for _, s := range [...]struct {
		to *string
		f  field
	}{
		{&e.LoRAName, fieldLoRAName}, {&e.CacheSalt, fieldCacheSalt},
		{&e.SessionID, fieldSessionID}, {&e.SpecKind, fieldSpecKind},
	} {
		if code := d.optString(e, s.to, at, s.f); code != 0 {
			return code
		}
	}
	if code := d.optList(&e.ExtraKeys, at, fieldExtraKeys); code != 0 {
		return code
	}
	if code := d.optList(&e.MMKeys, at, fieldMMKeys); code != 0 {
		return code
	}
	if code := d.optUint32(&e.GroupIdx, at, fieldGroupIdx); code != 0 {
		return code
	}
	if code := d.optUint32(&e.SlidingWindow, at, fieldWindow); code != 0 {
		return code
	}
	if pos := int(at[fieldLoRAID]); pos != 0 {
		// Advisory: whatever is no int64 counts as absent.
		if v, negative, ok := intAt(d.b, pos); ok && (negative || v <= math.MaxInt64) {
			e.LoRAID = Some(int64(v))
		}
	}
	return d.span(e, at)
}

func (d *decoder) span(e *Event, at *spans) Code {
	if at[fieldSpanParent]|at[fieldSpanTokens]|at[fieldSpanExtraKeys] == 0 {
		return 0
	}
	s := new(SkippedSpan)
	if code := d.optHash(&s.Parent, at, fieldSpanParent); code != 0 {
		return code
	}
	if code := d.optList(&s.Tokens, at, fieldSpanTokens); code != 0 {
		return code
	}
	if s.Tokens != nil {
		if _, code := tokenKind(d.b, int(at[fieldSpanTokens]), fieldSpanTokens); code != 0 {
			return code
		}
	}
	if code := d.optList(&s.ExtraKeys, at, fieldSpanExtraKeys); code != 0 {
		return code
	}
	if s.Parent != nil || s.Tokens != nil || s.ExtraKeys != nil {
		e.Span = s
	}
	return 0
}

func (d *decoder) blockHashes(e *Event, pos int) Code {
	n, pos, ok := arrayLen(d.b, pos)
	if !ok {
		return fieldHashes.code(fieldType)
	}
	e.Hashes = d.hashes.take(n, min((n+1)*d.left, len(d.b)-pos))
	for i := range e.Hashes {
		h, digest, code := hashAt(d.b, pos, fieldHashes)
		if code != 0 {
			return code
		}
		e.Hashes[i] = h
		if digest != nil {
			if e.HashBytes == nil {
				e.HashBytes = make([][]byte, n)
			}
			e.HashBytes[i] = digest
		}
		pos = skip(d.b, pos)
	}
	return 0
}

func (d *decoder) optHash(to **kvcache.EngineHash, at *spans, f field) Code {
	pos := int(at[f])
	if pos == 0 || isNil(d.b, pos) {
		return 0
	}
	h, _, code := hashAt(d.b, pos, f)
	if code == 0 {
		*to = &d.hashes.take(1, d.left)[0]
		**to = h
	}
	return code
}

// hashAt is a hash in its canonical 64 bits, and its bytes if it is binary.
func hashAt(b []byte, pos int, f field) (kvcache.EngineHash, []byte, Code) {
	if v, _, ok := intAt(b, pos); ok {
		return kvcache.EngineHash(v), nil, 0
	}
	digest, ok := binAt(b, pos)
	if !ok {
		return 0, nil, f.code(fieldType)
	}
	if len(digest) == 0 || len(digest) > maxHashBytes {
		return 0, nil, f.code(hashLength)
	}
	return CanonicalHash(digest), digest, 0
}

// CanonicalHash is the 64-bit form of a binary engine hash: its last 8 bytes, big-endian, or
// all of them where it is shorter. It equals what vLLM sends where it sends integers.
func CanonicalHash(digest []byte) kvcache.EngineHash {
	if len(digest) >= 8 {
		return kvcache.EngineHash(binary.BigEndian.Uint64(digest[len(digest)-8:]))
	}
	var h kvcache.EngineHash
	for _, c := range digest {
		h = h<<8 | kvcache.EngineHash(c)
	}
	return h
}

func (d *decoder) tokenIDs(e *Event, pos int) Code {
	n, first, ok := arrayLen(d.b, pos)
	if !ok {
		return fieldTokens.code(fieldType)
	}
	if n == 0 {
		return 0
	}
	if d.singleTokens(e, n, first) {
		return 0
	}
	kind, code := tokenKind(d.b, pos, fieldTokens)
	if code != 0 {
		return code
	}
	e.TokenKind = kind
	if kind != BigramTokens {
		e.TokenList = opaqueAt(d.b, pos)
		return 0
	}
	e.Bigrams = make([][2]uint32, n)
	pos = first
	for i := range e.Bigrams {
		pos++ // the pair's head: tokenKind accepts it in any width
		if c := d.b[pos-1]; c == 0xdc {
			pos += 2
		} else if c == 0xdd {
			pos += 4
		}
		for j := range 2 {
			v, _ := uintAt(d.b, pos, math.MaxUint32)
			e.Bigrams[i][j] = uint32(v)
			pos = skip(d.b, pos)
		}
	}
	return 0
}

// singleTokens reads a list of plain ids; false where it is anything else.
func (d *decoder) singleTokens(e *Event, n, pos int) bool {
	b := d.b
	if _, _, ok := intAt(b, pos); !ok {
		return false
	}
	tokens := d.tokens.take(n, min(n*d.left, len(b)-pos))
	for i := range tokens {
		switch c := b[pos]; {
		case c < 0x80:
			tokens[i] = uint32(c)
			pos++
		case c == 0xcd:
			tokens[i] = uint32(binary.BigEndian.Uint16(b[pos+1:]))
			pos += 3
		case c == 0xce:
			tokens[i] = binary.BigEndian.Uint32(b[pos+1:])
			pos += 5
		default:
			v, ok := uintAt(b, pos, math.MaxUint32)
			if !ok {
				return false
			}
			tokens[i] = uint32(v)
			pos = skip(b, pos)
		}
	}
	e.TokenKind, e.Tokens = SingleTokens, tokens
	return true
}

// tokenKind checks every element of the list of tokens at pos.
func tokenKind(b []byte, pos int, f field) (TokenKind, Code) {
	kind := NoTokens
	n, pos, _ := arrayLen(b, pos)
	for range n {
		k, code := tokenAt(b, pos, f)
		if code != 0 {
			return 0, code
		}
		if kind == NoTokens {
			kind = k
		} else if kind != k {
			kind = MixedTokens
		}
		pos = skip(b, pos)
	}
	return kind, 0
}

func tokenAt(b []byte, pos int, f field) (TokenKind, Code) {
	if text, ok := strAt(b, pos); ok {
		if !utf8.Valid(text) {
			return 0, f.code(invalidUTF8)
		}
		return TextTokens, 0
	}
	kind, n := SingleTokens, 1
	if size, first, ok := arrayLen(b, pos); ok {
		if size != 2 {
			return 0, f.code(fieldType)
		}
		kind, n, pos = BigramTokens, 2, first
	}
	for range n {
		v, negative, ok := intAt(b, pos)
		if !ok {
			return 0, f.code(fieldType)
		}
		if negative || v > math.MaxUint32 {
			return 0, f.code(tokenRange)
		}
		pos = skip(b, pos)
	}
	return kind, 0
}

func (d *decoder) optUint32(to *Opt[uint32], at *spans, f field) Code {
	pos := int(at[f])
	if pos == 0 || isNil(d.b, pos) {
		return 0
	}
	v, ok := uintAt(d.b, pos, math.MaxUint32)
	if !ok {
		return f.code(fieldType)
	}
	*to = Some(uint32(v))
	return 0
}

func (d *decoder) optList(to *Opaque, at *spans, f field) Code {
	pos := int(at[f])
	if pos == 0 || isNil(d.b, pos) {
		return 0
	}
	if _, _, ok := arrayLen(d.b, pos); !ok {
		return f.code(fieldType)
	}
	*to = opaqueAt(d.b, pos)
	return 0
}

func (d *decoder) optString(e *Event, to *string, at *spans, f field) Code {
	pos := int(at[f])
	if pos == 0 || isNil(d.b, pos) {
		return 0
	}
	s, ok := strAt(d.b, pos)
	if !ok {
		return f.code(fieldType)
	}
	if len(s) == 0 {
		e.empty |= 1 << f
		return 0
	}
	if !utf8.Valid(s) {
		return f.code(invalidUTF8)
	}
	*to = d.copied(s)
	return 0
}

// copied is s as a string that outlives the payload, without an allocation for the values
// that nearly every event has.
func (d *decoder) copied(s []byte) string {
	switch string(s) {
	case "GPU":
		return "GPU"
	case "CPU":
		return "CPU"
	case "CPU_PINNED":
		return "CPU_PINNED"
	case "STORAGE":
		return "STORAGE"
	case "full_attention":
		return "full_attention"
	case "sliding_window":
		return "sliding_window"
	case d.last:
		return d.last
	}
	d.last = string(s)
	return d.last
}

// arena hands out slices of one allocation, so that a batch of many small events costs few.
type arena[T any] struct {
	free []T
}

// arenaChunk is the most elements that are allocated ahead.
const arenaChunk = 1024

// take gives n elements; hint is how many may be asked for in all from here on.
func (a *arena[T]) take(n, hint int) []T {
	if n == 0 {
		return []T{}
	}
	if n > len(a.free) {
		if n > arenaChunk/2 {
			return make([]T, n) // its own, and what is free stays
		}
		a.free = make([]T, max(n, min(hint, arenaChunk)))
	}
	s := a.free[:n:n]
	a.free = a.free[n:]
	return s
}
