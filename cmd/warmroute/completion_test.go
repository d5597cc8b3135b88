package main

import (
	"bytes"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

func completionScript(t *testing.T, shell string) string {
	t.Helper()
	var out, errOut bytes.Buffer
	if code := run(t.Context(), []string{"completion", shell}, strings.NewReader(""), &out, &errOut); code != exitOK {
		t.Fatalf("exit code %d: %s", code, errOut.String())
	}
	return out.String()
}

// bash itself says what the script offers.
func TestBashCompletes(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("no bash")
	}
	script := completionScript(t, "bash")
	for line, want := range map[string][]string{
		"warmroute fro":                           {"frontend"},
		"warmroute bench l":                       {"lookup"},
		"warmroute plan --prompt":                 {"--prompt-tokens"},
		"warmroute check --rep":                   {"--repair"},
		"warmroute --log-format=json query --jso": {"--json"},
		"warmroute completion --hel":              {"--help"},
		"warmroute nonsense-":                     nil,
	} {
		words := strings.Fields(line)
		ask := script + "\nCOMP_WORDS=("
		for _, w := range words {
			ask += "'" + w + "' "
		}
		ask += ")\nCOMP_CWORD=" + string(rune('0'+len(words)-1)) + "\n_warmroute\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n"
		out, err := exec.CommandContext(t.Context(), bash, "-uc", ask).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
		if got := strings.Fields(string(out)); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
}

// Every shell's script knows every command, and where the shell is here it accepts the script.
func TestCompletionScripts(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		script := completionScript(t, shell)
		for _, word := range []string{"frontend", "indexer", "workers", "lookup-budget", "repair"} {
			if !strings.Contains(script, word) {
				t.Errorf("%s: no %s", shell, word)
			}
		}
		if path, err := exec.LookPath(shell); err == nil {
			cmd := exec.CommandContext(t.Context(), path, "-n")
			cmd.Stdin = strings.NewReader(script)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", shell, err, out)
			}
		}
	}
}

func TestColoursOnlyOnATerminal(t *testing.T) {
	var b bytes.Buffer
	if got := tintFor(&b).bad("x"); got != "x" {
		t.Errorf("%q into a buffer", got)
	}
	if got := (tinted{true}).bad("x"); got != "\x1b[31mx\x1b[0m" {
		t.Errorf("%q on a terminal", got)
	}
}
