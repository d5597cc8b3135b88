package main

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/indexer"
)

// indexerOptions are the settings of the indexer.
type indexerOptions struct {
	AdminListen   address `default:"127.0.0.1:9201" placeholder:"ADDR" help:"Address, host:port or :port, of registration, stream state and metrics (default ${default})." group:"Indexer"`
	AdminInsecure bool    `help:"Listen beyond this machine without a token all the same." group:"Indexer"`
	ClearedScope  string  `default:"worker" enum:"worker,rank" placeholder:"SCOPE" help:"What an engine's \"all blocks cleared\" clears: the worker with all its ranks, or the rank that said so (default ${default})." group:"Indexer"`

	BatchOps       int           `default:"1024" placeholder:"BLOCKS" help:"Most blocks that one write collects (default ${default})." group:"Streams"`
	BatchAge       time.Duration `default:"5ms" placeholder:"TIME" help:"Longest time that a message waits for others under load (default ${default})." group:"Streams"`
	BufferMessages int           `default:"20000" placeholder:"N" help:"Messages that one stream keeps while Redis is slow or away (default ${default})." group:"Streams"`
	BufferBytes    byteSize      `default:"16MiB" placeholder:"SIZE" help:"And their size together (default ${default})." group:"Streams"`
	ReplayBytes    byteSize      `default:"128MiB" placeholder:"SIZE" help:"Memory of one replay; a longer one is applied in parts (default ${default})." group:"Streams"`
	Replays        int           `default:"8" placeholder:"N" help:"Replays at one time (default ${default})." group:"Streams"`
	Remember       int           `default:"16384" placeholder:"N" help:"Engine hashes per stream remembered with their block hashes (default ${default})." group:"Streams"`
	Orphans        int           `default:"8192" placeholder:"N" help:"Blocks per stream that wait for an unknown parent (default ${default})." group:"Streams"`
	OrphanAge      time.Duration `default:"10m" placeholder:"TIME" help:"How long they wait for it (default ${default})." group:"Streams"`
	SweepInterval  time.Duration `default:"1s" placeholder:"TIME" help:"Time between two sweeps of blocks that nobody holds any more (default ${default})." group:"Streams"`
	CheckInterval  time.Duration `default:"1h" placeholder:"TIME" help:"Time between two checks, with repair, of everything that the index has, by one of the indexers; 0 = none (default ${default})." group:"Streams"`
	LeaseInterval  time.Duration `default:"10s" placeholder:"TIME" help:"Time between two looks for signs of life of each worker (default ${default})." group:"Streams"`
	LeaseGrace     time.Duration `default:"30s" placeholder:"TIME" help:"How long nobody may have seen a worker alive before its blocks leave the index; they come back with it (default ${default})." group:"Streams"`
	LeaseForget    time.Duration `default:"1h" placeholder:"TIME" help:"After how long without life a worker that registered is forgotten and has to register again (default ${default})." group:"Streams"`
}

// options are those of package indexer, without what the process shares.
func (o indexerOptions) options(workers workerList) indexer.Options {
	i := indexer.Options{
		Listen: string(o.AdminListen), AllowInsecure: o.AdminInsecure, ClearedScope: indexer.ClearedScope(o.ClearedScope),
		BatchOps: o.BatchOps, BatchAge: o.BatchAge, BufferMessages: o.BufferMessages, BufferBytes: int(o.BufferBytes),
		ReplayBytes: int(o.ReplayBytes), Replays: o.Replays, Remember: o.Remember, Orphans: o.Orphans, OrphanAge: o.OrphanAge,
		SweepInterval: o.SweepInterval, LeaseInterval: o.LeaseInterval,
		LeaseGrace: o.LeaseGrace, LeaseForget: o.LeaseForget, CheckInterval: cmp.Or(o.CheckInterval, -1),
	}
	for _, w := range workers {
		i.Workers = append(i.Workers, indexer.Worker{
			ID: w.ID, Model: w.Model, Tenant: w.Tenant, URL: w.URL, Endpoint: w.Events, ReplayEndpoint: w.Replay, Engine: w.Type,
			Ranks: w.Ranks, BlockSize: w.BlockSize, Topic: w.Topic, LoRA: w.LoRA, Salt: w.Salt, Mode: w.Mode,
		})
	}
	return i
}

// indexerCmd runs one indexer.
type indexerCmd struct {
	Redis   redisOptions   `embed:"" group:"Redis"`
	Indexer indexerOptions `embed:""`
	Access  accessOptions  `embed:""`
	Profile profileOptions `embed:""`
	Workers workerOptions  `embed:"" group:"Workers"`
}

// Help is the long form of the command's help.
func (indexerCmd) Help() string {
	return `Follows the KV events of the engines and keeps in Redis who holds which block. Run two with the
same settings: the first one to apply an event wins, the other's is a duplicate, and when one
dies nothing is lost. Engines come from --worker, or register with POST /register.

Example: two vLLM engines, each with replay

    warmroute indexer --redis redis://10.0.0.5:6379 \
        --worker id=w0,url=http://10.0.1.1:8000,model=llama,events=tcp://10.0.1.1:5557,replay=tcp://10.0.1.1:5657,block-size=16 \
        --worker id=w1,url=http://10.0.1.2:8000,model=llama,events=tcp://10.0.1.2:5557,replay=tcp://10.0.1.2:5657,block-size=16

Example: an engine that comes while the indexers run, and goes; tell one of them

    curl http://127.0.0.1:9201/register -d '{"instance_id": "w2", "url": "http://10.0.1.3:8000",
        "modelname": "llama", "endpoint": "tcp://10.0.1.3:5557", "replay_endpoint": "tcp://10.0.1.3:5657", "block_size": 16}'
    curl http://127.0.0.1:9201/unregister -d '{"instance_id": "w2", "modelname": "llama"}'

    With --admin-token, add -H 'Authorization: Bearer …'.

Example: what are the streams doing?

    curl -s http://127.0.0.1:9201/workers

` + serviceExits
}

// Run follows the engines until ctx ends.
func (c indexerCmd) Run(ctx context.Context, logger *slog.Logger) error {
	if err := c.Workers.Worker.forIndexer(); err != nil {
		return err
	}
	metrics := newRegistry()
	index, err := c.Redis.store(logger, metrics)
	if err != nil {
		return err
	}
	defer func() { _ = index.Close() }()
	o := c.Indexer.options(c.Workers.Worker)
	if o.Tokens, err = c.Access.tokens(ctx, logger, guard.Secrets{}); err != nil {
		return err
	}
	if o.Networks, err = c.Workers.networks(metrics); err != nil {
		return err
	}
	o.Store, o.Logger, o.Registerer, o.Gatherer = index, logger, metrics, metrics
	i, err := indexer.New(o)
	if err != nil {
		return setupError(err, "--admin-listen")
	}
	profiles, err := c.Profile.services()
	if err != nil {
		return err
	}
	return runServices(ctx, logger, append([]service{{"indexer", i.Addr().String(), i.Run}}, profiles...)...)
}
