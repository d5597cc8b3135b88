package integration

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A command says what is wrong with --redis where something answers there that is no index.
func TestWhatAnswersIsNoIndex(t *testing.T) {
	page := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(page.Close)
	for url, want := range map[string]string{
		startRedis(t).url() + "/99":                          "no database of that number",
		"redis://" + strings.TrimPrefix(page.URL, "http://"): "is no Redis",
	} {
		if out, errOut, code := output(t, "check", "--redis="+url); code != 1 || out != "" || !strings.Contains(errOut, want) {
			t.Errorf("check --redis=%s: exit code %d, want 1 and %q\n%s%s", url, code, want, out, errOut)
		}
	}
}
