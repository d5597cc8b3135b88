package storebench

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// LookupCell is one layout's figures for one size of fleet and prompt.
type LookupCell struct {
	Workers int    `json:"workers"`
	Blocks  int    `json:"blocks"`
	Callers int    `json:"callers"`
	Layout  string `json:"layout"`
	Latency
	RedisCPU    float64 `json:"redis_cpu_us"`           // per lookup
	CPUPerBlock float64 `json:"redis_cpu_us_per_block"` //
	ProcessCPU  float64 `json:"redis_process_cpu_us"`   // per lookup, of the whole server process
	Sent        int64   `json:"bytes_sent"`             // per lookup
	Received    int64   `json:"bytes_received"`
	Allocs      int64   `json:"allocs"`
}

// LookupReport is what [Lookup] measured.
type LookupReport struct {
	RedisVersion string       `json:"redis_version"`
	Cells        []LookupCell `json:"cells"`
}

// The layouts compared.
const (
	LayoutOurs    = "warmroute"
	LayoutZMScore = "zmscore" // one sorted set per worker, pipelined ZMSCORE of every block at every worker
	LayoutHKeys   = "hkeys"   // one hash per block with a 105-byte JSON field per holder, pipelined HKEYS
)

// The workload: what each worker holds, and how much of the common chain the first four hold.
const (
	blocksPerWorker = 4000
	commonBlocks    = 60
	groupBlocks     = 500
	groupSize       = 8
	privateChain    = 40
	deepWorkers     = 4
	deepBlocks      = 1988
)

// LookupSizes says which cells are measured.
type LookupSizes struct{ Workers, Blocks, Callers []int }

// DefaultLookupSizes is the published table.
var DefaultLookupSizes = LookupSizes{Workers: []int{8, 64, 256}, Blocks: []int{32, 128, 512, 2048}, Callers: []int{1, 8}}

// Lookup measures overlap lookups.
func Lookup(ctx context.Context, o Options, sizes LookupSizes) (LookupReport, error) {
	var report LookupReport
	r, err := newRig(ctx, o)
	if err != nil {
		return report, err
	}
	defer r.close()
	if report.RedisVersion, err = r.version(ctx); err != nil {
		return report, err
	}
	for _, workers := range sizes.Workers {
		part, cells, done := fmt.Sprintf("%d workers", workers), len(sizes.Blocks)*len(sizes.Callers), 0
		r.opts.Progress(part, 0, cells)
		w, err := r.fill(ctx, workers)
		if err != nil {
			return report, fmt.Errorf("fill %d workers: %w", workers, err)
		}
		for _, blocks := range sizes.Blocks {
			for _, callers := range sizes.Callers {
				c, err := w.cell(ctx, blocks, callers)
				if err != nil {
					return report, fmt.Errorf("%d workers × %d blocks, %d callers: %w", workers, blocks, callers, err)
				}
				report.Cells = append(report.Cells, c...)
				done++
				r.opts.Progress(part, done, cells)
			}
		}
		if err := r.clean(ctx); err != nil {
			return report, err
		}
	}
	return report, nil
}

func (r *rig) version(ctx context.Context) (string, error) {
	info, err := r.raw.Info(ctx, "server").Result()
	if err != nil {
		return "", err
	}
	_, v, _ := strings.Cut(info, "redis_version:")
	v, _, _ = strings.Cut(v, "\r\n")
	return v, nil
}

// world is a filled index in all layouts.
type world struct {
	r       *rig
	store   *store.Store
	workers int
	prompt  []kvcache.BlockHash
}

