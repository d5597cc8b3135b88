package integration

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// ask sends a request with a token, none for "", and returns the status and the answer.
func ask(t *testing.T, method, url, token, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, _ := io.ReadAll(resp.Body) // some answers break off
	return resp.StatusCode, string(b)
}

func write(t *testing.T, name, content string) string {
	t.Helper()
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// Tokens for each role, from files and variables: each opens its own, they are replaced while the process runs, commands show them, and they are
// nowhere to be read.
func TestTokens(t *testing.T) {
	const client, query, admin, next = "client-vnzquk", "query-vnzquk", "admin-vnzquk", "next-vnzquk"
	dir := t.TempDir()
	clients := write(t, filepath.Join(dir, "clients"), client+"\n")
	admins := write(t, filepath.Join(dir, "admins"), "# of the deployment\n"+admin+"\n")
	e0 := startEngine(t, "e0")
	cmd := exec.Command(warmroute, append([]string{"serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--poll-interval=100ms",
		"--token-file=" + clients, "--admin-token-file=" + admins, "--log-format=json", "--log-level=debug"}, workers(e0)...)...)
	cmd.Env = append(os.Environ(), "WARMROUTE_QUERY_TOKEN="+query)
	p := startCommand(t, "serve", cmd)
	front, indexer := p.url("frontend"), p.url("indexer")
	awaitReady(t, front)

	chat := `{"model":"` + model + `","messages":[{"role":"user","content":"who are you?"}],"max_tokens":2}`
	register := `{"instance_id":"x","model_name":"` + model + `","block_size":16,"url":"http://127.0.0.1:1"}`
	for _, c := range []struct {
		method, url, body string
		want              map[string]int
	}{
		{"POST", front + "/v1/chat/completions", chat, map[string]int{"": 401, "x": 401, client: 200, query: 403, admin: 403}},
		{"POST", front + "/tokenize", chat, map[string]int{"": 401, client: 200, query: 200}},
		{"GET", front + "/workers", "", map[string]int{"": 401, client: 403, query: 200, admin: 200}},
		{"GET", front + "/ui/state", "", map[string]int{"": 401, client: 403, query: 200, admin: 200}},
		{"GET", indexer + "/workers", "", map[string]int{"": 401, client: 403, query: 200, admin: 200}},
		{"POST", indexer + "/register", register, map[string]int{"": 401, client: 403, query: 403, admin: 201}},
		{"GET", front + "/ready", "", map[string]int{"": 200}}, {"GET", front + "/metrics", "", map[string]int{"": 200}},
		{"GET", indexer + "/health", "", map[string]int{"": 200}}, {"GET", front + "/", "", map[string]int{"": 200}},
	} {
		for token, want := range c.want {
			if got, text := ask(t, c.method, c.url, token, c.body); got != want {
				t.Errorf("%s %s with %q: %d, want %d: %s", c.method, c.url, token, got, want, text)
			}
		}
	}
	if _, text := ask(t, "POST", indexer+"/unregister", admin, `{"instance_id":"x","model_name":"`+model+`"}`); !strings.Contains(text, `"removed":1`) {
		t.Error(text)
	}

	// Commands, by flag, file and variable.
	at := []string{"--frontend=" + front}
	run := func(want int, says string, environ string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), warmroute, args...)
		cmd.Env = append(os.Environ(), environ)
		out, _ := cmd.CombinedOutput() // the exit code is looked at
		if code := cmd.ProcessState.ExitCode(); code != want || !strings.Contains(string(out), says) {
			t.Errorf("%s warmroute %v: exit code %d, want %d and %q: %s", environ, args, code, want, says, out)
		}
	}
	queries := write(t, filepath.Join(dir, "queries"), query+"\n")
	for name, args := range map[string][]string{
		"workers": append([]string{"workers", "--indexer=" + indexer}, at...), "top": append([]string{"top", "--once"}, at...),
		"explain": append([]string{"explain", "--model=" + model, "--prompt=x"}, at...),
	} {
		run(1, "WARMROUTE_TOKEN", "X=", args...)
		run(1, "WARMROUTE_QUERY_TOKEN", "WARMROUTE_TOKEN="+client, args...)
		run(0, "", "WARMROUTE_QUERY_TOKEN="+query, args...)
		run(0, "", "WARMROUTE_QUERY_TOKEN_FILE="+queries, args...)
		run(0, "", "WARMROUTE_TOKEN="+client, append(args, "--query-token="+query)...)
		run(0, "", "X=", append(args, "--token-file="+queries)...)
		run(0, "", "X=", append(args, "--config="+write(t, filepath.Join(dir, name+".yaml"), "token: "+client+"\nquery-token: ["+query+", other]\n"))...)
	}

	// Another token comes, then the old one goes; a file that is broken meanwhile changes nothing.
	passes := func(token string) bool { code, _ := ask(t, "GET", front+"/v1/models", token, ""); return code == 200 }
	write(t, clients, client+"\n"+next+"\n")
	eventually(t, "the new token passes", func() bool { return passes(next) })
	write(t, clients, "")
	p.awaitLog("tokens cannot be read, those known stay")
	if !passes(client) || !passes(next) || passes("") {
		t.Error("an empty file has changed who may pass")
	}
	write(t, clients, next+"\n")
	eventually(t, "the old token does not pass", func() bool { return !passes(client) })

	argv := []byte(strings.Join(p.cmd.Args, " "))
	if runtime.GOOS == "linux" { // and what a process makes of them
		var err error
		if argv, err = os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.cmd.Process.Pid)); err != nil {
			t.Fatal(err)
		}
	}
	_, metrics := ask(t, "GET", front+"/metrics", "", "")
	for where, text := range map[string]string{"the log": strings.Join(p.log(), "\n"), "the engine's log": strings.Join(e0.log(), "\n"), "ps": string(argv), "/metrics": metrics} {
		if strings.Contains(text, "vnzquk") {
			t.Errorf("%s has a token", where)
		}
	}
}

