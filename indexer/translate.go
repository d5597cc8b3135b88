package indexer

import (
	"time"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
)

// opKind says what an op does to the index.
type opKind uint8

const (
	opStore opKind = iota
	opAdopt        // store, said by an earlier message
	opRemove
	opRemoveKnown // the block hash is remembered
)

// op is one change of the index.
type op struct {
	kind   opKind
	tier   kvcache.Tier
	block  kvcache.BlockHash
	engine kvcache.EngineHash
}

// maxGroups bounds the KV-cache groups that a stream remembers.
const maxGroups = 256

// translator turns the events of one publisher into operations on the index. It does no I/O: what it may need
// from Redis it names beforehand ([translator.needs]).
type translator struct {
	size       int    // tokens per block; 0 while unknown
	lora, salt string // of events that name none
	known      *memory
	orphans    *orphans
	groups     map[uint32]bool // is a group that named its kind indexable by prefix
	resumed    bool            // the stream's beginning was another indexer's, or another life's: groups may be missing
	unkinded   bool            // the engine names groups and not their kinds
	metrics    *metrics
	now        func() time.Time

	// The result of the last message.
	ops   []op
	tally [4]int // events by [wire.Kind] that took effect
	muted bool   // before a clear of the same message: only learn
	ready []adoption
	seen  map[kvcache.EngineHash]struct{}
	text  []uint32
}

func newTranslator(p publisher, o Options, m *metrics) *translator {
	return &translator{
		size: p.reg.BlockSize, lora: p.reg.LoRA, salt: p.reg.Salt,
		known: newMemory(o.Remember), orphans: newOrphans(o.Orphans, o.OrphanAge),
		groups: map[uint32]bool{}, metrics: m, now: time.Now, seen: map[kvcache.EngineHash]struct{}{},
	}
}

// forget drops what was learnt of an engine process that has ended.
func (t *translator) forget() {
	t.known.forget()
	t.orphans.clear()
	clear(t.groups)
	t.resumed, t.unkinded = false, false
}

// blockSize is the size that a batch speaks of, 0 where it does not.
func (t *translator) blockSize(b *wire.Batch) int {
	for i := range b.Events {
		if e := &b.Events[i]; e.Kind == wire.Stored && e.Dense && e.Local() && e.PrefixIndexable() && e.BlockSize <= maxBlockSize {
			return e.BlockSize
		}
	}
	return 0
}

// needs lists the engine hashes that a batch refers to and this translator does not know.
func (t *translator) needs(b *wire.Batch) []kvcache.EngineHash {
	clear(t.seen)
	var out []kvcache.EngineHash
	need := func(h kvcache.EngineHash) {
		if _, ok := t.seen[h]; ok || t.orphans.has(h) || len(out) >= t.known.limit/2 {
			return
		}
		t.seen[h] = struct{}{}
		if _, ok := t.known.get(h); !ok {
			out = append(out, h)
		}
	}
	for i := range b.Events {
		e := &b.Events[i]
		if e.Kind != wire.Stored || !t.indexable(e) {
			continue
		}
		if t.hashable(e) {
			if e.Parent != nil {
				need(*e.Parent)
			}
			for _, h := range e.Hashes {
				t.seen[h] = struct{}{} // will be known
			}
		} else if t.location(e) {
			for _, h := range e.Hashes {
				need(h)
			}
		}
	}
	return out
}

// learn keeps what the index knows of an engine hash.
func (t *translator) learn(h kvcache.EngineHash, b kvcache.BlockHash) {
	t.known.put(h, known{block: b})
}

// begin starts a message.
func (t *translator) begin() {
	t.ops, t.tally, t.muted = t.ops[:0], [4]int{}, false
}

