package store

import (
	"encoding/binary"

	"github.com/warmroute/warmroute/kvcache"
)

// A nibble string has 4 bits per slot, one per tier: slot 2k is the low half of byte k, slot
// 2k+1 the high half; zero bytes at the end are left out. Read as little-endian words it holds 16
// slots in 64 bits, so one AND narrows the prefixes of 16 worker ranks by a block.
const slotsPerWord = 16

// prefixes narrows, block by block, which slots hold every block so far.
type prefixes struct {
	live   []uint64 // bit t of slot s: every block so far is on tier t or a faster one
	depths []depth  // by slot
	n      int      // blocks so far
}

// depth counts blocks per cumulative tier, as [kvcache.Overlap] does.
type depth [kvcache.NumTiers]int32

// cumulate makes bit t of each nibble the OR of bits 0..t.
func cumulate(w uint64) uint64 {
	w |= w << 1 & 0xEEEEEEEEEEEEEEEE
	return w | w<<2&0xCCCCCCCCCCCCCCCC
}

// add takes the nibble string of the next block, "" where nobody holds it, and reports whether
// any slot still has the whole prefix.
func (p *prefixes) add(nibbles string) bool {
	words := (len(nibbles) + 7) / 8
	if p.n == 0 {
		p.live = make([]uint64, words)
		p.depths = make([]depth, words*slotsPerWord)
		for i := range p.live {
			p.live[i] = cumulate(word(nibbles, i))
		}
	} else {
		for i := range p.live {
			var now uint64
			if i < words {
				now = p.live[i] & cumulate(word(nibbles, i))
			}
			if now != p.live[i] {
				p.settle(i, p.live[i]&^now)
				p.live[i] = now
			}
		}
		for len(p.live) > 0 && p.live[len(p.live)-1] == 0 {
			p.live = p.live[:len(p.live)-1]
		}
	}
	p.n++
	for _, w := range p.live {
		if w != 0 {
			return true
		}
	}
	return false
}

// settle records the depth of the bits that ended.
func (p *prefixes) settle(i int, ended uint64) {
	for s := i * slotsPerWord; ended != 0; s, ended = s+1, ended>>4 {
		for t := range kvcache.NumTiers {
			if ended>>t&1 != 0 {
				p.depths[s][t] = int32(p.n)
			}
		}
	}
}

// finish settles what is left and returns the depths by slot.
func (p *prefixes) finish() []depth {
	for i, w := range p.live {
		p.settle(i, w)
	}
	p.live = nil
	return p.depths
}

// word is the i-th little-endian word of s, with zeros after its end.
func word(s string, i int) uint64 {
	var b [8]byte
	copy(b[:], s[i*8:])
	return binary.LittleEndian.Uint64(b[:])
}
