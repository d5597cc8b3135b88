package wire

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/warmroute/warmroute/kvcache"
)

// Form is how events are written. The arrays are vLLM's, named by the length of a
// BlockStored; fields that a form has no place for are left out.
type Form int

// The forms, with the vLLM releases that wrote them.
const (
	FormMap     Form = 0  // 0.24 and later
	FormArray6  Form = 6  // 0.9.0 to 0.10.1
	FormArray7  Form = 7  // to 0.12: medium
	FormArray8  Form = 8  // to 0.15: lora_name
	FormArray9  Form = 9  // to 0.18: extra_keys
	FormArray10 Form = 10 // to 0.20: group_idx
	FormArray12 Form = 12 // to 0.23: kv_cache_spec_kind and its sliding window
)

// Encode appends a batch to dst as msgspec would write it: the shortest integers, floats of
// 64 bits, and in maps the keys in the engine's order, absent where the engine omits them.
// Each event must have one of the three kinds; Index, Tier, TokenKind and Dense are not written, since
// they follow from the rest. Of Tokens, Bigrams and TokenList the last that is not nil is
// written. Decode reads back what a form holds.
func Encode(dst []byte, b Batch, f Form) []byte {
	dst = append(dst, 0x93)
	if b.TSValid {
		dst = appendFloat(dst, b.TS)
	} else {
		dst = append(dst, 0xc0)
	}
	dst = appendArrayLen(dst, len(b.Events))
	for i := range b.Events {
		if f == FormMap {
			dst = appendEventMap(dst, &b.Events[i])
		} else {
			dst = appendEventArray(dst, &b.Events[i], int(f))
		}
	}
	if b.Rank == nil {
		return append(dst, 0xc0)
	}
	return appendInt(dst, int64(*b.Rank))
}

func appendEventArray(dst []byte, e *Event, arity int) []byte {
	switch e.Kind {
	case Removed:
		n := 2
		if arity >= 7 {
			n = 3
		}
		if arity >= 10 {
			n = 4
		}
		dst = appendStr(appendArrayLen(dst, n), tagRemoved)
		dst = appendHashes(dst, e)
		if n >= 3 {
			dst = appendOptStr(dst, e, e.Medium, fieldMedium)
		}
		if n >= 4 {
			dst = appendOptUint(dst, e.GroupIdx)
		}
		return dst
	case Cleared:
		return appendStr(append(dst, 0x91), tagCleared)
	}
	dst = appendStr(appendArrayLen(dst, arity), tagStored)
	dst = appendHashes(dst, e)
	dst = appendOptHash(dst, e.Parent)
	dst = appendTokens(dst, e)
	dst = appendInt(dst, int64(e.BlockSize))
	dst = appendLoRAID(dst, e)
	if arity >= 7 {
		dst = appendOptStr(dst, e, e.Medium, fieldMedium)
	}
	if arity >= 8 {
		dst = appendOptStr(dst, e, e.LoRAName, fieldLoRAName)
	}
	if arity >= 9 {
		dst = appendOptList(dst, e.ExtraKeys)
	}
	if arity >= 10 {
		dst = appendOptUint(dst, e.GroupIdx)
	}
	if arity >= 12 {
		dst = appendOptStr(dst, e, e.SpecKind, fieldSpecKind)
		dst = appendOptUint(dst, e.SlidingWindow)
	}
	return dst
}

