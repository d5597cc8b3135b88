package stage

import (
	"context"
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// Load plays conversations against the frontends.
type Load struct {
	Client   *Client
	Parallel int              // conversations at a time
	Observe  func(Outcome)    // called after each request; not concurrently
	Pace     <-chan time.Time // if set: one request for each time that comes, which is when it is due; see [Pace]
}

// Play runs the conversations, each turn after the answer to the one before, and returns the
// outcome of every request. A failed turn is left out of what follows. It ends early, without
// cutting a request short, when the sequence does.
func (l *Load) Play(ctx context.Context, conversations iter.Seq[Conversation]) []Outcome {
	var (
		outcomes []Outcome
		mu       sync.Mutex
		n        atomic.Int64
		wg       sync.WaitGroup
	)
	queue := make(chan Conversation)
	for range l.Parallel {
		wg.Go(func() {
			for c := range queue {
				history := []Message{{"system", c.System}}
				for _, turn := range c.Turns {
					if ctx.Err() != nil {
						return
					}
					var due time.Time
					if l.Pace != nil {
						select {
						case due = <-l.Pace:
						case <-ctx.Done():
							return
						}
					}
					asked := append(history, Message{"user", turn})
					o, reply := l.Client.Chat(ctx, int(n.Add(1)), c.ID, asked)
					if ctx.Err() != nil {
						return // the run was interrupted: this is nobody's failure
					}
					if !due.IsZero() {
						o.Late = o.Sent.Sub(due)
					}
					if o.Err == nil {
						history = append(asked, Message{"assistant", reply})
					}
					mu.Lock()
					outcomes = append(outcomes, o)
					if l.Observe != nil {
						l.Observe(o)
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

// Pace gives a time for every request of a constant rate, however slow the answers are, until ctx ends: what cannot be
// sent in time is sent late, not left out.
func Pace(ctx context.Context, perSecond int) <-chan time.Time {
	due := make(chan time.Time, 10*perSecond)
	go func() {
		timer := time.NewTimer(0)
		defer timer.Stop()
		for start, n := time.Now(), 0; ; n++ {
			at := start.Add(time.Duration(n) * time.Second / time.Duration(perSecond))
			timer.Reset(time.Until(at))
			select {
			case <-timer.C:
			case <-ctx.Done():
				return
			}
			select {
			case due <- at:
			case <-ctx.Done():
				return
			}
		}
	}()
	return due
}