// What engines ask for is replaced like the tokens of clients, for requests and polls, and while its file is away the last one stays.
func TestWorkersTokenIsReplaced(t *testing.T) {
	var mu sync.Mutex
	shown := map[string]string{} // by path
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		shown[r.URL.Path] = r.Header.Get("Authorization")
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"`+model+`","object":"model"}],"tokens":[1,2]}`)
	}))
	defer engine.Close()
	name := write(t, filepath.Join(t.TempDir(), "worker"), "first\n")
	p := start(t, "frontend", "--redis=redis://127.0.0.1:1", "--listen=127.0.0.1:0", "--poll-interval=50ms", "--worker-token-file="+name, "--worker=id=e,url="+engine.URL)
	front := p.url("frontend")
	awaitReady(t, front)
	is := func(token string) bool {
		for _, path := range []string{"/v1/chat/completions", "/tokenize"} {
			if code, text := ask(t, "POST", front+path, "of-the-client", `{"model":"`+model+`","messages":[{"role":"user","content":"x"}]}`); code != 200 {
				t.Fatalf("%d %s", code, text)
			}
		}
		mu.Lock()
		defer mu.Unlock()
		for _, path := range []string{"/v1/chat/completions", "/tokenize", "/v1/models"} {
			if shown[path] != "Bearer "+token {
				return false
			}
		}
		return true
	}
	if !is("first") {
		t.Errorf("the engine was shown %v", shown)
	}
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	p.awaitLog("tokens cannot be read, those known stay")
	if !is("first") {
		t.Errorf("with its file away, the engine was shown %v", shown)
	}
	write(t, name, "second\n")
	eventually(t, "the engine is shown the second token", func() bool { return is("second") })
}

// With the log at its lowest level, and engines that repeat what they were asked where nobody expects it, no process but the engines tells of a prompt.
func TestPromptsAreInNoLog(t *testing.T) {
	const word, id = "xyzzyplugh", 4242424242
	e0 := startEngine(t, "e0")
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		switch r.URL.Path {
		case "/health":
		case "/v1/models":
			_, _ = io.WriteString(w, `{"data":[{"id":"broken"}]}`)
		default:
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			// More than it announced, and then nothing: the connection looks as if it could be used again.
			_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}%s", body)
			if strings.Contains(string(body), "stream") {
				_, _ = conn.Write([]byte("\r\n" + word))
				_ = conn.(*net.TCPConn).SetLinger(0)
			}
			_ = conn.Close()
		}
	}))
	defer broken.Close()
	redis := startRedis(t)
	p, front := startServe(t, append(workers(e0), "--redis="+redis.url(), "--worker=id=broken,model=broken,url="+broken.URL)...)
	indexer := p.url("indexer")
	eventually(t, "the broken engine is up", func() bool { return strings.Contains(get(t, front+"/v1/models"), "broken") })

	text := strings.Repeat(word+" ", 200)
	ids := strings.TrimSuffix(strings.Repeat(fmt.Sprint(id)+",", 64), ",")
	for _, m := range []string{model, "broken", "nobody's"} {
		for path, body := range map[string]string{
			"/v1/chat/completions": fmt.Sprintf(`{"model":%q,"max_tokens":2,"messages":[{"role":"user","content":%q}]}`, m, text),
			"/v1/completions":      fmt.Sprintf(`{"model":%q,"max_tokens":2,"stream":true,"prompt":[%s]}`, m, ids),
			"/v1/responses":        fmt.Sprintf(`{"model":%q,"input":%q}`, m, text),
			"/v1/embeddings":       fmt.Sprintf(`{"model":%q,"input":%q}`, m, text),
			"/tokenize":            fmt.Sprintf(`{"model":%q,"prompt":%q}`, m, text),
			"/detokenize":          fmt.Sprintf(`{"model":%q,"tokens":[%s]}`, m, ids),
			"/query":               fmt.Sprintf(`{"model":%q,"token_ids":[%s]}`, m, ids),
			"/select":              fmt.Sprintf(`{"model_name":%q,"token_ids":[%s]}`, m, ids),
			"/select_and_reserve":  fmt.Sprintf(`{"model_name":%q,"token_ids":[%s]}`, m, ids),
			"/potential_loads":     fmt.Sprintf(`{"model_name":%q,"token_ids":[%s]}`, m, ids),
			"/ui/explore":          fmt.Sprintf(`{"model":%q,"token_ids":[%s]}`, m, ids),
		} {
			for _, b := range []string{body, body[:len(body)-1], strings.Replace(body, "[", `{"`+word+`":[`, 1)} {
				ask(t, "POST", front+path, "", b)
			}
		}
	}
	ask(t, "POST", indexer+"/events", "", fmt.Sprintf(`{"worker":"e0","events":[{"event":{"event_id":0,"data":{"stored":{"blocks":[{"block_hash":%q}]}}}}]}`, word))
	redis.stop()
	ask(t, "POST", front+"/v1/completions", "", fmt.Sprintf(`{"model":%q,"max_tokens":2,"prompt":%q}`, model, text))
	e0.kill()
	ask(t, "POST", front+"/v1/completions", "", fmt.Sprintf(`{"model":%q,"max_tokens":2,"prompt":%q}`, model, text))

	said := map[string]string{}
	for _, url := range []string{front + "/metrics", front + "/workers", front + "/ready", front + "/ui/state", indexer + "/metrics", indexer + "/workers", indexer + "/ready"} {
		said[url] = get(t, url)
	}
	var state struct{ Decisions []json.RawMessage }
	if err := json.Unmarshal([]byte(said[front+"/ui/state"]), &state); err != nil || len(state.Decisions) == 0 {
		t.Errorf("the page has no decisions: %v", err)
	}
	p.awaitLine("a library says", "starting with")
	p.terminate()
	said["the log"] = strings.Join(p.log(), "\n")
	for where, s := range said {
		for _, secret := range []string{word, fmt.Sprint(id), fmt.Sprintf("%x", id)} {
			if i := strings.Index(s, secret); i >= 0 {
				t.Errorf("%s tells of a prompt: …%s…", where, s[max(0, i-300):min(len(s), i+100)])
			}
		}
	}
}
