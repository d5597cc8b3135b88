package integration

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// The commands of docs/redis-cli.md are run question by question, as a reader would, and have to answer them.
func TestRedisCLIGuide(t *testing.T) {
	for _, program := range []string{"redis-cli", "xxd"} {
		if _, err := exec.LookPath(program); err != nil {
			needs(t, program)
		}
	}
	redis := startRedis(t)
	e0, e1 := startEngine(t, "w0"), startEngine(t, "w1")
	_, indexer := startIndexer(t, redis.url(), workers(e0, e1)...)
	// Without predictions an overlap shows that the events have come.
	_, frontend := startFrontend(t, redis.url(), append(workers(e0, e1), "--predict-ttl=0s")...)
	system, question := longPrompt("grapes"), message{"user", "what is it?"}
	a := chat(t, frontend, system, question)
	awaitOverlap(t, frontend, a.worker, a, system, question)

	setup, questions := guide(t, "../docs/redis-cli.md")
	if len(questions) != 10 {
		t.Fatalf("the page has %d questions, want 10", len(questions))
	}
	// One shell for all but the last question, which deletes: variables of one are used by the next.
	const mark = "=== question "
	script := "set -euo pipefail\n" + setup
	for i, q := range questions[:9] {
		script += fmt.Sprintf("\necho '%s%d'\n%s", mark, i+1, q)
	}
	environ := append(os.Environ(), "REDIS="+redis.url(), "POOL=default:"+model, "WORKER="+a.worker+"/0")
	out := bash(t, environ, script)
	answers := strings.Split(out, mark)
	if len(answers) != 10 {
		t.Fatalf("%d answers:\n%s", len(answers)-1, out)
	}
	lines := func(q int) []string { return strings.Split(strings.TrimSpace(answers[q]), "\n")[1:] }

	var held int
	var state struct {
		Workers []watermark
	}
	getJSON(t, indexer+"/workers", &state)
	for _, w := range state.Workers {
		if w.ID == a.worker {
			held = w.Watermark
		}
	}
	if got := lines(1); got[0] != "default:"+model || !follows(got, "block_size", "16") || !follows(got, "shards", "1") {
		t.Errorf("1: %q", got)
	}
	if got := lines(2); !follows(got, "w0", "0") || !follows(got, "w1", "0") || !strings.Contains(answers[2], "w1/0") {
		t.Errorf("2: %q", got)
	}
	if got := lines(3); !follows(got, "seq", strconv.Itoa(held)) || !follows(got, "url", map[string]string{"w0": e0.base, "w1": e1.base}[a.worker]) {
		t.Errorf("3: watermark %d by the indexer, in Redis %q", held, got)
	}
	m := regexp.MustCompile(regexp.QuoteMeta(a.worker) + `/0:device (\d+)`).FindStringSubmatch(answers[4])
	if m == nil {
		t.Fatalf("4: %q", answers[4])
	}
	if n, _ := strconv.Atoi(m[1]); n < a.prompt/16 {
		t.Errorf("4: %d blocks held, the prompt alone had %d", n, a.prompt/16)
	}
	block := lines(5)[0]
	if score := lines(5)[1]; !regexp.MustCompile(`^[0-9a-f]{16}$`).MatchString(block) || score == "" {
		t.Errorf("5: %q", lines(5))
	}
	if got := lines(6); len(got) != 1 || got[0] != block {
		t.Errorf("6: %q, want the block %s", got, block)
	}
	slot := "00000001"
	if follows(lines(2), "1", a.worker+"/0") {
		slot = "00010000"
	}
	if got := lines(7); !strings.Contains(got[0], slot) {
		t.Errorf("7: %q, want %s", got, slot)
	}
	if got := lines(8); strings.Join(got, "") != "" {
		t.Errorf("8: %q, but no generation has ended", got)
	}
	got := strings.Join(lines(9), "\n")
	if !strings.Contains(got, "maxmemory_policy:noeviction") || !strings.Contains(got, "evicted_keys:0") || !strings.HasSuffix(got, m[1]) {
		t.Errorf("9: %s, want so many blocks at the end: %s", got, m[1])
	}

	// 10: all of the pool is gone, and comes back by itself, with what the engines still hold.
	generation := setup + "\nr HGET \"$T:stream:$WORKER\" gen"
	before := bash(t, environ, generation)
	bash(t, environ, "set -euo pipefail\n"+setup+questions[9])
	eventually(t, "the stream is registered anew", func() bool {
		now := strings.TrimSpace(bash(t, environ, generation))
		return now != "" && now != strings.TrimSpace(before)
	})
	awaitOverlap(t, frontend, a.worker, a, system, question)
	if stdout, stderr, code := output(t, "check", "--redis="+redis.url()); code != 0 {
		t.Errorf("10: check afterwards: %s%s", stdout, stderr)
	}
}

// watermark is the part of an indexer's view of a stream that this test reads.
type watermark struct {
	ID        string `json:"worker"`
	Watermark int    `json:"watermark"`
}

// guide splits a page into the commands before its first question and those of each question.
func guide(t *testing.T, page string) (setup string, questions []string) {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)```sh\n(.*?)```")
	for i, section := range regexp.MustCompile(`(?m)^## `).Split(string(text), -1) {
		m := block.FindStringSubmatch(section)
		if m == nil {
			t.Fatalf("%s: no commands in %.60q", page, section)
		}
		if i == 0 {
			setup = m[1]
		} else {
			questions = append(questions, m[1])
		}
	}
	return setup, questions
}

// follows reports whether HGETALL gave the field this value.
func follows(lines []string, field, value string) bool {
	for i := 0; i+1 < len(lines); i++ {
		if lines[i] == field && lines[i+1] == value {
			return true
		}
	}
	return false
}

func bash(t *testing.T, environ []string, script string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-c", script)
	cmd.Env = environ
	var errOut strings.Builder
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, errOut.String())
	}
	return string(out)
}
