package store

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/warmroute/warmroute/kvcache"
)

// Batch collects the operations of consecutive messages of one stream: messages in ascending
// order, operations in the order of their message. Neighbouring operations of one kind and tier
// become one run of the script, whatever messages they come from. The zero value is ready to use.
type Batch struct {
	// Force applies over a gap.
	Force bool
	// Set counts no copies: a block that was stored twice is gone after one removal.
	Set bool

	restore bool // keep the watermark: see [Restorer]

	first, last int64
	digest      uint64 // of the last message
	messages    int
	ops         int
	marks       []mark
	args        []any // the runs, from ARGV[7] on
	run         int   // index in args of the current run's header; -1 = none
	kind        string
	values      int // in the current run
	seen        map[uint64]struct{}
	begun       bool
}

// mark says at which index of a batch's args the operations of a message begin.
type mark struct {
	seq int64
	at  int
}

// firstRun is the ARGV index of the first run in apply.lua.
const firstRun = 8

// A batch of more than splitOps blocks, which only one very large message or many orphans make, is applied in parts of
// partOps, or it would keep Redis from everybody else for a tenth of a second. The last part moves the watermark; a repetition repeats all.
const (
	splitOps = 2048
	partOps  = 512
)

// Message begins the operations of the message with that sequence number. A message without
// operations moves the watermark too.
func (b *Batch) Message(seq int64) {
	if b.messages == 0 {
		b.first = seq
	}
	b.last, b.digest = seq, 0
	b.messages++
	b.begun = false
}

// Sign gives the digest of the current message's payload, by which a message is told from another one that an engine
// has sent under the same number; 0 means unknown.
func (b *Batch) Sign(digest uint64) { b.digest = digest }

// mark notes where the current message's operations begin; one that has none needs no mark.
func (b *Batch) mark(values int) {
	if b.begun {
		return
	}
	b.begun = true
	b.marks = append(b.marks, mark{b.last, len(b.args) - values})
}

// part is what one call of apply.lua takes.
type part struct {
	marks []byte
	args  []any
	ops   int
}

func (p *part) mark(m mark) {
	if len(p.marks) > 0 {
		p.marks = append(p.marks, ' ')
	}
	p.marks = strconv.AppendInt(p.marks, m.seq, 10)
	p.marks = append(p.marks, ':')
	p.marks = strconv.AppendInt(p.marks, int64(firstRun+m.at), 10)
}

// parts cuts the runs, all of them closed, into what is applied at a time.
func (b *Batch) parts() []part {
	if b.ops <= splitOps {
		p := part{args: b.args, ops: b.ops}
		for _, m := range b.marks {
			p.mark(m)
		}
		return []part{p}
	}
	out := []part{{}}
	marks := b.marks // that are not in a part yet
	for i := 0; i < len(b.args); {
		kind, _ := b.args[i].(string)
		text, _ := b.args[i+1].(string)
		n, _ := strconv.Atoi(text)
		width := 2
		if kind[0] == 'r' {
			width = 1
		}
		for at, end := i+2, i+2+n; at < end; {
			if out[len(out)-1].ops == partOps {
				out = append(out, part{})
				out[len(out)-1].mark(mark{b.marks[len(b.marks)-len(marks)-1].seq, 0}) // the message that is cut, or the one before
			}
			p := &out[len(out)-1]
			take := min(end-at, (partOps-p.ops)*width)
			p.ops += take / width
			p.args = append(p.args, kind, strconv.Itoa(take))
			for _, v := range b.args[at : at+take] {
				if len(marks) > 0 && marks[0].at == at {
					p.mark(mark{marks[0].seq, len(p.args)})
					marks = marks[1:]
				}
				p.args = append(p.args, v)
				at++
			}
		}
		i += 2 + n
	}
	return out
}

