package store

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/kvcache"
)

// TEMPORARY API sketch: the shape that the other packages build on; bodies are being written.

// Options configures a Store.
type Options struct {
	// URL: redis://[user:pass@]host:port/db, rediss://…, redis+sentinel://host:port,…/master[/db], redis+cluster://host:port,…
	URL string
	// Shards is how many shards a pool that this process creates gets. Default 1.
	Shards int
	// LookupBudget bounds all Redis work of one lookup. Default 20 ms.
	LookupBudget time.Duration
	// WriteTimeout bounds one call of the write side. Default 1 s.
	WriteTimeout time.Duration
	// PoolSize is how many connections lookups may use per node. Default 16.
	PoolSize int
	// Dialer replaces the dialer; for tests.
	Dialer     func(ctx context.Context, network, addr string) (net.Conn, error)
	Logger     *slog.Logger          // default: discard
	Registerer prometheus.Registerer // default: metrics are kept but not registered
}

type Store struct{}

// New makes a Store. No I/O: Redis may be down.
func New(o Options) (*Store, error) { panic("sketch") }
func (s *Store) Close() error       { panic("sketch") }

// The three sentinels; every error of this package wraps at most one of them.
var (
	ErrUnavailable = errors.New("index unavailable") // transport, timeout, LOADING, CLUSTERDOWN, …
	ErrCorrupt     = errors.New("index corrupt")     // WRONGTYPE, undecodable
	ErrInvalid     = errors.New("invalid request")   // the caller's fault, e.g. a conflicting block size (*ConflictError)
)

// ConflictError: errors.Is(err, ErrInvalid) is true.
type ConflictError struct {
	Field      string // e.g. "block_size"
	Have, Want string
}

func (e *ConflictError) Error() string { panic("sketch") }

// Reason is the label value of an error for index_fallbacks_total:
// connection, timeout, loading, cluster_down, pool_exhausted, corrupt.
func Reason(err error) string { panic("sketch") }

// ---- pools

type PoolConfig struct {
	BlockSize int
	Shards    int
}

// Pools lists the known pools.
func (s *Store) Pools(ctx context.Context) ([]kvcache.PoolID, error) { panic("sketch") }

// PoolConfig reads a pool's configuration (cached once known). ok is false for an unknown pool.
func (s *Store) PoolConfig(ctx context.Context, pool kvcache.PoolID) (c PoolConfig, ok bool, err error) {
	panic("sketch")
}

// ---- streams: what an indexer writes

// StreamID names one publisher: one rank of one worker of one pool.
type StreamID struct {
	Pool kvcache.PoolID
	kvcache.WorkerRank
}

// Registration is what is known about a publisher; it is stored with the stream.
type Registration struct {
	BlockSize      int    // tokens per block, required
	URL            string // the worker's HTTP base URL; "" where unknown
	Endpoint       string // ZMQ PUB endpoint; "" where events come over HTTP
	ReplayEndpoint string
	Engine         string // "vLLM", "SGLang", "TRTLLM"
	Topic          string
	LoRA           string // adapter that all of the stream's blocks belong to; "" where events name it
	Salt           string
}

// Stream is the state of one publisher in Redis.
type Stream struct {
	StreamID
	Registration
	Shard      int
	Slot       int
	Generation int64
	Seq        int64 // watermark: the newest sequence number applied; -1 = none yet
	Updated    time.Time
}

// Register makes the stream, or finds it and updates its registration. created says which.
// A block size that differs from the pool's is a *ConflictError.
func (s *Store) Register(ctx context.Context, id StreamID, r Registration) (st Stream, created bool, err error) {
	panic("sketch")
}

// Stream reads a stream's state; ok is false where there is none.
func (s *Store) Stream(ctx context.Context, id StreamID) (st Stream, ok bool, err error) {
	panic("sketch")
}

// Streams lists all streams of a pool, from all shards that answer (the error names those that do not).
func (s *Store) Streams(ctx context.Context, pool kvcache.PoolID) ([]Stream, error) { panic("sketch") }

// Touch renews updated_ms of a stream (its lease).
func (s *Store) Touch(ctx context.Context, st Stream) error { panic("sketch") }

// Outcome is what a write did.
type Outcome int

