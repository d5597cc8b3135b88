package replay

import "slices"

// lru is the prefix cache of a worker.
type lru struct {
	capacity int
	blocks   map[uint64]*block
	ends     block // ends.next is the block used last, ends.prev the one to go first
}

type block struct {
	id         uint64
	prev, next *block
}

func newLRU(capacity int) *lru {
	c := &lru{capacity: capacity, blocks: map[uint64]*block{}}
	c.ends.prev, c.ends.next = &c.ends, &c.ends
	return c
}

// prefix is how many of the blocks are cached, from the first.
func (c *lru) prefix(blocks []uint64) int {
	for i, id := range blocks {
		if c.blocks[id] == nil {
			return i
		}
	}
	return len(blocks)
}

// use makes the blocks of a prompt the ones used last, the first of them the very last: engines let go of the end of a
// prompt first. It returns those that are new and those that had to go; a prompt larger than the cache keeps what fits.
func (c *lru) use(blocks []uint64) (added, gone []uint64) {
	blocks = blocks[:min(len(blocks), c.capacity)]
	for i := len(blocks) - 1; i >= 0; i-- {
		b := c.blocks[blocks[i]]
		if b == nil {
			b = &block{id: blocks[i]}
			c.blocks[b.id] = b
			added = append(added, b.id)
		} else {
			c.unlink(b)
		}
		b.prev, b.next = &c.ends, c.ends.next
		b.prev.next, b.next.prev = b, b
	}
	slices.Reverse(added) // parents before their children
	for len(c.blocks) > c.capacity {
		b := c.ends.prev
		c.unlink(b)
		delete(c.blocks, b.id)
		gone = append(gone, b.id)
	}
	return added, gone
}

func (c *lru) unlink(b *block) { b.prev.next, b.next.prev = b.next, b.prev }
