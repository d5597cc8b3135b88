package storebench

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// ApplyCell is one way of writing at one size of event.
type ApplyCell struct {
	BlocksPerEvent int     `json:"blocks_per_event"`
	Way            string  `json:"way"`
	BlocksPerSec   float64 `json:"blocks_per_s"`
	RedisCPU       float64 `json:"redis_cpu_us_per_block"`         // in commands, by commandstats
	ProcessCPU     float64 `json:"redis_process_cpu_us_per_block"` // of the whole server process
	VsZAdd         float64 `json:"vs_zadd"`                        // blocks/s against bare pipelined ZADD
	VsZAddHSet     float64 `json:"vs_zadd_hset"`                   // against bare pipelined ZADD + HSET
}

// ApplyReport is what [Apply] measured.
type ApplyReport struct {
	RedisVersion     string      `json:"redis_version"`
	Cells            []ApplyCell `json:"cells"`
	MemoryPerBlock   float64     `json:"memory_bytes_per_block_and_worker"` // nothing shared between workers
	ZAddMemory       float64     `json:"zadd_memory_bytes_per_block"`       // the sorted sets alone
	ClearWorker      Latency     `json:"clear_worker_4000_blocks"`
	SweepBlocksPerMs float64     `json:"sweep_blocks_per_ms"`
}

// The ways of writing that are compared.
const (
	WayZAdd       = "zadd"
	WayZAddHSet   = "zadd+hset"
	WayStore      = "store"
	WayRemove     = "remove"       // by the engine's hash alone
	WayRemoveHint = "remove-known" // the block hash remembered, as the indexer does
)

var ways = []string{WayZAdd, WayZAddHSet, WayStore, WayRemoveHint, WayRemove}

// EventSizes are the published sizes of event.
var EventSizes = []int{1, 8, 32, 128}

// Writers of one round: as many streams at once, each strictly serial, as an indexer follows.
const (
	writers         = 8
	blocksPerWriter = 4096
	maxOps          = 1024 // what the indexer coalesces into one call
	maxMessages     = 256
	pipelineDepth   = 64 // commands per pipeline of the bare ways
)

// Apply measures the write side.
func Apply(ctx context.Context, o Options, eventSizes []int) (ApplyReport, error) {
	var report ApplyReport
	r, err := newRig(ctx, o)
	if err != nil {
		return report, err
	}
	defer r.close()
	if report.RedisVersion, err = r.version(ctx); err != nil {
		return report, err
	}
	s, err := r.store(store.Options{})
	if err != nil {
		return report, err
	}
	for i, n := range eventSizes {
		r.opts.Progress("writes", i, len(eventSizes))
		cells, err := r.applyCells(ctx, s, n)
		if err != nil {
			return report, fmt.Errorf("%d blocks per event: %w", n, err)
		}
		report.Cells = append(report.Cells, cells...)
	}
	r.opts.Progress("writes", len(eventSizes), len(eventSizes))
	r.opts.Progress("memory, clears", 0, 2)
	if err := r.memory(ctx, s, &report); err != nil {
		return report, fmt.Errorf("memory: %w", err)
	}
	r.opts.Progress("memory, clears", 1, 2)
	if err := r.clears(ctx, s, &report); err != nil {
		return report, fmt.Errorf("clear: %w", err)
	}
	r.opts.Progress("memory, clears", 2, 2)
	return report, r.clean(ctx)
}

func (r *rig) blocksPerWriter() int {
	if r.opts.Quick {
		return blocksPerWriter / 16
	}
	return blocksPerWriter
}

// writer is one stream with its blocks.
type writer struct {
	name   string
	blocks []kvcache.BlockHash
	scores []string
	hex    []string
	st     store.Stream
	seq    int64
}

func (r *rig) newWriters(ctx context.Context, s *store.Store) ([]*writer, error) {
	out := make([]*writer, writers)
	for i := range out {
		w := &writer{name: workerName(i), blocks: chain(0, uint64(1000+i), r.blocksPerWriter())}
		for _, b := range w.blocks {
			w.scores = append(w.scores, strconv.FormatUint(engineHash(i, b).Score(), 10))
			w.hex = append(w.hex, b.String())
		}
		var err error
		id := store.StreamID{Pool: benchPool, WorkerRank: kvcache.WorkerRank{Worker: w.name}}
		if w.st, _, err = s.Register(ctx, id, store.Registration{BlockSize: 16}); err != nil {
			return nil, err
		}
		out[i] = w
	}
	return out, nil
}

