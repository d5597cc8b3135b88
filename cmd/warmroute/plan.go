package main

import (
	"encoding/json"
	"fmt"
	"text/tabwriter"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/capacity"
)

// planCmd is the calculator of docs/capacity.md.
type planCmd struct {
	Workers       int      `required:"" placeholder:"N" help:"Engine instances." env:"-"`
	Ranks         int      `default:"1" placeholder:"N" help:"Data-parallel ranks of each (default ${default})." env:"-"`
	Blocks        int      `placeholder:"N" help:"Cache of a rank in blocks, all tiers together; engines log it at the start (vLLM: num_gpu_blocks)." env:"-"`
	CacheMemory   byteSize `placeholder:"SIZE" help:"Instead of --blocks: memory of a rank's cache, with --bytes-per-token." env:"-"`
	BytesPerToken int64    `placeholder:"N" help:"2 × layers × KV heads × head size × bytes of a number; 131072 for Llama 3.1 8B in bf16." env:"-"`
	BlockSize     int      `default:"16" placeholder:"TOKENS" help:"Tokens of a block (default ${default})." env:"-"`
	Requests      float64  `name:"rate" default:"10" placeholder:"N" help:"Requests per second of the whole fleet (default ${default})." env:"-"`
	PromptTokens  int      `default:"2000" placeholder:"N" help:"Mean length of a prompt (default ${default})." env:"-"`
	OutputTokens  int      `default:"300" zero:"" placeholder:"N" help:"Mean length of an answer (default ${default})." env:"-"`
	HitRatio      float64  `default:"0.3" placeholder:"X" help:"Share of the prompts' blocks that are cached (default ${default})." env:"-"`
	Frontends     int      `default:"2" placeholder:"N" help:"Frontends (default ${default})." env:"-"`
	Indexers      int      `default:"2" placeholder:"N" help:"Indexers (default ${default})." env:"-"`
	RedisPool     int      `default:"16" placeholder:"N" help:"Their --redis-pool (default ${default})." env:"-"`
	RedisMemory   byteSize `default:"16GiB" placeholder:"SIZE" help:"Memory that one Redis node may use (default ${default})." env:"-"`
	JSON          bool     `help:"Print one JSON object." env:"-"`
}

// Help is the long form of the command's help.
func (planCmd) Help() string {
	return `What the index of a fleet needs of Redis: memory, part of one core, shards, connections. The formulas, and the
measurements behind them, are in docs/capacity.md; your own are better: warmroute bench lookup, warmroute bench apply.

Example: 16 engines with 20,000 blocks each

    warmroute plan --workers 16 --blocks 20000 --rate 50 --prompt-tokens 4000

Example: from the memory of the caches

    warmroute plan --workers 64 --ranks 8 --cache-memory 40GiB --bytes-per-token 131072 --rate 400 --prompt-tokens 8000

Exit codes: 0 it fits; 1 it does not, and the last lines say what to do; 2 wrong flags.`
}

// Run prints the sizing.
func (c planCmd) Run(std *stdio) error {
	if c.Blocks == 0 {
		if c.CacheMemory == 0 || c.BytesPerToken == 0 {
			return usagef("how large is a cache? Give --blocks, or --cache-memory and --bytes-per-token")
		}
		if c.Blocks = capacity.BlocksIn(int64(c.CacheMemory), c.BytesPerToken, c.BlockSize); c.Blocks == 0 {
			return usagef("--cache-memory holds no block of %d tokens of %d bytes", c.BlockSize, c.BytesPerToken)
		}
	} else if c.CacheMemory != 0 || c.BytesPerToken != 0 {
		return usagef("--blocks and --cache-memory exclude each other")
	}
	f := capacity.Fleet{
		Workers: c.Workers, Ranks: c.Ranks, Blocks: c.Blocks, BlockSize: c.BlockSize, Requests: c.Requests, PromptTokens: c.PromptTokens,
		OutputTokens: c.OutputTokens, HitRatio: c.HitRatio, Frontends: c.Frontends, Indexers: c.Indexers, Pool: c.RedisPool, NodeMemory: int64(c.RedisMemory),
	}
	s, err := capacity.Plan(f)
	if err != nil {
		return usagef("%w", err)
	}
	if c.JSON {
		err = json.NewEncoder(std.Out).Encode(struct {
			Fleet  capacity.Fleet  `json:"fleet"`
			Sizing capacity.Sizing `json:"sizing"`
		}{f, s})
	} else {
		t := tabwriter.NewWriter(std.Out, 0, 0, 2, ' ', 0)
		_, _ = fmt.Fprintf(t, "blocks in the index\t%d\t%d ranks × %d\n", s.IndexBlocks, c.Workers*c.Ranks, c.Blocks)
		_, _ = fmt.Fprintf(t, "memory of the index\t%s\t%d bytes per block\n", size(s.IndexBytes), capacity.BytesPerBlock)
		_, _ = fmt.Fprintf(t, "shards (--shards)\t%d\t%s\n", s.Shards, map[bool]string{true: "one Redis", false: "on as many masters of a cluster"}[s.Shards == 1])
		_, _ = fmt.Fprintf(t, "maxmemory per node\t%s\ta third stays free; maxmemory-policy noeviction\n", size(s.MaxMemory))
		_, _ = fmt.Fprintf(t, "Redis CPU per node\t%.1f %%\tof one core: lookups %.1f %%, writes %.1f %%\n", 100*s.Core, 100*s.LookupCore, 100*s.WriteCore)
		_, _ = fmt.Fprintf(t, "lookups\t%.0f/s\tof %d blocks; at half a core %.0f/s\n", s.Lookups, s.LookupBlocks, s.MostLookups)
		_, _ = fmt.Fprintf(t, "writes\t%.0f blocks/s\tstored and removed\n", s.WrittenBlocks)
		_, _ = fmt.Fprintf(t, "network of lookups\t%s/s\tper node\n", size(int64(s.LookupBytes)))
		_, _ = fmt.Fprintf(t, "connections per node\t%d\tmaxclients %d or more\n", s.Connections, s.MaxClients)
		err = t.Flush()
	}
	if err == nil && len(s.Warnings) > 0 {
		for _, w := range s.Warnings[1:] {
			_, _ = fmt.Fprintln(std.Err, "warmroute:", w)
		}
		err = fmt.Errorf("it does not fit: %s", s.Warnings[0])
	}
	return err
}

// size is a number of bytes for people.
func size(n int64) string {
	f, unit := float64(n), 0
	for f >= 1024 && unit < 4 {
		f /= 1024
		unit++
	}
	if unit == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", f, []string{"", "KiB", "MiB", "GiB", "TiB"}[unit])
}
