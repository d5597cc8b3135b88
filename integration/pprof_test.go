package integration

import (
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Every service serves profiles where it is asked to, and nowhere else; go tool pprof reads them.
func TestProfilesAreServedOnAPortOfTheirOwn(t *testing.T) {
	redis := startRedis(t)
	e0 := startEngine(t, "e0")
	for command, services := range map[string][]string{"serve": {"frontend", "indexer"}, "frontend": {"frontend"}, "indexer": {"indexer"}} {
		t.Run(command, func(t *testing.T) {
			args := append(workers(e0), "--redis="+redis.url(), "--admin-token=s3cret", "--pprof-listen=127.0.0.1:0")
			if command != "indexer" {
				args = append(args, "--listen=127.0.0.1:0")
			}
			if command != "frontend" {
				args = append(args, "--admin-listen=127.0.0.1:0")
			}
			p := start(t, append([]string{command}, args...)...)
			url := p.url("pprof")
			if text := get(t, url+"/debug/pprof/goroutine?debug=2"); !strings.Contains(text, "runServices") {
				t.Errorf("goroutines: %.200s", text)
			}
			if n := status(t, url+"/debug/pprof/cmdline"); n != http.StatusNotFound {
				t.Errorf("the command line, which may hold tokens, is served: %d", n)
			}
			if n := status(t, url+"/metrics"); n != http.StatusNotFound {
				t.Errorf("the port for profiles serves more than those: %d", n)
			}
			for _, s := range services {
				if n := status(t, p.url(s)+"/debug/pprof/"); n != http.StatusNotFound {
					t.Errorf("%s serves profiles at its own port: %d", s, n)
				}
			}
			for _, profile := range []string{"heap", "profile?seconds=1"} {
				cmd := exec.CommandContext(t.Context(), "go", "tool", "pprof", "-raw", url+"/debug/pprof/"+profile)
				cmd.Env = append(cmd.Environ(), "PPROF_TMPDIR="+filepath.Join(t.TempDir(), "pprof"))
				if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PeriodType:") {
					t.Errorf("go tool pprof %s: %v: %.300s", profile, err, out)
				}
			}
			p.terminate()
		})
	}
}

func TestNoProfilesUnlessAskedFor(t *testing.T) {
	e0 := startEngine(t, "e0")
	p, _ := startServe(t, workers(e0)...)
	p.terminate()
	if strings.Contains(strings.Join(p.log(), "\n"), "pprof") {
		t.Error("a port for profiles that nobody asked for")
	}
}
