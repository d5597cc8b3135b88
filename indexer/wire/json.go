package wire

import (
	"encoding/hex"
	"encoding/json"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/warmroute/warmroute/kvcache"
)

// JSON is the batch in the form of the test vectors:
//
//	{"ts":…, "dp_rank":…, "events":[{"type":"stored","hashes":["<16 hex digits>"],…}],
//	 "skipped":[{"index":…, "error":"<code>"}]}
//
// Optional fields appear only where they were sent. Values that JSON has no form for are
// {"$bin":"<hex>"}, {"$map":[[key,value],…]}, {"$ext":code,"data":"<hex>"}, and, for text
// that is not UTF-8 and numbers that are not finite, {"$str":"<hex>"} and {"$float":"<text>"}.
func (b Batch) JSON() []byte {
	dst := append([]byte(nil), `{"ts":`...)
	if b.TSValid {
		dst = appendJSONFloat(dst, b.TS)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"dp_rank":`...)
	if b.Rank != nil {
		dst = strconv.AppendInt(dst, int64(*b.Rank), 10)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"events":[`...)
	for i := range b.Events {
		dst = b.Events[i].appendJSON(comma(dst, i))
	}
	dst = append(dst, `],"skipped":[`...)
	for i, s := range b.Skipped {
		dst = append(comma(dst, i), `{"index":`...)
		dst = strconv.AppendInt(dst, int64(s.Index), 10)
		dst = append(dst, `,"error":"`...)
		dst = append(append(dst, s.Code.String()...), `"}`...)
	}
	return append(dst, "]}"...)
}

func comma(dst []byte, i int) []byte {
	if i > 0 {
		return append(dst, ',')
	}
	return dst
}

func (e *Event) appendJSON(dst []byte) []byte {
	key := func(name string) {
		dst = append(append(append(dst, `,"`...), name...), `":`...)
	}
	dst = append(append(append(dst, `{"type":"`...), e.Kind.String()...), '"')
	if e.Kind == Cleared {
		return append(dst, '}')
	}
	key("hashes")
	dst = append(dst, '[')
	for i, h := range e.Hashes {
		dst = appendJSONHash(comma(dst, i), &h)
	}
	dst = append(dst, ']')
	if e.HashBytes != nil {
		key("hash_bytes")
		dst = append(dst, '[')
		for i, h := range e.HashBytes {
			if dst = comma(dst, i); h == nil {
				dst = append(dst, "null"...)
			} else {
				dst = appendJSONHex(dst, h)
			}
		}
		dst = append(dst, ']')
	}
	key("tier")
	dst = appendJSONString(dst, e.Tier.String())
	if e.Kind == Stored {
		key("parent")
		dst = appendJSONHash(dst, e.Parent)
		key("tokens")
		dst = e.appendJSONTokens(dst)
		key("token_kind")
		dst = appendJSONString(dst, e.TokenKind.String())
		key("block_size")
		dst = strconv.AppendInt(dst, int64(e.BlockSize), 10)
		key("dense")
		dst = strconv.AppendBool(dst, e.Dense)
	}
	for _, s := range [...]struct {
		v string
		f field
	}{
		{e.Medium, fieldMedium}, {e.LoRAName, fieldLoRAName}, {e.CacheSalt, fieldCacheSalt},
		{e.SessionID, fieldSessionID}, {e.SpecKind, fieldSpecKind}, {e.Locality, fieldLocality},
		{e.Ownership, fieldOwnership},
	} {
		if s.v != "" || e.empty&(1<<s.f) != 0 {
			key(fieldNames[s.f])
			dst = appendJSONString(dst, s.v)
		}
	}
	if e.LoRAID.Valid {
		key("lora_id")
		dst = strconv.AppendInt(dst, e.LoRAID.Value, 10)
	}
	number := func(v Opt[uint32], f field) {
		if v.Valid {
			key(fieldNames[f])
			dst = strconv.AppendUint(dst, uint64(v.Value), 10)
		}
	}
	list := func(o Opaque, f field) {
		if o != nil {
			key(fieldNames[f])
			dst = appendJSONValue(dst, o.Values())
		}
	}
	number(e.GroupIdx, fieldGroupIdx)
	number(e.SlidingWindow, fieldWindow)
	list(e.ExtraKeys, fieldExtraKeys)
	list(e.MMKeys, fieldMMKeys)
	if s := e.Span; s != nil {
		if s.Parent != nil {
			key(fieldNames[fieldSpanParent])
			dst = appendJSONHash(dst, s.Parent)
		}
		list(s.Tokens, fieldSpanTokens)
		list(s.ExtraKeys, fieldSpanExtraKeys)
	}
	return append(dst, '}')
}

func (e *Event) appendJSONTokens(dst []byte) []byte {
	if e.TokenList != nil {
		return appendJSONValue(dst, e.TokenList.Values())
	}
	dst = append(dst, '[')
	for i, t := range e.Tokens {
		dst = strconv.AppendUint(comma(dst, i), uint64(t), 10)
	}
	for i, p := range e.Bigrams {
		dst = append(comma(dst, i), '[')
		dst = strconv.AppendUint(dst, uint64(p[0]), 10)
		dst = strconv.AppendUint(append(dst, ','), uint64(p[1]), 10)
		dst = append(dst, ']')
	}
	return append(dst, ']')
}

func appendJSONHash(dst []byte, h *kvcache.EngineHash) []byte {
	if h == nil {
		return append(dst, "null"...)
	}
	return append(kvcache.BlockHash(*h).AppendHex(append(dst, '"')), '"')
}

func appendJSONHex(dst, b []byte) []byte {
	return append(hex.AppendEncode(append(dst, '"'), b), '"')
}

func appendJSONFloat(dst []byte, f float64) []byte {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		dst = strconv.AppendFloat(append(dst, `{"$float":"`...), f, 'g', -1, 64)
		return append(dst, `"}`...)
	}
	if a := math.Abs(f); a != 0 && (a < 1e-6 || a >= 1e21) {
		return strconv.AppendFloat(dst, f, 'e', -1, 64)
	}
	return strconv.AppendFloat(dst, f, 'f', -1, 64)
}

func appendJSONString(dst []byte, s string) []byte {
	if !utf8.ValidString(s) {
		return append(appendJSONHex(append(dst, `{"$str":`...), []byte(s)), '}')
	}
	text, _ := json.Marshal(s) // cannot fail on a string
	return append(dst, text...)
}

func appendJSONValue(dst []byte, v any) []byte {
	switch v := v.(type) {
	case bool:
		return strconv.AppendBool(dst, v)
	case int64:
		return strconv.AppendInt(dst, v, 10)
	case uint64:
		return strconv.AppendUint(dst, v, 10)
	case float64:
		return appendJSONFloat(dst, v)
	case string:
		return appendJSONString(dst, v)
	case []byte:
		return append(appendJSONHex(append(dst, `{"$bin":`...), v), '}')
	case []any:
		dst = append(dst, '[')
		for i, e := range v {
			dst = appendJSONValue(comma(dst, i), e)
		}
		return append(dst, ']')
	case Map:
		dst = append(dst, `{"$map":[`...)
		for i, e := range v {
			dst = appendJSONValue(append(comma(dst, i), '['), e.Key)
			dst = append(appendJSONValue(append(dst, ','), e.Value), ']')
		}
		return append(dst, "]}"...)
	case Ext:
		dst = strconv.AppendInt(append(dst, `{"$ext":`...), int64(v.Code), 10)
		return append(appendJSONHex(append(dst, `,"data":`...), v.Data), '}')
	}
	return append(dst, "null"...)
}
