package indexer

import (
	"container/list"
	"slices"
	"time"

	"github.com/warmroute/warmroute/kvcache"
)

// orphan is a stored event whose parent is not known. Its blocks cannot be named before the parent is.
type orphan struct {
	parent kvcache.EngineHash
	tier   kvcache.Tier
	salt   string
	hashes []kvcache.EngineHash
	locals []kvcache.LocalHash
	gone   []bool // removed since
	born   time.Time
	place  *list.Element
}

// orphans keeps the orphans of a stream, oldest first, bounded in blocks and age.
type orphans struct {
	limit    int
	age      time.Duration
	blocks   int
	order    *list.List // of *orphan
	byParent map[kvcache.EngineHash][]*orphan
	byHash   map[kvcache.EngineHash][]*orphan
}

func newOrphans(limit int, age time.Duration) *orphans {
	o := &orphans{limit: limit, age: age}
	o.clear()
	return o
}

func (o *orphans) clear() {
	o.blocks, o.order = 0, list.New()
	o.byParent, o.byHash = map[kvcache.EngineHash][]*orphan{}, map[kvcache.EngineHash][]*orphan{}
}

// add keeps an orphan and drops the oldest ones that are too many or too old. One that is larger than the limit is
// not kept.
func (o *orphans) add(c *orphan) {
	if len(c.hashes) > o.limit {
		return
	}
	for e := o.order.Front(); e != nil; e = o.order.Front() {
		oldest := e.Value.(*orphan)
		if o.blocks+len(c.hashes) <= o.limit && c.born.Sub(oldest.born) <= o.age {
			break
		}
		o.drop(oldest)
	}
	c.hashes = slices.Clone(c.hashes) // they were part of a whole batch's memory
	c.gone = make([]bool, len(c.hashes))
	c.place = o.order.PushBack(c)
	o.blocks += len(c.hashes)
	o.byParent[c.parent] = append(o.byParent[c.parent], c)
	for _, h := range c.hashes {
		o.byHash[h] = append(o.byHash[h], c)
	}
}

func (o *orphans) drop(c *orphan) {
	o.order.Remove(c.place)
	o.blocks -= len(c.hashes)
	without(o.byParent, c.parent, c)
	for _, h := range c.hashes {
		without(o.byHash, h, c)
	}
}

func without(m map[kvcache.EngineHash][]*orphan, h kvcache.EngineHash, c *orphan) {
	rest := slices.DeleteFunc(m[h], func(x *orphan) bool { return x == c })
	if len(rest) == 0 {
		delete(m, h)
	} else {
		m[h] = rest
	}
}

// has says whether h is a block of an orphan, so that its children are orphans too.
func (o *orphans) has(h kvcache.EngineHash) bool { return len(o.byHash[h]) > 0 }

// remove takes one copy of a block away, if there is one.
func (o *orphans) remove(t kvcache.Tier, h kvcache.EngineHash) {
	for _, c := range o.byHash[h] {
		if i := slices.Index(c.hashes, h); c.tier == t && !c.gone[i] {
			c.gone[i] = true
			return
		}
	}
}

// take returns the orphans that wait for parent, which is known now, and forgets them.
func (o *orphans) take(parent kvcache.EngineHash) []*orphan {
	found := slices.Clone(o.byParent[parent])
	for _, c := range found {
		o.drop(c)
	}
	return found
}