func (r *rig) applyCells(ctx context.Context, s *store.Store, size int) ([]ApplyCell, error) {
	type total struct {
		blocks int
		time   time.Duration
		cpu    time.Duration
		proc   time.Duration
	}
	totals := map[string]*total{}
	for _, w := range ways {
		totals[w] = &total{}
	}
	deadline := time.Now().Add(r.opts.CellTime * time.Duration(len(ways)))
	for round := 0; round < 1 || time.Now().Before(deadline); round++ {
		if err := r.clean(ctx); err != nil {
			return nil, err
		}
		writersNow, err := r.newWriters(ctx, s)
		if err != nil {
			return nil, err
		}
		store_ := func(w *writer) error { return w.apply(ctx, s, size, WayStore) }
		run := func(way string, count bool, f func(*writer) error) error {
			var spent time.Duration
			u, err := r.measure(ctx, func() error {
				start := time.Now()
				err := together(writersNow, f)
				spent = time.Since(start)
				return err
			})
			if count {
				t := totals[way]
				t.blocks += writers * r.blocksPerWriter()
				t.time += spent
				t.cpu += u.cpu
				t.proc += u.process
			}
			return err
		}
		for _, way := range ways {
			switch way {
			case WayZAdd, WayZAddHSet:
				err = run(way, true, func(w *writer) error { return w.bare(ctx, r.raw, size, way) })
			case WayRemove: // stored once more, unmeasured
				if err = run(way, false, store_); err == nil {
					err = run(way, true, func(w *writer) error { return w.apply(ctx, s, size, way) })
				}
			default:
				err = run(way, true, func(w *writer) error { return w.apply(ctx, s, size, way) })
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", way, err)
			}
		}
	}
	perSec := func(way string) float64 {
		return float64(totals[way].blocks) / totals[way].time.Seconds()
	}
	var out []ApplyCell
	for _, way := range ways {
		out = append(out, ApplyCell{
			BlocksPerEvent: size, Way: way, BlocksPerSec: perSec(way),
			RedisCPU:   float64(totals[way].cpu.Microseconds()) / float64(totals[way].blocks),
			ProcessCPU: float64(totals[way].proc.Microseconds()) / float64(totals[way].blocks),
			VsZAdd:     perSec(way) / perSec(WayZAdd), VsZAddHSet: perSec(way) / perSec(WayZAddHSet),
		})
	}
	return out, nil
}