// message translates a batch into t.ops. A reason means that everything before t.ops has left the index: the engine
// cleared its cache, or a removal was lost.
func (t *translator) message(b *wire.Batch) (reset string) {
	t.begin()
	boundary := int32(-1)
	for i := range b.Events {
		if e := &b.Events[i]; e.Kind == wire.Cleared {
			boundary, reset = max(boundary, e.Index), resetClear
		}
	}
	for _, s := range b.Skipped {
		t.metrics.errors.WithLabelValues(s.Code.String()).Inc()
		t.metrics.event(s.Kind, resultSkipped, 1)
		if s.Removal() {
			boundary = max(boundary, s.Index)
			if reset == "" || s.Kind == wire.Cleared {
				reset = resetUndecodable
			}
		}
	}
	if boundary >= 0 {
		t.orphans.clear()
	}
	for i := range b.Events {
		e := &b.Events[i]
		t.muted = e.Index < boundary
		var result string
		switch e.Kind {
		case wire.Stored:
			result = t.stored(e)
		case wire.Removed:
			result = t.removed(e)
		case wire.Cleared:
			result = resultApplied
		}
		t.count(e.Kind, result)
	}
	return reset
}

// count notes an event's result; those that take effect are counted when they have.
func (t *translator) count(k wire.Kind, result string) {
	if result == resultApplied {
		t.tally[k]++
	} else {
		t.metrics.event(k, result, 1)
	}
}

// indexable says whether an event is about blocks of this worker that the index can hold.
func (t *translator) indexable(e *wire.Event) bool {
	if _, ok := e.Tier.Cache(); !ok || !e.Local() {
		return false
	}
	if e.SpecKind == "" && e.GroupIdx.Valid {
		if ok, named := t.groups[e.GroupIdx.Value]; named {
			return ok
		}
	}
	return e.PrefixIndexable()
}

// hashable says whether the blocks of a stored event can be named by their content.
func (t *translator) hashable(e *wire.Event) bool {
	return e.Dense && e.BlockSize == t.size && (e.TokenKind == wire.SingleTokens || e.TokenKind == wire.BigramTokens)
}

// location says whether a stored event without content of its own tells where known blocks are.
func (t *translator) location(e *wire.Event) bool {
	return len(e.Hashes) > 0 && (e.NumTokens() == 0 || !e.Dense && e.BlockSize == t.size)
}

func (t *translator) stored(e *wire.Event) string {
	if e.GroupIdx.Valid && e.SpecKind != "" {
		if _, named := t.groups[e.GroupIdx.Value]; named || len(t.groups) < maxGroups {
			t.groups[e.GroupIdx.Value] = e.PrefixIndexable()
		}
	}
	t.unkinded = t.unkinded || e.GroupIdx.Valid && e.SpecKind == "" && e.NumTokens() > 0
	tier, _ := e.Tier.Cache()
	switch {
	case !t.indexable(e) || len(e.Hashes) == 0 || t.selfReferring(e.Parent, e.Hashes):
		return resultSkipped
	case t.hashable(e):
		return t.content(e, tier)
	case t.location(e):
		result := resultOrphan
		for _, h := range e.Hashes {
			if k, ok := t.known.get(h); ok {
				t.emit(op{opStore, tier, k.block, h})
				result = resultApplied
			}
		}
		return result
	}
	return resultSkipped
}

// selfReferring finds the events that old engines made of repeated text: a block twice, or a block that is its own
// ancestor.
func (t *translator) selfReferring(parent *kvcache.EngineHash, hashes []kvcache.EngineHash) bool {
	clear(t.seen)
	if parent != nil {
		t.seen[*parent] = struct{}{}
	}
	for _, h := range hashes {
		if _, twice := t.seen[h]; twice {
			return true
		}
		t.seen[h] = struct{}{}
	}
	return false
}

