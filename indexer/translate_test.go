package indexer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

func testTranslator(t testing.TB, reg store.Registration) *translator {
	t.Helper()
	reg.BlockSize = 4
	o, err := Options{Store: &store.Store{}, Remember: 1000, Orphans: 100}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	return newTranslator(publisher{reg: reg}, o, newMetrics(prometheus.NewRegistry()))
}

// decoded sends events through the wire, which derives what the translator goes by.
func decoded(t *testing.T, events ...wire.Event) *wire.Batch {
	t.Helper()
	b, err := wire.Decode(payload(events...))
	if err != nil || len(b.Events) != len(events) {
		t.Fatalf("decode: %v, %d of %d events", err, len(b.Events), len(events))
	}
	return &b
}

func (t *translator) lines() []string {
	out := []string{}
	for _, o := range t.ops {
		switch o.kind {
		case opStore, opAdopt:
			out = append(out, fmt.Sprintf("+%s %d %s", o.tier, o.engine, o.block))
		case opRemoveKnown:
			out = append(out, fmt.Sprintf("-%s %d %s", o.tier, o.engine, o.block))
		case opRemove:
			out = append(out, fmt.Sprintf("-%s %d", o.tier, o.engine))
		}
	}
	return out
}

// blocksOf is what a frontend computes for a prompt.
func blocksOf(spec kvcache.HashSpec, tokens ...uint32) []kvcache.BlockHash {
	spec.BlockSize = 4
	return kvcache.HashTokens(spec, tokens)
}

func repeat4(tokens ...uint32) []uint32 {
	var out []uint32
	for _, x := range tokens {
		out = append(out, x, x, x, x)
	}
	return out
}

func wantOps(t *testing.T, tr *translator, want ...string) {
	t.Helper()
	if got := tr.lines(); !slices.Equal(got, want) {
		t.Errorf("operations %q, want %q", got, want)
	}
}

func TestTranslateChain(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	b := blocksOf(kvcache.HashSpec{}, repeat4(1, 2, 3)...)
	tr.message(decoded(t, stored(nil, 1, 2)))
	wantOps(t, tr, fmt.Sprint("+device 1 ", b[0]), fmt.Sprint("+device 2 ", b[1]))
	cpu := stored(below(2), 3)
	cpu.Medium = "cpu_pinned"
	disk := stored(below(2), 3)
	disk.Medium = "STORAGE"
	tr.message(decoded(t, cpu, disk, removed(2, 99)))
	wantOps(t, tr, fmt.Sprint("+host 3 ", b[2]), fmt.Sprint("+disk 3 ", b[2]), fmt.Sprint("-device 2 ", b[1]), "-device 99")
	// A removed block still names the prefix of its children.
	tr.message(decoded(t, stored(below(2), 3)))
	wantOps(t, tr, fmt.Sprint("+device 3 ", b[2]))
	if tr.tally != [4]int{wire.Stored: 1} {
		t.Errorf("tally %v", tr.tally)
	}
}

