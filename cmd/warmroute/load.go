package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// loadCmd makes an index from a dump.
type loadCmd struct {
	Redis     indexOptions `embed:"" group:"Redis"`
	Shards    int          `default:"1" placeholder:"N" help:"Shards of a pool that does not exist yet (default ${default})." env:"-"`
	Pool      string       `required:"" placeholder:"TENANT:MODEL" help:"Pool to load into." env:"-"`
	BlockSize int          `placeholder:"TOKENS" help:"Tokens per block; needed where the pool does not exist yet." env:"-"`
	JSON      bool         `help:"Print one JSON object: pool, lines, blocks, worker_ranks." env:"-"`
	File      string       `arg:"" placeholder:"FILE" help:"Dump to load; - is standard input."`
}

// Help is the long form of the command's help.
func (loadCmd) Help() string {
	return `Adds the blocks of a dump to an index. Worker ranks that it does not know yet get a stream without an endpoint, which an indexer takes over
when the worker registers. Watermarks stay as they are, so that an indexer replays what the dump does not know; where an
indexer finds none, the engine's own first event, or its replay, takes the place of what was loaded.
To load a dump twice is harmless. Memory does not grow with the dump.

Example:

    warmroute load --redis redis://127.0.0.1:6379 --pool default:llama-3-8b --block-size 16 llama.jsonl

Exit codes: 0 all of it is loaded; 1 a line is no line of a dump (the message has its number; what stood before it is loaded), or Redis is away;
2 wrong flags.`
}

// loadReport is the form of --json.
type loadReport struct {
	Pool   string `json:"pool"`
	Lines  int    `json:"lines"`
	Blocks int    `json:"blocks"`
	Ranks  int    `json:"worker_ranks"`
}

// maxLine bounds a line of a dump, and so the memory of a load.
const maxLine = 1 << 20

// Run loads the dump.
func (c loadCmd) Run(ctx context.Context, std *stdio, logger *slog.Logger) error {
	pool, err := kvcache.ParsePoolID(c.Pool)
	if err != nil {
		return usagef("--pool: %w", err)
	}
	if c.BlockSize < 0 {
		return usagef("--block-size must be positive")
	}
	in, size := std.In, int64(-1)
	if c.File != "-" {
		f, err := os.Open(c.File)
		if err != nil {
			return usagef("%w", err)
		}
		defer func() { _ = f.Close() }()
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			size = info.Size()
		}
		in = f
	}
	s, err := redisOptions{indexOptions: c.Redis, Shards: c.Shards}.store(logger, nil)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	r, err := s.Restore(ctx, pool, c.BlockSize)
	if err != nil {
		if c.BlockSize == 0 && errors.Is(err, store.ErrInvalid) {
			return usagef("--block-size is missing: the pool %s does not exist yet", pool)
		}
		return indexAway(err)
	}
	p := progress{w: std.Err, drawn: isTerminal(std.Err)}
	if !p.drawn {
		p.w = io.Discard
	}
	lines, err := loadLines(ctx, r, in, func(read int64) { p.show("load", int(read), int(size)) })
	p.end()
	if err != nil {
		return indexAway(fmt.Errorf("%s: %w", c.File, err))
	}
	blocks, ranks := r.Loaded()
	if c.JSON {
		return json.NewEncoder(std.Out).Encode(loadReport{pool.String(), lines, blocks, ranks})
	}
	_, err = fmt.Fprintf(std.Out, "%s: loaded %s of %s from %s\n", pool, count(blocks, "block"), count(ranks, "worker rank"), count(lines, "line"))
	return err
}

// loadLines adds line after line and says how many there were. What comes before a bad line is loaded.
func loadLines(ctx context.Context, r *store.Restorer, in io.Reader, progress func(read int64)) (lines int, err error) {
	scan := bufio.NewScanner(in)
	scan.Buffer(make([]byte, 1<<16), maxLine)
	read := int64(0)
	for scan.Scan() {
		lines++
		read += int64(len(scan.Bytes())) + 1
		if lines%1000 == 0 {
			progress(read)
		}
		if len(bytes.TrimSpace(scan.Bytes())) == 0 {
			continue
		}
		var e kvcache.RouterEvent
		err := json.Unmarshal(scan.Bytes(), &e)
		if err == nil {
			err = r.Add(ctx, e)
		}
		if err != nil {
			return lines, errors.Join(fmt.Errorf("line %d: %w", lines, err), r.Flush(ctx))
		}
	}
	progress(read)
	if err := scan.Err(); err != nil {
		if errors.Is(err, bufio.ErrTooLong) {
			err = fmt.Errorf("longer than %d bytes: this is no dump", maxLine)
		}
		return lines, errors.Join(fmt.Errorf("line %d: %w", lines+1, err), r.Flush(ctx))
	}
	return lines, r.Flush(ctx)
}
