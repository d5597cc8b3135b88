package integration

import (
	"net"
	"os"
	"os/exec"
	"testing"
	"time"
)

// redisServer is a real redis-server on a fixed port, which can go away and come back.
type redisServer struct {
	t    *testing.T
	port string
	cmd  *exec.Cmd
}

// startRedis starts a redis-server, or skips the test where there is none.
func startRedis(t *testing.T) *redisServer {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		needs(t, "redis-server")
	}
	r := &redisServer{t: t, port: freePort(t)}
	r.start()
	t.Cleanup(r.stop)
	return r
}

// needs skips the test for want of a dependency, or fails it under REQUIRE_REDIS=1.
func needs(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("REQUIRE_REDIS") == "1" {
		t.Fatalf("%s is missing, and REQUIRE_REDIS=1 forbids to skip", what)
	}
	t.Skipf("%s is missing", what)
}

func (r *redisServer) url() string { return "redis://127.0.0.1:" + r.port }

// start starts an empty server.
func (r *redisServer) start() {
	r.t.Helper()
	r.cmd = exec.Command("redis-server", "--port", r.port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
		"--maxmemory-policy", "noeviction", "--loglevel", "warning", "--dir", r.t.TempDir())
	if err := r.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	eventually(r.t, "redis-server answers", func() bool {
		c, err := net.DialTimeout("tcp", "127.0.0.1:"+r.port, time.Second)
		if err != nil {
			return false
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(time.Second))
		reply := make([]byte, 5)
		_, _ = c.Write([]byte("PING\r\n"))
		_, err = c.Read(reply)
		return err == nil && string(reply) == "+PONG"
	})
}

// stop kills the server; its data is gone.
func (r *redisServer) stop() {
	if r.cmd != nil {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait()
		r.cmd = nil
	}
}
