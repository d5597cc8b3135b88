package integration

import (
	"encoding/json"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// top and explain against running processes, while Redis is there and while it is not.
func TestTopAndExplain(t *testing.T) {
	redis := startRedis(t)
	e0, e1 := startEngine(t, "w0"), startEngine(t, "w1")
	_, indexer := startIndexer(t, redis.url(), workers(e0, e1)...)
	_, frontend := startFrontend(t, redis.url(), workers(e0, e1)...)
	system, question := longPrompt("quinces"), message{"user", "what is it?"}
	a := chat(t, frontend, system, question)
	awaitOverlap(t, frontend, a.worker, a, system, question)
	run := func(want int, args ...string) string {
		t.Helper()
		out, errOut, code := output(t, append(args, "--frontend="+frontend)...)
		if code != want {
			t.Fatalf("warmroute %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), code, want, out, errOut)
		}
		if strings.Contains(out, "\x1b[") {
			t.Errorf("warmroute %s: colours without a terminal", args[0])
		}
		return out + errOut
	}
	messages, err := json.Marshal([]message{system, question})
	if err != nil {
		t.Fatal(err)
	}

	out := ""
	eventually(t, "the engine's events take the place of the prediction", func() bool {
		out = run(0, "explain", "--model="+model, "--messages="+string(messages))
		return strings.Contains(out, strings.Repeat("D", 40))
	})
	if !strings.Contains(out, a.worker+"/0 would be chosen: it holds ") || !strings.Contains(out, strings.Repeat(".", 40)) {
		t.Errorf("explain:\n%s", out)
	}
	var explained struct {
		State      string `json:"index_state"`
		Reason     string
		Candidates []struct {
			Worker string `json:"worker_id"`
			Cost   *float64
		}
		Holders []struct{ Tiers string }
	}
	if err := json.Unmarshal([]byte(run(0, "explain", "--model="+model, "--json", "--messages="+string(messages))), &explained); err != nil {
		t.Fatal(err)
	}
	if explained.State != "exact" || explained.Reason != "overlap" || len(explained.Candidates) != 2 || explained.Candidates[0].Worker != a.worker ||
		explained.Candidates[0].Cost == nil || len(explained.Holders) != 1 || len(explained.Holders[0].Tiers) != a.prompt/16 {
		t.Errorf("explain --json: %+v", explained)
	}

	for _, want := range []string{"index exact", "WORKER", "w0/0", "w1/0", "healthy"} {
		if out := run(0, "top"); !strings.Contains(out, want) { // no terminal: one table
			t.Errorf("top: no %q in\n%s", want, out)
		}
	}
	type picture struct {
		Index   struct{ State string }
		Workers []struct {
			ID    string
			Ranks []struct {
				Streams []struct{ Blocks struct{ Device int } }
			}
		}
		Decisions []struct {
			Worker string `json:"worker_id"`
		}
	}
	var once picture
	if err := json.Unmarshal([]byte(run(0, "top", "--once", "--json")), &once); err != nil {
		t.Fatal(err)
	}
	blocks := 0
	for _, w := range once.Workers {
		for _, r := range w.Ranks {
			for _, s := range r.Streams {
				blocks += s.Blocks.Device
			}
		}
	}
	if once.Index.State != "exact" || len(once.Workers) != 2 || blocks < a.prompt/16 || len(once.Decisions) != 1 || once.Decisions[0].Worker != a.worker {
		t.Errorf("top --once --json: %d blocks, %+v", blocks, once)
	}

	// It follows until it is interrupted, through an outage.
	follow := exec.Command(warmroute, "top", "--json", "--frontend="+frontend)
	stdout, err := follow.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	lines := json.NewDecoder(stdout)
	await := func(state string) {
		t.Helper()
		for m := (picture{}); m.Index.State != state; {
			if err := lines.Decode(&m); err != nil {
				t.Fatalf("top --json: %v", err)
			}
		}
	}
	await("exact")
	redis.stop()
	await("degraded")
	if out := run(1, "top"); !strings.Contains(out, "index degraded") || !strings.Contains(out, "/ready says more") {
		t.Errorf("top without Redis:\n%s", out)
	}
	if out := run(1, "explain", "--model="+model, "--messages="+string(messages)); !strings.Contains(out, "by the fallback conversation-hash") {
		t.Errorf("explain without Redis:\n%s", out)
	}
	if out := run(1, "workers", "--indexer="+indexer); !strings.Contains(out, "w1/0") || !strings.Contains(out, "Redis is away") {
		t.Errorf("workers without Redis:\n%s", out)
	}
	redis.start()
	await("exact")
	if out := run(0, "workers", "--indexer="+indexer); !strings.Contains(out, "w1/0") {
		t.Errorf("workers:\n%s", out)
	}
	if err := follow.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := follow.Wait(); err != nil {
		t.Errorf("top, interrupted: %v", err)
	}
}