func TestTranslateSkips(t *testing.T) {
	sparse := stored(nil, 1, 2)
	sparse.Tokens = sparse.Tokens[:7]
	other := stored(nil, 1)
	other.BlockSize, other.Tokens = 2, other.Tokens[:2]
	text, err := wire.ListOf("a", "b", "c", "d")
	if err != nil {
		t.Fatal(err)
	}
	with := func(f func(*wire.Event)) wire.Event {
		e := stored(nil, 1)
		f(&e)
		return e
	}
	for name, tc := range map[string]struct {
		event  wire.Event
		result string
	}{
		"sparse, nothing known":  {sparse, resultOrphan},
		"another block size":     {other, resultSkipped},
		"text tokens":            {with(func(e *wire.Event) { e.Tokens, e.TokenList = nil, text }), resultSkipped},
		"no hashes":              {stored(nil), resultSkipped},
		"its own parent":         {stored(below(1), 1), resultSkipped},
		"its own ancestor":       {stored(below(2), 1, 2), resultSkipped},
		"a hash twice":           {stored(nil, 1, 2, 1), resultSkipped},
		"remote":                 {with(func(e *wire.Event) { e.Locality = "REMOTE" }), resultSkipped},
		"external":               {with(func(e *wire.Event) { e.Medium = "EXTERNAL" }), resultSkipped},
		"unknown medium":         {with(func(e *wire.Event) { e.Medium = "MOON" }), resultSkipped},
		"mamba":                  {with(func(e *wire.Event) { e.SpecKind = "mamba" }), resultSkipped},
		"group without kind":     {with(func(e *wire.Event) { e.GroupIdx = wire.Some[uint32](1) }), resultSkipped},
		"removal of that group":  {wire.Event{Kind: wire.Removed, Hashes: []kvcache.EngineHash{1}, GroupIdx: wire.Some[uint32](1)}, resultSkipped},
		"removal, remote":        {wire.Event{Kind: wire.Removed, Hashes: []kvcache.EngineHash{1}, Locality: "REMOTE"}, resultSkipped},
		"unknown parent":         {stored(below(9), 1), resultOrphan},
		"placeholder of unknown": {wire.Event{Kind: wire.Stored, Hashes: []kvcache.EngineHash{1}, Medium: "CPU"}, resultOrphan},
	} {
		t.Run(name, func(t *testing.T) {
			tr := testTranslator(t, store.Registration{})
			tr.message(decoded(t, tc.event))
			wantOps(t, tr)
			if n := counter(tr.metrics.events, tc.event.Kind.String(), tc.result); n != 1 {
				t.Errorf("not counted as %s", tc.result)
			}
		})
	}
}

// A removal names a group only; what kind it is was said when it was stored.
func TestTranslateGroups(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	in := func(e wire.Event, group uint32, kind string) wire.Event {
		e.GroupIdx, e.SpecKind = wire.Some(group), kind
		return e
	}
	b := blocksOf(kvcache.HashSpec{}, repeat4(1)...)
	tr.message(decoded(t, in(stored(nil, 1), 0, "mamba"), in(stored(nil, 1), 2, "full_attention"), in(stored(nil, 1), 3, "mla_attention")))
	wantOps(t, tr, fmt.Sprint("+device 1 ", b[0]), fmt.Sprint("+device 1 ", b[0]))
	tr.message(decoded(t, in(removed(1), 0, ""), in(removed(1), 2, ""), in(removed(1), 7, "")))
	wantOps(t, tr, fmt.Sprint("-device 1 ", b[0]))
	for g := range uint32(1000) {
		tr.message(decoded(t, in(stored(nil, 1), 10+g, "mamba")))
	}
	if len(tr.groups) > maxGroups {
		t.Errorf("%d groups are remembered", len(tr.groups))
	}
}

// After a restart of the indexer the kinds of the groups are unknown until each is stored again. A removal counts meanwhile, unless the
// engine is one that names no kinds.
func TestTranslateGroupsOfAnEarlierLife(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	tr.resumed = true
	in := func(e wire.Event, group uint32, kind string) wire.Event {
		e.GroupIdx, e.SpecKind = wire.Some(group), kind
		return e
	}
	tr.message(decoded(t, in(removed(1), 2, "")))
	wantOps(t, tr, "-device 1")
	tr.message(decoded(t, in(stored(nil, 2), 2, "mamba"), in(removed(1), 2, "")))
	wantOps(t, tr)
	tr.message(decoded(t, in(removed(1), 3, "")))
	wantOps(t, tr, "-device 1")
	tr.message(decoded(t, in(stored(nil, 3), 1, ""), in(removed(1), 3, "")))
	wantOps(t, tr)
	tr.forget() // a new engine process: all that it has was seen
	tr.message(decoded(t, in(removed(1), 5, "")))
	wantOps(t, tr)
}

