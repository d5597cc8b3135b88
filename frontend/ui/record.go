package ui

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
)

// The index states, in the order that [Sample.States] counts them.
var states = [...]string{"exact", "partial", "degraded", "bypassed"}

// Decision is one choice of a worker.
type Decision struct {
	// Seq numbers the choices of this frontend; [Page.Record] sets it.
	Seq      uint64    `json:"seq"`
	Time     time.Time `json:"time"`
	Endpoint string    `json:"endpoint"` // route
	Tenant   string    `json:"tenant_id"`
	Model    string    `json:"model"` // of the pool
	Worker   string    `json:"worker_id"`
	Rank     int       `json:"dp_rank"`
	Retry    int       `json:"retry"` // workers that were tried before
	State    string    `json:"index_state"`
	Cause    string    `json:"cause,omitempty"` // of index_fallbacks_total
	// Known: the overlap is; else it is not 0.
	Known   bool          `json:"overlap_known"`
	Overlap int           `json:"overlap_blocks"` // at the worker chosen
	Blocks  int           `json:"prompt_blocks"`  // full ones
	Index   time.Duration `json:"index_ns"`       // that the index took
	Route   time.Duration `json:"route_ns"`       // from the whole body to the choice; 0 where that is not measured
	// Explain works out the explanation, when somebody looks. It must be safe for concurrent use.
	Explain func() any `json:"-"`

	Explanation any `json:"explanation,omitempty"`
}

// Sample is one point of the plots: what happened since the one before.
type Sample struct {
	Time   int64  `json:"t"`      // ms
	States [4]int `json:"states"` // choices by index state: exact, partial, degraded, bypassed
	Hit    int    `json:"hit_blocks"`
	Blocks int    `json:"prompt_blocks"` // of prompts whose overlap was known
	// P50 and P99 are the time that the index took of a request, in µs, to about 20 %; 0 where it took none.
	P50 float64 `json:"index_p50_us"`
	P99 float64 `json:"index_p99_us"`
	// Busiest and Mean are requests under way at worker ranks that may get some.
	Busiest int     `json:"busiest"`
	Mean    float64 `json:"mean"`
}

// recorder counts choices.
type recorder struct {
	next   atomic.Uint64 // number of the newest decision
	ring   [keptDecisions]atomic.Pointer[Decision]
	states [len(states)]atomic.Uint32
	hit    atomic.Uint64
	blocks atomic.Uint64
	times  [timeBuckets]atomic.Uint32
	ranks  sync.Map // rankKey → *rankCounts
}

// rankCounts are those of one rank: since the last sample, and decaying sums of those before.
type rankCounts struct {
	requests, hit, blocks atomic.Uint64

	mu   sync.Mutex
	sums [3]float64
	over float64 // samples that the sums stand for
}

// Record notes a choice. It takes no lock and waits for nothing; d belongs to the page from then on.
func (r *recorder) Record(d *Decision) {
	d.Seq = r.next.Add(1)
	for i, s := range states {
		if s == d.State {
			r.states[i].Add(1)
		}
	}
	counts := r.of(rankKey{d.Tenant, d.Worker, d.Rank})
	counts.requests.Add(1)
	if d.Known && d.Blocks > 0 {
		hit, blocks := uint64(min(d.Overlap, d.Blocks)), uint64(d.Blocks)
		r.hit.Add(hit)
		r.blocks.Add(blocks)
		counts.hit.Add(hit)
		counts.blocks.Add(blocks)
	}
	if d.Index > 0 {
		r.times[timeBucket(d.Index)].Add(1)
	}
	r.ring[d.Seq%keptDecisions].Store(d)
}

func (r *recorder) of(k rankKey) *rankCounts {
	if c, ok := r.ranks.Load(k); ok {
		return c.(*rankCounts)
	}
	c, _ := r.ranks.LoadOrStore(k, &rankCounts{})
	return c.(*rankCounts)
}

// Times fall into buckets of a quarter of a power of two of nanoseconds, up to about a minute.
const timeBuckets = 4 * 36

