package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/warmroute/warmroute/frontend"
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
	return o.tracedStore(logger, reg, nil)
}

// tracedStore is store with spans of what requests ask; tracer may be nil.
func (o redisOptions) tracedStore(logger *slog.Logger, reg prometheus.Registerer, tracer trace.Tracer) (*store.Store, error) {
	if o.Redis == "" {
		return nil, usagef("--redis is missing: say where the index lives, for example --redis redis://127.0.0.1:6379")
	}
	options := store.Options{
		URL: o.Redis, Shards: o.Shards, LookupBudget: o.LookupBudget, WriteTimeout: o.WriteTimeout, PoolSize: o.RedisPool, FrequencyWindow: o.FrequencyWindow,
		Logger: logger, Registerer: reg,
	}
	if tracer != nil {
		options.Observe = frontend.ObserveLookups(tracer)
	}
	s, err := store.New(options)
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

// indexAway says what to do about an error of a command that is of no use without Redis.
func indexAway(err error) error {
	if !errors.Is(err, store.ErrUnavailable) {
		return err
	}
	var network *net.OpError
	advice := "are user and password of --redis right? docs/security-acl.md has the grants"
	switch store.Reason(err) {
	case store.ReasonLoading:
		advice = "try again when Redis has loaded its data"
	case store.ReasonTimeout:
		advice = "is --redis right, and is Redis stopped or overloaded?"
	case store.ReasonClusterDown:
		advice = "redis-cli CLUSTER INFO says which part is away"
	case store.ReasonRefused:
		advice = "Redis takes no writes: it is full, a replica, or could not save; redis-cli INFO says which"
	default:
		switch text := err.Error(); {
		case errors.As(err, &network):
			advice = "start Redis there, or name the right one by --redis"
		case strings.Contains(text, "DB index"):
			advice = "Redis has no database of that number, with which the URL of --redis ends"
		case strings.Contains(text, "redis: invalid reply"), strings.Contains(text, "redis: can't parse"):
			advice = "what answers at --redis is no Redis"
		}
	}
	return fmt.Errorf("%w (%s)", err, advice)
}

// reach makes sure that there is a Redis at url before a command begins work that is of no use without one.
func reach(ctx context.Context, url string) error {
	s, err := redisOptions{indexOptions: indexOptions{Redis: url}}.store(slog.New(slog.DiscardHandler), nil)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	_, err = s.Pools(ctx)
	return indexAway(err)
}

// reachOne is reach for a benchmark that can measure a single server only.
func reachOne(ctx context.Context, url string) error {
	if strings.HasPrefix(url, "redis+") {
		return usagef("--redis: this benchmark measures a single server: redis://host:port")
	}
	return reach(ctx, url)
}