func TestTranslatePlaceholder(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	b := blocksOf(kvcache.HashSpec{}, repeat4(1, 2)...)
	tr.message(decoded(t, stored(nil, 1, 2)))
	here := wire.Event{Kind: wire.Stored, Hashes: []kvcache.EngineHash{2, 5}, Medium: "CPU"}
	batch := decoded(t, here)
	if need := tr.needs(batch); !slices.Equal(need, []kvcache.EngineHash{5}) {
		t.Errorf("needs %v, want 5", need)
	}
	tr.message(batch)
	wantOps(t, tr, fmt.Sprint("+host 2 ", b[1]))
	tr.learn(5, 77)
	tr.message(batch)
	wantOps(t, tr, fmt.Sprint("+host 2 ", b[1]), fmt.Sprint("+host 5 ", kvcache.BlockHash(77)))
}

// A page of bigrams covers one token more than it has pairs; the block is named by the tokens at its own positions.
func TestTranslateBigrams(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}
	e := wire.Event{Kind: wire.Stored, Hashes: []kvcache.EngineHash{1, 2}, BlockSize: 4}
	for i := range 8 {
		e.Bigrams = append(e.Bigrams, [2]uint32{tokens[i], tokens[i+1]})
	}
	tr.message(decoded(t, e))
	b := blocksOf(kvcache.HashSpec{}, tokens[:8]...)
	wantOps(t, tr, fmt.Sprint("+device 1 ", b[0]), fmt.Sprint("+device 2 ", b[1]))
}

func TestTranslateExtraKeys(t *testing.T) {
	const digest = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
	list := func(v ...any) any { return v }
	for name, tc := range map[string]struct {
		reg   store.Registration
		event func(*wire.Event)
		keys  []any // per block
		mm    any   // of block 0, for TensorRT-LLM
		spec  kvcache.HashSpec
		seen  [2][]uint64 // multimodal hashes of the two blocks
	}{
		"nothing":    {keys: []any{nil, nil}},
		"lora event": {event: func(e *wire.Event) { e.LoRAName = "a" }, keys: []any{list("a"), list("a")}, spec: kvcache.HashSpec{LoRA: "a"}},
		"lora registered, event says another": {
			reg: store.Registration{LoRA: "b"}, event: func(e *wire.Event) { e.LoRAName = "a" }, spec: kvcache.HashSpec{LoRA: "a"},
		},
		"lora and salt registered": {reg: store.Registration{LoRA: "b", Salt: "s"}, spec: kvcache.HashSpec{LoRA: "b", Salt: "s"}},
		"salt in extra keys":       {keys: []any{list("s"), nil}, spec: kvcache.HashSpec{Salt: "s"}},
		"salt field":               {event: func(e *wire.Event) { e.CacheSalt = "s" }, spec: kvcache.HashSpec{Salt: "s"}},
		"lora and salt": {
			event: func(e *wire.Event) { e.LoRAName = "a" }, keys: []any{list("a", "s"), list("a")}, spec: kvcache.HashSpec{LoRA: "a", Salt: "s"},
		},
		"image pair": {keys: []any{nil, list(list(digest, 3))}, seen: [2][]uint64{nil, {0x0011223344556677}}},
		"image bare": {keys: []any{list(digest), list(digest)}, seen: [2][]uint64{{0x0011223344556677}, {0x0011223344556677}}},
		"image, salt": {
			keys: []any{list(list("cat.png", -2), "s"), list(list("cat.png", 0))}, spec: kvcache.HashSpec{Salt: "s"},
			seen: [2][]uint64{{kvcache.MultimodalHash("cat.png")}, {kvcache.MultimodalHash("cat.png")}},
		},
		"bare name in a later block": {keys: []any{nil, list("cat.png")}, seen: [2][]uint64{nil, {kvcache.MultimodalHash("cat.png")}}},
		"embeddings":                 {keys: []any{list([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8}), nil}, seen: [2][]uint64{{0x0001020304050607}, nil}},
		"too many lists":             {keys: []any{nil, nil, list(digest)}},
		"not lists":                  {keys: []any{"x", 7}},
	} {
		t.Run(name, func(t *testing.T) {
			tr := testTranslator(t, tc.reg)
			e := stored(nil, 1, 2)
			if tc.event != nil {
				tc.event(&e)
			}
			if tc.keys != nil {
				var err error
				if e.ExtraKeys, err = wire.ListOf(tc.keys...); err != nil {
					t.Fatal(err)
				}
			}
			tr.message(decoded(t, e))
			tc.spec.BlockSize = 4
			h := kvcache.NewHasher(tc.spec)
			h.AppendBlock(repeat4(1), tc.seen[0])
			h.AppendBlock(repeat4(2), tc.seen[1])
			wantOps(t, tr, fmt.Sprint("+device 1 ", h.Hashes()[0]), fmt.Sprint("+device 2 ", h.Hashes()[1]))
		})
	}
}

