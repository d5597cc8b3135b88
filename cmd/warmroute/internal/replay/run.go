package replay

import (
	"container/heap"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
)

// Options are what one run is made of.
type Options struct {
	Trace []Request
	// Policy is one of [Policies].
	Policy string
	// Weights are those of the cost under [KV].
	Weights choose.Weights
	// Workers is the size of the fleet.
	Workers int
	// CacheBlocks is how many blocks of 512 tokens a worker's cache holds.
	CacheBlocks int
	// Rate is how many blocks of prompts a worker computes in a second.
	Rate float64
	// TokenTime is how long a worker takes for a token of the answer.
	TokenTime time.Duration
	// DecodeCost is by how much an answer under way slows the computing of prompts at its worker: the rate is divided by
	// 1 + DecodeCost × answers under way when a prompt's turn comes.
	DecodeCost float64
	// Predict: the index knows what is on its way to a worker before it is computed.
	Predict bool
	// Load is how many times as fast as in the trace requests come.
	Load float64
	// Frontends is how many frontends share the requests; each request goes to one at random.
	Frontends int
	// OwnViews: every frontend knows only the load that it has made itself. Otherwise all share theirs.
	OwnViews bool
	// State is where index and loads are: one of [States].
	State string
	// Seed is that of the frontends' chances. Equal seeds give equal runs.
	Seed uint64
	// Sessions names the conversations of the trace, as x-session-id does. One stays where it is unless its worker is dearer
	// than the cheapest by more than SessionSlack prompt tokens to be computed. A session of a replay does not end.
	Sessions     bool
	SessionSlack int
	// Frontend, if set, starts a frontend as a process of its own with the given arguments, for [RunReal]: it returns its URL and what
	// ends it. Without it, and with OwnViews, frontends are in this process.
	Frontend func(ctx context.Context, args ...string) (url string, pid int, stop func(), err error)
	// Progress, if set, is told how many requests have come to their end.
	Progress func(done, of int)
}

func (o *Options) check() error {
	switch {
	case len(o.Trace) == 0:
		return fmt.Errorf("the trace is empty")
	case !slices.Contains(States, o.State):
		return fmt.Errorf("state %q: want one of %v", o.State, States)
	case !slices.Contains(Policies, o.Policy):
		return fmt.Errorf("policy %q: want one of %v", o.Policy, Policies)
	case o.Workers < 1 || o.Workers > 999 || o.CacheBlocks < 1 || o.Frontends < 1 || o.Frontends > 999:
		return fmt.Errorf("want 1 to 999 workers and frontends, and a cache of at least one block")
	case o.SessionSlack < 0:
		return fmt.Errorf("a session's slack is not negative")
	case !(o.Rate > 0) || !(o.Load > 0) || o.TokenTime < 0 || !(o.DecodeCost >= 0):
		return fmt.Errorf("rate and load are above 0, the time of a token is not negative")
	case math.IsInf(o.Rate, 1) || math.IsInf(o.Load, 1) || math.IsInf(o.DecodeCost, 1):
		return fmt.Errorf("rate, load and the cost of decoding are finite")
	case o.longest() > 1e9:
		return fmt.Errorf("at this rate and load the replay would take more than 30 years")
	}
	return o.Weights.Validate()
}

// longest is how many seconds the replay takes where one worker computes everything, and decodes everything meanwhile.
func (o *Options) longest() float64 {
	blocks, answer := 0, 0
	for i := range o.Trace {
		blocks += len(o.Trace[i].Blocks)
		answer = max(answer, o.Trace[i].Output)
	}
	computing := float64(blocks) / o.Rate * (1 + o.DecodeCost*float64(len(o.Trace)))
	return o.Trace[len(o.Trace)-1].At.Seconds()/o.Load + computing + float64(answer)*o.TokenTime.Seconds()
}

// kind is what happens at an event.
type kind uint8

const (
	arrives kind = iota
	computed
	finished
)

