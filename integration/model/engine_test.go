package model

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store/redisproc"
)

const (
	blockSize = 4
	prompts   = 12 // that engines are asked for
	depth     = 8  // blocks of each
)

// place is a block of a prompt: its position from the first.
type place struct{ prompt, at int }

// tokens are those of a prompt's first n blocks.
func tokens(prompt, n int) []uint32 {
	out := make([]uint32, 0, n*blockSize)
	for i := range n {
		out = append(out, uint32(prompt), uint32(i), 7, 7)
	}
	return out
}

func hashes(prompt, n int) []kvcache.BlockHash {
	return kvcache.HashTokens(kvcache.HashSpec{BlockSize: blockSize}, tokens(prompt, n))
}

// copies counts, by place, how often an engine holds a block on one tier.
type copies map[place]int

// engine is a publisher and the model of what it holds.
type engine struct {
	id   string
	rng  *rand.Rand
	path *redisproc.Proxy // between indexers and the publisher
	proc *zmtptest.Engine

	life int   // engine processes so far
	next int64 // sequence number
	last []byte
	held [3]copies // by tier
	// vague: the engine has said something that nobody can know any more, so the index may hold less than the engine.
	vague bool
}

// newLife is what a fresh engine process knows.
func (e *engine) newLife() {
	e.life++
	e.next, e.last, e.vague = 0, nil, false
	e.forget()
}

func (e *engine) forget() {
	for t := range e.held {
		e.held[t] = copies{}
	}
}

// own is a prompt that only this process of this engine is ever asked for.
func (e *engine) own(life int) int { return 1_000_000*int(e.id[1]-'0'+1) + life }

// engineHash is this process's name of a block.
func (e *engine) engineHash(p place) kvcache.EngineHash {
	return kvcache.EngineHash(e.life)<<40 | kvcache.EngineHash(p.prompt)<<8 | kvcache.EngineHash(p.at)
}

// prefix is how many blocks of a prompt the device holds from the first.
func (e *engine) prefix(prompt int) int {
	n := 0
	for e.held[kvcache.Device][place{prompt, n}] > 0 {
		n++
	}
	return n
}

// compute has the engine work on a prompt: it stores what it lacks, or, as vLLM may, a further copy of what it has.
func (e *engine) compute(prompt, n int) wire.Event {
	from := min(e.prefix(prompt), n-1)
	return e.store(kvcache.Device, prompt, from, n)
}

// store is the event that blocks from to n of a prompt are on a tier.
func (e *engine) store(t kvcache.Tier, prompt, from, n int) wire.Event {
	v := wire.Event{Kind: wire.Stored, BlockSize: blockSize, Medium: [...]string{"GPU", "CPU", "DISK"}[t]}
	if from > 0 {
		parent := e.engineHash(place{prompt, from - 1})
		v.Parent = &parent
	}
	for i := from; i < n; i++ {
		p := place{prompt, i}
		v.Hashes = append(v.Hashes, e.engineHash(p))
		e.held[t][p]++
	}
	v.Tokens = tokens(prompt, n)[from*blockSize:]
	return v
}

// evict is the event that a block has left a tier.
func (e *engine) evict(t kvcache.Tier, p place) wire.Event {
	if e.held[t][p]--; e.held[t][p] == 0 {
		delete(e.held[t], p)
	}
	return wire.Event{Kind: wire.Removed, Hashes: []kvcache.EngineHash{e.engineHash(p)}, Medium: [...]string{"GPU", "CPU", "DISK"}[t]}
}

// work is a batch of what an engine does all day.
func (e *engine) work() []wire.Event {
	var events []wire.Event
	for range 1 + e.rng.IntN(3) {
		prompt := e.rng.IntN(prompts)
		t := kvcache.Tier(e.rng.IntN(3))
		switch n := e.rng.IntN(10); {
		case n < 5:
			events = append(events, e.compute(prompt, 1+e.rng.IntN(depth)))
		case n < 6 && e.prefix(prompt) > 0: // written to a slower tier
			at := e.rng.IntN(e.prefix(prompt))
			events = append(events, e.store(t, prompt, at, at+1))
		default:
			if p, ok := e.any(t); ok {
				events = append(events, e.evict(t, p))
			}
		}
	}
	return events
}

// any is a block that a tier holds, but not the one that tells the engine's processes apart.
func (e *engine) any(t kvcache.Tier) (place, bool) {
	all := make([]place, 0, len(e.held[t]))
	for p := range e.held[t] {
		if p.prompt < prompts {
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		return place{}, false
	}
	slices.SortFunc(all, func(a, b place) int { return (a.prompt-b.prompt)*depth + a.at - b.at })
	return all[e.rng.IntN(len(all))], true
}

// sign is the event that stores the block that tells this process from those before.
func (e *engine) sign() wire.Event { return e.store(kvcache.Device, e.own(e.life), 0, 1) }

// take makes the next payload of events.
func (e *engine) take(events ...wire.Event) (seq int64, payload []byte) {
	e.last = wire.Encode(nil, wire.Batch{Events: events}, wire.FormMap)
	e.next++
	return e.next - 1, e.last
}

func (e *engine) publish(events ...wire.Event) {
	seq, payload := e.take(events...)
	e.proc.Publish("", seq, payload)
}

// repeat sends the last message again.
func (e *engine) repeat() {
	if e.last != nil {
		e.proc.Raw(nil, binary.BigEndian.AppendUint64(nil, uint64(e.next-1)), e.last)
	}
}

// resident is what the index should hold of the engine: "tier block-hash".
func (e *engine) resident() map[string]bool {
	out := map[string]bool{}
	for t, c := range e.held {
		for p := range c {
			out[fmt.Sprintf("%v %v", kvcache.Tier(t), hashes(p.prompt, p.at+1)[p.at])] = true
		}
	}
	return out
}

// overlap is what a lookup of a prompt should say.
func (e *engine) overlap(prompt int) kvcache.Overlap {
	var d [3]int
	for t := range d {
		for ; d[t] < depth; d[t]++ {
			p := place{prompt, d[t]}
			if !slices.ContainsFunc(e.held[:t+1], func(c copies) bool { return c[p] > 0 }) {
				break
			}
		}
	}
	return kvcache.Overlap{Device: d[0], Host: d[1], Disk: d[2], Any: d[2]}
}
