package indexer

import "github.com/warmroute/warmroute/kvcache"

// known is what a stream remembers of an engine hash.
type known struct {
	block kvcache.BlockHash
	salt  string // of its chain; vLLM names it with the first block only
}

// memory remembers the most recently used engine hashes of one engine process, between limit/2 and limit of them.
// What they stand for never changes while the process lives, so they outlast removals and clears.
type memory struct {
	limit      int
	young, old map[kvcache.EngineHash]known
}

func newMemory(limit int) *memory {
	return &memory{limit: max(limit, 2), young: map[kvcache.EngineHash]known{}}
}

func (m *memory) get(h kvcache.EngineHash) (known, bool) {
	if k, ok := m.young[h]; ok {
		return k, true
	}
	k, ok := m.old[h]
	if ok {
		m.put(h, k)
	}
	return k, ok
}

func (m *memory) put(h kvcache.EngineHash, k known) {
	if len(m.young) >= m.limit/2 {
		m.old, m.young = m.young, make(map[kvcache.EngineHash]known, m.limit/2)
	}
	m.young[h] = k
}

func (m *memory) forget() { m.young, m.old = map[kvcache.EngineHash]known{}, nil }
