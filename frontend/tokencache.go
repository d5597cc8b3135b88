package frontend

import (
	"container/list"
	"sync"

	"github.com/zeebo/xxh3"
)

// tokenCache keeps the token ids of recent prompts, the least recently used going first.
type tokenCache struct {
	limit int64

	mu    sync.Mutex
	used  int64
	order list.List // of *cachedTokens, the most recent first
	byKey map[xxh3.Uint128]*list.Element
}

type cachedTokens struct {
	key    xxh3.Uint128
	tokens []uint32
}

// entryOverhead is about what an entry takes beside its tokens.
const entryOverhead = 160

func (c *cachedTokens) size() int64 { return int64(len(c.tokens))*4 + entryOverhead }

func newTokenCache(limit int64) *tokenCache {
	return &tokenCache{limit: limit, byKey: map[xxh3.Uint128]*list.Element{}}
}

// get returns tokens that must not be changed.
func (c *tokenCache) get(key xxh3.Uint128) ([]uint32, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.byKey[key]
	if !ok {
		return nil, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*cachedTokens).tokens, true
}

// put keeps tokens, unless they alone exceed the limit.
func (c *tokenCache) put(key xxh3.Uint128, tokens []uint32) {
	entry := &cachedTokens{key, tokens}
	c.mu.Lock()
	defer c.mu.Unlock()
	if entry.size() > c.limit || c.byKey[key] != nil {
		return
	}
	c.byKey[key] = c.order.PushFront(entry)
	c.used += entry.size()
	for c.used > c.limit {
		last := c.order.Remove(c.order.Back()).(*cachedTokens)
		delete(c.byKey, last.key)
		c.used -= last.size()
	}
}
