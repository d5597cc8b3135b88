// Package redisproc runs real Redis servers on free ports of this machine: alone, as a cluster, or as a
// master and its replica under a sentinel. The fault benchmark and the tests stop, pause and cut them.
//
// Servers keep nothing on disk unless their arguments say so, listen on 127.0.0.1 alone, and end with the
// process that started them.
package redisproc

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// Program is what runs a server; it has to be on the PATH.
const Program = "redis-server"

// Server is a redis-server process.
type Server struct {
	Addr string // host:port
	URL  string // redis://host:port

	args  []string
	ready string // what it prints when it can be used
	cmd   *exec.Cmd
}

const readyLine = "Ready to accept connections"

// Start runs a server with its files in dir. args are further settings, as on its command line.
func Start(dir string, args ...string) (*Server, error) {
	return start(readyLine, func(port int) []string {
		return append([]string{
			"--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
			"--dir", dir, "--daemonize", "no", "--loglevel", "notice",
		}, args...)
	})
}

// start runs redis-server on a free port.
func start(ready string, args func(port int) []string) (*Server, error) {
	// Another process may take the port between the look and the start, so try a few.
	for try := 0; ; {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		if port > 55535 {
			continue // a cluster node also takes the port 10,000 above
		}
		s := &Server{Addr: fmt.Sprintf("127.0.0.1:%d", port), args: args(port), ready: ready}
		s.URL = "redis://" + s.Addr
		if err = s.Start(); err == nil {
			return s, nil
		}
		if try++; try == 5 {
			return nil, err
		}
	}
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// Start starts a stopped server again on the same port, and waits until it is ready. What it held is gone,
// unless its arguments make it keep it.
func (s *Server) Start() error { return s.startUntil(s.ready) }

// StartLoading is Start for a server with data on disk, which returns when it listens and still loads.
func (s *Server) StartLoading() error { return s.startUntil("Server initialized") }

func (s *Server) startUntil(ready string) error {
	if s.cmd != nil {
		return nil
	}
	cmd := exec.Command(Program, s.args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return err
	}
	var log strings.Builder
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		log.WriteString(lines.Text() + "\n")
		if strings.Contains(lines.Text(), ready) {
			go func() { _, _ = io.Copy(io.Discard, out) }() // or it would block on a full pipe
			s.cmd = cmd
			return nil
		}
	}
	_ = cmd.Wait()
	return fmt.Errorf("redis-server did not start:\n%s", log.String())
}

// Stop kills the server.
func (s *Server) Stop() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Signal(syscall.SIGCONT)
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	s.cmd = nil
}

// Pause stops the process without closing its connections.
func (s *Server) Pause() { _ = s.cmd.Process.Signal(syscall.SIGSTOP) }

// Resume undoes Pause.
func (s *Server) Resume() { _ = s.cmd.Process.Signal(syscall.SIGCONT) }

// Client makes a plain client of the server.
func (s *Server) Client() *redis.Client {
	return redis.NewClient(&redis.Options{Addr: s.Addr, Protocol: 2})
}

// Cluster is three masters that share all slots.
type Cluster struct {
	Nodes []*Server
	URL   string
}

// StartCluster runs a cluster with its files below dir.
func StartCluster(ctx context.Context, dir string, args ...string) (*Cluster, error) {
	const nodes, slots = 3, 16384
	c := &Cluster{}
	fail := func(err error) (*Cluster, error) {
		c.Stop()
		return nil, fmt.Errorf("start cluster: %w", err)
	}
	var clients []*redis.Client
	for i := range nodes {
		sub := filepath.Join(dir, fmt.Sprintf("node-%d", i))
		if err := os.MkdirAll(sub, 0o700); err != nil {
			return fail(err)
		}
		s, err := Start(sub, append([]string{"--cluster-enabled", "yes", "--cluster-node-timeout", "2000"}, args...)...)
		if err != nil {
			return fail(err)
		}
		c.Nodes = append(c.Nodes, s)
		client := s.Client()
		defer func() { _ = client.Close() }()
		clients = append(clients, client)
	}
	host, port, _ := net.SplitHostPort(c.Nodes[0].Addr)
	for i, client := range clients {
		if err := client.ClusterAddSlotsRange(ctx, i*slots/nodes, (i+1)*slots/nodes-1).Err(); err != nil {
			return fail(err)
		}
		if err := client.Do(ctx, "cluster", "set-config-epoch", i+1).Err(); err != nil {
			return fail(err)
		}
		if err := client.ClusterMeet(ctx, host, port).Err(); err != nil {
			return fail(err)
		}
	}
	for _, client := range clients {
		err := until(ctx, "the cluster to form", func() bool {
			info := client.ClusterInfo(ctx).Val()
			return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_slots_assigned:16384") &&
				strings.Contains(info, "cluster_known_nodes:3")
		})
		if err != nil {
			return fail(err)
		}
	}
	c.URL = "redis+cluster://" + c.Nodes[0].Addr + "," + c.Nodes[1].Addr + "," + c.Nodes[2].Addr
	return c, nil
}