const (
	Applied   Outcome = iota
	Duplicate         // everything in it was applied before; nothing done
	Gap               // First > watermark+1 and not forced; nothing done
	Stale             // the generation is over; nothing done: read the stream again
)

// Batch collects the operations of consecutive messages of one stream. Messages in ascending order;
// operations in the order of their message. A Batch can be reused after Reset.
type Batch struct {
	// Force applies over a gap.
	Force bool
	// Set counts no copies: a block stored twice is gone after one removal.
	Set bool
}

// Message starts the operations of message seq (also for a message without operations, which only moves the watermark).
func (b *Batch) Message(seq int64)                                                   { panic("sketch") }
func (b *Batch) Store(t kvcache.Tier, block kvcache.BlockHash, e kvcache.EngineHash) { panic("sketch") }
func (b *Batch) Remove(t kvcache.Tier, e kvcache.EngineHash)                         { panic("sketch") }

// Ops is the number of blocks stored and removed so far.
func (b *Batch) Ops() int     { panic("sketch") }
func (b *Batch) First() int64 { panic("sketch") }
func (b *Batch) Last() int64  { panic("sketch") }
func (b *Batch) Reset()       { panic("sketch") }

// Apply applies a batch atomically and moves the watermark. On Applied and Duplicate and Gap the returned seq is the
// watermark now in Redis. A batch may overlap what was applied before: only messages above the watermark take effect.
// A lost reply is harmless: the retry is a Duplicate.
func (s *Store) Apply(ctx context.Context, st Stream, b *Batch) (o Outcome, seq int64, err error) {
	panic("sketch")
}

// Resolve finds the block hashes of engine hashes (any tier); 0,false in ok where unknown. One round trip.
func (s *Store) Resolve(ctx context.Context, st Stream, hashes []kvcache.EngineHash) (blocks []kvcache.BlockHash, ok []bool, err error) {
	panic("sketch")
}

// Restart ends the stream's generation in O(1): all its blocks are gone from lookups at once, and it goes on in a new
// generation with watermark seq (-1 for a restarted engine; the sequence number before the clear for a clear).
// Stale: somebody else restarted it first. The returned stream is the state now in Redis either way.
func (s *Store) Restart(ctx context.Context, st Stream, seq int64) (Stream, Outcome, error) {
	panic("sketch")
}

// Remove ends the stream for good (unregister). Stale where its generation is over already.
func (s *Store) Remove(ctx context.Context, st Stream) (Outcome, error) { panic("sketch") }

// Sweep clears at most limit blocks of ended generations in one shard-sized step per shard and reports how many it cleared and
// whether any are left.
func (s *Store) Sweep(ctx context.Context, pool kvcache.PoolID, limit int) (swept int, more bool, err error) {
	panic("sketch")
}

// ---- lookups: what a frontend reads

type LookupOptions struct {
	TreeSizes bool // fill OverlapScores.TreeSizes
}

// Lookup finds how far each worker rank holds the prompt. It returns within the lookup budget whatever Redis does.
// The state is Exact (err nil), Partial or Degraded (err says why, for Reason; scores hold what is known).
// An unknown pool gives empty scores, Exact, nil.
func (s *Store) Lookup(ctx context.Context, pool kvcache.PoolID, blocks []kvcache.BlockHash, o LookupOptions) (kvcache.OverlapScores, kvcache.IndexState, error) {
	panic("sketch")
}

// LinkStatus is the state of the connection to one shard (shard "*" before a pool is known).
type LinkStatus struct {
	Shard string // "<pool>#<n>"
	Up    bool
	Since time.Time
	Cause string // the reason while down
}

// Links lists the links of all shards in use.
func (s *Store) Links() []LinkStatus { panic("sketch") }

// Dump calls f for every stored block of the pool (not predicted ones), in bounded steps.
func (s *Store) Dump(ctx context.Context, pool kvcache.PoolID, f func(kvcache.RouterEvent) error) error {
	panic("sketch")
}

// Report is what Check found.
type Report struct {
	Blocks, Streams, Slots int
	Problems               []string // one line each, at most 100
	ProblemCount           int
	Repaired               int
}

// Check compares the sorted sets, holders and stream metadata of a pool, online, and repairs holders where asked to.
func (s *Store) Check(ctx context.Context, pool kvcache.PoolID, repair bool) (Report, error) {
	panic("sketch")
}
