package sim

import (
	"context"
	"sync"
)

// gate lets everything pass while it is open, which it is at first, and nothing while it is shut.
type gate struct {
	mu   sync.Mutex
	shut chan struct{} // closed when the gate opens again; nil while it is open
}

func (g *gate) set(open bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case open && g.shut != nil:
		close(g.shut)
		g.shut = nil
	case !open && g.shut == nil:
		g.shut = make(chan struct{})
	}
}

func (g *gate) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.shut == nil
}

// wait returns when the gate is open, and whether it had been shut.
func (g *gate) wait(ctx context.Context) (waited bool, err error) {
	for {
		g.mu.Lock()
		shut := g.shut
		g.mu.Unlock()
		if shut == nil {
			return waited, ctx.Err()
		}
		waited = true
		select {
		case <-shut:
		case <-ctx.Done():
			return waited, ctx.Err()
		}
	}
}