// whole waits until every node answers for its slots: one that has come back refuses for some time.
func (c *Cluster) whole(ctx context.Context) error {
	return c.untilAll(ctx, "the cluster to be whole", c.Nodes, "cluster_state:ok", "cluster_slots_ok:16384")
}

// refuses waits until every node but the dead one refuses all commands.
func (c *Cluster) refuses(ctx context.Context, dead *Server) error {
	alive := slices.DeleteFunc(slices.Clone(c.Nodes), func(n *Server) bool { return n == dead })
	return c.untilAll(ctx, "the cluster to be down", alive, "cluster_state:fail")
}

// untilAll waits until what each of the nodes tells of the cluster contains all the lines.
func (c *Cluster) untilAll(ctx context.Context, what string, nodes []*Server, lines ...string) error {
	for _, n := range nodes {
		client := n.Client()
		err := until(ctx, what, func() bool {
			info := client.ClusterInfo(ctx).Val()
			return !slices.ContainsFunc(lines, func(line string) bool { return !strings.Contains(info, line) })
		})
		_ = client.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// fullest is the node with the most keys.
func (c *Cluster) fullest(ctx context.Context) (*Server, error) {
	var most int64 = -1
	var found *Server
	for _, n := range c.Nodes {
		client := n.Client()
		size, err := client.DBSize(ctx).Result()
		_ = client.Close()
		if err != nil {
			return nil, err
		}
		if size > most {
			most, found = size, n
		}
	}
	return found, nil
}

// Stop kills all nodes.
func (c *Cluster) Stop() {
	for _, n := range c.Nodes {
		n.Stop()
	}
}

// Sentinel is a master and a replica that one sentinel watches under the name "main". It notices within a
// second that the master is gone.
type Sentinel struct {
	Master, Replica, Watcher *Server
	URL                      string
}

// StartSentinel runs the three with their files below dir.
func StartSentinel(ctx context.Context, dir string) (*Sentinel, error) {
	s := &Sentinel{}
	fail := func(err error) (*Sentinel, error) {
		s.Stop()
		return nil, fmt.Errorf("start sentinel: %w", err)
	}
	var err error
	if s.Master, err = Start(dir); err != nil {
		return fail(err)
	}
	host, port, _ := net.SplitHostPort(s.Master.Addr)
	if s.Replica, err = Start(dir, "--replicaof", host+" "+port); err != nil {
		return fail(err)
	}
	conf := filepath.Join(dir, "sentinel.conf")
	text := fmt.Sprintf("sentinel monitor main %s %s 1\nsentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 3000\n", host, port)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		return fail(err)
	}
	s.Watcher, err = start("Sentinel ID is", func(port int) []string {
		return []string{conf, "--sentinel", "--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--daemonize", "no"}
	})
	if err != nil {
		return fail(err)
	}
	c := s.Watcher.Client()
	defer func() { _ = c.Close() }()
	err = until(ctx, "the sentinel to find the replica", func() bool {
		v, err := c.Do(ctx, "sentinel", "replicas", "main").Slice()
		return err == nil && len(v) == 1
	})
	if err != nil {
		return fail(err)
	}
	s.URL = "redis+sentinel://" + s.Watcher.Addr + "/main"
	return s, nil
}

// Stop kills the three.
func (s *Sentinel) Stop() {
	for _, p := range []*Server{s.Watcher, s.Replica, s.Master} {
		if p != nil {
			p.Stop()
		}
	}
}

// until asks until the answer is yes, for at most a minute.
func until(ctx context.Context, what string, ask func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ask() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, ctx.Err())
		}
	}
	return nil
}