func appendEventMap(dst []byte, e *Event) []byte {
	head := len(dst)
	dst = append(dst, 0xde, 0, 0) // a map of up to 65535, shortened at the end
	n := 0
	key := func(name string) {
		dst = appendStr(dst, name)
		n++
	}
	key("type")
	switch e.Kind {
	case Cleared:
		dst = appendStr(dst, tagCleared)
	case Removed:
		dst = appendStr(dst, tagRemoved)
		key("block_hashes")
		dst = appendHashes(dst, e)
		key("medium")
		dst = appendOptStr(dst, e, e.Medium, fieldMedium)
	default:
		dst = appendStr(dst, tagStored)
		key("block_hashes")
		dst = appendHashes(dst, e)
		key("parent_block_hash")
		dst = appendOptHash(dst, e.Parent)
		key("token_ids")
		dst = appendTokens(dst, e)
		key("block_size")
		dst = appendInt(dst, int64(e.BlockSize))
		key("lora_id")
		dst = appendLoRAID(dst, e)
		key("medium")
		dst = appendOptStr(dst, e, e.Medium, fieldMedium)
		key("lora_name")
		dst = appendOptStr(dst, e, e.LoRAName, fieldLoRAName)
	}
	// From here on what is absent is not written.
	str := func(s string, f field) {
		if s != "" || e.empty&(1<<f) != 0 {
			key(fieldNames[f])
			dst = appendStr(dst, s)
		}
	}
	list := func(o Opaque, f field) {
		if o != nil {
			key(fieldNames[f])
			dst = append(dst, o...)
		}
	}
	number := func(v Opt[uint32], f field) {
		if v.Valid {
			key(fieldNames[f])
			dst = appendOptUint(dst, v)
		}
	}
	if e.Kind == Stored {
		list(e.ExtraKeys, fieldExtraKeys)
		list(e.MMKeys, fieldMMKeys)
	}
	if e.Kind != Cleared {
		number(e.GroupIdx, fieldGroupIdx)
	}
	if e.Kind == Stored {
		str(e.SpecKind, fieldSpecKind)
		number(e.SlidingWindow, fieldWindow)
	}
	if e.Kind != Cleared {
		str(e.Locality, fieldLocality)
		str(e.Ownership, fieldOwnership)
	}
	if e.Kind == Stored {
		str(e.CacheSalt, fieldCacheSalt)
		str(e.SessionID, fieldSessionID)
		if s := e.Span; s != nil {
			if s.Parent != nil {
				key(fieldNames[fieldSpanParent])
				dst = appendOptHash(dst, s.Parent)
			}
			list(s.Tokens, fieldSpanTokens)
			list(s.ExtraKeys, fieldSpanExtraKeys)
		}
	}
	if n < 16 {
		dst[head] = 0x80 | byte(n)
		return append(dst[:head+1], dst[head+3:]...)
	}
	binary.BigEndian.PutUint16(dst[head+1:], uint16(n))
	return dst
}

func appendHashes(dst []byte, e *Event) []byte {
	dst = appendArrayLen(dst, len(e.Hashes))
	for i, h := range e.Hashes {
		if i < len(e.HashBytes) && e.HashBytes[i] != nil {
			dst = appendBin(dst, e.HashBytes[i])
		} else {
			dst = appendUint(dst, uint64(h))
		}
	}
	return dst
}

func appendTokens(dst []byte, e *Event) []byte {
	switch {
	case e.TokenList != nil:
		return append(dst, e.TokenList...)
	case e.Bigrams != nil:
		dst = appendArrayLen(dst, len(e.Bigrams))
		for _, p := range e.Bigrams {
			dst = append(dst, 0x92)
			dst = appendUint(appendUint(dst, uint64(p[0])), uint64(p[1]))
		}
		return dst
	}
	dst = appendArrayLen(dst, len(e.Tokens))
	for _, t := range e.Tokens {
		dst = appendUint(dst, uint64(t))
	}
	return dst
}

func appendOptHash(dst []byte, h *kvcache.EngineHash) []byte {
	if h == nil {
		return append(dst, 0xc0)
	}
	return appendUint(dst, uint64(*h))
}

func appendLoRAID(dst []byte, e *Event) []byte {
	if !e.LoRAID.Valid {
		return append(dst, 0xc0)
	}
	return appendInt(dst, e.LoRAID.Value)
}

func appendOptUint(dst []byte, v Opt[uint32]) []byte {
	if !v.Valid {
		return append(dst, 0xc0)
	}
	return appendUint(dst, uint64(v.Value))
}

