// Package storetest gives tests their Redis: miniredis in the process, and real servers (see
// [redisproc]), alone, as a cluster or under a sentinel. All end with the test.
package storetest

import (
	"os"
	"os/exec"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/warmroute/warmroute/store/redisproc"
)

// Miniredis starts an in-process server and returns it with its URL.
func Miniredis(t testing.TB) (*miniredis.Miniredis, string) {
	t.Helper()
	m := miniredis.RunT(t)
	return m, "redis://" + m.Addr()
}

// Require skips the test where a program is missing, and fails it where REQUIRE_REDIS=1 says that
// nothing may be skipped.
func Require(t testing.TB, program, install string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err == nil {
		return path
	}
	if os.Getenv("REQUIRE_REDIS") == "1" {
		t.Fatalf("%s is missing and REQUIRE_REDIS=1: %s", program, install)
	}
	t.Skipf("%s is missing: %s", program, install)
	return ""
}

// Server is a real redis-server of a test.
type Server struct {
	*redisproc.Server
	t testing.TB
}

// Start starts a stopped server again on the same port.
func (s *Server) Start() {
	s.t.Helper()
	if err := s.Server.Start(); err != nil {
		s.t.Fatal(err)
	}
}

// Redis starts a real redis-server without persistence; args are further settings, as on its
// command line. It skips where there is none (see [Require]).
func Redis(t testing.TB, args ...string) *Server {
	t.Helper()
	return &Server{must(t, func() (*redisproc.Server, error) { return redisproc.Start(t.TempDir(), args...) }), t}
}

// Cluster starts three masters that share all slots.
func Cluster(t testing.TB, args ...string) *redisproc.Cluster {
	t.Helper()
	return must(t, func() (*redisproc.Cluster, error) { return redisproc.StartCluster(t.Context(), t.TempDir(), args...) })
}

// Sentinel starts a master, a replica and one sentinel that watches them.
func Sentinel(t testing.TB) *redisproc.Sentinel {
	t.Helper()
	return must(t, func() (*redisproc.Sentinel, error) { return redisproc.StartSentinel(t.Context(), t.TempDir()) })
}

// Proxy puts a path that can be cut in front of a server.
func Proxy(t testing.TB, target string) *redisproc.Proxy {
	t.Helper()
	p, err := redisproc.NewProxy(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func must[S interface{ Stop() }](t testing.TB, start func() (S, error)) S {
	t.Helper()
	Require(t, redisproc.Program, "apt-get install redis-server")
	s, err := start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}
