package frontend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/predict"
	"github.com/warmroute/warmroute/frontend/reserve"
	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Worker is one engine instance that a frontend may send requests to.
type Worker = fleet.Worker

// Overlaps answers which worker rank holds how much of a prompt.
type Overlaps interface {
	// Lookup returns within its own budget, whatever Redis does.
	Lookup(ctx context.Context, pool kvcache.PoolID, blocks []kvcache.BlockHash, o store.LookupOptions) (kvcache.OverlapScores, kvcache.IndexState, error)
	// PoolConfig reads a pool's configuration; ok is false where there is no such pool.
	PoolConfig(ctx context.Context, pool kvcache.PoolID) (c store.PoolConfig, ok bool, err error)
}

// punctual is an [Index] that knows whether it needs no watching: PoolConfig, Lookup and Select always end by the deadline of
// their context. They are then called from the request's own goroutine, which saves a request four hand-offs between
// goroutines. Others are called from a goroutine that is left alone where it is late.
type punctual interface{ Punctual() bool }

// Inspector shows the state and the contents of the index.
type Inspector interface {
	// Links lists the links to all shards in use.
	Links() []store.LinkStatus
	// Sizes counts every worker rank's blocks by tier, and Holders says who holds each of the blocks; with an error, as far as is
	// known.
	Sizes(ctx context.Context, pool kvcache.PoolID) (map[kvcache.WorkerRank][kvcache.NumTiers]int, error)
	Holders(ctx context.Context, pool kvcache.PoolID, blocks []kvcache.BlockHash) (map[kvcache.WorkerRank][]byte, error)
	// Dump calls f for every stored block of a pool.
	Dump(ctx context.Context, pool kvcache.PoolID, f func(kvcache.RouterEvent) error) error
}

// Loads are what all frontends together have under way.
type Loads interface {
	reserve.Leases
	// Release ends a reservation; false where there is none.
	Release(ctx context.Context, pool kvcache.PoolID, lease string) (bool, error)
	// Loads lists what every worker rank of a pool has under way.
	Loads(ctx context.Context, pool kvcache.PoolID) (map[kvcache.WorkerRank]store.Load, error)
}

// Predictions record where prompts were routed.
type Predictions = predict.Index

// Index is all that a frontend needs of Redis. *store.Store is one.
type Index interface {
	Overlaps
	Loads
	Predictions
	fleet.Catalog
	Inspector
}

// Load is what a worker rank has under way.
type Load = choose.Load

