package main

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/warmroute/warmroute/frontend"
	"github.com/warmroute/warmroute/frontend/choose"
)

// frontendOptions are the settings of the OpenAI-compatible router.
type frontendOptions struct {
	Listen          address `default:"127.0.0.1:8080" placeholder:"ADDR" help:"Address, host:port or :port, of the OpenAI API, queries and metrics (default ${default})." group:"Frontend"`
	Policy          string  `default:"kv" enum:"kv,conversation-hash,prefix-hash,least-loaded,power-of-two,round-robin,random" placeholder:"POLICY" help:"How a worker is chosen: kv, conversation-hash, prefix-hash, least-loaded, power-of-two, round-robin or random (default ${default})." group:"Frontend"`
	Fallback        string  `default:"conversation-hash" enum:"conversation-hash,prefix-hash,least-loaded,power-of-two,round-robin,random" placeholder:"POLICY" help:"How kv chooses while it does not know who holds what, as when Redis is away (default ${default})." group:"Frontend"`
	Tenant          string  `default:"default" placeholder:"NAME" help:"Tenant whose pools the OpenAI routes serve (default \"${default}\")." group:"Frontend"`
	WorkerToken     string  `placeholder:"SECRET" help:"Bearer token that workers get instead of the client's (default: the client's, unless it is one of warmroute's own)." group:"Frontend"`
	WorkerTokenFile string  `placeholder:"FILE" help:"File with it, the first line of it; read again when it changes." group:"Frontend"`

	CostPrefillScale  float64       `default:"${prefill_scale}" placeholder:"N" help:"kv: weight of the work before a first token against decoding (default ${default})." group:"Choice"`
	CostMiss          float64       `default:"${miss}" placeholder:"N" help:"kv: weight of a block that has to be computed for this prompt against one that waits in a queue (default ${default})." group:"Choice"`
	CostDecode        float64       `default:"${decode}" zero:"" placeholder:"N" help:"kv: weight of a block occupied by a request under way (default ${default})." group:"Choice"`
	CostRequest       float64       `default:"${request}" zero:"" placeholder:"N" help:"kv: weight of a request under way, in blocks (default ${default})." group:"Choice"`
	CostTemperature   float64       `default:"0" zero:"" placeholder:"N" help:"kv: above zero, a lottery by cost instead of the cheapest (default ${default})." group:"Choice"`
	HostWeight        float64       `default:"${host_weight}" zero:"" placeholder:"N" help:"What a block in host memory is worth, of one on the device (default ${default})." group:"Choice"`
	DiskWeight        float64       `default:"${disk_weight}" zero:"" placeholder:"N" help:"What a block on disk is worth (default ${default})." group:"Choice"`
	BusyRequests      int           `placeholder:"N" help:"A worker rank with as many requests of all frontends gets no more (default: any number)." group:"Choice"`
	BusyPrefillTokens int           `placeholder:"N" help:"The same for prompt tokens waiting to be computed." group:"Choice"`
	BusyDecodeBlocks  int           `placeholder:"N" help:"The same for blocks in use." group:"Choice"`
	BusyStatus        int           `default:"503" placeholder:"CODE" help:"Answer where all workers are busy: 503 or 429 (default ${default})." group:"Choice"`
	SessionTTL        time.Duration `name:"session-ttl" default:"10m" zero:"" placeholder:"TIME" help:"Time that a session (x-session-id) stays on its worker after its last request; 0: sessions do not decide (default ${default})." group:"Choice"`
	SessionSlack      int           `default:"8192" zero:"" placeholder:"TOKENS" help:"Prompt tokens by which a session's worker may have a longer queue than the cheapest before the session moves; one of this prompt that it does not hold counts as cost-miss of them (default ${default})." group:"Choice"`
	PredictTTL        time.Duration `name:"predict-ttl" default:"5s" zero:"" placeholder:"TIME" help:"Time that a routed prompt counts as cached before the engine's events say so; 0: not at all (default ${default})." group:"Choice"`
	EventsOff         []string      `name:"kv-events-off" placeholder:"MODEL" help:"Model whose engines publish no KV events, or * for all: what was routed where stands in for them; repeatable." group:"Choice"`
	EventsOffTTL      time.Duration `name:"kv-events-off-ttl" default:"2m" placeholder:"TIME" help:"Time that such engines are taken to keep a block after its last use (default ${default})." group:"Choice"`
	EventsOffBlock    int           `name:"kv-events-off-block-size" default:"16" placeholder:"N" help:"Tokens per block for them (default ${default})." group:"Choice"`

	MaxBody         byteSize `default:"32MiB" placeholder:"SIZE" help:"Largest request body (default ${default})." group:"Limits"`
	MaxBuffered     byteSize `default:"512MiB" placeholder:"SIZE" help:"Request bodies in memory at one time, together (default ${default})." group:"Limits"`
	MaxInFlight     int      `default:"4096" placeholder:"N" help:"Requests at one time; more get a 503 (default ${default})." group:"Limits"`
	MaxConnections  int      `placeholder:"N" help:"Connections from clients; idle ones make room for new ones (default: twice --max-in-flight)." group:"Limits"`
	MaxPromptTokens int      `default:"1000000" placeholder:"N" help:"Longest prompt; the model's own limit lowers it (default ${default})." group:"Limits"`

	BodyTimeout           time.Duration `default:"1m" placeholder:"TIME" help:"Time that a client has to send its body (default ${default})." group:"Timeouts and retries"`
	SendTimeout           time.Duration `default:"1m" placeholder:"TIME" help:"Time that a client has to accept a part of an answer (default ${default})." group:"Timeouts and retries"`
	ConnectTimeout        time.Duration `default:"1s" placeholder:"TIME" help:"Time to connect to a worker (default ${default})." group:"Timeouts and retries"`
	ResponseHeaderTimeout time.Duration `default:"5m" placeholder:"TIME" help:"Time until a worker's response header; without streaming that is the whole answer (default ${default})." group:"Timeouts and retries"`
	IdleChunkTimeout      time.Duration `default:"5m" placeholder:"TIME" help:"Time between two chunks of a response (default ${default})." group:"Timeouts and retries"`
	Retries               int           `default:"2" zero:"" placeholder:"N" help:"Other workers to try where one cannot have got the request (default ${default})." group:"Timeouts and retries"`
	BreakerFailures       int           `default:"5" zero:"" placeholder:"N" help:"Failures in a row that take a worker out for a while; 0: none do (default ${default})." group:"Timeouts and retries"`
	BreakerPause          time.Duration `default:"5s" placeholder:"TIME" help:"First pause of such a worker; it doubles up to a minute (default ${default})." group:"Timeouts and retries"`
	LoadLease             time.Duration `default:"15s" placeholder:"TIME" help:"Time that the load of this frontend's requests outlives it in Redis (default ${default})." group:"Timeouts and retries"`
	ReservationLease      time.Duration `default:"5m" placeholder:"TIME" help:"Time that a reservation of /select_and_reserve lives after the last word about it (default ${default})." group:"Timeouts and retries"`
	PollInterval          time.Duration `default:"2s" placeholder:"TIME" help:"Time between two health polls of the workers (default ${default})." group:"Timeouts and retries"`
	PollTimeout           time.Duration `default:"3s" placeholder:"TIME" help:"Time that a worker has to answer one (default ${default})." group:"Timeouts and retries"`
	TokenizeTimeout       time.Duration `default:"500ms" placeholder:"TIME" help:"Time that a worker has to tokenize a prompt (default ${default})." group:"Timeouts and retries"`
	TokenizeCache         byteSize      `default:"64MiB" placeholder:"SIZE" help:"Memory for token ids of prompts seen before (default ${default})." group:"Limits"`

	WorkerDNS         []string      `name:"worker-dns" placeholder:"HOST:PORT" help:"Name whose every address is a worker, looked up again and again; repeatable." group:"Workers"`
	WorkerDNSInterval time.Duration `name:"worker-dns-interval" default:"10s" placeholder:"TIME" help:"Time between two look-ups of these names (default ${default})." group:"Workers"`
	Snapshot          string        `placeholder:"FILE" help:"File that keeps the workers that Redis last listed, to start with while Redis is away (default: none)." group:"Workers"`

	DrainDelay time.Duration `default:"0s" zero:"" placeholder:"TIME" help:"After SIGTERM: time in which /ready says 503 but requests are taken, for load balancers to notice (default ${default})." group:"Shutdown"`
	DrainLimit time.Duration `default:"30s" placeholder:"TIME" help:"After that: time for requests in flight to finish before they are cut (default ${default})." group:"Shutdown"`
}

