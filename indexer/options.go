package indexer

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/indexer/zmtp"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Worker is one engine that is known from the start.
type Worker struct {
	// ID names the worker; the frontends use the same one. Required.
	ID string
	// Model is the base model that it serves, Tenant whose it is (default "default"). Model is required.
	Model, Tenant string
	// URL is the base of its HTTP API, for the frontends. Default: unknown.
	URL string
	// Endpoint is where rank 0 publishes events, ReplayEndpoint where it answers replay requests, as tcp://host:port
	// or ipc://path; rank r's ports are these plus r. Without Endpoint events come by POST /events; without
	// ReplayEndpoint every gap costs the stream its blocks.
	Endpoint, ReplayEndpoint string
	// Engine is vLLM, SGLang or TRTLLM. Default vLLM. It informs; every form of event is understood from any.
	Engine string
	// Ranks is the number of data-parallel ranks. Default 1.
	Ranks int
	// BlockSize is the tokens per cache block. Default: the pool's, or what the first event says.
	BlockSize int
	// Topic is the prefix to subscribe to. Default: everything.
	Topic string
	// LoRA and Salt are the adapter and the cache salt of blocks whose events name none. Default: none.
	LoRA, Salt string
	// Mode is [ModeCount] or [ModeSet]. Default [ModeCount].
	Mode string
}

// The ways to treat a block that an engine stores again.
const (
	// ModeCount: each removal takes one copy away. Right for engines that report physical copies, as vLLM and SGLang do.
	ModeCount = "count"
	// ModeSet: one removal removes the block. For engines that report again what they hold, as vLLM does for requests with
	// kv_cache_report_mode "full", or that lose removals.
	ModeSet = "set"
)

// ClearedScope says what an engine's "all blocks cleared" clears.
type ClearedScope string

// The scopes. A missed clear sends requests to a cache that is gone, an extra one costs some hits.
const (
	ClearedWorker ClearedScope = "worker" // every rank of the worker that this indexer follows
	ClearedRank   ClearedScope = "rank"   // the rank that said so
)

// Options configures an Indexer.
type Options struct {
	// Store is the index. Required.
	Store Store
	// Workers are followed from the start. Others may register, and are found again after a restart.
	Workers []Worker
	// Listen is the address of the admin surface. Default 127.0.0.1:9201.
	Listen string
	// Tokens are the bearer tokens that routes ask for: those that change something, the administrator's, /workers and /dump those for queries.
	// Default: nobody is asked.
	Tokens *guard.Tokens
	// Networks are where workers may be that are not in Workers. Default: everywhere but [guard.NetworkOptions]'s exceptions.
	Networks *guard.Networks
	// AllowInsecure permits a Listen address that is not loopback without a token of the administrator. Default false.
	AllowInsecure bool
	// ClearedScope is what a clear clears. Default ClearedWorker.
	ClearedScope ClearedScope

	// BatchOps is how many blocks one write to the index collects at most before it is sent; a larger message
	// is sent in parts. Default 1024.
	BatchOps int
	// BatchAge is how long a message may wait for others under load. An idle stream does not wait. Default 5 ms.
	BatchAge time.Duration
	// BufferMessages and BufferBytes bound what one stream keeps while Redis is slow or away. Default 20,000 messages
	// and 16 MiB.
	BufferMessages, BufferBytes int
	// ReplayBytes bounds the memory of one replay; a longer one is applied in parts. Default 128 MiB.
	ReplayBytes int
	// Replays is how many replays may be in progress in this process. Default 8.
	Replays int
	// Remember is how many engine hashes per stream are remembered with their block hashes. The rest is looked up in
	// Redis. Default 16,384.
	Remember int
	// Orphans and OrphanAge bound the blocks per stream that wait for an unknown parent. Default 8,192 and 10 minutes.
	Orphans   int
	OrphanAge time.Duration
	// SweepInterval is the time between two sweeps of ended generations. Default 1 s.
	SweepInterval time.Duration
	// WatchInterval is the time between two looks whether Redis still has what was written. Default 500 ms.
	WatchInterval time.Duration
	// LeaseInterval is the time between two looks for signs of life of each worker (GET /health where its URL is known),
	// which renew the leases of its streams. Default 10 s.
	LeaseInterval time.Duration
	// LeaseGrace is how long nobody may have renewed a lease before the stream's blocks leave the index. They come
	// back with the worker. Default 30 s.
	LeaseGrace time.Duration
	// LeaseForget is after how long without life a worker that is not in Workers is unregistered. Default 1 h.
	LeaseForget time.Duration
	// CheckInterval is the time between two checks of everything that the index has of a pool, with repair, by one of the
	// indexers. Default 1 h; negative: none.
	CheckInterval time.Duration

	// Logger gets transitions and operator errors. Default: none.
	Logger *slog.Logger
	// Registerer takes the metrics and Gatherer serves GET /metrics. Default: a registry of their own.
	Registerer prometheus.Registerer
	Gatherer   prometheus.Gatherer
}