// enter makes the current run one of that kind that does not hold id yet: within a run an id
// occurs once, so that the script can handle a run as a set.
func (b *Batch) enter(kind string, id uint64) {
	if b.seen == nil {
		b.seen = map[uint64]struct{}{}
	}
	if b.kind == kind {
		if _, twice := b.seen[id]; !twice {
			b.seen[id] = struct{}{}
			return
		}
	}
	b.closeRun()
	clear(b.seen)
	b.seen[id] = struct{}{}
	b.kind, b.run, b.values = kind, len(b.args), 0
	b.args = append(b.args, kind, "")
}

func (b *Batch) closeRun() {
	if b.kind != "" {
		b.args[b.run+1] = strconv.Itoa(b.values)
	}
}

var (
	storeKinds  = [...]string{"s0", "s1", "s2"}
	adoptKinds  = [...]string{"a0", "a1", "a2"}
	removeKinds = [...]string{"r0", "r1", "r2"}
	knownKinds  = [...]string{"x0", "x1", "x2"}
)

// Store adds a block on a tier under the engine's own hash.
func (b *Batch) Store(t kvcache.Tier, block kvcache.BlockHash, e kvcache.EngineHash) {
	b.store(storeKinds[t], block, e)
}

// Adopt is Store for what an earlier message has said, which another caller may have applied: where the block is there
// already, it is not a further copy.
func (b *Batch) Adopt(t kvcache.Tier, block kvcache.BlockHash, e kvcache.EngineHash) {
	b.store(adoptKinds[t], block, e)
}

func (b *Batch) store(kind string, block kvcache.BlockHash, e kvcache.EngineHash) {
	b.enter(kind, uint64(block))
	b.args = append(b.args, strconv.FormatUint(e.Score(), 10), block.String())
	b.values += 2
	b.ops++
	b.mark(2)
}

// Remove takes a block off a tier by the engine's own hash. Removing an unknown block is nothing.
func (b *Batch) Remove(t kvcache.Tier, e kvcache.EngineHash) {
	b.enter(removeKinds[t], e.Score())
	b.args = append(b.args, strconv.FormatUint(e.Score(), 10))
	b.values++
	b.ops++
	b.mark(1)
}

// RemoveKnown is Remove for a caller that remembers the block hash, which is faster: the script need
// not search. The memory is believed where the tier holds that block, even if it was stored again under
// another engine hash meanwhile: that errs to the harmless side. Where the tier does not hold it, the
// script searches.
func (b *Batch) RemoveKnown(t kvcache.Tier, block kvcache.BlockHash, e kvcache.EngineHash) {
	b.enter(knownKinds[t], e.Score())
	b.args = append(b.args, strconv.FormatUint(e.Score(), 10), block.String())
	b.values += 2
	b.ops++
	b.mark(2)
}

// Ops is how many blocks are stored and removed.
func (b *Batch) Ops() int { return b.ops }

// Messages is how many messages the batch holds.
func (b *Batch) Messages() int { return b.messages }

// First is the sequence number of the first message.
func (b *Batch) First() int64 { return b.first }

// Last is the sequence number of the last message.
func (b *Batch) Last() int64 { return b.last }

// Reset empties the batch, keeping its memory and its flags.
func (b *Batch) Reset() {
	clear(b.args)
	b.args, b.marks = b.args[:0], b.marks[:0]
	b.messages, b.ops, b.values, b.kind = 0, 0, 0, ""
	clear(b.seen)
}

// Apply applies a batch and moves the watermark, atomically unless the batch is very large: then an error may leave a beginning of it
// applied, which a repetition completes. seq is the watermark now in Redis,
// unless the outcome is Stale. A batch may overlap what was applied before: only messages above
// the watermark take effect. A lost reply is harmless, the repetition is a Duplicate.
func (s *Store) Apply(ctx context.Context, st Stream, b *Batch) (o Outcome, seq int64, err error) {
	if b.messages == 0 {
		return Duplicate, st.Seq, nil
	}
	b.closeRun()
	parts := b.parts()
	for i := range parts {
		o, seq, err = s.applyPart(ctx, st, b, &parts[i], i == len(parts)-1)
		if err != nil || o != Applied {
			return o, seq, err
		}
	}
	return o, seq, nil
}

