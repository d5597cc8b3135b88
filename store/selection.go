package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/warmroute/warmroute/kvcache"
)

// Load is what one worker rank has under way, of all leases that live.
type Load struct {
	Requests      int // not finished
	PrefillTokens int // of prompts, not computed yet and not cached
	DecodeBlocks  int // that the requests occupy
}

// Weights are the parameters of the cost, which is in blocks; lower is better:
//
//	PrefillScale × (queued prefill + Miss × max(0, prompt − credit)) + Decode × active decode blocks + Request × active requests
//
// Package frontend/choose has the same arithmetic in Go, and the defaults.
type Weights struct{ PrefillScale, Miss, Decode, Request, Temperature float64 }

// Candidate is a worker rank that could take a request.
type Candidate struct {
	kvcache.WorkerRank
	Credit float64 // blocks of the prompt that need no prefill there
}

// Limits of a selection.
const (
	MaxCandidates = 4096
	MaxLeaseID    = 128            // bytes of a lease's id
	MaxLeases     = 100_000        // leases of a pool; more requests are chosen for, and not held
	MaxLease      = 24 * time.Hour // longest lease
	maxTokens     = 1_000_000_000  // of a prompt, and decode blocks
	idsPerCall    = 1000           // of one run of lease.lua
	reapedPerCall = 64             // ended leases that one run of a script frees
	maxWeight     = 1e9            //
	MaxSlack      = 1e15           // of a session
	MaxSessionTTL = 1e12 * time.Millisecond
	MaxBusy       = 1_000_000_000 // of a threshold
)

// Ask is one request that wants a worker.
type Ask struct {
	// ID names the reservation; "" chooses and reserves nothing. Asking again under one ID, after a reply that was lost,
	// returns the same choice and reserves once; where that worker is no candidate any more, the reservation
	// moves. 1 to 128 printable bytes, unique in the pool.
	ID string
	// Lease is how long the reservation lives unless it is renewed. Required with an ID, 1 ms to 24 h.
	Lease time.Duration

	BlockSize    int // tokens per block
	PromptTokens int
	DecodeBlocks int // blocks that the request occupies until it ends
	// Candidates are 1 to 4,096 worker ranks, those that may be chosen.
	Candidates []Candidate
	Weights    Weights
	// Busy: a worker rank at or above any member that is not zero is skipped.
	Busy Load

	// Session keeps requests of one name on one worker rank: it stays where the last one was, for SessionTTL after it,
	// unless that is no candidate or busy, or its cost exceeds the cheapest by more than SessionSlack. "" = none.
	Session      string
	SessionTTL   time.Duration
	SessionSlack float64

	// Random gives a number from 0 to but without 1, which decides between ties and the lottery of the temperature.
	// Default [rand.Float64].
	Random func() float64
}

// Choice is what came out of an [Ask].
type Choice struct {
	kvcache.WorkerRank
	Index   int     // among the candidates
	Cost    float64 // of the one chosen, before it was reserved
	Session bool    // the session decided
	Held    bool    // it is reserved; false without an ID, and where the pool has MaxLeases
	AllBusy bool    // no candidate is below Ask.Busy: nothing is chosen
	Loads   []Load  // of the candidates in their order, before this request
}

// Select chooses the cheapest candidate by the loads that all frontends share, and reserves the request's load there,
// in one atomic step. It is on the way of a request: it returns within the lookup budget, or by ctx's deadline where that
// is earlier, whatever Redis does, and at once while the link to the pool's loads is down. After an error
// the reservation may have been made all the same: it ends with its lease, or by [Store.Release].
func (s *Store) Select(ctx context.Context, id kvcache.PoolID, a Ask) (Choice, error) {
	if err := a.validate(); err != nil {
		return Choice{}, fmt.Errorf("select worker: %w: %w", err, ErrInvalid)
	}
	start := time.Now()
	l := s.leases(id)
	if err := l.link.check(); err != nil {
		return Choice{}, err
	}
	bounded, cancel, budget := s.budgeted(ctx)
	defer cancel()
	waited, err := l.gate.enter(bounded, budget)
	if err != nil {
		return Choice{}, err
	}
	defer l.gate.leave()
	if waited > 0 {
		if err := l.link.check(); err != nil {
			return Choice{}, err
		}
	}
	keys := l.keys()
	if a.Session != "" {
		keys = append(keys, sessionKey(id, a.Session))
	}
	if a.Random == nil {
		a.Random = rand.Float64
	}
	v, err := scripts.selects.run(bounded, s.read, keys, a.args(a.Random())...)
	var c Choice
	if err == nil {
		c, err = a.read(v)
	}
	if err == nil {
		s.metrics.selectSeconds.Observe(time.Since(start).Seconds())
		return c, nil
	}
	err = classify(context.WithoutCancel(ctx), fmt.Errorf("select worker: %w", err))
	if Reason(err) == ReasonTimeout && budget-waited < s.opts.LookupBudget/2 {
		return Choice{}, overload(err) // Redis has had no time: the lookup before, or this process's own queue, has eaten it
	}
	return Choice{}, l.link.report(ctx, err)
}