func appendOptList(dst []byte, o Opaque) []byte {
	if o == nil {
		return append(dst, 0xc0)
	}
	return append(dst, o...)
}

func appendOptStr(dst []byte, e *Event, s string, f field) []byte {
	if s == "" && e.empty&(1<<f) == 0 {
		return append(dst, 0xc0)
	}
	return appendStr(dst, s)
}

// ListOf is a list for the Opaque fields of an event that is to be encoded. It takes what
// [Opaque.Values] gives, and int.
func ListOf(values ...any) (Opaque, error) {
	return appendValue(nil, values)
}

func appendValue(dst []byte, v any) ([]byte, error) {
	var err error
	switch v := v.(type) {
	case nil:
		return append(dst, 0xc0), nil
	case bool:
		if v {
			return append(dst, 0xc3), nil
		}
		return append(dst, 0xc2), nil
	case int:
		return appendInt(dst, int64(v)), nil
	case int64:
		return appendInt(dst, v), nil
	case uint64:
		return appendUint(dst, v), nil
	case float64:
		return appendFloat(dst, v), nil
	case string:
		return appendStr(dst, v), nil
	case []byte:
		return appendBin(dst, v), nil
	case []any:
		dst = appendArrayLen(dst, len(v))
		for _, e := range v {
			if dst, err = appendValue(dst, e); err != nil {
				return nil, err
			}
		}
		return dst, nil
	case Map:
		dst = appendLen(dst, len(v), 0x80, 15, 0, 0xde, 0xdf)
		for _, e := range v {
			for _, x := range [...]any{e.Key, e.Value} {
				if dst, err = appendValue(dst, x); err != nil {
					return nil, err
				}
			}
		}
		return dst, nil
	case Ext:
		dst = appendLen(dst, len(v.Data), 0, -1, 0xc7, 0xc8, 0xc9)
		return append(append(dst, byte(v.Code)), v.Data...), nil
	}
	return nil, fmt.Errorf("a list of a KV event cannot hold a %T", v)
}

func appendUint(dst []byte, v uint64) []byte {
	switch {
	case v < 0x80:
		return append(dst, byte(v))
	case v <= math.MaxUint8:
		return append(dst, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(dst, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(dst, 0xcf), v)
}

func appendInt(dst []byte, v int64) []byte {
	switch {
	case v >= 0:
		return appendUint(dst, uint64(v))
	case v >= -32:
		return append(dst, byte(v))
	case v >= math.MinInt8:
		return append(dst, 0xd0, byte(v))
	case v >= math.MinInt16:
		return binary.BigEndian.AppendUint16(append(dst, 0xd1), uint16(v))
	case v >= math.MinInt32:
		return binary.BigEndian.AppendUint32(append(dst, 0xd2), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(dst, 0xd3), uint64(v))
}

func appendFloat(dst []byte, v float64) []byte {
	return binary.BigEndian.AppendUint64(append(dst, 0xcb), math.Float64bits(v))
}

func appendStr(dst []byte, s string) []byte {
	return append(appendLen(dst, len(s), 0xa0, 31, 0xd9, 0xda, 0xdb), s...)
}

func appendBin(dst, b []byte) []byte {
	return append(appendLen(dst, len(b), 0, -1, 0xc4, 0xc5, 0xc6), b...)
}

func appendArrayLen(dst []byte, n int) []byte { return appendLen(dst, n, 0x90, 15, 0, 0xdc, 0xdd) }

// appendLen writes a head with the shortest length: in the code byte fix up to fixMax, or
// after the code byte of that width. Arrays and maps have no width of one byte (w8 is 0).
func appendLen(dst []byte, n int, fix byte, fixMax int, w8, w16, w32 byte) []byte {
	switch {
	case n <= fixMax:
		return append(dst, fix|byte(n))
	case n <= math.MaxUint8 && w8 != 0:
		return append(dst, w8, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, w16), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(dst, w32), uint32(n))
}
