package capacity

import (
	"math"
	"strings"
	"testing"
)

// fleet is 16 workers of 20,000 blocks with 50 requests/s of 4,000 tokens, half of them cached.
func fleet() Fleet {
	return Fleet{Workers: 16, Ranks: 1, Blocks: 20_000, BlockSize: 16, Requests: 50, PromptTokens: 4000, OutputTokens: 400, HitRatio: 0.5,
		Frontends: 2, Indexers: 2, Pool: 16, NodeMemory: 16 << 30}
}

// The formulas of docs/capacity.md, by hand.
func TestPlanByHand(t *testing.T) {
	s, err := Plan(fleet())
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ got, want float64 }{
		"blocks":         {float64(s.IndexBlocks), 320_000},
		"bytes":          {float64(s.IndexBytes), 76_800_000},
		"maxmemory":      {float64(s.MaxMemory), 115_200_000},
		"shards":         {float64(s.Shards), 1},
		"lookup blocks":  {float64(s.LookupBlocks), 250},
		"lookup core":    {s.LookupCore, 50 * (5e-6 + 250*2e-7)},
		"written blocks": {s.WrittenBlocks, 2 * 150 * 50},
		"write core":     {s.WriteCore, 50 * 150 * 4.6e-6},
		"most lookups":   {s.MostLookups, 0.5 / (55e-6 + 150*4.6e-6)},
		"connections":    {float64(s.Connections), 128},
		"maxclients":     {float64(s.MaxClients), 10_000},
	} {
		if math.Abs(c.got-c.want) > 1e-9*math.Abs(c.want) {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}
	if len(s.Warnings) > 0 {
		t.Errorf("warnings: %q", s.Warnings)
	}
}

func TestPlanShards(t *testing.T) {
	f := fleet()
	f.Blocks = 4_000_000 // 64 M blocks: 23 GB with the spare
	if s, _ := Plan(f); s.Shards != 2 || s.MaxMemory > f.NodeMemory {
		t.Errorf("by memory: %d shards of %d bytes", s.Shards, s.MaxMemory)
	}
	f = fleet()
	f.Requests = 2000
	f.HitRatio = 0
	s, _ := Plan(f)
	if s.Shards < 3 || s.Core > CoreShare || len(s.Warnings) > 0 {
		t.Errorf("by writes: %+v", s)
	}
	if math.Abs(s.LookupCore-2000*55e-6) > 1e-9 {
		t.Errorf("shards do not divide lookups: %+v", s)
	}
	f.PromptTokens = 200_000
	if s, _ := Plan(f); len(s.Warnings) == 0 || !strings.Contains(s.Warnings[0], "lookups alone") {
		t.Errorf("too many lookups: %+v", s)
	}
	f = fleet()
	f.Workers, f.NodeMemory = 1, 1<<20
	if s, _ := Plan(f); s.Shards != 1 || len(s.Warnings) != 1 {
		t.Errorf("one worker does not fit: %+v", s)
	}
}

func TestPlanRefuses(t *testing.T) {
	for name, change := range map[string]func(*Fleet){
		"no workers":   func(f *Fleet) { f.Workers = 0 },
		"hit ratio":    func(f *Fleet) { f.HitRatio = 1.5 },
		"negative":     func(f *Fleet) { f.PromptTokens = -1 },
		"not a number": func(f *Fleet) { f.Requests = math.NaN() },
	} {
		f := fleet()
		change(&f)
		if _, err := Plan(f); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestBlocksIn(t *testing.T) {
	// Llama 3.1 8B in bf16: 2 × 32 layers × 8 heads × 128 × 2 bytes per token.
	if got := BlocksIn(40<<30, 131072, 16); got != 20480 {
		t.Errorf("%d blocks, want 20480", got)
	}
	if got := BlocksIn(40<<30, 0, 16); got != 0 {
		t.Errorf("%d blocks of nothing", got)
	}
}
