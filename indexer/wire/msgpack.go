package wire

import (
	"encoding/binary"
	"math"
)

// Limits of a payload.
const (
	MaxPayload = 64 << 20 // bytes
	MaxDepth   = 32       // of nesting, the batch itself being at depth 0
)

// validate checks the structure of a whole payload: exactly one value within the limits.
// Everything else in this package reads only what has passed it, and so without bounds to
// check. Code 0 means valid.
func validate(b []byte) Code {
	if len(b) > MaxPayload {
		return PayloadTooLarge
	}
	var outer [MaxDepth + 1]int // values still to come around the innermost container, by depth
	for left, depth, pos := 1, 0, 0; ; {
		for left == 0 {
			if depth == 0 {
				if pos < len(b) {
					return TrailingBytes
				}
				return 0
			}
			depth--
			left = outer[depth]
		}
		left--
		if pos < len(b) {
			if n := int(scalarSize[b[pos]]); n != 0 && n <= len(b)-pos {
				pos += n
				continue
			}
		}
		next, children, code := step(b, pos)
		if code != 0 {
			return code
		}
		pos = next
		if children > 0 {
			if depth == MaxDepth {
				return DepthLimit
			}
			outer[depth] = left
			depth++
			left = children
		}
	}
}

// skip is the position after the value at pos.
func skip(b []byte, pos int) int {
	for pending := 1; pending > 0; pending-- {
		if n := int(scalarSize[b[pos]]); n != 0 {
			pos += n
			continue
		}
		next, children, _ := step(b, pos)
		pos, pending = next, pending+children
	}
	return pos
}

// scalarSize is the size of a whole value, its code byte included, by that byte; 0 for the
// values that have a length.
var scalarSize = func() (size [256]uint8) {
	for c := range 0x80 {
		size[c] = 1 // positive fixint
	}
	for c := 0xe0; c < 0x100; c++ {
		size[c] = 1 // negative fixint
	}
	size[0xc0], size[0xc2], size[0xc3] = 1, 1, 1 // nil, false, true
	size[0xca], size[0xcb] = 5, 9                // floats
	for i := range 4 {
		size[0xcc+i] = 1 + 1<<i // unsigned
		size[0xd0+i] = 1 + 1<<i // signed
	}
	return size
}()

// step reads one head: the position after it and its bytes, and how many values it contains.
func step(b []byte, pos int) (next, children int, code Code) {
	if pos >= len(b) {
		return 0, 0, Truncated
	}
	c := b[pos]
	if n := int(scalarSize[c]); n != 0 {
		if n > len(b)-pos {
			return 0, 0, Truncated
		}
		return pos + n, 0, 0
	}
	pos++
	switch {
	case c < 0x90:
		return container(b, pos, 2*int(c&0x0f))
	case c < 0xa0:
		return container(b, pos, int(c&0x0f))
	case c < 0xc0:
		return body(b, pos, int(c&0x1f))
	case c == 0xc1:
		return 0, 0, ReservedByte
	case c >= 0xd4 && c <= 0xd8: // fixext: type, data
		if pos == len(b) {
			return 0, 0, Truncated
		}
		return body(b, pos+1, 1<<(c-0xd4))
	}
	width := lengthWidth(c)
	if len(b)-pos < width {
		return 0, 0, Truncated
	}
	n := length(b, pos, width)
	pos += width
	switch c {
	case 0xc7, 0xc8, 0xc9: // ext: type, data
		if pos == len(b) {
			return 0, 0, Truncated
		}
		return body(b, pos+1, n)
	case 0xdc, 0xdd:
		return container(b, pos, n)
	case 0xde, 0xdf:
		return container(b, pos, 2*n)
	}
	return body(b, pos, n) // bin, str
}

func body(b []byte, pos, n int) (next, children int, code Code) {
	if n > len(b)-pos {
		return 0, 0, LengthExceedsInput
	}
	return pos + n, 0, 0
}

func container(b []byte, pos, n int) (next, children int, code Code) {
	if n > len(b)-pos { // a value takes at least one byte
		return 0, 0, LengthExceedsInput
	}
	return pos, n, 0
}

