// Package integration holds what needs real processes: the warmroute binary as a user runs it,
// a real redis-server, publishers built on libzmq, and OpenAI's own client.
package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// warmroute is the path of the binary under test.
var warmroute string

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "warmroute-integration-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	warmroute = filepath.Join(dir, "warmroute")
	build := exec.Command("go", "build", "-o", warmroute, "../cmd/warmroute")
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build warmroute:", err)
		return 1
	}
	return m.Run()
}
