// Package storebench measures the index against other ways to keep the same facts in Redis. Every
// figure is a ratio within one run: the layouts take turns on the same server, with the same data, and
// must give the same answers.
//
// It needs a server of its own: it writes under the pool "default:bench" and under "wrbench:", and
// removes both at the end.
package storebench

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// Options configures a run.
type Options struct {
	// URL of the Redis server. Required; standalone only, because one server's CPU is measured.
	URL string
	// CellTime is how long each cell of the table is measured. Default 2 s.
	CellTime time.Duration
	// Quick makes a small run, which shows the form of the tables and no more.
	Quick bool
	// Progress is called as parts of the work begin and go on.
	Progress func(part string, done, total int)
}

// Latency is the distribution of one operation's time, in µs.
type Latency struct {
	P50   float64 `json:"p50_us"`
	P99   float64 `json:"p99_us"`
	Count int     `json:"count"`
}

func latency(d []time.Duration) Latency {
	if len(d) == 0 {
		return Latency{}
	}
	slices.Sort(d)
	at := func(q float64) float64 {
		return float64(d[min(len(d)-1, int(q*float64(len(d))))].Nanoseconds()) / 1e3
	}
	return Latency{P50: at(0.5), P99: at(0.99), Count: len(d)}
}

// rig is a server under measurement.
type rig struct {
	opts   Options
	raw    *redis.Client
	sent   atomic.Int64
	recvd  atomic.Int64
	closed []func() error
}

var benchPool = kvcache.PoolID{Tenant: "default", Model: "bench"}

const rawPrefix = "wrbench:"

func newRig(ctx context.Context, o Options) (*rig, error) {
	if o.CellTime <= 0 {
		o.CellTime = 2 * time.Second
	}
	if o.Progress == nil {
		o.Progress = func(string, int, int) {}
	}
	ro, err := redis.ParseURL(o.URL)
	if err != nil {
		return nil, fmt.Errorf("redis URL: %w", err)
	}
	r := &rig{opts: o}
	ro.Dialer = r.dial
	ro.Protocol = 2
	ro.ReadTimeout, ro.WriteTimeout = time.Minute, time.Minute
	ro.MaxRetries = -1
	ro.PipelinePoolSize = -1
	ro.PoolSize = 16
	ro.DisableIdentity = true
	r.raw = redis.NewClient(ro)
	r.closed = append(r.closed, r.raw.Close)
	if err := r.raw.Ping(ctx).Err(); err != nil {
		r.close()
		return nil, err
	}
	return r, r.clean(ctx)
}

func (r *rig) close() {
	for _, f := range r.closed {
		_ = f()
	}
}

func (r *rig) store(o store.Options) (*store.Store, error) {
	o.URL, o.Dialer = r.opts.URL, r.dial
	o.LookupBudget, o.WriteTimeout = time.Minute, time.Minute
	s, err := store.New(o)
	if err == nil {
		r.closed = append(r.closed, s.Close)
	}
	return s, err
}

// dial counts the bytes of a connection.
func (r *rig) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	return countingConn{c, r}, err
}

type countingConn struct {
	net.Conn
	r *rig
}

func (c countingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.r.recvd.Add(int64(n))
	return n, err
}

func (c countingConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.r.sent.Add(int64(n))
	return n, err
}

// clean removes what an earlier run left.
func (r *rig) clean(ctx context.Context) error {
	for _, pattern := range []string{"wr:1:{default:bench*", rawPrefix + "*"} {
		iter := r.raw.Scan(ctx, 0, pattern, 5000).Iterator()
		var keys []string
		for iter.Next(ctx) {
			keys = append(keys, iter.Val())
		}
		if err := iter.Err(); err != nil {
			return err
		}
		for step := range slices.Chunk(keys, 1000) {
			if err := r.raw.Unlink(ctx, step...).Err(); err != nil {
				return err
			}
		}
	}
	return r.raw.SRem(ctx, "wr:1:pools", benchPool.String()).Err()
}

// serverCPU is the time that Redis has spent in commands so far, and how much of it in scripts. Redis
// counts a command that a script calls twice: as itself and within the script.
func (r *rig) serverCPU(ctx context.Context) (all, scripts time.Duration, err error) {
	info, err := r.raw.Info(ctx, "commandstats").Result()
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(info) {
		name, rest, ok := strings.Cut(strings.TrimSpace(line), ":calls=")
		if !ok || name == "cmdstat_info" {
			continue
		}
		_, usec, _ := strings.Cut(rest, ",usec=")
		usec, _, _ = strings.Cut(usec, ",")
		n, err := strconv.ParseInt(usec, 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("commandstats: %q", line)
		}
		all += time.Duration(n) * time.Microsecond
		if strings.HasPrefix(name, "cmdstat_eval") {
			scripts += time.Duration(n) * time.Microsecond
		}
	}
	return all, scripts, nil
}

// processCPU is the CPU time of the Redis process: commands, parsing, sockets, everything.
func (r *rig) processCPU(ctx context.Context) (time.Duration, error) {
	info, err := r.raw.Info(ctx, "cpu").Result()
	if err != nil {
		return 0, err
	}
	var sum float64
	for _, field := range []string{"used_cpu_user:", "used_cpu_sys:"} {
		_, v, _ := strings.Cut(info, "\n"+field)
		v, _, _ = strings.Cut(v, "\r\n")
		f, err := strconv.ParseFloat(v, 64)
		if err != nil {
			return 0, fmt.Errorf("INFO cpu: %s%q", field, v)
		}
		sum += f
	}
	return time.Duration(sum * float64(time.Second)), nil
}

// usage is what a slice of work took beside time.
type usage struct {
	cpu, process        time.Duration // of commands; of the whole Redis process
	sent, recvd, allocs int64
}

func (r *rig) measure(ctx context.Context, f func() error) (usage, error) {
	all, scripts, err := r.serverCPU(ctx)
	if err != nil {
		return usage{}, err
	}
	process, err := r.processCPU(ctx)
	if err != nil {
		return usage{}, err
	}
	var m1, m2 runtime.MemStats
	runtime.ReadMemStats(&m1)
	sent, recvd := r.sent.Load(), r.recvd.Load()
	if err := f(); err != nil {
		return usage{}, err
	}
	u := usage{sent: r.sent.Load() - sent, recvd: r.recvd.Load() - recvd}
	runtime.ReadMemStats(&m2)
	u.allocs = int64(m2.Mallocs - m1.Mallocs)
	process2, err := r.processCPU(ctx)
	if err != nil {
		return usage{}, err
	}
	u.process = process2 - process
	all2, scripts2, err := r.serverCPU(ctx)
	// Work is either all scripts or none.
	if u.cpu = scripts2 - scripts; u.cpu == 0 {
		u.cpu = all2 - all
	}
	return u, err
}

// chain makes n block hashes that follow parent; the name tells chains apart.
func chain(parent kvcache.BlockHash, name uint64, n int) []kvcache.BlockHash {
	out := make([]kvcache.BlockHash, n)
	for i := range out {
		parent = kvcache.ChainHash(parent, kvcache.LocalHash(name<<20+uint64(i)))
		out[i] = parent
	}
	return out
}

// engineHash makes up a worker's own hash of a block.
func engineHash(worker int, b kvcache.BlockHash) kvcache.EngineHash {
	return kvcache.EngineHash(kvcache.ChainHash(b, kvcache.LocalHash(worker)))
}

func workerName(i int) string { return "w" + strconv.Itoa(i) }
