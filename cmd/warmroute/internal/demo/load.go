package demo

import (
	"context"
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// load plays conversations against the frontends.
type load struct {
	client   *client
	parallel int              // conversations at a time
	observe  func(outcome)    // called after each request; not concurrently
	pace     <-chan time.Time // if set: one request for each tick
}

// play runs the conversations, each turn after the answer to the one before, and returns the
// outcome of every request. A failed turn is left out of what follows. It ends early, without
// cutting a request short, when the sequence does.
func (l *load) play(ctx context.Context, conversations iter.Seq[conversation]) []outcome {
	var (
		outcomes []outcome
		mu       sync.Mutex
		n        atomic.Int64
		wg       sync.WaitGroup
	)
	queue := make(chan conversation)
	for range l.parallel {
		wg.Go(func() {
			for c := range queue {
				history := []message{{"system", c.system}}
				for _, turn := range c.turns {
					if ctx.Err() != nil {
						return
					}
					if l.pace != nil {
						select {
						case <-l.pace:
						case <-ctx.Done():
							return
						}
					}
					asked := append(history, message{"user", turn})
					o, reply := l.client.chat(ctx, int(n.Add(1)), c.id, asked)
					if ctx.Err() != nil {
						return // the demo was interrupted: this is nobody's failure
					}
					if o.err == nil {
						history = append(asked, message{"assistant", reply})
					}
					mu.Lock()
					outcomes = append(outcomes, o)
					if l.observe != nil {
						l.observe(o)
					}
					mu.Unlock()
				}
			}
		})
	}
	for c := range conversations {
		select {
		case queue <- c:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(queue)
	wg.Wait()
	return outcomes
}
