package redisproc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// move is the slots of one node of a cluster on their way to another one, and back.
type move struct {
	slots    []int
	from, to int // nodes
	nodes    []*redis.Client
	ids      []string
	addrs    []string
}

// newMove looks for the node that has the most keys, and the slots that they are in.
func (c *Cluster) newMove(ctx context.Context) (m *move, err error) {
	m = &move{}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	full, err := c.fullest(ctx)
	if err != nil {
		return m, err
	}
	for i, n := range c.Nodes {
		client := n.Client()
		m.nodes = append(m.nodes, client)
		id, err := client.Do(ctx, "cluster", "myid").Text()
		if err != nil {
			return m, err
		}
		m.ids, m.addrs = append(m.ids, id), append(m.addrs, n.Addr)
		if n == full {
			m.from, m.to = i, (i+1)%len(c.Nodes)
		}
	}
	keys := m.nodes[m.from].Scan(ctx, 0, "*", 100).Iterator()
	for keys.Next(ctx) {
		slot, err := m.nodes[m.from].ClusterKeySlot(ctx, keys.Val()).Result()
		if err != nil {
			return m, err
		}
		if !slices.Contains(m.slots, int(slot)) {
			m.slots = append(m.slots, int(slot))
		}
	}
	if err := keys.Err(); err != nil {
		return m, err
	}
	if len(m.slots) == 0 {
		return m, errors.New("the cluster has no key to move")
	}
	return m, nil
}

// run moves slot after slot, a key every 10 ms, and back when all have arrived, until ended. The slot that is under way
// then is brought to its end.
func (m *move) run(ctx context.Context, ended <-chan struct{}) error {
	defer m.close()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, slot := range m.slots {
			if err := m.announce(ctx, slot); err != nil {
				return err
			}
			if err := m.keys(ctx, slot, ended, tick.C); err != nil {
				return err
			}
			if err := m.settle(ctx, slot); err != nil {
				return err
			}
			select {
			case <-ended:
				return nil
			case <-tick.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		m.from, m.to = m.to, m.from
	}
}

// keys moves all keys of the slot, one for each tick, or as fast as it can once ended.
func (m *move) keys(ctx context.Context, slot int, ended <-chan struct{}, tick <-chan time.Time) error {
	host, port, err := net.SplitHostPort(m.addrs[m.to])
	if err != nil {
		return err
	}
	for {
		keys, err := m.nodes[m.from].ClusterGetKeysInSlot(ctx, slot, 1).Result()
		if err != nil || len(keys) == 0 {
			return err
		}
		if err := m.nodes[m.from].Migrate(ctx, host, port, keys[0], 0, 5*time.Second).Err(); err != nil {
			return fmt.Errorf("migrate %s: %w", keys[0], err)
		}
		select {
		case <-ended:
		case <-tick:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// announce tells both nodes of the move, the new owner first.
func (m *move) announce(ctx context.Context, slot int) error {
	if err := m.set(ctx, m.to, slot, "importing", m.ids[m.from]); err != nil {
		return err
	}
	return m.set(ctx, m.from, slot, "migrating", m.ids[m.to])
}

// settle tells all nodes whose slot it is now, the new owner first.
func (m *move) settle(ctx context.Context, slot int) error {
	for i := range m.nodes {
		if err := m.set(ctx, (m.to+i)%len(m.nodes), slot, "node", m.ids[m.to]); err != nil {
			return err
		}
	}
	return nil
}

func (m *move) set(ctx context.Context, node, slot int, state, id string) error {
	if err := m.nodes[node].Do(ctx, "cluster", "setslot", slot, state, id).Err(); err != nil {
		return fmt.Errorf("set slot %d to %s: %w", slot, state, err)
	}
	return nil
}

func (m *move) close() {
	for _, c := range m.nodes {
		_ = c.Close()
	}
}
