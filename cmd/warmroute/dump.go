package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// dumpCmd writes a pool's stored blocks as lines of JSON.
type dumpCmd struct {
	Redis indexOptions `embed:"" group:"Redis"`
	Pool  string       `placeholder:"TENANT:MODEL" help:"Pool to dump (default: the only one)." env:"-"`
	Out   string       `placeholder:"FILE" default:"-" help:"File to write; - is standard output." env:"-"`
	JSON  bool         `help:"With --out: print one JSON object: pool, blocks, worker_ranks." env:"-"`
}

// Help is the long form of the command's help.
func (dumpCmd) Help() string {
	return `Writes one stored event per block and line, in the JSON shape of Dynamo's RouterEvent: worker_id, storage_tier, event.dp_rank, and
of the block block_hash, which names its whole prefix, and engine_hash (the low 53 bits of the engine's own).
Every event that was acknowledged before is in it; predictions are not. The index stays in use.

Example: move an index to another Redis

    warmroute dump --redis redis://10.0.0.5:6379 --pool default:llama-3-8b --out llama.jsonl
    warmroute load --redis redis://10.0.0.6:6379 --pool default:llama-3-8b --block-size 16 llama.jsonl

Exit codes: 0 all of it is written; 1 Redis is away, or the file cannot be written: it is then as it was before; 2 wrong flags.`
}

// dumpReport is the form of --json.
type dumpReport struct {
	Pool   string `json:"pool"`
	Blocks int    `json:"blocks"`
	Ranks  int    `json:"worker_ranks"`
}

// Run dumps the pool.
func (c dumpCmd) Run(ctx context.Context, std *stdio, logger *slog.Logger) error {
	if c.JSON && c.Out == "-" {
		return usagef("--json goes with --out FILE: without it the dump is what is printed, and it is JSON")
	}
	s, err := redisOptions{indexOptions: c.Redis}.store(logger, nil)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	pool, err := onePool(ctx, s, c.Pool)
	if err != nil {
		return indexAway(err)
	}
	if c.Out == "-" {
		_, err := writeDump(ctx, std, s, pool, std.Out, isTerminal(std.Err) && !isTerminal(std.Out))
		return indexAway(err)
	}
	// Under another name first: a dump that breaks off leaves nothing that looks like one.
	f, err := os.CreateTemp(filepath.Dir(c.Out), ".warmroute-dump-*")
	if err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	r, err := writeDump(ctx, std, s, pool, f, isTerminal(std.Err))
	if err != nil {
		_ = f.Close()
		return indexAway(err)
	}
	if err := cmp.Or(f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), c.Out); err != nil {
		return err
	}
	if c.JSON {
		return json.NewEncoder(std.Out).Encode(r)
	}
	_, err = fmt.Fprintf(std.Out, "%s: dumped %s of %s\n", pool, count(r.Blocks, "block"), count(r.Ranks, "worker rank"))
	return err
}

func writeDump(ctx context.Context, std *stdio, s *store.Store, pool kvcache.PoolID, out io.Writer, draw bool) (dumpReport, error) {
	p := progress{w: std.Err, drawn: draw}
	if !draw {
		p.w = io.Discard
	}
	defer p.end()
	w := bufio.NewWriterSize(out, 1<<16)
	enc := json.NewEncoder(w)
	r, ranks := dumpReport{Pool: pool.String()}, map[kvcache.WorkerRank]bool{}
	err := s.Dump(ctx, pool, func(e kvcache.RouterEvent) error {
		ranks[kvcache.WorkerRank{Worker: string(e.WorkerID), Rank: e.Event.DPRank}] = true
		if r.Blocks++; r.Blocks%1000 == 0 {
			p.show("dump", r.Blocks, -1)
		}
		return enc.Encode(e)
	})
	r.Ranks = len(ranks)
	return r, cmp.Or(err, w.Flush())
}

// onePool is the pool that was named, or the only one.
func onePool(ctx context.Context, s *store.Store, name string) (kvcache.PoolID, error) {
	c := checkCmd{}
	if name != "" {
		c.Pool = []string{name}
	}
	pools, err := c.pools(ctx, s)
	switch {
	case err != nil:
		return kvcache.PoolID{}, err
	case len(pools) == 1:
		return pools[0], nil
	case len(pools) == 0:
		return kvcache.PoolID{}, errNoPools
	}
	names := make([]string, len(pools))
	for i, p := range pools {
		names[i] = p.String()
	}
	return kvcache.PoolID{}, usagef("--pool is missing: the index has %s", strings.Join(names, ", "))
}
