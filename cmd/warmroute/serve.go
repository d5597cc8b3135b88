package main

import (
	"context"
	"log/slog"

	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/indexer"
)

// serveCmd runs indexer and frontend in one process.
type serveCmd struct {
	Redis    redisOptions    `embed:"" group:"Redis"`
	Frontend frontendOptions `embed:""`
	Indexer  indexerOptions  `embed:""`
	Access   accessOptions   `embed:""`
	Trace    traceOptions    `embed:""`
	Profile  profileOptions  `embed:""`
	Workers  workerOptions   `embed:"" group:"Workers"`
}

// Help is the long form of the command's help.
func (serveCmd) Help() string {
	return `Indexer and frontend in one process: all of warmroute for a small fleet. Without --redis the index
lives in this process and is rebuilt from the engines after a restart.
The frontend is at --listen, the indexer's own surface at --admin-listen.

Example: one engine, nothing else

    warmroute serve --worker id=w0,url=http://127.0.0.1:8000,model=llama,events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5657,block-size=16

    The model and the block size are the engine's own.

Example: from a file, reachable from other machines

    WARMROUTE_ADMIN_TOKEN=s3cret warmroute serve --config warmroute.yaml --listen :8080

Then ask it like any OpenAI server, at http://127.0.0.1:8080/v1.

` + serviceExits
}

// Run serves until ctx ends. The frontend drains first; the indexer follows the engines until then.
func (c serveCmd) Run(ctx context.Context, logger *slog.Logger) error {
	if err := c.Workers.Worker.forIndexer(); err != nil {
		return err
	}
	if c.Redis.Redis == "" {
		url, stop, err := embeddedRedis()
		if err != nil {
			return err
		}
		defer stop()
		c.Redis.Redis = url
		logger.Info("no --redis: the index lives in this process and ends with it")
	}
	metrics := newRegistry()
	tracer, stop, err := c.Trace.start(ctx, logger, metrics, "warmroute")
	if err != nil {
		return err
	}
	defer stop()
	index, err := c.Redis.tracedStore(logger, metrics, tracer)
	if err != nil {
		return err
	}
	defer func() { _ = index.Close() }()

	tokens, err := c.Access.tokens(ctx, logger, c.Frontend.workerToken())
	if err != nil {
		return err
	}
	networks, err := c.Workers.networks(metrics)
	if err != nil {
		return err
	}
	io := c.Indexer.options(c.Workers.Worker)
	io.Tokens, io.Networks = tokens, networks
	io.Store, io.Logger, io.Registerer, io.Gatherer = index, logger, metrics, metrics
	i, err := indexer.New(io)
	if err != nil {
		return setupError(err, "--admin-listen")
	}
	fo := c.Frontend.options(c.Redis.LookupBudget, c.Workers.Worker)
	fo.Tokens, fo.WorkerToken, fo.Networks = tokens, tokens.Worker, networks
	fo.Index, fo.Tracer, fo.Logger, fo.Registerer, fo.Gatherer = index, tracer, logger, metrics, metrics
	f, err := frontend.New(fo)
	if err != nil {
		return setupError(err, "--listen")
	}
	if len(c.Workers.Worker) == 0 {
		logger.Info("no --worker: engines have to register", "at", "http://"+i.Addr().String()+"/register")
	}
	profiles, err := c.Profile.services()
	if err != nil {
		return err
	}
	return runServices(ctx, logger, append([]service{{"frontend", f.Addr(), f.Run}, {"indexer", i.Addr().String(), i.Run}}, profiles...)...)
}