// options are those of package frontend, without what the process shares.
func (o frontendOptions) options(lookupBudget time.Duration, workers workerList) frontend.Options {
	f := frontend.Options{
		Listen: string(o.Listen), Policy: o.Policy, Fallback: o.Fallback, Tenant: o.Tenant,
		LookupBudget: lookupBudget, WorkerDNS: o.WorkerDNS, WorkerDNSInterval: o.WorkerDNSInterval, SnapshotFile: o.Snapshot,
		MaxBody: int64(o.MaxBody), MaxBuffered: int64(o.MaxBuffered), MaxInFlight: o.MaxInFlight, MaxConnections: o.MaxConnections, MaxPromptTokens: o.MaxPromptTokens,
		BodyTimeout: o.BodyTimeout, SendTimeout: o.SendTimeout, ConnectTimeout: o.ConnectTimeout, ResponseHeaderTimeout: o.ResponseHeaderTimeout,
		IdleChunkTimeout: o.IdleChunkTimeout, Retries: o.Retries, PollInterval: o.PollInterval, PollTimeout: o.PollTimeout,
		TokenizeTimeout: o.TokenizeTimeout, TokenizeCacheBytes: int64(o.TokenizeCache),
		DrainDelay: o.DrainDelay, DrainLimit: o.DrainLimit,
		Weights: choose.Weights{
			PrefillScale: o.CostPrefillScale, Miss: o.CostMiss, Decode: o.CostDecode, Request: o.CostRequest, Temperature: o.CostTemperature,
		},
		Tiers:      choose.Tiers{Host: o.HostWeight, Disk: o.DiskWeight, Predicted: choose.DefaultTiers.Predicted},
		Busy:       frontend.Load{Requests: o.BusyRequests, PrefillTokens: o.BusyPrefillTokens, DecodeBlocks: o.BusyDecodeBlocks},
		BusyStatus: o.BusyStatus, SessionTTL: o.SessionTTL, SessionSlack: o.SessionSlack,
		PredictTTL: o.PredictTTL, EventsOff: o.EventsOff, EventsOffTTL: o.EventsOffTTL, BlockSize: o.EventsOffBlock,
		BreakerFailures: o.BreakerFailures, BreakerPause: o.BreakerPause, LoadLease: o.LoadLease, ReservationLease: o.ReservationLease,
	}
	// There, zero means the default, and less means none.
	if f.Retries == 0 {
		f.Retries = -1
	}
	if f.BreakerFailures == 0 {
		f.BreakerFailures = -1
	}
	if f.SessionTTL == 0 {
		f.SessionTTL = -1
	}
	if f.SessionSlack == 0 {
		f.SessionSlack = -1
	}
	if f.PredictTTL == 0 {
		f.PredictTTL = -1
	}
	for _, w := range workers {
		if w.URL != "" {
			f.Workers = append(f.Workers, frontend.Worker{ID: w.ID, URL: w.URL, Ranks: w.Ranks, Engine: w.Type, Tenant: w.Tenant})
		}
	}
	return f
}

