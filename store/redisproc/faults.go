package redisproc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Fault is one way that Redis can be away, on servers of its own.
type Fault struct {
	URL  string
	Boot bool // Redis is away from the start, before Begin
	Once bool // it happens in an instant: Redis answers again when Begin returns

	begin, end func(context.Context) error
	stop       func()
}

// Begin lets it happen.
func (f *Fault) Begin(ctx context.Context) error { return f.begin(ctx) }

// End undoes it: Redis answers again when it returns.
func (f *Fault) End(ctx context.Context) error { return f.end(ctx) }

// Stop ends the servers.
func (f *Fault) Stop() { f.stop() }

// Faults are the names that [StartFault] takes.
func Faults() []string {
	names := make([]string, 0, len(faults))
	for name := range faults {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

var faults = map[string]func(ctx context.Context, dir string) (*Fault, error){
	"killed":                 oneServer(func(s *Server) (begin, end func() error) { return stopped(s), s.Start }),
	"stopped":                oneServer(func(s *Server) (begin, end func() error) { return done(s.Pause), done(s.Resume) }),
	"refused-at-boot":        refusedAtBoot,
	"swallowed":              throughProxy(Swallow),
	"reset":                  throughProxy(Refuse),
	"slow":                   slow,
	"lost-replies":           throughProxy(Deafen),
	"loading":                loading,
	"script-flush":           scriptFlush,
	"flushall":               flushAll,
	"oom":                    command(config("maxmemory", "1mb"), config("maxmemory", "0")),
	"readonly":               command(replicaOf("127.0.0.1", "1"), replicaOf("no", "one")),
	"acl":                    command(aclDefault("-hmget"), aclDefault("+hmget")),
	"maxclients":             maxClients,
	"cluster-master-killed":  clusterFault("no", func(s *Server) (begin, end func() error) { return stopped(s), s.Start }),
	"cluster-master-stopped": clusterFault("no", func(s *Server) (begin, end func() error) { return done(s.Pause), done(s.Resume) }),
	"clusterdown":            clusterFault("yes", func(s *Server) (begin, end func() error) { return stopped(s), s.Start }),
	"sentinel-failover":      sentinelFailover,
	"reshard":                reshard,
}

func done(f func()) func() error { return func() error { f(); return nil } }

func stopped(s *Server) func() error { return done(s.Stop) }

func plain(f func() error) func(context.Context) error {
	return func(context.Context) error { return f() }
}

func oneServer(of func(*Server) (begin, end func() error)) func(context.Context, string) (*Fault, error) {
	return func(_ context.Context, dir string) (*Fault, error) {
		s, err := Start(dir)
		if err != nil {
			return nil, err
		}
		begin, end := of(s)
		return &Fault{URL: s.URL, begin: plain(begin), end: plain(end), stop: s.Stop}, nil
	}
}

func refusedAtBoot(_ context.Context, dir string) (*Fault, error) {
	s, err := Start(dir)
	if err != nil {
		return nil, err
	}
	s.Stop()
	return &Fault{URL: s.URL, Boot: true, begin: plain(func() error { return nil }), end: plain(s.Start), stop: s.Stop}, nil
}

func throughProxy(mode Mode) func(context.Context, string) (*Fault, error) {
	return func(_ context.Context, dir string) (*Fault, error) {
		s, err := Start(dir)
		if err != nil {
			return nil, err
		}
		p, err := NewProxy(s.Addr)
		if err != nil {
			s.Stop()
			return nil, err
		}
		return &Fault{
			URL:   "redis://" + p.Addr,
			begin: plain(func() error { p.Set(mode); return nil }),
			end:   plain(func() error { p.Set(Pass); return nil }),
			stop:  func() { p.Close(); s.Stop() },
		}, nil
	}
}

// loading saves the index and a ballast that takes about two seconds to load, and restarts the server.
func loading(_ context.Context, dir string) (*Fault, error) {
	s, err := Start(dir, "--save", "3600 1", "--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
	if err != nil {
		return nil, err
	}
	begin := func(ctx context.Context) error {
		c := s.Client()
		defer func() { _ = c.Close() }()
		pipe := c.Pipeline()
		for i := range 2000 {
			pipe.Set(ctx, fmt.Sprintf("ballast:%d", i), strings.Repeat("x", 64), 0)
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}
		if err := c.Save(ctx).Err(); err != nil {
			return err
		}
		s.Stop()
		return s.StartLoading()
	}
	end := func(ctx context.Context) error {
		c := s.Client()
		defer func() { _ = c.Close() }()
		return until(ctx, "Redis to load its data", func() bool {
			return c.Ping(ctx).Err() == nil
		})
	}
	return &Fault{URL: s.URL, begin: begin, end: end, stop: s.Stop}, nil
}

// scriptFlush forgets all scripts, again and again.
func scriptFlush(_ context.Context, dir string) (*Fault, error) {
	s, err := Start(dir)
	if err != nil {
		return nil, err
	}
	var cancel context.CancelFunc
	flushed := make(chan error, 1)
	begin := func(ctx context.Context) error {
		ctx, cancel = context.WithCancel(ctx)
		go func() {
			c := s.Client()
			defer func() { _ = c.Close() }()
			var err error
			for err == nil && ctx.Err() == nil {
				err = c.ScriptFlush(ctx).Err()
			}
			if ctx.Err() != nil {
				err = nil
			}
			flushed <- err
		}()
		return nil
	}
	end := func(context.Context) error {
		cancel()
		return <-flushed
	}
	return &Fault{URL: s.URL, begin: begin, end: end, stop: s.Stop}, nil
}

// flushAll empties the server once.
func flushAll(ctx context.Context, dir string) (*Fault, error) {
	f, err := command(func(ctx context.Context, c *redis.Client) error { return c.FlushAll(ctx).Err() }, nil)(ctx, dir)
	if err != nil {
		return nil, err
	}
	f.Once = true
	return f, nil
}

// slow answers every call 5 ms late.
func slow(_ context.Context, dir string) (*Fault, error) {
	s, err := Start(dir)
	if err != nil {
		return nil, err
	}
	p, err := NewProxy(s.Addr)
	if err != nil {
		s.Stop()
		return nil, err
	}
	delay := func(d time.Duration) func(context.Context) error {
		return plain(func() error { p.Delay(d); return nil })
	}
	return &Fault{URL: "redis://" + p.Addr, begin: delay(5 * time.Millisecond), end: delay(0), stop: func() { p.Close(); s.Stop() }}, nil
}

type redisCall func(ctx context.Context, c *redis.Client) error

func config(name, value string) redisCall {
	return func(ctx context.Context, c *redis.Client) error { return c.ConfigSet(ctx, name, value).Err() }
}

func replicaOf(host, port string) redisCall {
	return func(ctx context.Context, c *redis.Client) error { return c.Do(ctx, "replicaof", host, port).Err() }
}

func aclDefault(rule string) redisCall {
	return func(ctx context.Context, c *redis.Client) error {
		return c.Do(ctx, "acl", "setuser", "default", rule).Err()
	}
}

// command begins and ends a fault by a command.
func command(begin, end redisCall) func(context.Context, string) (*Fault, error) {
	return func(_ context.Context, dir string) (*Fault, error) {
		s, err := Start(dir)
		if err != nil {
			return nil, err
		}
		do := func(f redisCall) func(context.Context) error {
			return func(ctx context.Context) error {
				if f == nil {
					return nil
				}
				c := s.Client()
				defer func() { _ = c.Close() }()
				return f(ctx, c)
			}
		}
		return &Fault{URL: s.URL, begin: do(begin), end: do(end), stop: s.Stop}, nil
	}
}

// maxClients throws all connections out and lets only its own in.
func maxClients(ctx context.Context, dir string) (*Fault, error) {
	s, err := Start(dir)
	if err != nil {
		return nil, err
	}
	c := s.Client()
	if err := c.Ping(ctx).Err(); err != nil {
		s.Stop()
		return nil, err
	}
	one := c.Conn()
	begin := func(ctx context.Context) error {
		if err := one.ConfigSet(ctx, "maxclients", "1").Err(); err != nil {
			return err
		}
		return one.Do(ctx, "client", "kill", "type", "normal", "skipme", "yes").Err()
	}
	end := func(ctx context.Context) error { return one.ConfigSet(ctx, "maxclients", "10000").Err() }
	return &Fault{URL: s.URL, begin: begin, end: end, stop: func() { _ = one.Close(); _ = c.Close(); s.Stop() }}, nil
}

func clusterFault(coverage string, of func(*Server) (begin, end func() error)) func(context.Context, string) (*Fault, error) {
	return func(ctx context.Context, dir string) (*Fault, error) {
		c, err := StartCluster(ctx, dir, "--cluster-require-full-coverage", coverage)
		if err != nil {
			return nil, err
		}
		var end func() error
		begin := func(ctx context.Context) error {
			victim, err := c.fullest(ctx)
			if err != nil {
				return err
			}
			var begin func() error
			begin, end = of(victim)
			if err := begin(); err != nil || coverage == "no" {
				return err
			}
			return c.refuses(ctx, victim) // it takes the others two seconds and more to notice
		}
		return &Fault{URL: c.URL, begin: begin, end: func(ctx context.Context) error {
			if err := end(); err != nil {
				return err
			}
			return c.whole(ctx)
		}, stop: c.Stop}, nil
	}
}

// reshard moves the slots of the node with the most keys to another node and back, a key at a time, as redis-cli --cluster
// reshard does.
func reshard(ctx context.Context, dir string) (*Fault, error) {
	c, err := StartCluster(ctx, dir)
	if err != nil {
		return nil, err
	}
	ended := make(chan struct{})
	moved := make(chan error, 1)
	begin := func(ctx context.Context) error {
		m, err := c.newMove(ctx)
		if err != nil {
			return err
		}
		go func() { moved <- m.run(ctx, ended) }()
		return nil
	}
	end := func(context.Context) error {
		close(ended)
		return <-moved
	}
	return &Fault{URL: c.URL, begin: begin, end: end, stop: c.Stop}, nil
}

// sentinelFailover kills the master; the replica takes over.
func sentinelFailover(ctx context.Context, dir string) (*Fault, error) {
	s, err := StartSentinel(ctx, dir)
	if err != nil {
		return nil, err
	}
	return &Fault{URL: s.URL, begin: plain(stopped(s.Master)), end: func(ctx context.Context) error {
		c := s.Replica.Client()
		defer func() { _ = c.Close() }()
		return until(ctx, "the replica to become the master", func() bool {
			return strings.Contains(c.Info(ctx, "replication").Val(), "role:master")
		})
	}, stop: s.Stop}, nil
}

// StartFault starts a fault's servers in a directory of their own.
func StartFault(ctx context.Context, name string) (*Fault, error) {
	start, ok := faults[name]
	if !ok {
		return nil, fmt.Errorf("fault %q: want one of %s", name, strings.Join(Faults(), ", "))
	}
	dir, err := os.MkdirTemp("", "warmroute-fault-")
	if err != nil {
		return nil, err
	}
	f, err := start(ctx, filepath.Clean(dir))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	stop := f.stop
	f.stop = func() { stop(); _ = os.RemoveAll(dir) }
	return f, nil
}