// lengthWidth is the number of bytes of the length that follows the code byte c.
func lengthWidth(c byte) int {
	switch c {
	case 0xc4, 0xc7, 0xd9:
		return 1
	case 0xc5, 0xc8, 0xda, 0xdc, 0xde:
		return 2
	}
	return 4
}

func length(b []byte, pos, width int) int {
	switch width {
	case 1:
		return int(b[pos])
	case 2:
		return int(binary.BigEndian.Uint16(b[pos:]))
	}
	return int(binary.BigEndian.Uint32(b[pos:]))
}

// The functions below read a value that has passed validate. Their last result is false
// where the value at pos is of another kind.

// arrayLen is the length of an array and the position of its first element.
func arrayLen(b []byte, pos int) (n, first int, ok bool) {
	switch c := b[pos]; {
	case c >= 0x90 && c < 0xa0:
		return int(c & 0x0f), pos + 1, true
	case c == 0xdc:
		return length(b, pos+1, 2), pos + 3, true
	case c == 0xdd:
		return length(b, pos+1, 4), pos + 5, true
	}
	return 0, 0, false
}

// mapLen is the number of a map's entries and the position of its first key.
func mapLen(b []byte, pos int) (n, first int, ok bool) {
	switch c := b[pos]; {
	case c >= 0x80 && c < 0x90:
		return int(c & 0x0f), pos + 1, true
	case c == 0xde:
		return length(b, pos+1, 2), pos + 3, true
	case c == 0xdf:
		return length(b, pos+1, 4), pos + 5, true
	}
	return 0, 0, false
}

// strAt is the bytes of a string.
func strAt(b []byte, pos int) ([]byte, bool) {
	c := b[pos]
	if c >= 0xa0 && c < 0xc0 {
		n := int(c & 0x1f)
		return b[pos+1 : pos+1+n : pos+1+n], true
	}
	if c >= 0xd9 && c <= 0xdb {
		return sized(b, pos), true
	}
	return nil, false
}

// binAt is the bytes of a binary value.
func binAt(b []byte, pos int) ([]byte, bool) {
	if c := b[pos]; c < 0xc4 || c > 0xc6 {
		return nil, false
	}
	return sized(b, pos), true
}

func sized(b []byte, pos int) []byte {
	width := lengthWidth(b[pos])
	from := pos + 1 + width
	to := from + length(b, pos+1, width)
	return b[from:to:to]
}

// intAt is an integer's low 64 bits, and whether it is negative.
func intAt(b []byte, pos int) (v uint64, negative, ok bool) {
	c := b[pos]
	switch {
	case c < 0x80:
		return uint64(c), false, true
	case c >= 0xe0:
		return uint64(int64(int8(c))), true, true
	}
	switch c {
	case 0xcc:
		return uint64(b[pos+1]), false, true
	case 0xcd:
		return uint64(binary.BigEndian.Uint16(b[pos+1:])), false, true
	case 0xce:
		return uint64(binary.BigEndian.Uint32(b[pos+1:])), false, true
	case 0xcf:
		return binary.BigEndian.Uint64(b[pos+1:]), false, true
	}
	var s int64
	switch c {
	case 0xd0:
		s = int64(int8(b[pos+1]))
	case 0xd1:
		s = int64(int16(binary.BigEndian.Uint16(b[pos+1:])))
	case 0xd2:
		s = int64(int32(binary.BigEndian.Uint32(b[pos+1:])))
	case 0xd3:
		s = int64(binary.BigEndian.Uint64(b[pos+1:]))
	default:
		return 0, false, false
	}
	return uint64(s), s < 0, true
}

// uintAt is a whole number from 0 to limit.
func uintAt(b []byte, pos int, limit uint64) (uint64, bool) {
	v, negative, ok := intAt(b, pos)
	return v, ok && !negative && v <= limit
}

// floatAt is a floating-point number.
func floatAt(b []byte, pos int) (float64, bool) {
	switch b[pos] {
	case 0xca:
		return float64(math.Float32frombits(binary.BigEndian.Uint32(b[pos+1:]))), true
	case 0xcb:
		return math.Float64frombits(binary.BigEndian.Uint64(b[pos+1:])), true
	}
	return 0, false
}

func isNil(b []byte, pos int) bool { return b[pos] == 0xc0 }
