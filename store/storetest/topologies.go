package storetest

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Cluster starts three masters that share all slots and returns them with their URL.
func Cluster(t testing.TB) ([]*Server, string) {
	t.Helper()
	const nodes, slots = 3, 16384
	servers := make([]*Server, nodes)
	clients := make([]*redis.Client, nodes)
	for i := range servers {
		servers[i] = Redis(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no")
		clients[i] = redis.NewClient(&redis.Options{Addr: servers[i].Addr, Protocol: 2})
		defer clients[i].Close()
	}
	ctx := t.Context()
	for i, c := range clients {
		if err := c.ClusterAddSlotsRange(ctx, i*slots/nodes, (i+1)*slots/nodes-1).Err(); err != nil {
			t.Fatal(err)
		}
		if err := c.Do(ctx, "cluster", "set-config-epoch", i+1).Err(); err != nil {
			t.Fatal(err)
		}
		host, port, _ := net.SplitHostPort(servers[0].Addr)
		if err := c.ClusterMeet(ctx, host, port).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range clients {
		wait(t, "cluster formed", func() bool {
			info := c.ClusterInfo(ctx).Val()
			return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_slots_assigned:16384") && strings.Contains(info, "cluster_known_nodes:3")
		})
	}
	return servers, "redis+cluster://" + servers[0].Addr + "," + servers[1].Addr + "," + servers[2].Addr
}

// Sentinel starts a master, a replica and one sentinel that watches them, and returns the master, the
// replica and the URL.
func Sentinel(t testing.TB) (master, replica *Server, url string) {
	t.Helper()
	master = Redis(t)
	host, port, _ := net.SplitHostPort(master.Addr)
	replica = Redis(t, "--replicaof", host+" "+port)
	conf := filepath.Join(t.TempDir(), "sentinel.conf")
	text := fmt.Sprintf("sentinel monitor main %s %s 1\nsentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 3000\n", host, port)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	sentinel := start(t, "Sentinel ID is", func(port int) []string {
		return []string{conf, "--sentinel", "--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--daemonize", "no"}
	})
	c := redis.NewClient(&redis.Options{Addr: sentinel.Addr, Protocol: 2})
	defer c.Close()
	wait(t, "the sentinel knows the replica", func() bool {
		v, err := c.Do(t.Context(), "sentinel", "replicas", "main").Slice()
		return err == nil && len(v) == 1
	})
	return master, replica, "redis+sentinel://" + sentinel.Addr + "/main"
}

func wait(t testing.TB, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(60 * time.Second)
	for !f() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("never happened: %s", what)
		}
	}
}
