package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// readmeCommands are the blocks of shell commands of the README's quick start.
func readmeCommands(t *testing.T) []string {
	t.Helper()
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	var blocks []string
	for _, m := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(readme), -1) {
		blocks = append(blocks, m[1])
	}
	if len(blocks) != 2 {
		t.Fatalf("the README has %d blocks of commands, this test knows 2: the demo and the tour by hand", len(blocks))
	}
	return blocks
}

// shell runs commands as a reader would who stops at the first that fails; what runs in the
// background ends with them.
func shell(t *testing.T, commands string, environ ...string) string {
	t.Helper()
	script := "set -eu\ntrap 'code=$?; jobs -p | xargs -r kill; wait; exit $code' EXIT\n" + commands
	cmd := exec.CommandContext(t.Context(), "bash", "-c", script)
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), environ...)
	var errOut strings.Builder
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, errOut.String())
	}
	return string(out)
}

func TestReadmeDemo(t *testing.T) {
	out := shell(t, strings.Replace(readmeCommands(t)[0], "go run ./cmd/warmroute", warmroute, 1))
	hits := regexp.MustCompile(`block hit ratio +([\d.]+) % +([\d.]+) %`).FindStringSubmatch(out)
	if hits == nil {
		t.Fatalf("no hit ratios in\n%s", out)
	}
	kv, _ := strconv.ParseFloat(hits[1], 64)
	roundRobin, _ := strconv.ParseFloat(hits[2], 64)
	if kv < roundRobin+10 {
		t.Errorf("kv routing hits %v %%, round robin %v %%: want clearly more", kv, roundRobin)
	}
	for _, line := range []string{`failed +0 +0`, `failed +0\s*\n`, `recovered +yes`} {
		if !regexp.MustCompile(line).MatchString(out) {
			t.Errorf("no line %q in\n%s", line, out)
		}
	}
}

func TestReadmeTourByHand(t *testing.T) {
	// The default ports may be taken on this machine, and the binary is there already.
	commands := readmeCommands(t)[1]
	ports := map[string]string{}
	for _, port := range []string{"8000", "8080", "5557", "5657", "9201"} {
		ports[port] = freePort(t)
		commands = strings.ReplaceAll(commands, ":"+port, ":"+ports[port])
	}
	commands = strings.Replace(commands, "go build -o bin/warmroute ./cmd/warmroute", "true", 1)
	commands = strings.ReplaceAll(commands, "bin/warmroute", warmroute)
	out := shell(t, commands,
		"WARMROUTE_HTTP_LISTEN=127.0.0.1:"+ports["8000"], "WARMROUTE_EVENTS_LISTEN=tcp://127.0.0.1:"+ports["5557"],
		"WARMROUTE_REPLAY_LISTEN=tcp://127.0.0.1:"+ports["5657"],
		"WARMROUTE_LISTEN=127.0.0.1:"+ports["8080"], "WARMROUTE_ADMIN_LISTEN=127.0.0.1:"+ports["9201"])
	for _, want := range []string{`"status":"ready"`, `"object":"chat.completion"`, `"w0"`} {
		if !strings.Contains(strings.ReplaceAll(out, `": "`, `":"`), want) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
}

func TestDocumentationLinksLeadSomewhere(t *testing.T) {
	pages, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	deeper, err := filepath.Glob("../docs/*/*.md")
	if err != nil {
		t.Fatal(err)
	}
	pages = append(pages, deeper...)
	for _, page := range append(pages, "../deploy/README.md", "../README.md", "../CONTRIBUTING.md", "../CHANGELOG.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`).FindAllStringSubmatch(string(text), -1) {
			target, err := os.ReadFile(filepath.Join(filepath.Dir(page), m[1]))
			if info, missing := os.Stat(filepath.Join(filepath.Dir(page), m[1])); missing != nil {
				t.Errorf("%s links to %s: %v", page, m[1], missing)
			} else if anchor := strings.TrimPrefix(m[2], "#"); anchor != "" && !info.IsDir() && (err != nil || !hasHeading(string(target), anchor)) {
				t.Errorf("%s links to %s, which has no heading %s", page, m[1], anchor)
			}
		}
		for _, m := range regexp.MustCompile(`\]\(#([^)]+)\)`).FindAllStringSubmatch(string(text), -1) {
			if !hasHeading(string(text), m[1]) {
				t.Errorf("%s links to its heading %s, which it has not", page, m[1])
			}
		}
	}
}

// hasHeading reports whether a page has the heading that GitHub gives an anchor.
func hasHeading(page, anchor string) bool {
	for _, m := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(page, -1) {
		slug := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		if strings.ReplaceAll(slug, " ", "-") == anchor {
			return true
		}
	}
	return false
}