// tierDefaults are the weights of tiers that the help shows.
func tierDefaults() map[string]string {
	f := func(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }
	return map[string]string{"host_weight": f(choose.DefaultTiers.Host), "disk_weight": f(choose.DefaultTiers.Disk)}
}

// frontendCmd runs one frontend.
type frontendCmd struct {
	Redis    redisOptions    `embed:"" group:"Redis"`
	Frontend frontendOptions `embed:""`
	Access   accessOptions   `embed:""`
	Trace    traceOptions    `embed:""`
	Profile  profileOptions  `embed:""`
	Workers  workerOptions   `embed:"" group:"Workers"`
}

// Help is the long form of the command's help.
func (frontendCmd) Help() string {
	return `The OpenAI-compatible router. Frontends keep no state: run as many as you like behind any load
balancer. With Redis away, before or after the start, requests are routed without the index.
Workers come from --worker, from --worker-dns, and from what the indexers have registered in Redis; --snapshot
keeps the latter for a start while Redis is away.

Example: two frontends on one Redis

    warmroute frontend --redis redis://10.0.0.5:6379 --listen :8080
    warmroute frontend --redis redis://10.0.0.5:6379 --listen :8081

Example: with workers that are known even before Redis is

    warmroute frontend --redis redis://10.0.0.5:6379 \
        --worker id=w0,url=http://10.0.1.1:8000 --worker id=w1,url=http://10.0.1.2:8000

Example: every pod behind a headless service is a worker

    warmroute frontend --redis redis://10.0.0.5:6379 --worker-dns vllm.default.svc.cluster.local:8000

Example: engines that publish no KV events

    warmroute frontend --redis redis://10.0.0.5:6379 --kv-events-off llama \
        --worker id=w0,url=http://10.0.1.1:8000 --worker id=w1,url=http://10.0.1.2:8000

Example: settings from a file, a secret from a variable

    WARMROUTE_TOKEN=s3cret warmroute frontend --config warmroute.yaml

` + serviceExits
}

