package integration

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// openaiPackage is OpenAI's own client for JavaScript: a client that nobody here wrote.
const openaiPackage = "openai@7"

func TestOfficialOpenAIClient(t *testing.T) {
	dir := installOpenAI(t)
	e0 := startEngine(t, "e0", "--decode-per-token=5ms")
	_, url := startServe(t, workers(e0)...)

	client := exec.CommandContext(t.Context(), "node", filepath.Join(dir, "client.mjs"), url+"/v1", model)
	out, err := client.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("the client failed: %s", exit.Stderr)
		}
		t.Fatal(err)
	}
	type text struct {
		Text, Finish string
		Usage        *struct {
			PromptTokens     int `json:"prompt_tokens"`
			CompletionTokens int `json:"completion_tokens"`
		}
	}
	var seen struct {
		Models                                         []string
		Chat, ChatStream, Completion, CompletionStream text
		State                                          string
		UnknownModel                                   struct {
			NotFound bool
			Status   int
			Message  string
		}
		Aborted    int
		AbortError string
	}
	if err := json.Unmarshal(out, &seen); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if !slices.Equal(seen.Models, []string{model}) {
		t.Errorf("models %v, want %s", seen.Models, model)
	}
	// Answers of a simulated engine depend on the prompt alone, so both ways must give the same.
	for _, c := range []struct {
		name           string
		whole, streamd text
	}{{"chat", seen.Chat, seen.ChatStream}, {"completion", seen.Completion, seen.CompletionStream}} {
		if c.whole.Text == "" || c.whole.Text != c.streamd.Text || c.whole.Finish != "length" || c.streamd.Finish != "length" {
			t.Errorf("%s: %+v, streamed %+v", c.name, c.whole, c.streamd)
		}
	}
	for _, c := range []text{seen.Chat, seen.ChatStream} {
		if c.Usage == nil || c.Usage.PromptTokens == 0 || c.Usage.CompletionTokens != 12 {
			t.Errorf("usage %+v, want prompt tokens and 12 completion tokens", c.Usage)
		}
	}
	if seen.State != "exact" {
		t.Errorf("x-kv-index-state %q, want exact", seen.State)
	}
	if u := seen.UnknownModel; !u.NotFound || u.Status != 404 || u.Message == "" {
		t.Errorf("an unknown model: %+v, want a NotFoundError", u)
	}
	if seen.Aborted != 2 {
		t.Errorf("aborted after %d chunks, want 2 (%s)", seen.Aborted, seen.AbortError)
	}
	eventually(t, "the engine sees that the client left", func() bool { return e0.state().Cancelled == 1 })
}

// installOpenAI puts the client and its package into a directory, or skips the test where npm or its
// registry is not to be had; REQUIRE_NPM=1 forbids that.
func installOpenAI(t *testing.T) string {
	t.Helper()
	skip := t.Skipf
	if os.Getenv("REQUIRE_NPM") == "1" {
		skip = t.Fatalf
	}
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			skip("%s is missing: the official OpenAI client was not tried", program)
		}
	}
	dir := t.TempDir()
	install := exec.CommandContext(t.Context(), "npm", "install", "--prefix", dir, "--no-audit", "--no-fund", "--ignore-scripts",
		"--fetch-retries=1", "--fetch-timeout=20000", openaiPackage)
	if out, err := install.CombinedOutput(); err != nil {
		skip("npm install %s: %v: the official OpenAI client was not tried\n%s", openaiPackage, err, out)
	}
	script, err := os.ReadFile("testdata/client.mjs")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "client.mjs"), script, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}
