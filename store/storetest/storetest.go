// Package storetest starts Redis servers for tests: miniredis in the process, and real ones on free
// ports, alone, as a cluster or under a sentinel. All end with the test.
package storetest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/alicebob/miniredis/v2"
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

// Server is a real redis-server.
type Server struct {
	Addr string // host:port
	URL  string

	t     testing.TB
	args  []string
	ready string // what it prints when it can be used
	cmd   *exec.Cmd
}

// Redis starts a real redis-server without persistence; args are further settings, as on its
// command line. It skips where there is none (see [Require]).
func Redis(t testing.TB, args ...string) *Server {
	t.Helper()
	return start(t, "Ready to accept connections", func(port int) []string {
		return append([]string{
			"--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
			"--dir", t.TempDir(), "--daemonize", "no", "--loglevel", "notice",
		}, args...)
	})
}

// start runs redis-server on a free port.
func start(t testing.TB, ready string, args func(port int) []string) *Server {
	t.Helper()
	Require(t, "redis-server", "apt-get install redis-server")
	// Another process may take the port between the look and the start, so try a few.
	for try := 0; ; try++ {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		l.Close()
		if port > 55535 { // a cluster node also takes the port 10,000 above
			try--
			continue
		}
		s := &Server{Addr: fmt.Sprintf("127.0.0.1:%d", port), t: t, args: args(port), ready: ready}
		s.URL = "redis://" + s.Addr
		if err := s.start(); err == nil {
			t.Cleanup(s.Stop)
			return s
		} else if try == 4 {
			t.Fatal(err)
		}
	}
}

func (s *Server) start() error {
	cmd := exec.Command("redis-server", s.args...)
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
		if strings.Contains(lines.Text(), s.ready) {
			go func() { _, _ = io.Copy(io.Discard, out) }()
			s.cmd = cmd
			return nil
		}
	}
	_ = cmd.Wait()
	return fmt.Errorf("redis-server did not start:\n%s", log.String())
}

// Start starts a stopped server again on the same port, empty.
func (s *Server) Start() {
	s.t.Helper()
	if s.cmd != nil {
		return
	}
	if err := s.start(); err != nil {
		s.t.Fatal(err)
	}
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

// Pause stops the process without closing its connections; Resume lets it go on.
func (s *Server) Pause() { _ = s.cmd.Process.Signal(syscall.SIGSTOP) }

// Resume undoes Pause.
func (s *Server) Resume() { _ = s.cmd.Process.Signal(syscall.SIGCONT) }
