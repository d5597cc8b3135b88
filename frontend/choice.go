package frontend

import (
	"context"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"time"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/inflight"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// want is a request that needs a place.
type want struct {
	pool   kvcache.PoolID
	k      *knowledge
	policy string

	weights choose.Weights
	session string
	// tokens are those of the prompt, or the estimate; blocks are those that the request occupies until it ends.
	tokens, blocks int
	// conversation and prefix name the request for the policies that hash. They are called where the name matters.
	conversation, prefix func() conversation

	// id names the reservation; "" means that the load is not counted anywhere.
	id    string
	lease time.Duration
	// local: the loads in Redis are not to be asked.
	local bool
	// pinned: the request restricts the choice.
	pinned bool
	// made: the choice is made, and only counted. No threshold refuses it.
	made bool
}

// placed is where a request goes.
type placed struct {
	list   []candidate // those that were compared
	index  int
	policy string
	reason string
	loads  []choose.Load // of list, before this request
	shared bool          // loads are those of all frontends
	held   bool          // reserved in Redis
	costed bool          // the cost decided
	busy   choose.Load   // the thresholds
}

func (p *placed) chosen() *candidate { return &p.list[p.index] }

func (w *want) request() choose.Request {
	return choose.Request{BlockSize: w.k.blockSize, Tokens: w.tokens}
}

// adds is the load that the request is at a candidate.
func (w *want) adds(c *candidate) choose.Load {
	return choose.Load{Requests: 1, PrefillTokens: w.request().Prefill(c.credit), DecodeBlocks: w.blocks}
}

// place chooses one of the candidates, of which there is at least one. Where the policy goes by load, one call to Redis
// chooses by the loads that all frontends share and reserves; without an answer in time, this frontend's own loads
// decide. take counts the request there in the same step; it may be nil.
func (f *Frontend) place(ctx context.Context, w *want, list []candidate, take func(list []candidate, places []inflight.Place, pick func([]choose.Load) int)) (placed, error) {
	p := placed{list: list, policy: w.policy, reason: reasonPolicy, busy: choose.Load(f.o.Busy)}
	weights := w.weights
	var pick blind
	switch w.policy {
	case PolicyKV:
		p.costed = true
	case PolicyPowerOfTwo:
		p.list = f.twoOf(w, list)
		fallthrough
	case PolicyLeastLoaded:
		weights, p.costed = choose.LeastRequests, true
	default:
		if pick, p.reason = f.blind(w); pick == nil { // nothing names the request
			p.policy, weights, p.costed = PolicyLeastLoaded, choose.LeastRequests, true
		}
	}
	shared := p.costed && !w.local && f.askLoads(ctx, w, &p, weights)
	if shared && p.index < 0 && len(p.list) < len(list) { // the two are busy, and others may not be
		p.list = list
		shared = f.askLoads(ctx, w, &p, weights)
	}
	if shared {
		if p.index < 0 {
			return p, f.busy()
		}
		w.explain(&p)
		return p, nil
	}
	choice := func(loads []choose.Load) int {
		p.loads = loads
		if p.costed {
			p.index = choose.Choose(f.localAsk(w, weights), withLoads(p.list, loads)).Index
		} else {
			p.index = f.pickBlind(&p, pick)
		}
		return p.index
	}
	for {
		places := make([]inflight.Place, len(p.list))
		for i := range p.list {
			places[i] = p.list[i].place()
		}
		if take != nil {
			take(p.list, places, choice)
		} else {
			choice(f.inFlight.Loads(places))
		}
		if p.index >= 0 {
			break
		}
		if len(p.list) == len(list) {
			return p, f.busy()
		}
		p.list = list // as above
	}
	w.explain(&p)
	return p, nil
}

// explain says why a choice is what it is.
func (w *want) explain(p *placed) {
	if w.pinned {
		p.reason = reasonPinned
		return
	}
	if p.policy != PolicyKV || p.reason != reasonPolicy {
		return
	}
	p.reason = reasonLoad
	if p.chosen().overlap.Any > 0 {
		p.reason = reasonOverlap
	}
}

func (f *Frontend) localAsk(w *want, weights choose.Weights) choose.Ask {
	return choose.Ask{Request: w.request(), Weights: weights, Busy: choose.Load(f.o.Busy), Home: -1, Random: rand.Float64()}
}

func withLoads(list []candidate, loads []choose.Load) []choose.Candidate {
	out := make([]choose.Candidate, len(list))
	for i := range list {
		out[i] = choose.Candidate{Load: loads[i], Credit: list[i].credit}
	}
	return out
}

// ask is the question for the loads in Redis.
func (f *Frontend) ask(w *want, list []candidate, weights choose.Weights) store.Ask {
	a := store.Ask{
		ID: w.id, Lease: w.lease, BlockSize: w.k.blockSize, PromptTokens: w.tokens, DecodeBlocks: w.blocks,
		Weights: store.Weights(weights), Candidates: make([]store.Candidate, len(list)),
	}
	if !w.made {
		a.Busy = store.Load(f.o.Busy)
	}
	for i := range list {
		a.Candidates[i] = store.Candidate{WorkerRank: list[i].WorkerRank, Credit: list[i].credit}
	}
	if w.session != "" && f.o.SessionTTL > 0 {
		a.Session, a.SessionTTL = w.session, f.o.SessionTTL
		if a.SessionSlack = min(weights.Slack(f.o.SessionSlack, w.k.blockSize), store.MaxSlack); weights == choose.LeastRequests && f.o.SessionSlack > 0 {
			a.SessionSlack = noLoad
		}
	}
	return a
}

// askLoads chooses by the loads that all frontends share; false where that cannot be had within what is left of the
// lookup budget.
func (f *Frontend) askLoads(ctx context.Context, w *want, p *placed, weights choose.Weights) bool {
	if len(p.list) > store.MaxCandidates {
		return false
	}
	a := f.ask(w, p.list, weights)
	type answer struct {
		choice store.Choice
		err    error
	}
	got, ok := inTime(f, ctx, w.k, func(ctx context.Context) (r answer) {
		r.choice, r.err = f.o.Index.Select(ctx, w.pool, a)
		return r
	})
	if !ok || got.err != nil {
		if ctx.Err() == nil { // else the client left
			f.metrics.loadFallbacks.WithLabelValues(fallbackReasonOf(ok, got.err)).Inc()
		}
		return false
	}
	c := got.choice
	p.shared, p.held = true, c.Held
	p.index = -1
	p.loads = make([]choose.Load, len(c.Loads))
	for i, l := range c.Loads {
		p.loads[i] = choose.Load(l)
	}
	if !c.AllBusy {
		p.index = c.Index
		if c.Session {
			p.reason = reasonSession
		}
	}
	return true
}

func fallbackReasonOf(inTime bool, err error) string {
	if !inTime {
		return store.ReasonTimeout
	}
	return closedReason(store.Reason(err))
}

// inTime runs a call to the index within what is left of the request's lookup budget, and takes its time off that. It ends
// on time even where the index does not; then, and where the call panics, ok is false.
func inTime[T any](f *Frontend, ctx context.Context, k *knowledge, call func(context.Context) T) (answer T, ok bool) {
	left := f.o.LookupBudget - k.spent
	if left <= 0 {
		return answer, false
	}
	start := time.Now()
	defer func() { k.spent += time.Since(start) }()
	contained := func(ctx context.Context) (answer T, ok bool) {
		defer func() {
			if p := recover(); p != nil {
				f.o.Logger.Error("panic in a call to the index", "panic", p, "stack", string(debug.Stack()))
			}
		}()
		return call(ctx), true
	}
	if f.punctual {
		return contained(deadlined{ctx, start.Add(left)})
	}
	// The index keeps the same budget by itself and knows better why it is late, so it gets a little longer.
	ctx, cancel := context.WithTimeoutCause(ctx, left+budgetSlack, errBudget)
	defer cancel()
	answers := make(chan T, 1)
	go func() {
		if a, ok := contained(ctx); ok {
			answers <- a
		} else {
			close(answers)
		}
	}()
	select {
	case answer, ok = <-answers:
		return answer, ok
	case <-ctx.Done():
		return answer, false
	}
}

// deadlined is a context with a deadline that it tells and does not keep: for a call that keeps it. It needs no timer.
type deadlined struct {
	context.Context
	at time.Time
}

// Deadline is that of the call.
func (d deadlined) Deadline() (time.Time, bool) { return d.at, true }

// busy refuses a request because every candidate is at its threshold.
func (f *Frontend) busy() error {
	return &apiError{
		status: f.o.BusyStatus, kind: "server_error", code: "overloaded", message: "all workers that serve this model are busy; try again", retryAfter: 1,
	}
}

// choose picks a worker for one attempt, counts the request there, and begins to care for its reservation.
func (f *Frontend) choose(ctx context.Context, x *exchange) error {
	s := f.fleet.Snapshot()
	target, err := f.resolve(s, x.tenant, x.parsed.Model)
	if err != nil {
		return err
	}
	excluded := x.tried
	for {
		list := f.candidates(target, x.pin, &x.knowledge, f.o.Tiers, excluded)
		if len(list) == 0 {
			return nobody(s, target, x.tenant, x.pin)
		}
		w := f.wantOf(x, target.Pool)
		p, err := f.choosing(ctx, &w, list, len(x.tried), func(list []candidate, places []inflight.Place, pick func([]choose.Load) int) {
			_, x.lease = f.inFlight.Take(places, pick, func(i int) choose.Load { return w.adds(&list[i]) })
		})
		if err != nil {
			return err
		}
		x.chosen = p.chosen()
		if x.explain {
			x.explanation = explain(&w, &p).header()
		}
		if p.shared {
			x.lease = f.inFlight.Add(x.chosen.place(), w.adds(x.chosen))
		}
		if f.keeper != nil && !x.bypass { // with Redis away too: what is still under way when it is back counts again
			w.made = true
			x.reserved = f.keeper.Take(target.Pool, f.ask(&w, []candidate{*x.chosen}, choose.Weights{}), p.held)
		}
		if !f.breakers.Begin(x.chosen.node.Key()) { // another request has begun the one trial
			others := append(slices.Clone(excluded), x.chosen.Worker)
			if len(f.candidates(target, x.pin, &x.knowledge, f.o.Tiers, others)) > 0 {
				x.giveBack()
				excluded = others
				continue
			} // else a worker that is suspected is better than none, and what is pinned to it gets it
		}
		pool := target.Pool.String()
		f.selected(pool, &p)
		if x.inference {
			f.decided(x.path, &w, &p, len(x.tried), x.start)
		}
		f.metrics.workerRequests.WithLabelValues(x.chosen.Worker).Inc()
		f.predict(x, target.Pool)
		o := x.chosen.overlap.Disk // what engines have said
		if f.eventsOff(target.Pool) {
			o = x.chosen.overlap.Any
		}
		if x.blocks > 0 && x.overlapKnown(o) {
			f.metrics.overlapRatio.WithLabelValues(pool).Observe(float64(min(o, x.blocks)) / float64(x.blocks))
		}
		return nil
	}
}

// wantOf is what a proxied request wants.
func (f *Frontend) wantOf(x *exchange, pool kvcache.PoolID) want {
	w := want{
		pool: pool, k: &x.knowledge, policy: f.policy(&x.knowledge), weights: f.o.Weights, session: x.session,
		tokens: x.tokens, conversation: x.conversation, prefix: x.prefix, pinned: !x.pin.any(),
		id: f.nextID(), lease: f.o.LoadLease, local: f.o.Index == nil || x.bypass || x.state == kvcache.Degraded,
	}
	if w.tokens == 0 {
		w.tokens = x.guess * x.blockSize
	}
	w.blocks = (w.tokens + x.blockSize - 1) / x.blockSize
	return w
}

// selected counts a choice.
func (f *Frontend) selected(pool string, p *placed) {
	f.metrics.selected.WithLabelValues(pool, p.policy, p.reason).Inc()
}
