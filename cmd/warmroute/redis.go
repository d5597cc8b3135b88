package main

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/store"
)

// indexOptions say where the index lives, for a command that neither routes nor registers.
type indexOptions struct {
	Redis        string        `placeholder:"URL" help:"Where the index lives: redis://, rediss://, redis+sentinel://host,…/master, redis+cluster://host,…; serve without it has one of its own."`
	WriteTimeout time.Duration `default:"1s" placeholder:"TIME" help:"Longest time of one write to the index (default ${default})."`
}

// redisOptions say where the index lives and how long to wait for it.
type redisOptions struct {
	indexOptions
	Shards       int           `default:"1" placeholder:"N" help:"Shards of a pool that this process is the first to know; a pool that exists keeps its number (default ${default})."`
	LookupBudget time.Duration `default:"20ms" placeholder:"TIME" help:"Longest time that a request waits for the index (default ${default})."`
	RedisPool    int           `default:"16" placeholder:"N" help:"Connections per Redis node for lookups, and as many for the rest (default ${default})."`

	FrequencyWindow time.Duration `default:"0s" zero:"" placeholder:"TIME" help:"Count how often blocks were looked up in this time, for the frequencies of an answer; equal for all frontends; 0s counts nothing (default ${default})."`
}

// store makes the client of the index. It does no I/O: Redis may be down.
func (o redisOptions) store(logger *slog.Logger, reg prometheus.Registerer) (*store.Store, error) {
	if o.Redis == "" {
		return nil, usagef("--redis is missing: say where the index lives, for example --redis redis://127.0.0.1:6379")
	}
	s, err := store.New(store.Options{
		URL: o.Redis, Shards: o.Shards, LookupBudget: o.LookupBudget, WriteTimeout: o.WriteTimeout, PoolSize: o.RedisPool, FrequencyWindow: o.FrequencyWindow,
		Logger: logger, Registerer: reg,
	})
	if err != nil {
		return nil, usagef("--redis: %s", strings.TrimSuffix(err.Error(), ": "+store.ErrInvalid.Error()))
	}
	return s, nil
}

// embeddedRedis starts a Redis in this process, for trying things out: it speaks the protocol
// and forgets everything at the end.
func embeddedRedis() (url string, stop func(), err error) {
	m := miniredis.NewMiniRedis()
	if err := m.StartAddr("127.0.0.1:0"); err != nil {
		return "", nil, fmt.Errorf("embedded Redis: %w", err)
	}
	return "redis://" + m.Addr(), m.Close, nil
}

// indexAway explains an error of a command that is of no use without Redis.
func indexAway(err error) error {
	if errors.Is(err, store.ErrUnavailable) {
		return fmt.Errorf("%w (is --redis right, and Redis up?)", err)
	}
	return err
}