func (a *Ask) validate() error {
	within := func(n, top int) bool { return n >= 0 && n <= top }
	switch {
	case a.ID != "" && !printable(a.ID, MaxLeaseID):
		return errors.New("an id is at most 128 printable bytes")
	case a.ID != "" && (a.Lease < time.Millisecond || a.Lease > MaxLease):
		return errors.New("a lease is 1 ms to 24 h")
	case len(a.Candidates) == 0 || len(a.Candidates) > MaxCandidates:
		return errors.New("want 1 to 4096 candidates")
	case a.BlockSize < 1 || a.BlockSize > 1_000_000:
		return errors.New("the block size is 1 to 1000000 tokens")
	case !within(a.PromptTokens, maxTokens) || !within(a.DecodeBlocks, maxTokens):
		return errors.New("tokens and blocks are 0 to 1e9")
	case !within(a.Busy.Requests, MaxBusy) || !within(a.Busy.PrefillTokens, MaxBusy) || !within(a.Busy.DecodeBlocks, MaxBusy):
		return errors.New("a busy threshold is negative or too large")
	case a.SessionTTL < 0 || a.SessionTTL > MaxSessionTTL || !number(a.SessionSlack, MaxSlack):
		return errors.New("a session's TTL and slack are not negative")
	}
	for _, w := range [...]float64{a.Weights.PrefillScale, a.Weights.Miss, a.Weights.Decode, a.Weights.Request, a.Weights.Temperature} {
		if !number(w, maxWeight) {
			return errors.New("weights are numbers from 0 to 1e9")
		}
	}
	for _, c := range a.Candidates {
		if !number(c.Credit, maxTokens) {
			return errors.New("a credit is a number of blocks, not negative")
		}
		if err := c.Validate(); err != nil {
			return err
		}
	}
	return nil
}

func number(x, top float64) bool { return x >= 0 && x <= top } // false for NaN

func printable(s string, most int) bool {
	if s == "" || len(s) > most {
		return false
	}
	for i := range len(s) {
		if s[i] < 0x21 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// args are those of select.lua.
func (a *Ask) args(random float64) []any {
	i := func(n int) string { return strconv.Itoa(n) }
	f := func(x float64) string { return strconv.FormatFloat(x, 'f', -1, 64) } // miniredis reads no 1e+06
	args := make([]any, 0, 17+2*len(a.Candidates))
	args = append(args, a.ID, strconv.FormatInt(a.Lease.Milliseconds(), 10), i(a.PromptTokens), i(a.DecodeBlocks), i(a.BlockSize),
		f(a.Weights.PrefillScale), f(a.Weights.Miss), f(a.Weights.Decode), f(a.Weights.Request), f(a.Weights.Temperature), f(random),
		i(a.Busy.Requests), i(a.Busy.PrefillTokens), i(a.Busy.DecodeBlocks),
		strconv.FormatInt(a.SessionTTL.Milliseconds(), 10), f(a.SessionSlack), i(MaxLeases))
	for _, c := range a.Candidates {
		args = append(args, c.String(), f(c.Credit))
	}
	return args
}

// read reads the reply of select.lua.
func (a *Ask) read(v []string) (Choice, error) {
	const loads = 5
	if len(v) != loads+len(a.Candidates) {
		return Choice{}, errShortReply
	}
	index, err := strconv.Atoi(v[1])
	cost, err2 := strconv.ParseFloat(v[4], 64)
	if err = errors.Join(err, err2); err != nil || index < 0 || index >= len(a.Candidates) {
		return Choice{}, fmt.Errorf("selection reply %q: %w", v[:loads], ErrCorrupt)
	}
	c := Choice{Loads: make([]Load, len(a.Candidates)), AllBusy: v[0] == "1"}
	for i := range c.Loads {
		if c.Loads[i], err = parseLoad(v[loads+i]); err != nil {
			return Choice{}, err
		}
	}
	if !c.AllBusy {
		c.WorkerRank, c.Index, c.Cost = a.Candidates[index].WorkerRank, index, cost
		c.Session, c.Held = v[2] == "1", v[3] == "1"
	}
	return c, nil
}

// parseLoad reads the sums of one worker rank; "" are none.
func parseLoad(s string) (l Load, err error) {
	if s == "" {
		return l, nil
	}
	r, rest, _ := strings.Cut(s, " ")
	p, d, _ := strings.Cut(rest, " ")
	var errs [3]error
	l.Requests, errs[0] = strconv.Atoi(r)
	l.PrefillTokens, errs[1] = strconv.Atoi(p)
	l.DecodeBlocks, errs[2] = strconv.Atoi(d)
	if errors.Join(errs[:]...) != nil {
		return Load{}, fmt.Errorf("load %q: %w", s, ErrCorrupt)
	}
	return l, nil
}

func sessionKey(p kvcache.PoolID, session string) string {
	h := xxh3.HashString128(session).Bytes()
	return poolTag(p) + fmt.Sprintf(":session:%x", h[:])
}
