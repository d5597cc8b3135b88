package integration

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

// systemd takes the units as they are meant: no unknown setting, and next to no exposure.
func TestSystemdUnits(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		needs(t, "systemd-analyze")
	}
	units, err := filepath.Glob("../deploy/systemd/*.service")
	if err != nil || len(units) != 2 {
		t.Fatalf("units %v, %v", units, err)
	}
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		tokens, err := os.ReadFile("../deploy/systemd/tokens.conf") // a drop-in is as if it were written below
		if err != nil {
			t.Fatal(err)
		}
		// The program has to exist for the check.
		copied := filepath.Join(t.TempDir(), filepath.Base(unit))
		if err := os.WriteFile(copied, []byte(strings.Replace(string(text)+string(tokens), "/usr/local/bin/warmroute", warmroute, 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", copied).CombinedOutput()
		if err != nil || strings.Contains(string(out), filepath.Base(unit)) {
			t.Errorf("%s: %v\n%s", unit, err, out)
		}
		out, err = exec.CommandContext(t.Context(), "systemd-analyze", "security", "--offline=true", "--no-pager", copied).CombinedOutput()
		m := regexp.MustCompile(`Overall exposure level for \S+: ([\d.]+)`).FindSubmatch(out)
		if err != nil || m == nil {
			t.Fatalf("%s: %v\n%s", unit, err, out)
		}
		if exposure, _ := strconv.ParseFloat(string(m[1]), 64); exposure > 2 {
			t.Errorf("%s: exposure %v of 10, want at most 2", unit, exposure)
		}
	}
}

var defaultOf = regexp.MustCompile(`\$\{\w+:-([^}]*)\}`)

// Processes in the shape of the compose file: its commands and variables, but for host names and ports, which are those of this machine.
func TestComposeShapeWithProcesses(t *testing.T) {
	text, err := os.ReadFile("../docker-compose.yml")
	if err != nil {
		t.Fatal(err)
	}
	var compose struct {
		Services map[string]struct {
			Image       string
			Command     []string
			Environment map[string]string
		}
	}
	if err := yaml.Unmarshal(defaultOf.ReplaceAll(text, []byte("$1")), &compose); err != nil {
		t.Fatal(err)
	}
	redis := startRedis(t)
	// What a service listens on, and what the others call it, is host:port here and there.
	here := map[string]string{"redis:6379": "127.0.0.1:" + redis.port}
	for _, host := range []string{"engine-0", "engine-1"} {
		for _, port := range []string{"8000", "5557", "5657"} {
			here[host+":"+port] = "127.0.0.1:" + freePort(t)
		}
	}
	var names []string
	for name, s := range compose.Services {
		if s.Image == "warmroute" {
			names = append(names, name)
		}
	}
	slices.Sort(names) // engines come first
	processes := map[string]*process{}
	for _, name := range names {
		s := compose.Services[name]
		args := slices.Clone(s.Command)
		for i, a := range args {
			if port, ok := strings.CutPrefix(a, "tcp://*:"); ok {
				args[i] = "tcp://" + here[name+":"+port]
			} else if port, ok := strings.CutPrefix(a, ":"); ok {
				args[i] = "127.0.0.1:0"
				if at, ok := here[name+":"+port]; ok {
					args[i] = at
				}
			}
		}
		cmd := exec.Command(warmroute, append(args, "--log-format=json")...)
		cmd.Env = os.Environ()
		for k, v := range s.Environment {
			for there, at := range here {
				v = strings.ReplaceAll(v, there, at)
			}
			cmd.Env = append(cmd.Env, k+"="+v)
		}
		processes[name] = startCommand(t, name, cmd)
	}
	frontends := []string{processes["frontend-0"].url("frontend"), processes["frontend-1"].url("frontend")}
	for _, f := range frontends {
		awaitReady(t, f)
	}
	processes["indexer-0"].url("indexer")

	system, question := longPrompt("compose"), message{"user", "who holds it?"}
	a := chat(t, frontends[0], system, question)
	for _, f := range frontends {
		awaitOverlap(t, f, a.worker, a, system, question)
	}
	if b := chat(t, frontends[1], system, question); b.worker != a.worker || b.overlap == 0 {
		t.Errorf("the other frontend sends it to %s with %d blocks, want %s and more", b.worker, b.overlap, a.worker)
	}
	// One indexer suffices.
	processes["indexer-0"].terminate()
	other := longPrompt("one indexer")
	b := chat(t, frontends[0], other, question)
	awaitOverlap(t, frontends[1], b.worker, b, other, question)
	// So does none, and no Redis.
	redis.stop()
	for _, f := range frontends {
		if c := chat(t, f, system, question); c.state != "degraded" && c.state != "exact" {
			t.Errorf("index state %q without Redis", c.state)
		}
		eventually(t, "the frontend notices", func() bool { return chat(t, f, system, question).state == "degraded" })
		if code := status(t, f+"/ready"); code != http.StatusOK {
			t.Error(fmt.Sprint("/ready ", code, " without Redis"))
		}
	}
	processes["frontend-0"].terminate()
}
