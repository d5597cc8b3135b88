package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
)

// StreamID names one publisher: one rank of one worker of one pool.
type StreamID struct {
	Pool kvcache.PoolID
	kvcache.WorkerRank
}

// Registration is what is known about a publisher. It is kept with the stream, so that every
// indexer can follow it and every frontend can reach the worker.
type Registration struct {
	BlockSize      int    // tokens per block; required
	URL            string // base URL of the worker's HTTP server; "" where unknown
	Endpoint       string // ZMQ publisher; "" where events come over HTTP
	ReplayEndpoint string // ZMQ replay socket; "" where there is none
	Engine         string // vLLM, SGLang or TRTLLM
	Topic          string // ZMQ subscription prefix
	LoRA           string // adapter that all blocks belong to; "" where the events name it
	Salt           string // salt of all blocks; "" where the events name it
	Set            bool   // one removal removes a block, however often it was stored
}

// Stream is the state of one publisher as it is in Redis.
type Stream struct {
	StreamID
	Registration
	Shard      int
	Slot       int
	Generation int64
	Seq        int64     // watermark: newest sequence number applied; -1 = none yet
	Epoch      int64     // the generation in which the engine's present process began; 0 = unknown
	Digest     uint64    // of message Seq, see [Batch.Sign]; 0 = unknown
	Updated    time.Time // last write or renewal, by the writer's clock
}

// Outcome is what a write did.
type Outcome int

const (
	Applied   Outcome = iota // it took effect
	Duplicate                // all of it had been applied before
	Gap                      // a message before it is missing; nothing done
	Stale                    // the caller's view is over; nothing done: read the stream again
)

func (o Outcome) String() string {
	return [...]string{"applied", "duplicate", "gap", "stale"}[o]
}

func (r Registration) fields() []any {
	return []any{
		"url", r.URL, "endpoint", r.Endpoint, "replay_endpoint", r.ReplayEndpoint,
		"engine", r.Engine, "topic", r.Topic, "lora", r.LoRA, "salt", r.Salt, "set", strconv.FormatBool(r.Set),
	}
}

// Register makes the stream, or finds it and updates its registration; created says which.
// A block size that differs from the pool's is a [*ConflictError].
func (s *Store) Register(ctx context.Context, id StreamID, r Registration) (st Stream, created bool, err error) {
	return s.register(ctx, id, r, "0")
}

// Follow is Register for a caller that was not asked to register the worker and only goes on following it: where
// the stream was removed on purpose it is [ErrRemoved], and a registration with an endpoint that is there stays, since it may
// be newer. The mark of a removal lasts a day.
func (s *Store) Follow(ctx context.Context, id StreamID, r Registration) (st Stream, created bool, err error) {
	return s.register(ctx, id, r, "1")
}

func (s *Store) register(ctx context.Context, id StreamID, r Registration, follow string) (st Stream, created bool, err error) {
	if err := errors.Join(id.Pool.Validate(), id.WorkerRank.Validate()); err != nil {
		return Stream{}, false, fmt.Errorf("register: %w: %w", err, ErrInvalid)
	}
	if r.BlockSize < 1 || r.BlockSize > 1<<20 {
		return Stream{}, false, fmt.Errorf("register: block size %d: want 1 to %d: %w", r.BlockSize, 1<<20, ErrInvalid)
	}
	bounded, cancel := s.bound(ctx)
	defer cancel()
	for {
		st, created, err = s.registerOnce(ctx, bounded, id, r, follow)
		if err != nil {
			return Stream{}, false, err
		}
		here, placed, err := s.stays(bounded, st)
		if err != nil {
			return Stream{}, false, s.writeFailed(ctx, fmt.Errorf("register: %w", err))
		}
		if here {
			return st, created, nil
		}
		if !placed {
			continue
		}
		// Somebody has placed the worker elsewhere meanwhile: what is here would stay for ever. No mark, nobody wanted it removed.
		if _, err := s.Remove(bounded, st); err != nil {
			return Stream{}, false, err
		}
		if err := s.write.Del(bounded, newShardKeys(s.pool(id.Pool).id, st.Shard).stream(id.WorkerRank)).Err(); err != nil {
			return Stream{}, false, s.writeFailed(ctx, fmt.Errorf("register: %w", err))
		}
	}
}