func together(ws []*writer, f func(*writer) error) error {
	errs := make([]error, len(ws))
	var wg sync.WaitGroup
	for i, w := range ws {
		wg.Go(func() { errs[i] = f(w) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// bare writes the same facts without any guarantee.
func (w *writer) bare(ctx context.Context, c *redis.Client, size int, way string) error {
	zset := rawPrefix + way + ":" + w.name
	pipe := c.Pipeline()
	for from := 0; from < len(w.blocks); from += size {
		to := min(from+size, len(w.blocks))
		zadd := make([]any, 0, 2+2*(to-from))
		zadd = append(zadd, "zadd", zset)
		for i := from; i < to; i++ {
			zadd = append(zadd, &w.scores[i], &w.hex[i])
		}
		_ = pipe.Process(ctx, redis.NewIntCmd(ctx, zadd...))
		if way == WayZAddHSet {
			hset := make([]any, 0, 2+2*(to-from))
			hset = append(hset, "hset", rawPrefix+"holders")
			for i := from; i < to; i++ {
				hset = append(hset, &w.hex[i], "\x01")
			}
			_ = pipe.Process(ctx, redis.NewIntCmd(ctx, hset...))
		}
		if pipe.Len() >= pipelineDepth || to == len(w.blocks) {
			if _, err := pipe.Exec(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// apply writes events of that size through the store, coalesced as the indexer does.
func (w *writer) apply(ctx context.Context, s *store.Store, size int, way string) error {
	var b store.Batch
	worker, _ := strconv.Atoi(strings.TrimPrefix(w.name, "w"))
	for from := 0; from < len(w.blocks); from += size {
		to := min(from+size, len(w.blocks))
		b.Message(w.seq)
		w.seq++
		for _, h := range w.blocks[from:to] {
			e := engineHash(worker, h)
			switch way {
			case WayStore:
				b.Store(kvcache.Device, h, e)
			case WayRemove:
				b.Remove(kvcache.Device, e)
			case WayRemoveHint:
				b.RemoveKnown(kvcache.Device, h, e)
			}
		}
		if b.Ops() >= maxOps || b.Messages() >= maxMessages || to == len(w.blocks) {
			o, _, err := s.Apply(ctx, w.st, &b)
			if err != nil {
				return err
			}
			if o != store.Applied {
				return fmt.Errorf("outcome %v", o)
			}
			b.Reset()
		}
	}
	return nil
}

// memory measures what a block costs when no two workers share any.
func (r *rig) memory(ctx context.Context, s *store.Store, report *ApplyReport) error {
	used := func() (float64, error) {
		info := "lazyfree_pending_objects:1\r\n"
		var err error
		for strings.Contains(info, "lazyfree_pending_objects:") && !strings.Contains(info, "lazyfree_pending_objects:0\r\n") {
			if info, err = r.raw.Info(ctx, "memory").Result(); err != nil {
				return 0, err
			}
		}
		_, v, _ := strings.Cut(info, "used_memory:")
		v, _, _ = strings.Cut(v, "\r\n")
		n, err := strconv.ParseFloat(v, 64)
		return n, err
	}
	grown := func(f func() error) (float64, error) {
		if err := r.clean(ctx); err != nil {
			return 0, err
		}
		before, err := used()
		if err != nil {
			return 0, err
		}
		if err := f(); err != nil {
			return 0, err
		}
		after, err := used()
		return (after - before) / float64(r.memoryWorkers()*memoryBlocks), err
	}
	var err error
	report.ZAddMemory, err = grown(func() error {
		for i := range r.memoryWorkers() {
			w := memoryWriter(i)
			if err := w.bare(ctx, r.raw, 128, WayZAdd); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	report.MemoryPerBlock, err = grown(func() error {
		for i := range r.memoryWorkers() {
			w := memoryWriter(i)
			id := store.StreamID{Pool: benchPool, WorkerRank: kvcache.WorkerRank{Worker: w.name}}
			if w.st, _, err = s.Register(ctx, id, store.Registration{BlockSize: 16}); err != nil {
				return err
			}
			if err := w.apply(ctx, s, 128, WayStore); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

const (
	memoryWorkers = 64
	memoryBlocks  = 4000
)

func (r *rig) memoryWorkers() int {
	if r.opts.Quick {
		return 4
	}
	return memoryWorkers
}

func memoryWriter(i int) *writer {
	w := &writer{name: workerName(i), blocks: chain(0, uint64(5000+i), memoryBlocks)}
	for _, b := range w.blocks {
		w.scores = append(w.scores, strconv.FormatUint(engineHash(i, b).Score(), 10))
		w.hex = append(w.hex, b.String())
	}
	return w
}

// clears measures how long it takes until a worker's 4,000 blocks are gone from every lookup, and how
// fast the sweep then frees their memory.
func (r *rig) clears(ctx context.Context, s *store.Store, report *ApplyReport) error {
	if err := r.clean(ctx); err != nil {
		return err
	}
	var times []time.Duration
	var swept int
	var sweeping time.Duration
	for i := range r.memoryWorkers() {
		w := memoryWriter(i)
		id := store.StreamID{Pool: benchPool, WorkerRank: kvcache.WorkerRank{Worker: w.name}}
		st, _, err := s.Register(ctx, id, store.Registration{BlockSize: 16})
		if err != nil {
			return err
		}
		w.st = st
		if err := w.apply(ctx, s, 128, WayStore); err != nil {
			return err
		}
		st.Seq = w.seq - 1
		start := time.Now()
		_, o, err := s.Restart(ctx, st, -1, 0)
		if err != nil || o != store.Applied {
			return fmt.Errorf("restart: %v %w", o, err)
		}
		times = append(times, time.Since(start))
		start = time.Now()
		for more := true; more; {
			var n int
			if n, more, err = s.Sweep(ctx, benchPool, 500); err != nil {
				return err
			}
			swept += n
		}
		sweeping += time.Since(start)
	}
	report.ClearWorker = latency(times)
	report.SweepBlocksPerMs = float64(swept) / float64(sweeping.Milliseconds()+1)
	return nil
}
