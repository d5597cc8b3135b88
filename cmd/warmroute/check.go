package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// checkCmd compares the sorted sets of the index with what is derived from them.
type checkCmd struct {
	Redis  indexOptions `embed:"" group:"Redis"`
	Pool   []string     `placeholder:"TENANT:MODEL" help:"Pools to check (default: all)." env:"-"`
	Repair bool         `help:"Put right what differs, from the sorted sets and the streams." env:"-"`
	JSON   bool         `help:"Print one JSON object per pool." env:"-"`
}

// Help is the long form of the command's help.
func (checkCmd) Help() string {
	return `Proves, in every pool and shard, that the sorted sets (the truth), the holders hash that lookups read,
the slot map, the streams and the workers' places agree, and the sums of what is under way with its leases. It
is safe while the index is in use, and reads in small steps. What --repair cannot derive from the sorted sets and streams, such as a watermark, makes the stream
begin a new generation, which the indexer fills by replay.

Example: is the index sound?

    warmroute check --redis redis://127.0.0.1:6379

Example: repair one pool

    warmroute check --redis redis://127.0.0.1:6379 --pool default:llama-3-8b --repair

Exit codes: 0 nothing found, or all of it repaired; 1 problems remain, or Redis is away; 2 wrong flags.`
}

// errNoPools is an index of nothing: sound, but probably not what was meant.
var errNoPools = errors.New("the index has no pools: no worker has registered yet, or --redis is not the indexers'")

// poolReport is the form of --json.
type poolReport struct {
	Pool string `json:"pool"`
	store.Report
}

// Run checks the pools one after the other.
func (c checkCmd) Run(ctx context.Context, std *stdio, logger *slog.Logger) error {
	s, err := redisOptions{indexOptions: c.Redis}.store(logger, nil)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	pools, err := c.pools(ctx, s)
	if err != nil {
		return indexAway(err)
	}
	if len(pools) == 0 {
		_, _ = fmt.Fprintln(std.Err, "warmroute:", errNoPools)
	}
	remaining := 0
	for _, pool := range pools {
		r, err := s.Check(ctx, pool, c.Repair)
		if err != nil {
			return indexAway(err)
		}
		remaining += r.Found - r.Repaired
		if c.JSON {
			r.Problems = append([]string{}, r.Problems...) // never null
			err = json.NewEncoder(std.Out).Encode(poolReport{pool.String(), r})
		} else {
			err = printReport(std.Out, pool, r)
		}
		if err != nil {
			return err
		}
	}
	if remaining > 0 {
		return fmt.Errorf("problems that remain: %d", remaining)
	}
	return nil
}

func (c checkCmd) pools(ctx context.Context, s *store.Store) ([]kvcache.PoolID, error) {
	named := make([]kvcache.PoolID, len(c.Pool))
	for i, name := range c.Pool {
		pool, err := kvcache.ParsePoolID(name)
		if err != nil {
			return nil, usagef("--pool: %w", err)
		}
		named[i] = pool
	}
	known, err := s.Pools(ctx)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(known, func(a, b kvcache.PoolID) int { return strings.Compare(a.String(), b.String()) })
	if len(named) == 0 {
		return known, nil
	}
	for _, pool := range named {
		if !slices.Contains(known, pool) {
			names := make([]string, len(known))
			for i, k := range known {
				names[i] = k.String()
			}
			return nil, fmt.Errorf("no pool %s: the index has %s", pool, cmp.Or(strings.Join(names, ", "), "none"))
		}
	}
	return named, nil
}

func printReport(w io.Writer, pool kvcache.PoolID, r store.Report) error {
	verdict := "sound"
	switch {
	case r.Found > 0 && r.Repaired == r.Found:
		verdict = count(r.Found, "problem") + ", all repaired"
	case r.Found > 0:
		verdict = fmt.Sprintf("%s, %d repaired", count(r.Found, "problem"), r.Repaired)
	}
	_, err := fmt.Fprintf(w, "%s: %s (%s, %s held, %d distinct, %d waiting for the sweep)\n",
		pool, verdict, count(r.Streams, "stream"), count(r.Blocks, "block"), r.Holders, r.Retired)
	for _, p := range r.Problems {
		if err == nil {
			_, err = fmt.Fprintf(w, "  %s\n", p)
		}
	}
	if more := r.Found - len(r.Problems); more > 0 && err == nil {
		_, err = fmt.Fprintf(w, "  … and %d more\n", more)
	}
	return err
}
