package openai

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/bits"
)

// Prompts of token ids are long, so most of one is read eight bytes at a time. A word has one byte of text in each of its
// bytes, the first in the lowest; a mask of bytes has their top bits.
const (
	each = 0x0101010101010101 // times a byte: that byte everywhere
	tops = 0x80 * each
)

// zeros are the bytes of w that are zero.
func zeros(w uint64) uint64 { return ^(w&^tops + 0x7F*each | w) & tops }

// beyond9 are the bytes of w that are greater than 9.
func beyond9(w uint64) uint64 { return (w&^tops + 0x76*each | w) & tops }

// idArray decodes the JSON array of token ids that begins at b[i], and says where it ends. end is 0 where there is
// something else, one of more than limit ids, or none that is valid.
func idArray(b []byte, i, limit int) (ids []uint32, end int) {
	ids = make([]uint32, min(bytes.Count(b[i:], []byte{','})+1, limit))
	n := 0
	for i = space(b, i+1); ; {
		var some int
		some, i = decodeIDs(ids[n:], b, i)
		n += some
		i = space(b, i)
		start, id := i, uint64(0)
		for ; i < len(b) && b[i] >= '0' && b[i] <= '9' && i-start <= 10; i++ {
			id = id*10 + uint64(b[i]-'0')
		}
		zero := i > start+1 && b[start] == '0'
		if i == start || zero || id > math.MaxUint32 || n == len(ids) {
			return nil, 0
		}
		ids[n] = uint32(id)
		n++
		if i = space(b, i); i == len(b) {
			return nil, 0
		}
		switch b[i] {
		case ']':
			return ids[:n], i + 1
		case ',':
			i++
		default:
			return nil, 0
		}
	}
}

// decodeIDs fills ids with those of up to eight digits that have a comma, and perhaps a space, right behind. It
// begins at b[i], where an element may begin, and says how many they are and where it has found another thing.
func decodeIDs(ids []uint32, b []byte, i int) (n, begin int) {
	begin = i
	if begin < 8 { // it reads the eight bytes ahead of each comma
		return 0, begin
	}
	for ; i+8 <= len(b); i += 8 {
		for commas := zeros(binary.LittleEndian.Uint64(b[i:]) ^ ','*each); commas != 0; commas &= commas - 1 {
			end := i + bits.TrailingZeros64(commas)/8
			others := uint(64 - 8*(end-begin)) // bits of the eight bytes that are ahead of the id
			if others > 56 || n == len(ids) || b[begin] == '0' {
				return n, begin
			}
			w := (binary.LittleEndian.Uint64(b[end-8:]) ^ '0'*each) >> (others & 63) << (others & 63)
			if beyond9(w) != 0 {
				return n, begin
			}
			w = w*10 + w>>8 // neighbours are joined three times
			w = w&(0xFF<<32|0xFF)*(1_000_000<<32|100) + w>>16&(0xFF<<32|0xFF)*(10_000<<32|1)
			ids[n] = uint32(w >> 32)
			n++
			if begin = end + 1; begin < len(b) && b[begin] == ' ' {
				begin++
			}
		}
	}
	return n, begin
}