// registerOnce places the worker and registers the stream there.
func (s *Store) registerOnce(ctx, bounded context.Context, id StreamID, r Registration, follow string) (st Stream, created bool, err error) {
	fail := func(err error) (Stream, bool, error) {
		return Stream{}, false, s.writeFailed(ctx, fmt.Errorf("register: %w", err))
	}
	sh, n, err := s.place(bounded, id, r.BlockSize)
	if err != nil {
		return fail(err)
	}
	if err := s.write.SAdd(bounded, keyPools, s.pool(id.Pool).id.String()).Err(); err != nil {
		return fail(err)
	}
	v, err := scripts.register.run(bounded, s.write,
		[]string{sh.keys.stream(id.WorkerRank), sh.keys.slots(), sh.keys.idle(), sh.keys.version(), sh.keys.top()},
		append([]any{id.WorkerRank.String(), follow}, r.fields()...)...)
	if err != nil {
		return fail(err)
	}
	if len(v) != 6 {
		return fail(errShortReply)
	}
	if v[0] == "2" {
		return Stream{}, false, ErrRemoved
	}
	st = Stream{StreamID: id, Registration: r, Shard: n, Updated: time.Now()}
	if err := st.read(v[1:]); err != nil {
		return fail(err)
	}
	if v[0] == "3" { // whatever was removed while nobody kept the watermark
		st, _, err = s.retire(ctx, st, "-1", "-1", 0)
	}
	return st, v[0] != "0", err
}

// read takes over what a script reported: gen, seq, slot, epoch, digest.
func (st *Stream) read(v []string) error {
	var err1, err2, err3 error
	st.Generation, err1 = strconv.ParseInt(v[0], 10, 64)
	st.Seq, err2 = strconv.ParseInt(v[1], 10, 64)
	st.Slot, err3 = strconv.Atoi(v[2])
	st.Epoch, _ = strconv.ParseInt(v[3], 10, 64) // unknown is fine
	st.Digest, _ = strconv.ParseUint(v[4], 16, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("stream state: %w: %w", err, ErrCorrupt)
	}
	return nil
}

func formatDigest(d uint64) string {
	if d == 0 {
		return ""
	}
	return strconv.FormatUint(d, 16)
}

// readHash takes over a stream's whole hash.
func (st *Stream) readHash(h map[string]string, blockSize int) error {
	st.Registration = Registration{
		BlockSize: blockSize, URL: h["url"], Endpoint: h["endpoint"], ReplayEndpoint: h["replay_endpoint"],
		Engine: h["engine"], Topic: h["topic"], LoRA: h["lora"], Salt: h["salt"], Set: h["set"] == "true",
	}
	st.Updated = millis(h["updated_ms"])
	return st.read([]string{h["gen"], h["seq"], h["slot"], h["epoch"], h["digest"]})
}

// Stream reads a stream's state; ok is false where there is none.
func (s *Store) Stream(ctx context.Context, id StreamID) (st Stream, ok bool, err error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	k, n, err := s.locate(bounded, id)
	if err != nil || k == nil {
		return Stream{}, false, classify(ctx, err)
	}
	h, err := s.write.HGetAll(bounded, k.shards[n].keys.stream(id.WorkerRank)).Result()
	if err != nil {
		return Stream{}, false, classify(ctx, fmt.Errorf("read stream: %w", err))
	}
	if len(h) == 0 || h["removed_ms"] != "" {
		return Stream{}, false, nil
	}
	st = Stream{StreamID: id, Shard: n}
	if err := st.readHash(h, k.BlockSize); err != nil {
		return Stream{}, false, err
	}
	return st, true, nil
}

// Streams lists the streams of a pool: those of all shards that answer. The error names the
// shards that do not.
func (s *Store) Streams(ctx context.Context, id kvcache.PoolID) ([]Stream, error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	k, err := s.pool(id).load(bounded, s.write)
	if err != nil || k == nil {
		return nil, classify(ctx, err)
	}
	var out []Stream
	var errs []error
	for n, sh := range k.shards {
		streams, err := s.shardStreams(bounded, id, k, n)
		out = append(out, streams...)
		if err != nil {
			errs = append(errs, classify(ctx, fmt.Errorf("streams of shard %s: %w", sh.name, err)))
		}
	}
	return out, errors.Join(errs...)
}