func timeBucket(d time.Duration) int {
	n := max(uint64(d), 4)
	top := bits.Len64(n) - 1 // at least 2
	return min((top-2)*4+int(n>>(top-2)&3), timeBuckets-1)
}

// bucketTime is the middle of a bucket, in µs.
func bucketTime(i int) float64 {
	low := uint64(4+i%4) << (i / 4)
	return (float64(low) + float64(uint64(1)<<(i/4))/2) / 1e3
}

// decay is what is left of a sum after one sample: a minute of samples has about the weight of all.
const decay = 1 - 1.0/60

// sample takes what was counted since the last one, and forgets the ranks that are gone.
func (r *recorder) sample(now time.Time, s *State) Sample {
	out := Sample{Time: now.UnixMilli(), Hit: int(r.hit.Swap(0)), Blocks: int(r.blocks.Swap(0))}
	for i := range r.states {
		out.States[i] = int(r.states[i].Swap(0))
	}
	var times [timeBuckets]uint32
	total := uint32(0)
	for i := range r.times {
		times[i] = r.times[i].Swap(0)
		total += times[i]
	}
	if total > 0 {
		out.P50, out.P99 = quantile(&times, total, 0.5), quantile(&times, total, 0.99)
	}
	ranks, requests := 0, 0
	alive := map[rankKey]bool{}
	for i := range s.Workers {
		w := &s.Workers[i]
		for j := range w.Ranks {
			alive[rankKey{w.Tenant, w.ID, w.Ranks[j].Rank}] = true
			if w.State != "healthy" {
				continue
			}
			ranks++
			requests += w.Ranks[j].Load.Requests
			out.Busiest = max(out.Busiest, w.Ranks[j].Load.Requests)
		}
	}
	if ranks > 0 {
		out.Mean = float64(requests) / float64(ranks)
	}
	r.ranks.Range(func(k, v any) bool {
		if !alive[k.(rankKey)] {
			r.ranks.Delete(k)
			return true
		}
		c := v.(*rankCounts)
		c.mu.Lock()
		defer c.mu.Unlock()
		for i, n := range []*atomic.Uint64{&c.requests, &c.hit, &c.blocks} {
			c.sums[i] = c.sums[i]*decay + float64(n.Swap(0))
		}
		c.over = c.over*decay + 1
		return true
	})
	return out
}

func quantile(times *[timeBuckets]uint32, total uint32, q float64) float64 {
	rest := q * float64(total)
	for i, n := range times {
		if rest -= float64(n); n > 0 && rest <= 0 {
			return bucketTime(i)
		}
	}
	return 0
}

// rates are a rank's share of hits, nil where nothing is known of late, and its requests per second.
func (r *recorder) rates(k rankKey, interval time.Duration) (hits *float64, perSecond float64) {
	v, ok := r.ranks.Load(k)
	if !ok {
		return nil, 0
	}
	c := v.(*rankCounts)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sums[2] >= 0.5 { // else the last prompt was long ago
		h := c.sums[1] / c.sums[2]
		hits = &h
	}
	if c.over > 0 {
		perSecond = c.sums[0] / c.over / interval.Seconds()
	}
	return hits, perSecond
}

// since lists the decisions after one, explained, and the number of the newest; those that the ring has lost are left out.
func (r *recorder) since(seq uint64) ([]Decision, uint64) {
	newest := r.next.Load()
	out := []Decision{}
	first := seq + 1
	if newest >= keptDecisions {
		first = max(first, newest-keptDecisions+1)
	}
	last := seq
	for n := first; n <= newest; n++ {
		d := r.ring[n%keptDecisions].Load()
		if d == nil || d.Seq < n {
			break // being recorded: the next message has it
		}
		last = n
		if d.Seq > n { // overtaken
			continue
		}
		one := *d
		if d.Explain != nil {
			one.Explanation = d.Explain()
		}
		out = append(out, one)
	}
	return out, last
}
