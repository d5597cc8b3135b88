package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Flags that make an example small, or lead it to the processes of the test, by command.
var exampleFlags = map[string]string{
	"bench lookup":  "--workers=4 --blocks=32 --callers=1 --cell-time=10ms",
	"bench apply":   "--blocks=8 --cell-time=10ms",
	"bench sweep":   "--blocks=1000 --steps=100 --cell-time=10ms",
	"bench visible": "--workers=2 --rate=200 --duration=500ms",
	"bench route":   "--tokens=64 --rate=20 --duration=1s --callers=1",
	"query":         "--frontend=$FRONTEND",
	"explain":       "--frontend=$FRONTEND",
	"top":           "--frontend=$FRONTEND",
	"workers":       "--frontend=$FRONTEND --indexer=$INDEXER",
}

// Examples that another test runs, because they take long or end only when they are interrupted.
var examplesElsewhere = map[string]string{
	"warmroute demo\n":          "TestReadmeDemo",
	"warmroute demo --redis":    "TestDemoOnARealRedisPrintsOneJSONObject",
	"warmroute events --follow": "TestCommandsAskRunningProcesses",
	"warmroute bench outage":    "TestFaults",
}

// The examples of every command's help are run as they stand there, and succeed. Only addresses, the model's name and sizes are the test's.
func TestExamplesOfHelpWork(t *testing.T) {
	if exec.Command(python, "-c", "import zmq").Run() != nil {
		needs(t, python+" with zmq")
	}
	index, scratch := startRedis(t), startRedis(t)
	e0, e1, faulty := startEngine(t, "w0"), startEngine(t, "w1"), startEngine(t, "faulty")
	_, indexer := startIndexer(t, index.url(), workers(e0, e1)...)
	_, frontend := startFrontend(t, index.url(), append(workers(e0, e1), "--lookup-budget=5s")...) // a busy machine is no example
	awaitFollowing(t, indexer, e0, e1)
	dir := exampleFiles(t, frontend)

	common := []string{
		"redis://10.0.0.6:6379", scratch.url(), "redis://127.0.0.1:6390", scratch.url(),
		"http://10.0.0.7:8080", frontend, "http://10.0.0.8:9201", indexer, "http://127.0.0.1:9201", indexer, "http://127.0.0.1:8000", faulty.base,
		"tcp://10.0.1.1:5557", e0.events, "tcp://10.0.1.1:5657", e0.replay, "tcp://127.0.0.1:5557", e0.events,
		"http://10.0.1.1:8000", e0.base, "http://10.0.1.2:8000", e1.base,
		"default:llama-3-8b", "default:" + model, "--model llama", "--model " + model, `"modelname": "llama"`, `"modelname": "` + model + `"`,
		":8080", "127.0.0.1:0", ":8081", "127.0.0.1:0", "python3", python, "--requests 2000", "--requests 2 --speed 100",
	}
	asking := strings.NewReplacer(append([]string{"redis://10.0.0.5:6379", index.url(), "redis://127.0.0.1:6379", index.url()}, common...)...)
	// What writes workers of its own has an index of its own.
	serving := strings.NewReplacer(append([]string{"redis://10.0.0.5:6379", scratch.url(), "redis://127.0.0.1:6379", scratch.url()}, common...)...)
	environ := append(os.Environ(), "PATH="+filepath.Dir(warmroute)+":"+os.Getenv("PATH"), "FRONTEND="+frontend, "INDEXER="+indexer, "NO_COLOR=1",
		"WARMROUTE_LISTEN=127.0.0.1:0", "WARMROUTE_ADMIN_LISTEN=127.0.0.1:0", "WARMROUTE_HTTP_LISTEN=127.0.0.1:0",
		"WARMROUTE_EVENTS_LISTEN=tcp://127.0.0.1:0", "WARMROUTE_REPLAY_LISTEN=tcp://127.0.0.1:0", "WARMROUTE_LOG_FORMAT=json")
	command := func(script string) *exec.Cmd {
		cmd := exec.Command("bash", "-c", script)
		cmd.Dir, cmd.Env = dir, environ
		return cmd
	}

	run := 0
	for _, path := range commandPaths(t) {
		help, _, code := output(t, append(strings.Fields(path), "--help")...)
		if code != 0 {
			t.Fatalf("%s --help: exit code %d", path, code)
		}
	examples:
		for _, example := range exampleBlocks(help) {
			for begin, where := range examplesElsewhere {
				if strings.HasPrefix(example, begin) {
					t.Logf("%s: run by %s", strings.TrimSpace(example), where)
					continue examples
				}
			}
			run++
			if service := regexp.MustCompile(`^(?:\w+=\S+ )?warmroute (serve|indexer|frontend|sim)\b`); service.MatchString(example) {
				for line := range strings.Lines(strings.ReplaceAll(example, "\\\n", " ")) {
					p := startCommand(t, path, command("exec env "+serving.Replace(line)))
					p.awaitLog("listening")
					p.terminate()
				}
				continue
			}
			words := asking
			if strings.HasPrefix(path, "bench") {
				words = serving
			}
			script := regexp.MustCompile(`(?m)^.*\bwarmroute (bench \w+|\w+) .*$`).ReplaceAllStringFunc(words.Replace(example), func(line string) string {
				return line + " " + exampleFlags[regexp.MustCompile(`\bwarmroute (bench \w+|\w+) `).FindStringSubmatch(line)[1]]
			})
			if strings.HasPrefix(script, "redis-server") {
				_, script, _ = strings.Cut(script, "\n") // the test's own
			}
			quiet := func() {}
			if strings.Contains(script, e0.events) {
				quiet = keepPublishing(t, e0)
			}
			if out, err := command("set -e -o pipefail\n" + script).CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s\n%s", path, err, script, out)
			}
			quiet()
		}
	}
	if run < 35 {
		t.Errorf("only %d examples found", run)
	}
}

