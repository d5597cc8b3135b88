package sim

import (
	"slices"

	"github.com/warmroute/warmroute/kvcache"
)

// block is one physical block of a rank's KV memory.
type block struct {
	refs       int  // running sequences that use it
	cached     bool // its content can be found by hash
	engine     kvcache.EngineHash
	content    kvcache.BlockHash
	prev, next *block // neighbours in the free list; nil while in use
}

// freeList holds the blocks that no sequence uses, the next to be taken first. Cached
// blocks in it are hits until they are taken.
type freeList struct {
	root block
	len  int
}

func (f *freeList) init() { f.root.prev, f.root.next = &f.root, &f.root }

func (f *freeList) insertAfter(at, b *block) {
	b.prev, b.next = at, at.next
	at.next.prev = b
	at.next = b
	f.len++
}

func (f *freeList) pushFront(b *block) { f.insertAfter(&f.root, b) }
func (f *freeList) pushBack(b *block)  { f.insertAfter(f.root.prev, b) }

func (f *freeList) remove(b *block) {
	b.prev.next, b.next.prev = b.next, b.prev
	b.prev, b.next = nil, nil
	f.len--
}

// blockPool is the block cache of one rank. It is not safe for concurrent use.
//
// A sequence reserves all the blocks that it can ever need when it is admitted, so that a
// running sequence never has to be preempted: reserved ≤ free.len at all times.
type blockPool struct {
	size       int
	duplicates bool
	all        []block
	free       freeList
	cached     map[kvcache.EngineHash][]*block // physical copies, the oldest first
	reserved   int
}

func newBlockPool(o *Options) *blockPool {
	p := &blockPool{
		size: o.BlockSize, duplicates: o.Duplicates,
		all: make([]block, o.Blocks), cached: map[kvcache.EngineHash][]*block{},
	}
	p.free.init()
	for i := range p.all {
		p.free.pushBack(&p.all[i])
	}
	return p
}

// admit gives the sequence the cached blocks of its prompt's prefix and reserves the rest.
// It reports false, and does nothing, where too few blocks are free. The last token of a
// prompt is always computed, so a hit never covers the whole prompt.
func (p *blockPool) admit(s *sequence) bool {
	var hits []*block
	idle := 0 // hits that leave the free list
	for i := range (s.promptLen - 1) / s.size {
		copies := p.cached[s.engine[i]]
		if len(copies) == 0 {
			break
		}
		hits = append(hits, copies[0])
		if copies[0].refs == 0 {
			idle++
		}
	}
	need := (s.end()+p.size-1)/p.size - len(hits)
	if p.free.len-idle-p.reserved < need {
		return false
	}
	for _, b := range hits {
		p.use(b)
	}
	p.reserved += need
	s.reserved = need
	s.blocks = hits
	s.registered = len(hits)
	s.hit = len(hits) * p.size
	s.computed = s.hit
	return true
}

func (p *blockPool) use(b *block) {
	if b.refs == 0 {
		p.free.remove(b)
	}
	b.refs++
}

// advance computes the next n tokens of the sequence and returns what changed: first the
// evictions that made room, then what was stored.
func (p *blockPool) advance(s *sequence, n int) []event {
	var events []event
	s.computed += n
	for len(s.blocks)*p.size < s.computed {
		b := p.free.root.next
		if b.cached {
			p.forget(b)
			events = append(events, event{kind: removed, hashes: []kvcache.EngineHash{b.engine}})
		}
		p.use(b)
		s.blocks = append(s.blocks, b)
		s.reserved--
		p.reserved--
	}
	run := -1 // where in events the stored event is that the next block continues
	for ; s.registered < s.computed/p.size; s.registered++ {
		i := s.registered
		h := s.engine[i]
		if copies := p.cached[h]; len(copies) > 0 && !p.duplicates {
			// Another sequence computed the same meanwhile: share its copy, give ours back.
			own := s.blocks[i]
			own.refs = 0
			p.free.pushFront(own)
			p.use(copies[0])
			s.blocks[i] = copies[0]
			run = -1
			continue
		}
		b := s.blocks[i]
		b.cached, b.engine, b.content = true, h, s.content.Hashes()[i]
		p.cached[h] = append(p.cached[h], b)
		if run < 0 {
			run = len(events)
			e := event{kind: stored, lora: s.lora}
			if i > 0 {
				e.parent = &s.engine[i-1]
			}
			events = append(events, e)
		}
		e := &events[run]
		e.hashes = append(e.hashes, h)
		e.tokens = append(e.tokens, s.tokens[i*p.size:(i+1)*p.size]...)
		e.extra = append(e.extra, s.extraKeys(i))
	}
	return events
}

func (p *blockPool) forget(b *block) {
	b.cached = false
	copies := p.cached[b.engine]
	if len(copies) == 1 {
		delete(p.cached, b.engine)
		return
	}
	i := slices.Index(copies, b)
	p.cached[b.engine] = slices.Delete(copies, i, i+1)
}

// release ends the sequence: its blocks stay cached until something else needs the room.
// The tail is freed first, and so evicted first; blocks without cached content go to
// the front, since nothing is lost with them.
func (p *blockPool) release(s *sequence) {
	p.reserved -= s.reserved
	s.reserved = 0
	for _, b := range slices.Backward(s.blocks) {
		b.refs--
		switch {
		case b.refs > 0:
		case b.cached:
			p.free.pushBack(b)
		default:
			p.free.pushFront(b)
		}
	}
	s.blocks = nil
}

// clear empties the cache, which needs it to be idle.
func (p *blockPool) clear() bool {
	if p.free.len < len(p.all) || p.reserved > 0 {
		return false
	}
	for i := range p.all {
		p.all[i].cached = false
	}
	clear(p.cached)
	return true
}

// inUse is how many blocks belong to running sequences.
func (p *blockPool) inUse() int { return len(p.all) - p.free.len }

// ResidentBlock is a block that a rank's cache holds.
type ResidentBlock struct {
	Content kvcache.BlockHash  // the content hash of the prefix that ends in it
	Engine  kvcache.EngineHash // the engine's own name of it, as in events
	Copies  int                // physical copies, at least 1
}

// resident lists what the cache holds, ordered by content.
func (p *blockPool) resident() []ResidentBlock {
	out := make([]ResidentBlock, 0, len(p.cached))
	for h, copies := range p.cached {
		out = append(out, ResidentBlock{Content: copies[0].content, Engine: h, Copies: len(copies)})
	}
	slices.SortFunc(out, func(a, b ResidentBlock) int {
		switch {
		case a.Content < b.Content:
			return -1
		case a.Content > b.Content:
			return 1
		}
		return 0
	})
	return out
}