// content hashes the blocks of a stored event and stores them.
func (t *translator) content(e *wire.Event, tier kvcache.Tier) string {
	spec := kvcache.HashSpec{BlockSize: t.size, LoRA: e.LoRAName}
	if spec.LoRA == "" {
		spec.LoRA = t.lora
	}
	x := extrasOf(e, spec.LoRA)
	spec.Salt = x.salt
	if spec.Salt == "" && e.Parent != nil {
		if p, ok := t.known.get(*e.Parent); ok {
			spec.Salt = p.salt
		}
	}
	if spec.Salt == "" {
		spec.Salt = t.salt
	}
	locals := make([]kvcache.LocalHash, len(e.Hashes))
	for i := range e.Hashes {
		var mm []uint64
		if x.mm != nil {
			mm = x.mm[i]
		}
		t.text = e.BlockTokens(t.text[:0], i)
		locals[i] = kvcache.HashBlock(spec, t.text, mm)
	}
	return t.chain(tier, e.Parent, spec.Salt, e.Hashes, locals)
}

// chain stores consecutive blocks below parent, and the orphans that waited for them.
func (t *translator) chain(tier kvcache.Tier, parent *kvcache.EngineHash, salt string, hashes []kvcache.EngineHash, locals []kvcache.LocalHash) string {
	if parent != nil {
		p, ok := t.known.get(*parent)
		if !ok {
			if !t.muted {
				t.orphans.add(&orphan{parent: *parent, tier: tier, salt: salt, hashes: hashes, locals: locals, born: t.now()})
			}
			return resultOrphan
		}
		t.link(opStore, &p.block, salt, tier, hashes, locals, nil)
	} else {
		t.link(opStore, nil, salt, tier, hashes, locals, nil)
	}
	// Whoever waited for one of these blocks may itself be waited for.
	for len(t.ready) > 0 {
		a := t.ready[0]
		t.ready = t.ready[1:]
		t.link(opAdopt, &a.parent, a.salt, a.tier, a.hashes, a.locals, a.gone)
	}
	return resultApplied
}

// adoption is an orphan whose parent is known now.
type adoption struct {
	parent kvcache.BlockHash // shadows the orphan's engine hash of it
	*orphan
}

// link stores blocks below parent, nil at the root, and notes the orphans that waited for them.
func (t *translator) link(kind opKind, parent *kvcache.BlockHash, salt string, tier kvcache.Tier, hashes []kvcache.EngineHash, locals []kvcache.LocalHash, gone []bool) {
	for i, h := range hashes {
		block := kvcache.BlockHash(locals[i])
		if parent != nil {
			block = kvcache.ChainHash(*parent, locals[i])
		}
		parent = &block
		t.known.put(h, known{block, salt})
		if gone == nil || !gone[i] {
			t.emit(op{kind, tier, block, h})
		}
		for _, c := range t.orphans.take(h) {
			t.ready = append(t.ready, adoption{parent: block, orphan: c})
		}
	}
}

// ofUnknownGroup says whether a removal is of a group whose kind was perhaps named before this translator's time. It is taken for
// indexable: a removal too many costs a hit, one too few sends requests to a block that is gone.
func (t *translator) ofUnknownGroup(e *wire.Event) bool {
	_, ok := e.Tier.Cache()
	_, named := t.groups[e.GroupIdx.Value]
	return ok && e.Local() && t.resumed && !t.unkinded && e.GroupIdx.Valid && !named
}

func (t *translator) removed(e *wire.Event) string {
	if !t.indexable(e) && !t.ofUnknownGroup(e) {
		return resultSkipped
	}
	tier, _ := e.Tier.Cache()
	t.remove(tier, e.Hashes)
	return resultApplied
}

func (t *translator) remove(tier kvcache.Tier, hashes []kvcache.EngineHash) {
	for _, h := range hashes {
		if !t.muted {
			t.orphans.remove(tier, h) // and from the index: another indexer may have known its parent
		}
		if k, ok := t.known.get(h); ok {
			t.emit(op{opRemoveKnown, tier, k.block, h})
		} else {
			t.emit(op{opRemove, tier, 0, h})
		}
	}
}

func (t *translator) emit(o op) {
	if !t.muted {
		t.ops = append(t.ops, o)
	}
}