// keepPublishing gives an engine prompts that it has not seen, so that it publishes events, until it is told to stop.
func keepPublishing(t *testing.T, e *engine) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ; n++ {
			select {
			case <-quit:
				return
			default:
				postJSON(t, e.base+"/v1/completions", map[string]any{"model": model, "prompt": strings.Repeat(fmt.Sprintf("never %d ", n), 20), "max_tokens": 1}, nil)
			}
		}
	}()
	return func() { close(quit); <-done }
}

// commandPaths are the commands that completion knows, such as "bench lookup".
func commandPaths(t *testing.T) (paths []string) {
	t.Helper()
	script, _, _ := output(t, "completion", "bash")
	for _, m := range regexp.MustCompile(`(?m)^    "([^"]+)"\) words=`).FindAllStringSubmatch(script, -1) {
		paths = append(paths, m[1])
	}
	if len(paths) < 20 {
		t.Fatalf("only the commands %q", paths)
	}
	return paths
}

// exampleBlocks are the indented paragraphs of a help that are commands.
func exampleBlocks(help string) (blocks []string) {
	about, _, _ := strings.Cut(help, "\nFlags:\n")
	for _, paragraph := range strings.Split(about, "\n\n") {
		if regexp.MustCompile(`^    (\w+=\S+ )?(warmroute|curl|echo|od|python3|redis-server) `).MatchString(paragraph) {
			blocks = append(blocks, regexp.MustCompile(`(?m)^    `).ReplaceAllString(paragraph, "")+"\n")
		}
	}
	return blocks
}

// exampleFiles makes a directory with the files that the examples name. What is in the prompts, the frontend's index holds.
func exampleFiles(t *testing.T, frontend string) string {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	messages := []message{longPrompt("medlars"), {"user", "what is it?"}}
	a := chat(t, frontend, messages...)
	awaitOverlap(t, frontend, a.worker, a, messages...)
	asJSON, err := json.Marshal(messages)
	if err != nil {
		t.Fatal(err)
	}
	write("chat.json", string(asJSON)+"\n")

	prompt := longPrompt("rowans").Content
	postJSON(t, frontend+"/v1/completions", map[string]any{"model": model, "prompt": prompt, "max_tokens": 1}, nil)
	var tokens struct{ Tokens []uint32 }
	postJSON(t, frontend+"/tokenize", map[string]any{"model": model, "prompt": prompt}, &tokens)
	write("prompt.txt", prompt+"\n")
	write("ids.json", strings.ReplaceAll(fmt.Sprint(tokens.Tokens), " ", ", "))
	eventually(t, "the completion's prompt is held", func() bool {
		_, _, code := output(t, "query", "--frontend="+frontend, "--model="+model, "--prompt=@"+filepath.Join(dir, "prompt.txt"))
		return code == 0
	})

	const cleared = "\x92\xc0\x91\x91\xb0AllBlocksCleared"
	write("payload.bin", cleared)
	write("payload.hex", fmt.Sprintf("%x\n", cleared))
	copyFile(t, "../indexer/wire/testdata/kv-event-vectors.json", filepath.Join(dir, "kv-event-vectors.json"))
	write("conversation_trace.jsonl", `{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 9000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}
`)
	write("warmroute.yaml", "redis: redis://127.0.0.1:1\nworker:\n  - {id: w0, url: \"http://127.0.0.1:1\", model: m}\n")
	return dir
}