func (s *Store) applyPart(ctx context.Context, st Stream, b *Batch, p *part, last bool) (o Outcome, seq int64, err error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	sh, err := s.shard(bounded, st)
	if err != nil {
		return 0, 0, s.writeFailed(ctx, fmt.Errorf("apply batch: %w", err))
	}
	if sh == nil {
		return Stale, -1, nil
	}
	flags := ""
	if b.Force {
		flags += "f"
	}
	if b.Set {
		flags += "s"
	}
	if b.restore {
		flags += "sk"
	}
	if !last {
		flags += "p"
	}
	k, w := sh.keys, st.WorkerRank
	keys := []string{
		k.stream(w), k.holders(),
		k.blocks(w, kvcache.Device), k.blocks(w, kvcache.Host), k.blocks(w, kvcache.Disk),
		k.copies(w, kvcache.Device), k.copies(w, kvcache.Host), k.copies(w, kvcache.Disk),
		k.blocks(w, kvcache.Predicted),
	}
	start := time.Now()
	args := make([]any, 0, firstRun-1+len(p.args))
	args = append(args,
		strconv.FormatInt(st.Generation, 10), strconv.FormatInt(b.first, 10), strconv.FormatInt(b.last, 10),
		flags, strconv.FormatInt(start.UnixMilli(), 10), string(p.marks), formatDigest(b.digest))
	args = append(args, p.args...)
	v, err := scripts.apply.run(bounded, s.write, keys, args...)
	if err == nil && len(v) != 2 {
		err = errShortReply
	}
	if err != nil {
		return 0, 0, s.writeFailed(ctx, fmt.Errorf("apply batch: %w", err))
	}
	s.metrics.applySeconds.WithLabelValues(sh.name).Observe(time.Since(start).Seconds())
	s.metrics.applyBlocks.WithLabelValues(sh.name).Observe(float64(p.ops))
	code, err1 := strconv.Atoi(v[0])
	seq, err2 := strconv.ParseInt(v[1], 10, 64)
	if err1 != nil || err2 != nil || code < 0 || code > int(Stale) {
		return 0, 0, fmt.Errorf("apply batch: reply %q %q: %w", v[0], v[1], ErrCorrupt)
	}
	return Outcome(code), seq, nil
}

// Resolve finds the block hashes that a stream's engine hashes stand for, on any tier, in one
// round trip. ok[i] is false where hashes[i] is unknown.
func (s *Store) Resolve(ctx context.Context, st Stream, hashes []kvcache.EngineHash) (blocks []kvcache.BlockHash, ok []bool, err error) {
	blocks, ok = make([]kvcache.BlockHash, len(hashes)), make([]bool, len(hashes))
	if len(hashes) == 0 {
		return blocks, ok, nil
	}
	bounded, cancel := s.bound(ctx)
	defer cancel()
	fail := func(err error) ([]kvcache.BlockHash, []bool, error) {
		return nil, nil, classify(ctx, fmt.Errorf("resolve engine hashes: %w", err))
	}
	sh, err := s.shard(bounded, st)
	if err != nil {
		return fail(err)
	}
	if sh == nil {
		return blocks, ok, nil
	}
	pipe := s.write.Pipeline()
	type answer interface{ Result() ([]string, error) }
	var answers []answer
	for _, h := range hashes {
		score := strconv.FormatUint(h.Score(), 10)
		for t := range kvcache.Predicted {
			answers = append(answers, pipe.ZRangeByScore(bounded, sh.keys.blocks(st.WorkerRank, t), rangeOf(score)))
		}
	}
	if _, err := pipe.Exec(bounded); err != nil {
		return fail(err)
	}
	for i := range hashes {
		for t := range int(kvcache.Predicted) {
			found, err := answers[i*int(kvcache.Predicted)+t].Result()
			if err != nil {
				return fail(err)
			}
			if len(found) > 0 && !ok[i] {
				if blocks[i], err = kvcache.ParseBlockHash(found[0]); err != nil {
					return fail(fmt.Errorf("block hash %q: %w", found[0], ErrCorrupt))
				}
				ok[i] = true
			}
		}
	}
	return blocks, ok, nil
}
