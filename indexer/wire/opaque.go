package wire

import "math"

// Opaque is one list of a payload, kept as it came: valid MessagePack, of the payload's
// memory. nil means that no list was sent.
type Opaque []byte

// Map is a MessagePack map of an [Opaque] value, in the order sent.
type Map []MapEntry

// MapEntry is one key of a [Map] with its value.
type MapEntry struct {
	Key, Value any
}

// Ext is a MessagePack extension of an [Opaque] value.
type Ext struct {
	Code int8
	Data []byte
}

func opaqueAt(b []byte, pos int) Opaque {
	end := skip(b, pos)
	return Opaque(b[pos:end:end])
}

// Len is the number of elements; 0 for nil.
func (o Opaque) Len() int {
	if o == nil {
		return 0
	}
	n, _, _ := arrayLen(o, 0)
	return n
}

// AllNil reports that no element holds anything: engines send one nil per block where
// nothing but its tokens decides a block.
func (o Opaque) AllNil() bool {
	if o == nil {
		return true
	}
	n, pos, _ := arrayLen(o, 0)
	for _, c := range o[pos:] {
		if c != 0xc0 {
			return false
		}
	}
	return len(o)-pos == n
}

// Values decodes the elements: nil, bool, int64, uint64 (only above the range of int64),
// float64, string (possibly not UTF-8), []byte, []any, [Map] or [Ext].
func (o Opaque) Values() []any {
	if o == nil {
		return nil
	}
	n, pos, _ := arrayLen(o, 0)
	list, _ := values(o, pos, n)
	return list
}

func values(b []byte, pos, n int) ([]any, int) {
	list := make([]any, n)
	for i := range list {
		list[i], pos = valueAt(b, pos)
	}
	return list, pos
}

// valueAt decodes one value that has passed validate, which bounds the recursion.
func valueAt(b []byte, pos int) (v any, next int) {
	if n, first, ok := arrayLen(b, pos); ok {
		return values(b, first, n)
	}
	if n, p, ok := mapLen(b, pos); ok {
		m := make(Map, n)
		for i := range m {
			m[i].Key, p = valueAt(b, p)
			m[i].Value, p = valueAt(b, p)
		}
		return m, p
	}
	next = skip(b, pos)
	if s, ok := strAt(b, pos); ok {
		return string(s), next
	}
	if bin, ok := binAt(b, pos); ok {
		return bin, next
	}
	if bits, negative, ok := intAt(b, pos); ok {
		if negative || bits <= math.MaxInt64 {
			return int64(bits), next
		}
		return bits, next
	}
	if f, ok := floatAt(b, pos); ok {
		return f, next
	}
	switch c := b[pos]; {
	case c == 0xc2 || c == 0xc3:
		return c == 0xc3, next
	case c >= 0xd4 && c <= 0xd8: // fixext
		return Ext{int8(b[pos+1]), b[pos+2 : next]}, next
	case c >= 0xc7 && c <= 0xc9:
		data := pos + 1 + lengthWidth(c)
		return Ext{int8(b[data]), b[data+1 : next]}, next
	}
	return nil, next
}
