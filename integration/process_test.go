package integration

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds every wait in these tests. It is no expectation: a wait that is met ends at once.
const patience = 30 * time.Second

// process is a running program whose standard error is a log, one JSON object per line.
type process struct {
	t    *testing.T
	name string
	cmd  *exec.Cmd

	mu      sync.Mutex
	lines   []string
	changed chan struct{} // closed and replaced with every line
	exited  chan struct{} // closed when the process is gone and its log complete
}

// start runs warmroute with a JSON log on free ports. The test's end kills it.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	return startCommand(t, args[0], exec.Command(warmroute, append(args, "--log-format=json", "--log-level=debug")...))
}

func startCommand(t *testing.T, name string, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, name: name, cmd: cmd, changed: make(chan struct{}), exited: make(chan struct{})}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	go p.follow(stderr)
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("log of %s:\n%s", p.name, strings.Join(p.log(), "\n"))
		}
	})
	return p
}

func (p *process) follow(stderr io.Reader) {
	lines := bufio.NewScanner(stderr)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		p.mu.Lock()
		p.lines = append(p.lines, lines.Text())
		close(p.changed)
		p.changed = make(chan struct{})
		p.mu.Unlock()
	}
	_ = p.cmd.Wait() // the exit code is in ProcessState
	close(p.exited)
}

func (p *process) log() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lines
}

// awaitLog waits for a line of the log whose message is msg and which has the given pairs of
// key and value, and returns it.
func (p *process) awaitLog(msg string, pairs ...string) map[string]any {
	p.t.Helper()
	deadline := time.After(patience)
	for seen := 0; ; {
		p.mu.Lock()
		lines, changed := p.lines, p.changed
		p.mu.Unlock()
		for ; seen < len(lines); seen++ {
			var entry map[string]any
			if json.Unmarshal([]byte(lines[seen]), &entry) == nil && entry["msg"] == msg && hasPairs(entry, pairs) {
				return entry
			}
		}
		select {
		case <-changed:
		case <-p.exited:
			p.t.Fatalf("%s ended (%v) without logging %q %v", p.name, p.cmd.ProcessState, msg, pairs)
		case <-deadline:
			p.t.Fatalf("%s did not log %q %v", p.name, msg, pairs)
		}
	}
}

func hasPairs(entry map[string]any, pairs []string) bool {
	for i := 0; i+1 < len(pairs); i += 2 {
		if entry[pairs[i]] != pairs[i+1] {
			return false
		}
	}
	return true
}

// url waits until a service of the process listens and returns its base URL.
func (p *process) url(service string) string {
	p.t.Helper()
	return "http://" + p.awaitLog("listening", "service", service)["addr"].(string)
}

func (p *process) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("signal %s: %v", p.name, err)
	}
}

// exitCode waits for the end of the process.
func (p *process) exitCode() int {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.t.Fatalf("%s does not end", p.name)
	}
	return p.cmd.ProcessState.ExitCode()
}

// terminate asks the process to end and expects it to do so in order.
func (p *process) terminate() {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	if code := p.exitCode(); code != 0 {
		p.t.Errorf("%s: exit code %d after SIGTERM, want 0", p.name, code)
	}
}

func (p *process) kill() {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("kill %s: %v", p.name, err)
	}
	<-p.exited
}

// output runs warmroute to its end and returns what it printed and its exit code.
func output(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), warmroute, args...)
	var out, errOut strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errOut
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// freePort is a TCP port that nobody used a moment ago.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// eventually waits until the condition holds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("in vain: %s", what)
		}
	}
}

// awaitLine waits for a line of the log that contains all the given texts.
func (p *process) awaitLine(texts ...string) {
	p.t.Helper()
	eventually(p.t, p.name+" logs "+strings.Join(texts, ", "), func() bool {
		for _, line := range p.log() {
			if !slices.ContainsFunc(texts, func(s string) bool { return !strings.Contains(line, s) }) {
				return true
			}
		}
		return false
	})
}