type event struct {
	at    time.Duration
	order int // of events at one time
	kind  kind
	job   *job
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any     { x := (*e)[len(*e)-1]; *e = (*e)[:len(*e)-1]; return x }

// job is a request under way.
type job struct {
	*Request
	id       string
	session  string
	frontend int
	worker   int
	arrived  time.Duration
	hits     int // blocks that were cached when its turn came
}

// engine is a simulated worker.
type engine struct {
	cache   *lru
	queue   []*job
	answers int // under way
}

// simulation is one run in virtual time.
type simulation struct {
	Options
	ctx     context.Context
	state   state
	routers []router
	random  *rand.Rand
	names   []kvcache.WorkerRank
	engines []engine
	events  events
	order   int
	outcome []Outcome
	done    int
}

// Outcome is how a request fared.
type Outcome struct {
	Arrived time.Duration
	TTFT    time.Duration
	Worker  int
	Blocks  int // of the prompt, a partial one included
	Hits    int // of them were cached
	Work    float64
}

// Run replays a trace in virtual time.
func Run(ctx context.Context, o Options) (*Result, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	s := &simulation{
		Options: o, ctx: ctx, names: names(o.Workers),
		random: rand.New(rand.NewPCG(o.Seed, 1)), engines: make([]engine, o.Workers),
	}
	caches := make([]*lru, o.Workers)
	for i := range s.engines {
		caches[i] = newLRU(o.CacheBlocks)
		s.engines[i].cache = caches[i]
	}
	switch o.State {
	case Memory:
		views := 1
		if o.OwnViews {
			views = o.Frontends
		}
		s.state = newMemory(caches, views, o.Predict)
	default:
		r, err := openStores(ctx, o, s.names)
		if err != nil {
			return nil, err
		}
		defer r.close()
		s.state = r
	}
	for i := range o.Frontends {
		s.routers = append(s.routers, router{policy: o.Policy, weights: o.Weights, random: rand.New(rand.NewPCG(o.Seed, uint64(2+i)))})
	}
	var session []int
	if o.Sessions {
		session = sessions(o.Trace)
	}
	for i := range o.Trace {
		j := &job{Request: &o.Trace[i], id: strconv.Itoa(i)}
		if session != nil {
			j.session = strconv.Itoa(session[i])
		}
		s.push(time.Duration(float64(j.At)/o.Load), arrives, j)
	}
	for len(s.events) > 0 {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		e := heap.Pop(&s.events).(event)
		if err := s.happen(e); err != nil {
			return nil, err
		}
	}
	return summarize(o, s.outcome), nil
}

func (s *simulation) push(at time.Duration, k kind, j *job) {
	heap.Push(&s.events, event{at, s.order, k, j})
	s.order++
}

func (s *simulation) happen(e event) error {
	j := e.job
	switch e.kind {
	case arrives:
		return s.arrive(e.at, j)
	case computed:
		added, gone := s.engines[j.worker].cache.use(j.whole())
		if err := s.state.changed(s.ctx, j.worker, added, gone); err != nil {
			return err
		}
		s.outcome = append(s.outcome, Outcome{
			Arrived: j.arrived, TTFT: e.at - j.arrived, Worker: j.worker, Blocks: len(j.Blocks), Hits: j.hits,
			Work: float64(j.Input-j.hits*BlockTokens) / BlockTokens,
		})
		s.push(e.at+time.Duration(j.Output)*s.TokenTime, finished, j)
		engine := &s.engines[j.worker]
		engine.answers++
		if engine.queue = engine.queue[1:]; len(engine.queue) > 0 {
			s.start(e.at, engine.queue[0])
		}
		return s.state.prefilled(s.ctx, j.frontend, j.id)
	default:
		s.done++
		s.engines[j.worker].answers--
		if s.Progress != nil {
			s.Progress(s.done, len(s.Trace))
		}
		return s.state.finished(s.ctx, j.frontend, j.id)
	}
}

// arrive chooses a worker for a request, as the frontend that it has come to does.
func (s *simulation) arrive(now time.Duration, j *job) error {
	j.arrived, j.frontend = now, s.random.IntN(len(s.routers))
	r := &s.routers[j.frontend]
	among, credits, w, err := r.plan(j.Request, s.names,
		func() ([]int, error) { return s.state.overlaps(s.ctx, j.frontend, j.whole()) },
		func() ([]choose.Load, error) { return s.state.loads(s.ctx, j.frontend) })
	if err != nil {
		return err
	}
	j.worker, err = s.state.place(s.ctx, j.frontend, placement{
		id: j.id, session: j.session, request: j.Request, among: among, credits: credits,
		ask: choose.Ask{
			Request: choose.Request{BlockSize: BlockTokens, Tokens: j.Input}, Weights: w, Home: -1, Slack: w.Slack(s.SessionSlack, BlockTokens),
			Random: r.random.Float64(),
		},
	})
	if err != nil {
		return err
	}
	engine := &s.engines[j.worker]
	if engine.queue = append(engine.queue, j); len(engine.queue) == 1 {
		s.start(now, j)
	}
	return nil
}

// start computes a prompt from where the cache ends.
func (s *simulation) start(now time.Duration, j *job) {
	j.hits = s.engines[j.worker].cache.prefix(j.whole())
	work := float64(j.Input-j.hits*BlockTokens) / BlockTokens
	rate := s.Rate / (1 + s.DecodeCost*float64(s.engines[j.worker].answers))
	s.push(now+time.Duration(work/rate*float64(time.Second)), computed, j)
}