// Run serves until ctx ends and requests in flight are done.
func (c frontendCmd) Run(ctx context.Context, logger *slog.Logger) error {
	metrics := newRegistry()
	tracer, stop, err := c.Trace.start(ctx, logger, metrics, "warmroute-frontend")
	if err != nil {
		return err
	}
	defer stop()
	index, err := c.Redis.tracedStore(logger, metrics, tracer)
	if err != nil {
		return err
	}
	defer func() { _ = index.Close() }()
	o := c.Frontend.options(c.Redis.LookupBudget, c.Workers.Worker)
	if o.Tokens, err = c.Access.tokens(ctx, logger, c.Frontend.workerToken()); err != nil {
		return err
	}
	if o.Networks, err = c.Workers.networks(metrics); err != nil {
		return err
	}
	o.WorkerToken = o.Tokens.Worker
	o.Index, o.Tracer, o.Logger, o.Registerer, o.Gatherer = index, tracer, logger, metrics, metrics
	f, err := frontend.New(o)
	if err != nil {
		return setupError(err, "--listen")
	}
	profiles, err := c.Profile.services()
	if err != nil {
		return err
	}
	return runServices(ctx, logger, append([]service{{"frontend", f.Addr(), f.Run}}, profiles...)...)
}

// byteSize is a number of bytes, written with or without KiB, MiB or GiB.
type byteSize int64

// UnmarshalText reads "512", "64KiB", "32MiB" or "1GiB".
func (b *byteSize) UnmarshalText(text []byte) error {
	digits, shift := string(text), 0
	for unit, s := range map[string]int{"KiB": 10, "MiB": 20, "GiB": 30} {
		if d, ok := strings.CutSuffix(digits, unit); ok {
			digits, shift = strings.TrimSpace(d), s
			break
		}
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 1 || n > 1<<62>>shift {
		return fmt.Errorf("%q: want a positive number of bytes, or one with KiB, MiB or GiB", text)
	}
	*b = byteSize(n << shift)
	return nil
}