func setDefault[T int | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

func (o Options) withDefaults() (Options, error) {
	if o.Store == nil {
		return o, errors.New("indexer: Store is missing")
	}
	if o.Listen == "" {
		o.Listen = "127.0.0.1:9201"
	}
	switch o.ClearedScope {
	case "":
		o.ClearedScope = ClearedWorker
	case ClearedWorker, ClearedRank:
	default:
		return o, fmt.Errorf("indexer: ClearedScope %q: want %s or %s", o.ClearedScope, ClearedWorker, ClearedRank)
	}
	setDefault(&o.BatchOps, 1024)
	setDefault(&o.BatchAge, 5*time.Millisecond)
	setDefault(&o.BufferMessages, 20_000)
	setDefault(&o.BufferBytes, 16<<20)
	setDefault(&o.ReplayBytes, 128<<20)
	setDefault(&o.Replays, 8)
	setDefault(&o.Remember, 16_384)
	setDefault(&o.Orphans, 8_192)
	setDefault(&o.OrphanAge, 10*time.Minute)
	setDefault(&o.SweepInterval, time.Second)
	setDefault(&o.LeaseInterval, 10*time.Second)
	setDefault(&o.LeaseGrace, 30*time.Second)
	setDefault(&o.LeaseForget, time.Hour)
	if o.CheckInterval == 0 {
		o.CheckInterval = time.Hour
	}
	setDefault(&o.WatchInterval, 500*time.Millisecond)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Registerer == nil {
		r := prometheus.NewRegistry()
		o.Registerer, o.Gatherer = r, r
	}
	if o.Gatherer == nil {
		g, ok := o.Registerer.(prometheus.Gatherer)
		if !ok {
			return o, errors.New("indexer: Gatherer is missing: GET /metrics could serve nothing of Registerer")
		}
		o.Gatherer = g
	}
	if o.Networks == nil {
		var err error
		if o.Networks, err = guard.NewNetworks(guard.NetworkOptions{Registerer: o.Registerer}); err != nil {
			return o, err
		}
	}
	return o, o.checkListen()
}

func (o Options) checkListen() error {
	host, _, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return fmt.Errorf("indexer: listen address %q: %w", o.Listen, err)
	}
	if isLoopback(host) || o.Tokens.Asks(guard.Admin) || o.AllowInsecure {
		return nil
	}
	return fmt.Errorf("indexer: %q can be reached from other machines: set a token (--admin-token), listen on loopback (--admin-listen), or allow it all the same (--admin-insecure)", o.Listen)
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// maxBlockSize is the most tokens that a block can have.
const maxBlockSize = 1 << 20

// publisher is what one stream follows.
type publisher struct {
	id  store.StreamID
	reg store.Registration

	discovered bool // found in the index: nobody asked this indexer for it
	configured bool // one of [Options.Workers]
}

// publishers are the streams of the configured workers.
func (o Options) publishers() ([]publisher, error) {
	var out []publisher
	seen := map[store.StreamID]bool{}
	for _, w := range o.Workers {
		for rank := range max(w.Ranks, 1) {
			p, err := w.publisher(rank)
			if err != nil {
				return nil, fmt.Errorf("indexer: worker %q: %w", w.ID, err)
			}
			if seen[p.id] {
				return nil, fmt.Errorf("indexer: worker %q is given twice for model %q", w.ID, w.Model)
			}
			seen[p.id] = true
			out = append(out, p)
		}
	}
	return out, nil
}

func (w Worker) publisher(rank int) (publisher, error) {
	p := publisher{
		configured: true,
		id: store.StreamID{
			Pool:       poolID(w.Tenant, w.Model),
			WorkerRank: kvcache.WorkerRank{Worker: w.ID, Rank: rank},
		},
		reg: store.Registration{
			BlockSize: w.BlockSize, URL: w.URL, Engine: w.Engine, Topic: w.Topic, LoRA: w.LoRA, Salt: w.Salt, Set: w.Mode == ModeSet,
		},
	}
	if err := checkMode(w.Mode); err != nil {
		return p, err
	}
	if err := checkURL(w.URL); err != nil {
		return p, err
	}
	var err error
	if w.Endpoint != "" {
		if p.reg.Endpoint, err = zmtp.WithRank(w.Endpoint, rank); err != nil {
			return p, err
		}
	}
	if w.ReplayEndpoint != "" {
		if p.reg.ReplayEndpoint, err = zmtp.WithRank(w.ReplayEndpoint, rank); err != nil {
			return p, err
		}
	}
	return p, p.check()
}

// poolID names a pool in full, so that equal pools have equal names.
func poolID(tenant, model string) kvcache.PoolID {
	if tenant == "" {
		tenant = kvcache.DefaultTenant
	}
	return kvcache.PoolID{Tenant: tenant, Model: model}
}

func checkMode(mode string) error {
	switch mode {
	case "", ModeCount, ModeSet:
		return nil
	}
	return fmt.Errorf("mode %q: want %s or %s", mode, ModeCount, ModeSet)
}

// checkURL refuses a worker's URL that no frontend could use.
func checkURL(raw string) error {
	if raw == "" {
		return nil
	}
	_, err := guard.WorkerURL(raw)
	return err
}

// check refuses what could never be followed, and fills in the engine.
func (p *publisher) check() error {
	if err := errors.Join(p.id.Pool.Validate(), p.id.WorkerRank.Validate()); err != nil {
		return err
	}
	switch p.reg.Engine {
	case "":
		p.reg.Engine = "vLLM"
	case "vLLM", "SGLang", "TRTLLM":
	default:
		return fmt.Errorf("engine %q: want vLLM, SGLang or TRTLLM", p.reg.Engine)
	}
	if p.reg.BlockSize < 0 || p.reg.BlockSize > maxBlockSize {
		return fmt.Errorf("block size %d: want 1 to %d", p.reg.BlockSize, maxBlockSize)
	}
	for _, e := range []string{p.reg.Endpoint, p.reg.ReplayEndpoint} {
		if e == "" {
			continue
		}
		if _, _, err := zmtp.ParseEndpoint(e); err != nil {
			return err
		}
	}
	if p.reg.Endpoint == "" && p.reg.ReplayEndpoint != "" {
		return errors.New("a replay endpoint without an endpoint")
	}
	return nil
}