// TensorRT-LLM names multimodal inputs in a field of its own.
func TestTranslateMMKeys(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	e := stored(nil, 1, 2)
	var err error
	e.MMKeys, err = wire.ListOf([]any{wire.Map{{Key: "type", Value: "mm_key"}, {Key: "hash", Value: "aabbccddeeff00112233"}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	tr.message(decoded(t, e))
	h := kvcache.NewHasher(kvcache.HashSpec{BlockSize: 4})
	h.AppendBlock(repeat4(1), []uint64{0xaabbccddeeff0011})
	h.AppendBlock(repeat4(2), nil)
	wantOps(t, tr, fmt.Sprint("+device 1 ", h.Hashes()[0]), fmt.Sprint("+device 2 ", h.Hashes()[1]))
}

// vLLM names the salt with block 0 only; what follows, also from the middle of an event, inherits it.
func TestTranslateSaltIsInherited(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	root := stored(nil, 1, 2)
	var err error
	if root.ExtraKeys, err = wire.ListOf([]any{"s"}, nil); err != nil {
		t.Fatal(err)
	}
	tr.message(decoded(t, root, stored(below(2), 3), stored(below(1), 4)))
	long := blocksOf(kvcache.HashSpec{Salt: "s"}, repeat4(1, 2, 3)...)
	fork := blocksOf(kvcache.HashSpec{Salt: "s"}, repeat4(1, 4)...)
	wantOps(t, tr, fmt.Sprint("+device 1 ", long[0]), fmt.Sprint("+device 2 ", long[1]), fmt.Sprint("+device 3 ", long[2]), fmt.Sprint("+device 4 ", fork[1]))
}

func TestTranslateOrphans(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	b := blocksOf(kvcache.HashSpec{}, repeat4(1, 2, 3, 4, 5)...)
	tr.message(decoded(t, stored(below(2), 3, 4)))
	tr.message(decoded(t, stored(below(4), 5))) // child of an orphan
	batch := decoded(t, stored(below(4), 6))
	if need := tr.needs(batch); len(need) != 0 {
		t.Errorf("asks the index for the orphan %v", need)
	}
	wantOps(t, tr)
	tr.message(decoded(t, removed(3))) // gone before it was ever indexed, unless by another indexer
	wantOps(t, tr, "-device 3")
	tr.message(decoded(t, removed(3)))
	wantOps(t, tr, "-device 3")
	tr.message(decoded(t, stored(nil, 1, 2)))
	wantOps(t, tr, fmt.Sprint("+device 1 ", b[0]), fmt.Sprint("+device 2 ", b[1]), fmt.Sprint("+device 4 ", b[3]), fmt.Sprint("+device 5 ", b[4]))
	if tr.orphans.blocks != 0 || tr.orphans.order.Len() != 0 || len(tr.orphans.byHash) != 0 || len(tr.orphans.byParent) != 0 {
		t.Errorf("orphans are left: %+v", tr.orphans)
	}
}

func TestOrphanCycle(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	tr.message(decoded(t, stored(below(2), 1), stored(below(1), 2), stored(below(3), 2)))
	wantOps(t, tr)
	tr.message(decoded(t, stored(nil, 3)))
	// 3 adopts a 2, which adopts a 1, which adopts the other 2.
	if n := len(tr.ops); n != 4 {
		t.Errorf("%d operations: %q", n, tr.lines())
	}
	if tr.orphans.blocks != 0 {
		t.Error("orphans are left")
	}
}

func TestOrphanBounds(t *testing.T) {
	tr := testTranslator(t, store.Registration{})
	now := time.Unix(1000, 0)
	tr.now = func() time.Time { return now }
	for i := range kvcache.EngineHash(150) {
		tr.message(decoded(t, stored(below(1000+i), i)))
	}
	if tr.orphans.blocks != 100 || tr.orphans.has(49) || !tr.orphans.has(50) {
		t.Errorf("%d orphans, the oldest 50 must be gone", tr.orphans.blocks)
	}
	now = now.Add(11 * time.Minute)
	tr.message(decoded(t, stored(below(5000), 4000)))
	if tr.orphans.blocks != 1 {
		t.Errorf("%d orphans after 11 minutes, want the new one", tr.orphans.blocks)
	}
	var many []kvcache.EngineHash
	for i := range kvcache.EngineHash(101) {
		many = append(many, 10_000+i)
	}
	tr.message(decoded(t, stored(below(9999), many...)))
	if tr.orphans.blocks != 1 {
		t.Errorf("%d orphans: one event larger than the bound must not displace the others", tr.orphans.blocks)
	}
	if len(tr.orphans.byHash) != 1 || len(tr.orphans.byParent) != 1 || tr.orphans.order.Len() != 1 {
		t.Error("the indices of the orphans do not shrink with them")
	}
}

func TestTranslateResets(t *testing.T) {
	lost := []byte("\x93\xc0\x93" +
		"\x96\xabBlockStored\x91\x01\xc0\x94\x01\x01\x01\x01\x04\xc0" + // 1
		"\x92\xacBlockRemoved\x91\xa1x" + // unreadable
		"\x96\xabBlockStored\x91\x02\x01\x94\x02\x02\x02\x02\x04\xc0" + // 2 below 1
		"\x00")
	tr := testTranslator(t, store.Registration{})
	b, err := wire.Decode(lost)
	if err != nil {
		t.Fatal(err)
	}
	if reset := tr.message(&b); reset != resetUndecodable {
		t.Errorf("lost removal: reset %q", reset)
	}
	// What came before teaches, but is not stored.
	wantOps(t, tr, fmt.Sprint("+device 2 ", blocksOf(kvcache.HashSpec{}, repeat4(1, 2)...)[1]))

	tr.message(decoded(t, stored(below(8), 9)))
	if reset := tr.message(decoded(t, stored(nil, 3), cleared, stored(below(3), 4))); reset != resetClear {
		t.Errorf("clear: reset %q", reset)
	}
	wantOps(t, tr, fmt.Sprint("+device 4 ", blocksOf(kvcache.HashSpec{}, repeat4(3, 4)...)[1]))
	if tr.orphans.blocks != 0 {
		t.Error("a clear leaves orphans")
	}
	if reset := tr.message(decoded(t, stored(nil, 3))); reset != "" {
		t.Errorf("no clear: reset %q", reset)
	}
}

// The memory holds what was used last and never more than its limit.
func TestMemoryBound(t *testing.T) {
	m := newMemory(100)
	rng := rand.New(rand.NewPCG(1, 2))
	m.put(1, known{block: 11})
	for i := range 10_000 {
		m.put(kvcache.EngineHash(100+rng.IntN(5000)), known{block: kvcache.BlockHash(i)})
		if len(m.young)+len(m.old) > 100 {
			t.Fatalf("%d entries", len(m.young)+len(m.old))
		}
		if k, ok := m.get(1); !ok || k.block != 11 {
			t.Fatal("what is used all the time was forgotten")
		}
	}
}
