package integration

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
)

// The commands that ask running processes, in the order in which one on call uses them.
func TestCommandsAskRunningProcesses(t *testing.T) {
	e0, e1 := startEngine(t, "w0"), startEngine(t, "w1")
	p, frontend := startServe(t, workers(e0, e1)...)
	indexer := p.url("indexer")
	system, question := longPrompt("grapes"), message{"user", "what is it?"}
	a := chat(t, frontend, system, question)
	awaitOverlap(t, frontend, a.worker, a, system, question)
	warm, cold := e0, e1
	if a.worker == "w1" {
		warm, cold = e1, e0
	}

	both := []string{"--frontend=" + frontend, "--indexer=" + indexer}
	run := func(want int, args ...string) string {
		t.Helper()
		out, errOut, code := output(t, args...)
		if code != want {
			t.Fatalf("warmroute %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), code, want, out, errOut)
		}
		if strings.Contains(out, "\x1b[") {
			t.Errorf("warmroute %s: colours without a terminal", args[0])
		}
		return out + errOut
	}

	// workers
	out := run(0, append([]string{"workers"}, both...)...)
	for _, want := range []string{"w0/0", "w1/0", "healthy", "followed", model} {
		if !strings.Contains(out, want) {
			t.Errorf("workers: no %q in\n%s", want, out)
		}
	}
	for line := range strings.Lines(run(0, append([]string{"workers", "--json"}, both...)...)) {
		var w struct {
			Worker   string `json:"worker_id"`
			Healthy  bool
			Followed bool
		}
		if err := json.Unmarshal([]byte(line), &w); err != nil || w.Worker == "" || !w.Healthy || !w.Followed {
			t.Errorf("workers --json: %v: %s", err, line)
		}
	}

	// query
	messages, err := json.Marshal([]message{system, question})
	if err != nil {
		t.Fatal(err)
	}
	out = run(0, "query", "--frontend="+frontend, "--model="+model, "--messages="+string(messages))
	if first := strings.Split(out, "\n")[1]; !strings.HasPrefix(first, a.worker+"/0 ") || !strings.Contains(first, "####") {
		t.Errorf("query: want %s first:\n%s", a.worker, out)
	}
	var answer struct {
		State    string `json:"index_state"`
		Overlaps []struct {
			Worker string `json:"worker_id"`
			Tokens int
		}
		Hashes []string `json:"block_hashes"`
	}
	if err := json.Unmarshal([]byte(run(0, "query", "--frontend="+frontend, "--model="+model, "--hashes=16", "--json", "--messages="+string(messages))), &answer); err != nil {
		t.Fatal(err)
	}
	if answer.State != "exact" || len(answer.Overlaps) != 1 || answer.Overlaps[0].Worker != a.worker || answer.Overlaps[0].Tokens != a.prompt/16*16 || len(answer.Hashes) != a.prompt/16 {
		t.Errorf("query --json: %+v of %d tokens", answer, a.prompt)
	}
	if out := run(1, "query", "--frontend="+frontend, "--model="+model, "--tokens=1,2,3"); !strings.Contains(out, "no worker holds a block") {
		t.Errorf("query of what nobody has: %s", out)
	}
	if out := run(1, "query", "--frontend="+frontend, "--model=nonesuch", "--tokens=1,2,3"); !strings.Contains(out, "warmroute workers lists the models") {
		t.Errorf("query of an unknown model: %s", out)
	}

	// events: what was, and what comes
	if out := run(0, "events", "--past", warm.replay); !strings.Contains(out, "message 0: batch of ") || !strings.Contains(out, "stored") {
		t.Errorf("events --past: %s", out)
	}
	if out := run(1, "events", warm.replay); !strings.Contains(out, "--past asks there") {
		t.Errorf("events at the replay endpoint: %s", out)
	}
	for line := range strings.Lines(run(0, "events", "--past", "--json", warm.replay)) {
		var m struct {
			Batch struct{ Events []any }
		}
		if err := json.Unmarshal([]byte(line), &m); err != nil || len(m.Batch.Events) == 0 {
			t.Errorf("events --json: %v: %s", err, line)
		}
	}
	if out := run(1, "events", "--past", cold.replay); !strings.Contains(out, "no message to replay") {
		t.Errorf("events --past of an engine that has said nothing: %s", out)
	}
	follow := exec.Command(warmroute, "events", "--follow", warm.events)
	printed, err := follow.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	follower := startCommand(t, "events", follow)
	said := make(chan string, 1)
	go func() {
		b := make([]byte, 4096)
		n, _ := printed.Read(b)
		said <- string(b[:n])
	}()
	var got string
	for n := 0; got == ""; n++ { // until it has subscribed
		postJSON(t, warm.base+"/v1/completions", map[string]any{"model": model, "prompt": strings.Repeat("never before ", n+20), "max_tokens": 1}, nil)
		select {
		case got = <-said:
		case <-follower.exited:
			t.Fatal("events --follow ended by itself")
		default:
		}
	}
	if !strings.Contains(got, "message ") {
		t.Errorf("events --follow: %s", got)
	}
	follower.terminate()

	// A worker that is gone shows.
	e1.kill()
	eventually(t, "workers finds that w1 is away", func() bool {
		out, _, code := output(t, append([]string{"workers"}, both...)...)
		return code == 1 && strings.Contains(out, "unhealthy")
	})
}
