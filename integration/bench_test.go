package integration

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// bench route leaves no worker and no block in the user's Redis, whether it comes to its end or is interrupted.
func TestBenchRouteClearsUp(t *testing.T) {
	for name, interrupt := range map[string]bool{"to its end": false, "interrupted": true} {
		t.Run(name, func(t *testing.T) {
			redis := startRedis(t)
			duration := map[bool]string{true: "10m", false: "1s"}[interrupt]
			p := startCommand(t, "bench", exec.Command(warmroute, "bench", "route", "--redis="+redis.url(), "--tokens=64", "--rate=20", "--callers=1", "--duration="+duration))
			want := 0
			if interrupt {
				eventually(t, "its worker is there", func() bool {
					out, _, _ := output(t, "check", "--json", "--redis="+redis.url())
					return strings.Contains(out, `"streams":1`)
				})
				p.signal(syscall.SIGINT)
				want = 1
			}
			if code := p.exitCode(); code != want {
				t.Errorf("exit code %d: %v", code, p.log())
			}
			if out, _, _ := output(t, "check", "--json", "--redis="+redis.url()); !strings.Contains(out, `"streams":0,"blocks":0,"retired":0,"holders":0`) {
				t.Errorf("it leaves %s", out)
			}
		})
	}
}
