package sim

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// rank is one data-parallel rank: its own cache, queue and event stream.
type rank struct {
	id      int
	o       *Options
	hung    *gate
	asleep  *gate
	slots   chan struct{} // one token per running sequence
	prefill chan struct{} // one token: the prefill that is going on
	m       rankMetrics
	load    atomic.Int64 // sequences that wait or run

	mu    sync.Mutex
	pool  *blockPool
	freed chan struct{} // closed, and replaced, when a sequence gives its blocks back
	pub   *publisher    // batches are published under mu, in the order of the steps
}

// generate runs one sequence to its end: it waits for a slot, for the prefills before it
// and for room in the cache, computes what the cache does not hold, then makes the
// answer. Each token is handed to emit at the time when it is due. The error is that
// of the context; the blocks are given back in any case.
func (r *rank) generate(ctx context.Context, s *sequence, emit func(i int, token uint32) error) error {
	start := time.Now()
	r.m.waiting.Inc()
	release, err := r.start(ctx, s)
	r.m.waiting.Dec()
	if err != nil {
		return err
	}
	r.m.running.Inc()
	defer func() {
		r.m.running.Dec()
		release()
	}()
	err = r.computePrompt(ctx, s)
	<-r.prefill
	if err != nil {
		return err
	}
	r.m.firstToken.Observe(time.Since(start).Seconds())
	return r.decode(ctx, s, emit)
}

// start waits until the sequence is admitted. On success the sequence owns a slot and
// blocks, which release gives back, and the prefill token.
func (r *rank) start(ctx context.Context, s *sequence) (release func(), err error) {
	if err := acquire(ctx, r.slots); err != nil {
		return nil, err
	}
	if err := acquire(ctx, r.prefill); err != nil {
		<-r.slots
		return nil, err
	}
	for {
		if _, err = r.ready(ctx); err != nil {
			break
		}
		r.mu.Lock()
		admitted, freed := r.pool.admit(s), r.freed
		r.gauge()
		r.mu.Unlock()
		if admitted {
			r.m.prompt.Add(float64(s.promptLen))
			r.m.queries.Add(float64(s.promptLen))
			r.m.hits.Add(float64(s.hit))
			return func() { r.finish(s) }, nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
		}
	}
	<-r.prefill
	<-r.slots
	return nil, err
}

func (r *rank) finish(s *sequence) {
	r.mu.Lock()
	r.pool.release(s)
	close(r.freed)
	r.freed = make(chan struct{})
	r.gauge()
	r.mu.Unlock()
	<-r.slots
}

// computePrompt prefills in chunks, each a step of its own with its own event batch. The
// events go out when a step begins, as in vLLM, which registers blocks before it computes them.
func (r *rank) computePrompt(ctx context.Context, s *sequence) error {
	due := time.Now()
	for s.computed < s.promptLen {
		n := min(r.o.PrefillChunk, s.promptLen-s.computed)
		waited, err := r.ready(ctx)
		if err != nil {
			return err
		}
		if waited {
			due = time.Now()
		}
		r.step(s, n)
		due = due.Add(time.Duration(n) * r.o.PrefillPerToken)
		if err := sleepUntil(ctx, due); err != nil {
			return err
		}
	}
	return nil
}

// decode makes the answer. The first token comes out of the prefill.
func (r *rank) decode(ctx context.Context, s *sequence, emit func(i int, token uint32) error) error {
	due := time.Now()
	for i := range s.outLen {
		if i > 0 {
			due = due.Add(r.o.DecodePerToken)
			if err := sleepUntil(ctx, due); err != nil {
				return err
			}
			r.m.interToken.Observe(r.o.DecodePerToken.Seconds())
		}
		waited, err := r.ready(ctx)
		if err != nil {
			return err
		}
		if waited {
			due = time.Now()
		}
		if i > 0 {
			r.step(s, 1)
		}
		token := s.answer.token(i)
		s.append(token)
		r.m.generated.Inc()
		if err := emit(i, token); err != nil {
			return err
		}
	}
	return nil
}

// step computes n tokens of the sequence and publishes what changed as one batch.
func (r *rank) step(s *sequence, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pub.publish(r.pool.advance(s, n))
	r.gauge()
}

// ready waits while the engine hangs or sleeps.
func (r *rank) ready(ctx context.Context) (waited bool, err error) {
	for {
		hung, err := r.hung.wait(ctx)
		if err != nil {
			return true, err
		}
		asleep, err := r.asleep.wait(ctx)
		waited = waited || hung || asleep
		if err != nil || !asleep {
			return waited, err
		}
	}
}

// clear empties the cache; false where sequences are running. The event goes out at once
// or, as in vLLM, with the next step.
func (r *rank) clear(atOnce bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.pool.clear() {
		return false
	}
	r.pub.hold(event{kind: cleared})
	if atOnce {
		r.pub.publish(nil)
	}
	return true
}

// embed takes the time of a prefill without using the cache.
func (r *rank) embed(ctx context.Context, tokens int) error {
	if err := acquire(ctx, r.prefill); err != nil {
		return err
	}
	defer func() { <-r.prefill }()
	if _, err := r.ready(ctx); err != nil {
		return err
	}
	return sleepUntil(ctx, time.Now().Add(time.Duration(tokens)*r.o.PrefillPerToken))
}

// gauge shows how full the cache is. The caller holds mu.
func (r *rank) gauge() {
	r.m.usage.Set(float64(r.pool.inUse()) / float64(len(r.pool.all)))
}

// acquire puts a token into a semaphore; those who wait are served in order.
func acquire(ctx context.Context, sem chan struct{}) error {
	select {
	case sem <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// sleepUntil returns at t, or with the context's error before.
func sleepUntil(ctx context.Context, t time.Time) error {
	d := time.Until(t)
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
