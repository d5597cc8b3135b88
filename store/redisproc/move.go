package redisproc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/redis/go-redis/v9"
)

// move is one slot of a cluster on its way from one node to another.
type move struct {
	slot     int
	from, to int // nodes
	nodes    []*redis.Client
	ids      []string
	addrs    []string
}

// newMove begins to move the slot that has the most keys of the node that has the most.
func (c *Cluster) newMove(ctx context.Context) (m *move, err error) {
	m = &move{slot: -1}
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
	var most int64
	for keys := m.nodes[m.from].Scan(ctx, 0, "*", 100).Iterator(); keys.Next(ctx); {
		slot, err := m.nodes[m.from].ClusterKeySlot(ctx, keys.Val()).Result()
		if err != nil {
			return m, err
		}
		n, err := m.nodes[m.from].ClusterCountKeysInSlot(ctx, int(slot)).Result()
		if err != nil {
			return m, err
		}
		if n > most {
			most, m.slot = n, int(slot)
		}
	}
	if m.slot < 0 {
		return m, errors.New("the cluster has no key to move")
	}
	return m, m.announce(ctx)
}

// run moves a key every 20 ms, and the slot back when it has arrived, until ended. What is under way then is brought to
// its end.
func (m *move) run(ctx context.Context, ended <-chan struct{}) error {
	defer m.close()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := m.keys(ctx, ended, tick.C); err != nil {
			return err
		}
		if err := m.settle(ctx); err != nil {
			return err
		}
		select {
		case <-ended:
			return nil
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		m.from, m.to = m.to, m.from
		if err := m.announce(ctx); err != nil {
			return err
		}
	}
}

// keys moves all keys of the slot, one for each tick, or as fast as it can once ended.
func (m *move) keys(ctx context.Context, ended <-chan struct{}, tick <-chan time.Time) error {
	host, port, err := net.SplitHostPort(m.addrs[m.to])
	if err != nil {
		return err
	}
	for {
		keys, err := m.nodes[m.from].ClusterGetKeysInSlot(ctx, m.slot, 1).Result()
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
func (m *move) announce(ctx context.Context) error {
	if err := m.set(ctx, m.to, "importing", m.ids[m.from]); err != nil {
		return err
	}
	return m.set(ctx, m.from, "migrating", m.ids[m.to])
}

// settle tells all nodes whose slot it is now, the new owner first.
func (m *move) settle(ctx context.Context) error {
	for i := range m.nodes {
		if err := m.set(ctx, (m.to+i)%len(m.nodes), "node", m.ids[m.to]); err != nil {
			return err
		}
	}
	return nil
}

func (m *move) set(ctx context.Context, node int, state, id string) error {
	if err := m.nodes[node].Do(ctx, "cluster", "setslot", m.slot, state, id).Err(); err != nil {
		return fmt.Errorf("set slot %d to %s: %w", m.slot, state, err)
	}
	return nil
}

func (m *move) close() {
	for _, c := range m.nodes {
		_ = c.Close()
	}
}