// shardStreams lists those of a shard. One that cannot be read is an error beside the others.
func (s *Store) shardStreams(ctx context.Context, id kvcache.PoolID, k *knownPool, n int) ([]Stream, error) {
	keys := k.shards[n].keys
	slots, err := s.write.HGetAll(ctx, keys.slots()).Result()
	if err != nil || len(slots) == 0 {
		return nil, err
	}
	pipe := s.write.Pipeline()
	var ids []StreamID
	var hashes []*redis.MapStringStringCmd
	var errs []error
	for _, owner := range slots {
		w, err := kvcache.ParseWorkerRank(owner)
		if err != nil {
			errs = append(errs, fmt.Errorf("slot map: %w: %w", err, ErrCorrupt))
			continue
		}
		ids = append(ids, StreamID{Pool: id, WorkerRank: w})
		hashes = append(hashes, pipe.HGetAll(ctx, keys.stream(w)))
	}
	if _, err := pipe.Exec(ctx); err != nil && !redis.HasErrorPrefix(err, "WRONGTYPE") {
		return nil, err
	}
	var out []Stream
	for i, h := range hashes {
		st := Stream{StreamID: ids[i], Shard: n}
		err := h.Err()
		switch {
		case redis.HasErrorPrefix(err, "WRONGTYPE"):
			err = fmt.Errorf("%w: %w", err, ErrCorrupt)
		case err != nil:
			return nil, err // the first error was another one's
		case len(h.Val()) == 0 || h.Val()["removed_ms"] != "":
			continue // ended in between
		default:
			err = st.readHash(h.Val(), k.BlockSize)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("stream %s: %w", ids[i].WorkerRank, err))
			continue
		}
		out = append(out, st)
	}
	return out, errors.Join(errs...)
}

// Touch renews a stream's lease. Stale means that the generation is over, or the stream gone.
func (s *Store) Touch(ctx context.Context, st Stream) (Outcome, error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	sh, err := s.shard(bounded, st)
	if err == nil && sh == nil {
		return Stale, nil
	}
	var v []string
	if err == nil {
		v, err = scripts.touch.run(bounded, s.write, []string{sh.keys.stream(st.WorkerRank), sh.keys.slots(), sh.keys.version()},
			strconv.FormatInt(st.Generation, 10), strconv.FormatInt(time.Now().UnixMilli(), 10), st.WorkerRank.String())
	}
	if err != nil {
		return 0, s.writeFailed(ctx, fmt.Errorf("renew stream: %w", err))
	}
	if len(v) != 1 || v[0] != "0" {
		return Stale, nil
	}
	return Applied, nil
}

// Restart ends the stream's generation in O(1): all its blocks are gone from lookups at once. It
// goes on in a new one with watermark seq, and the digest of that message where it is known (see [Batch.Sign]), else 0; -1 means that the
// engine began again at 0, in a process of its own (see [Stream]). It takes effect
// only if generation and watermark are still those of st; else Stale, and nothing is done. The
// returned stream is the state now in Redis either way.
func (s *Store) Restart(ctx context.Context, st Stream, seq int64, digest uint64) (Stream, Outcome, error) {
	return s.retire(ctx, st, strconv.FormatInt(st.Seq, 10), strconv.FormatInt(seq, 10), digest)
}

// Remove ends the stream for good, and leaves a mark that this was wanted (see [Store.Follow]). It takes effect only if the generation is still that of st;
// else Stale, and nothing is done.
func (s *Store) Remove(ctx context.Context, st Stream) (Outcome, error) {
	_, o, err := s.retire(ctx, st, "", "", 0)
	return o, err
}

func (s *Store) retire(ctx context.Context, st Stream, seq, newSeq string, digest uint64) (Stream, Outcome, error) {
	bounded, cancel := s.bound(ctx)
	defer cancel()
	sh, err := s.shard(bounded, st)
	if err != nil {
		return Stream{}, 0, s.writeFailed(ctx, fmt.Errorf("retire stream: %w", err))
	}
	if sh == nil {
		return Stream{StreamID: st.StreamID, Registration: st.Registration, Shard: st.Shard, Seq: -1}, Stale, nil
	}
	k, w := sh.keys, st.WorkerRank
	keys := []string{k.stream(w), k.slots(), k.idle(), k.version()}
	for t := range kvcache.Tier(kvcache.NumTiers) {
		keys = append(keys, k.blocks(w, t))
	}
	for t := range kvcache.Predicted {
		keys = append(keys, k.copies(w, t))
	}
	for t := range kvcache.Tier(kvcache.NumTiers) {
		keys = append(keys, k.retired(st.Slot, t))
	}
	keys = append(keys, k.top())
	v, err := scripts.retire.run(bounded, s.write, keys,
		strconv.FormatInt(st.Generation, 10), seq, strconv.Itoa(st.Slot), newSeq, w.String(), formatDigest(digest))
	if err == nil && len(v) != 6 {
		err = errShortReply
	}
	if err != nil {
		return Stream{}, 0, s.writeFailed(ctx, fmt.Errorf("retire stream: %w", err))
	}
	outcome := Applied
	if v[0] != "0" {
		outcome = Stale
	}
	if v[1] == "" { // the stream has ended
		return Stream{StreamID: st.StreamID, Registration: st.Registration, Shard: st.Shard, Seq: -1}, outcome, nil
	}
	if err := st.read(v[1:]); err != nil {
		return Stream{}, 0, err
	}
	return st, outcome, nil
}