func (r *rig) fill(ctx context.Context, workers int) (*world, error) {
	s, err := r.store(store.Options{})
	if err != nil {
		return nil, err
	}
	w := &world{r: r, store: s, workers: workers}
	common := chain(0, 0, commonBlocks)
	end := common[len(common)-1]
	deep := chain(end, 1, deepBlocks)
	w.prompt = append(append(w.prompt, common...), deep...)
	for i := range workers {
		blocks := append([]kvcache.BlockHash(nil), common...)
		blocks = append(blocks, chain(end, uint64(100+i/groupSize), groupBlocks)...)
		if i < deepWorkers {
			blocks = append(blocks, deep...)
		}
		for c := 0; len(blocks) < blocksPerWorker; c++ {
			n := min(privateChain, blocksPerWorker-len(blocks))
			blocks = append(blocks, chain(end, uint64(100000+i*1000+c), n)...)
		}
		id := store.StreamID{Pool: benchPool, WorkerRank: kvcache.WorkerRank{Worker: workerName(i)}}
		st, _, err := s.Register(ctx, id, store.Registration{BlockSize: 16})
		if err != nil {
			return nil, err
		}
		var b store.Batch
		b.Message(0)
		for _, h := range blocks {
			b.Store(kvcache.Device, h, engineHash(i, h))
		}
		if _, _, err := s.Apply(ctx, st, &b); err != nil {
			return nil, err
		}
		pipe := r.raw.Pipeline()
		field := jsonHolder(i)
		for _, h := range blocks {
			pipe.HSet(ctx, rawPrefix+h.String(), field, "")
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// holder is what a field of the hkeys layout says.
type holder struct {
	Pod  string `json:"podIdentifier"`
	Tier string `json:"deviceTier"`
	Pad  string `json:"pad"`
}

// jsonHolder is a worker's field: 105 bytes.
func jsonHolder(worker int) string {
	h := holder{Pod: workerName(worker), Tier: "gpu"}
	short, _ := json.Marshal(h) // strings alone cannot fail
	h.Pad = strings.Repeat("x", 105-len(short))
	b, _ := json.Marshal(h)
	return string(b)
}

type answer = map[string]int // worker -> contiguous blocks

// layouts are the ways to ask, in the order in which they take turns.
func (w *world) layouts() []struct {
	name string
	ask  func(context.Context, []kvcache.BlockHash) (answer, error)
} {
	type layout = struct {
		name string
		ask  func(context.Context, []kvcache.BlockHash) (answer, error)
	}
	return []layout{{LayoutOurs, w.ours}, {LayoutZMScore, w.zmscore}, {LayoutHKeys, w.hkeys}}
}

func (w *world) ours(ctx context.Context, prompt []kvcache.BlockHash) (answer, error) {
	scores, _, err := w.store.Lookup(ctx, benchPool, prompt, store.LookupOptions{})
	if err != nil {
		return nil, err
	}
	out := make(answer, len(scores.Scores))
	for k, v := range scores.Scores {
		out[k.Worker] = v.Any
	}
	return out, nil
}

func (w *world) zmscore(ctx context.Context, prompt []kvcache.BlockHash) (answer, error) {
	members := make([]string, len(prompt))
	for i, b := range prompt {
		members[i] = b.String()
	}
	pipe := w.r.raw.Pipeline()
	cmds := make([]*redis.StringSliceCmd, w.workers)
	for i := range cmds {
		// The sorted sets of our own index: the same members under the same scores.
		args := make([]any, 0, 2+len(members))
		args = append(args, "zmscore", "wr:1:{"+benchPool.String()+"#0}:blocks:"+workerName(i)+"/0:device")
		for k := range members {
			args = append(args, &members[k])
		}
		cmds[i] = redis.NewStringSliceCmd(ctx, args...)
		_ = pipe.Process(ctx, cmds[i])
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return nil, err
	}
	out := answer{}
	for i, c := range cmds {
		n := 0
		for _, score := range c.Val() {
			if score == "" {
				break
			}
			n++
		}
		if n > 0 {
			out[workerName(i)] = n
		}
	}
	return out, nil
}

func (w *world) hkeys(ctx context.Context, prompt []kvcache.BlockHash) (answer, error) {
	pipe := w.r.raw.Pipeline()
	cmds := make([]*redis.StringSliceCmd, len(prompt))
	for i, b := range prompt {
		cmds[i] = pipe.HKeys(ctx, rawPrefix+b.String())
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return nil, err
	}
	out := answer{}
	for depth, c := range cmds {
		any := false
		for _, field := range c.Val() {
			var h holder
			if err := json.Unmarshal([]byte(field), &h); err != nil {
				return nil, err
			}
			if out[h.Pod] == depth {
				out[h.Pod] = depth + 1
				any = true
			}
		}
		if !any {
			break
		}
	}
	return out, nil
}

// cell measures all layouts for one size. They take turns in short slices, each with as many lookups as
// take about the same time, so that whatever else the machine does falls on all of them.
func (w *world) cell(ctx context.Context, blocks, callers int) ([]LookupCell, error) {
	prompt := w.prompt[:blocks]
	expect := answer{}
	for i := range w.workers {
		expect[workerName(i)] = min(blocks, commonBlocks)
		if i < deepWorkers {
			expect[workerName(i)] = blocks
		}
	}
	layouts := w.layouts()
	const slices_ = 8
	slice := w.r.opts.CellTime / time.Duration(slices_*len(layouts))
	counts := make([]int, len(layouts))
	for i, l := range layouts {
		var last time.Duration
		for range 3 { // warm: connections, slot map
			start := time.Now()
			got, err := l.ask(ctx, prompt)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", l.name, err)
			}
			last = time.Since(start)
			if !maps.Equal(got, expect) {
				return nil, fmt.Errorf("%s: another answer than the workload's: %d workers instead of %d", l.name, len(got), len(expect))
			}
		}
		counts[i] = max(1, int(slice/max(last, time.Microsecond)))
	}
	times := make([][]time.Duration, len(layouts))
	totals := make([]usage, len(layouts))
	for range slices_ {
		for i, l := range layouts {
			u, err := w.r.measure(ctx, func() error {
				t, err := ask(ctx, callers, counts[i], func() error { _, err := l.ask(ctx, prompt); return err })
				times[i] = append(times[i], t...)
				return err
			})
			if err != nil {
				return nil, fmt.Errorf("%s: %w", l.name, err)
			}
			totals[i].cpu += u.cpu
			totals[i].process += u.process
			totals[i].sent += u.sent
			totals[i].recvd += u.recvd
			totals[i].allocs += u.allocs
		}
	}
	var out []LookupCell
	for i, l := range layouts {
		n := int64(len(times[i]))
		cpu := float64(totals[i].cpu.Microseconds()) / float64(n)
		out = append(out, LookupCell{
			Workers: w.workers, Blocks: blocks, Callers: callers, Layout: l.name, Latency: latency(times[i]),
			RedisCPU: cpu, CPUPerBlock: cpu / float64(blocks), ProcessCPU: float64(totals[i].process.Microseconds()) / float64(n),
			Sent: totals[i].sent / n, Received: totals[i].recvd / n, Allocs: totals[i].allocs / n,
		})
	}
	return out, nil
}

// ask runs f n times on each of so many callers at once.
func ask(ctx context.Context, callers, n int, f func() error) ([]time.Duration, error) {
	var mu sync.Mutex
	var all []time.Duration
	var first error
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			times := make([]time.Duration, 0, n)
			var err error
			for range n {
				if err = ctx.Err(); err != nil {
					break
				}
				start := time.Now()
				if err = f(); err != nil {
					break
				}
				times = append(times, time.Since(start))
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, times...)
			if first == nil {
				first = err
			}
		})
	}
	wg.Wait()
	return all, first
}