// Options configures a Frontend.
type Options struct {
	// Listen is the TCP address to serve on, e.g. ":8000". Default "127.0.0.1:0".
	Listen string
	// Index is the index to ask. Nil means none: every request is routed by the fallback.
	Index Index
	// Workers are the configured workers. More are learnt from the index's streams.
	Workers []Worker
	// WorkerDNS are host:port names. Every address that a host resolves to is a worker "address:port" of the
	// default tenant, reached by http. Where the index knows the same URL by another name, that name
	// counts.
	WorkerDNS []string
	// WorkerDNSInterval is the time between two look-ups. Default 10 s.
	WorkerDNSInterval time.Duration
	// SnapshotFile, if set, keeps the workers and pools that the index last listed. A frontend that starts
	// while Redis is away begins with them. The file is replaced as a whole, and only when its content
	// changes; one that cannot be read or written costs a line in the log.
	SnapshotFile string
	// Tenant is whose pools the OpenAI routes serve. Default [kvcache.DefaultTenant].
	Tenant string
	// Policy is how a worker is chosen: one of the Policy constants. Default [PolicyKV].
	Policy string
	// Fallback is how a worker is chosen under [PolicyKV] for a request whose overlaps are unknown, because the
	// index is away, was not asked, or the prompt's tokens cannot be had: one of the other Policy
	// constants. Default [PolicyConversationHash].
	Fallback string
	// Weights are those of [PolicyKV]. Default [choose.Default].
	Weights choose.Weights
	// Tiers are what blocks count that are not on the device. Default [choose.DefaultTiers].
	Tiers choose.Tiers
	// Busy: a worker rank at or above any member that is not zero gets no request. Where all are, the request is
	// refused with BusyStatus. Default: no thresholds.
	Busy Load
	// BusyStatus is 503 or 429. Default 503.
	BusyStatus int
	// SessionTTL is for how long after its last request a session (x-session-id) stays on its worker rank. Default 10 min;
	// negative means that sessions do not decide.
	SessionTTL time.Duration
	// SessionSlack is by how many prompt tokens a session's worker rank may have a longer queue than the cheapest before the session
	// moves; a token of this prompt that it does not hold counts as Weights.Miss of them. Default 8,192, by which no replay of a trace loses
	// time. Where a policy counts requests instead (least-loaded), it is 4 requests. Negative means none.
	SessionSlack int
	// EventsOff names the models whose engines publish no KV events; "*" means all. For them the index holds what was routed
	// where, for EventsOffTTL after its last use; where no token ids can be had, chunks of the prompt's text stand for
	// its blocks. The first frontend to route a prompt makes the pool, with BlockSize.
	EventsOff []string
	// EventsOffTTL is how long engines without events are taken to keep a block. Default 120 s.
	EventsOffTTL time.Duration
	// PredictTTL is for how long a routed prompt counts as cached before the engine's own events confirm it, so that
	// requests that begin alike and come at the same time meet. Default 5 s; negative means off.
	PredictTTL time.Duration
	// LoadLease is how long the load of this frontend's requests outlives it in Redis. Default 15 s.
	LoadLease time.Duration
	// ReservationLease is how long a reservation of POST /select_and_reserve lives after the last word about it. Default 5 min.
	ReservationLease time.Duration

	// Tokens are the bearer tokens that routes ask for: OpenAI's those of clients, all else those for queries, but /health, /ready,
	// /metrics, /openapi.yaml and the page's files. None of them is passed on to workers. Default: nobody is asked.
	Tokens *guard.Tokens
	// Networks are where workers may be that are not in Workers. Default: everywhere but [guard.NetworkOptions]'s exceptions.
	Networks *guard.Networks
	// WorkerToken, if set, returns the bearer token that workers get now in place of the client's; "" means the client's.
	WorkerToken func() string

	// LookupBudget bounds all index work of one request. It should equal the store's. Default 20 ms.
	LookupBudget time.Duration
	// BlockSize is used for a pool whose configuration is unknown, in tokens. Default 16.
	BlockSize int
	// MaxPromptTokens is the longest prompt that is taken, in tokens; a model's max_model_len lowers it.
	// Default 1,000,000.
	MaxPromptTokens int

	// MaxBody is the largest request body, in bytes. Default 32 MiB.
	MaxBody int64
	// MaxBuffered bounds the request bodies in memory at one time, in bytes. Default 16 × MaxBody.
	MaxBuffered int64
	// MaxInFlight bounds the requests being proxied. Default 4096.
	MaxInFlight int
	// BodyTimeout bounds the time a client takes to send its body. Default 1 min.
	BodyTimeout time.Duration
	// SendTimeout bounds the time a client takes to accept a part of an answer, of 64 KiB at most. Default 1 min.
	SendTimeout time.Duration
	// MaxConnections bounds the connections from clients; see [guard.ConnOptions]. Default 2 × MaxInFlight.
	MaxConnections int

	// ConnectTimeout bounds dialling a worker. Default 1 s.
	ConnectTimeout time.Duration
	// ResponseHeaderTimeout bounds the time from the choice of a worker to its response header. An
	// answer that is not streamed has its header at the end of the work. Default 5 min.
	ResponseHeaderTimeout time.Duration
	// IdleChunkTimeout bounds the time between two chunks of a response. Default 5 min.
	IdleChunkTimeout time.Duration
	// BreakerFailures is how many failures in a row (no connection, no response header in time, an answer that breaks off,
	// 502, 503, 504) take a worker out for BreakerPause, and for longer where a single trial after that fails too. At most
	// half of a model's workers are out at a time. Negative means never. Default 5.
	BreakerFailures int
	// BreakerPause is the first pause. Default 5 s; it doubles up to 1 min.
	BreakerPause time.Duration
	// Retries is how many other workers are tried where one cannot have got the request; negative
	// means none. Default 2.
	Retries int

	// PollInterval is the time between two health polls of all workers and two readings of
	// the index's streams. Default 2 s.
	PollInterval time.Duration
	// PollTimeout bounds one poll of one worker. Default 3 s.
	PollTimeout time.Duration

	// TokenizeCacheBytes bounds the memory of the cached token ids. Default 64 MiB.
	TokenizeCacheBytes int64
	// TokenizeTimeout bounds the wait for a worker's /tokenize. Default 500 ms.
	TokenizeTimeout time.Duration

	// DrainDelay is how long the listener stays open after /ready has turned to 503. Default 0.
	DrainDelay time.Duration
	// DrainLimit is how long requests in flight may take to finish after that before they are
	// aborted. Default 30 s.
	DrainLimit time.Duration

	// Tracer, if set, makes the spans of requests; [ObserveLookups] makes those of the index. Default: none, which costs nothing.
	Tracer trace.Tracer
	// Logger is the logger. Default: discard.
	Logger *slog.Logger
	// Registerer gets the metrics. Default: they are kept but not registered.
	Registerer prometheus.Registerer
	// Gatherer is what /metrics shows. Default: nothing.
	Gatherer prometheus.Gatherer
}

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// complete checks the options and fills in the defaults.
func (o *Options) complete() error {
	orDefault(&o.Listen, "127.0.0.1:0")
	orDefault(&o.Tenant, kvcache.DefaultTenant)
	if o.WorkerToken == nil {
		o.WorkerToken = func() string { return "" }
	}
	orDefault(&o.Policy, PolicyKV)
	orDefault(&o.Fallback, PolicyConversationHash)
	orDefault(&o.Weights, choose.Default)
	orDefault(&o.Tiers, choose.DefaultTiers)
	orDefault(&o.BusyStatus, http.StatusServiceUnavailable)
	orDefault(&o.SessionTTL, 10*time.Minute)
	orDefault(&o.SessionSlack, 8192)
	orDefault(&o.EventsOffTTL, 120*time.Second)
	orDefault(&o.PredictTTL, 5*time.Second)
	orDefault(&o.LoadLease, 15*time.Second)
	orDefault(&o.ReservationLease, 5*time.Minute)
	orDefault(&o.BreakerPause, 5*time.Second)
	orDefault(&o.LookupBudget, 20*time.Millisecond)
	orDefault(&o.BlockSize, 16)
	orDefault(&o.MaxPromptTokens, 1_000_000)
	orDefault(&o.MaxBody, 32<<20)
	orDefault(&o.MaxBuffered, 16*o.MaxBody)
	orDefault(&o.MaxInFlight, 4096)
	orDefault(&o.BodyTimeout, time.Minute)
	orDefault(&o.SendTimeout, time.Minute)
	orDefault(&o.MaxConnections, 2*o.MaxInFlight)
	orDefault(&o.ConnectTimeout, time.Second)
	orDefault(&o.ResponseHeaderTimeout, 5*time.Minute)
	orDefault(&o.IdleChunkTimeout, 5*time.Minute)
	orDefault(&o.Retries, 2)
	orDefault(&o.PollInterval, 2*time.Second)
	orDefault(&o.PollTimeout, 3*time.Second)
	orDefault(&o.TokenizeCacheBytes, 64<<20)
	orDefault(&o.TokenizeTimeout, 500*time.Millisecond)
	orDefault(&o.DrainLimit, 30*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Gatherer == nil {
		o.Gatherer = prometheus.NewRegistry()
	}
	if o.Networks == nil {
		var err error
		if o.Networks, err = guard.NewNetworks(guard.NetworkOptions{Registerer: o.Registerer}); err != nil {
			return err
		}
	}
	blind := strings.Join(blindPolicies, ", ")
	if o.Policy != PolicyKV && !slices.Contains(blindPolicies, o.Policy) {
		return fmt.Errorf("policy %q: want kv, %s", o.Policy, blind)
	}
	if !slices.Contains(blindPolicies, o.Fallback) {
		return fmt.Errorf("fallback policy %q: want %s", o.Fallback, blind)
	}
	if err := errors.Join(o.Weights.Validate(), o.Tiers.Validate()); err != nil {
		return err
	}
	o.SessionSlack = max(o.SessionSlack, 0)
	switch {
	case o.BusyStatus != http.StatusServiceUnavailable && o.BusyStatus != http.StatusTooManyRequests:
		return fmt.Errorf("busy status %d: want 503 or 429", o.BusyStatus)
	case o.Busy.Requests < 0 || o.Busy.PrefillTokens < 0 || o.Busy.DecodeBlocks < 0:
		return errors.New("a busy threshold is negative")
	case max(o.Busy.Requests, o.Busy.PrefillTokens, o.Busy.DecodeBlocks, o.SessionSlack) > store.MaxBusy:
		return fmt.Errorf("busy thresholds and the slack of sessions are at most %d", store.MaxBusy)
	case o.SessionTTL > store.MaxSessionTTL:
		return fmt.Errorf("a session stays at most %v", store.MaxSessionTTL)
	case o.LoadLease < time.Second || max(o.LoadLease, o.ReservationLease) > store.MaxLease:
		return fmt.Errorf("leases are 1 s to %v", store.MaxLease)
	}
	for _, w := range o.Workers {
		if err := checkTenant(w.Tenant); err != nil {
			return fmt.Errorf("worker %q: %w", w.ID, err)
		}
	}
	if err := checkTenant(o.Tenant); err != nil {
		return err
	}
	if _, _, err := net.SplitHostPort(o.Listen); err != nil {
		return fmt.Errorf("listen address: %w", err)
	}
	if o.Index == nil && len(o.Workers) == 0 && len(o.WorkerDNS) == 0 {
		return errors.New("no workers are configured and there is no index to find them in")
	}
	for _, d := range []time.Duration{o.LookupBudget, o.BodyTimeout, o.SendTimeout, o.ConnectTimeout, o.ResponseHeaderTimeout,
		o.BreakerPause, o.EventsOffTTL, o.ReservationLease, o.WorkerDNSInterval, o.IdleChunkTimeout, o.PollInterval, o.PollTimeout, o.TokenizeTimeout, o.DrainDelay, o.DrainLimit} {
		if d < 0 {
			return fmt.Errorf("a duration of %v is negative", d)
		}
	}
	if o.BlockSize < 0 || o.MaxPromptTokens < 0 || o.MaxBody < 0 || o.MaxInFlight < 0 || o.MaxConnections < 0 || o.TokenizeCacheBytes < 0 {
		return errors.New("a size or limit is negative")
	}
	if o.MaxBuffered < o.MaxBody {
		return fmt.Errorf("%d buffered bytes in all are less than one body of %d", o.MaxBuffered, o.MaxBody)
	}
	return nil
}

// places are where the configured workers are, host:port as a transport dials them.
func (o *Options) places() []string {
	var out []string
	for _, w := range o.Workers {
		if place, ok := guard.Place(w.URL); ok {
			out = append(out, place)
		}
	}
	return out
}

// The answer of /query has a member named after the tenant, beside these.
var queryMembers = []string{"scores", "frequencies", "tree_sizes", "index_state"}

// checkTenant refuses names of tenants that would hide a part of an answer.
func checkTenant(name string) error {
	if slices.Contains(queryMembers, name) {
		return fmt.Errorf("a tenant cannot be called %q: answers of /query have a member of that name", name)
	}
	return nil
}
