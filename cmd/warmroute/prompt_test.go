package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// asking are the commands that ask about a prompt, with the path that each asks at.
var asking = map[string]string{"query": "/query", "explain": "/ui/explore"}

// Every way to give a prompt reaches the frontend as the same question, from both commands.
func TestPromptsAreTakenAlike(t *testing.T) {
	var tokenized, asked map[string]any
	mux := http.NewServeMux()
	read := func(r *http.Request, body *map[string]any) {
		if err := json.NewDecoder(r.Body).Decode(body); err != nil {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
	}
	mux.HandleFunc("POST /tokenize", func(w http.ResponseWriter, r *http.Request) {
		read(r, &tokenized)
		_, _ = fmt.Fprint(w, `{"tokens":[7,8,9]}`)
	})
	mux.HandleFunc("POST /query", func(w http.ResponseWriter, r *http.Request) {
		read(r, &asked)
		_, _ = fmt.Fprint(w, `{"scores":{"w":{"0":3}},"index_state":"exact"}`)
	})
	mux.HandleFunc("POST /ui/explore", func(w http.ResponseWriter, r *http.Request) {
		read(r, &asked)
		_, _ = fmt.Fprint(w, `{"index_state":"exact","candidates":[{"worker_id":"w","dp_rank":0}]}`)
	})
	frontend := httptest.NewServer(mux)
	defer frontend.Close()
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "given")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return "@" + path
	}
	const chat = `[{"role":"user","content":"Hello"}]`
	for name, c := range map[string]struct {
		args      []string
		stdin     string
		tokenized string // the body of /tokenize; "" where nothing is tokenized
		ids       string
	}{
		"text":                {[]string{"--prompt", "Hello, world"}, "", `{"model":"m","prompt":"Hello, world"}`, "[7 8 9]"},
		"text of a file":      {[]string{"--prompt", file("two\nlines\n")}, "", `{"model":"m","prompt":"two\nlines"}`, "[7 8 9]"},
		"text from input":     {[]string{"--prompt", "-"}, "@piped\r\n", `{"model":"m","prompt":"@piped"}`, "[7 8 9]"},
		"a text in brackets":  {[]string{"--prompt", chat}, "", `{"model":"m","prompt":"[{\"role\":\"user\",\"content\":\"Hello\"}]"}`, "[7 8 9]"},
		"messages":            {[]string{"--messages", chat}, "", `{"messages":[{"content":"Hello","role":"user"}],"model":"m"}`, "[7 8 9]"},
		"messages of a file":  {[]string{"--messages", file(chat)}, "", `{"messages":[{"content":"Hello","role":"user"}],"model":"m"}`, "[7 8 9]"},
		"messages from input": {[]string{"--messages=-"}, chat + "\n", `{"messages":[{"content":"Hello","role":"user"}],"model":"m"}`, "[7 8 9]"},
		"tokens":              {[]string{"--tokens", "1,2,3"}, "", "", "[1 2 3]"},
		"tokens as an array":  {[]string{"--tokens", "[1, 2, 3]"}, "", "", "[1 2 3]"},
		"tokens of a file":    {[]string{"--tokens", file("1 2\n4294967295\n")}, "", "", "[1 2 4.294967295e+09]"},
		"tokens from input":   {[]string{"--tokens", "-"}, "1\n2\n", "", "[1 2]"},
	} {
		for command := range asking {
			t.Run(command+" "+name, func(t *testing.T) {
				tokenized, asked = nil, nil
				args := append([]string{command, "--frontend", frontend.URL, "--model=m", "--tenant=t", "--salt=s"}, c.args...)
				var out, errOut bytes.Buffer
				if code := run(t.Context(), args, strings.NewReader(c.stdin), &out, &errOut); code != exitOK {
					t.Fatalf("exit code %d: %s", code, errOut.String())
				}
				body := ""
				if tokenized != nil {
					b, err := json.Marshal(tokenized)
					if err != nil {
						t.Fatal(err)
					}
					body = string(b)
				}
				if body != c.tokenized {
					t.Errorf("tokenized %s, want %s", body, c.tokenized)
				}
				want := "map[cache_salt:s model:m tenant_id:t token_ids:" + c.ids + "]"
				if got := fmt.Sprint(asked); got != want {
					t.Errorf("asked %s, want %s", got, want)
				}
			})
		}
	}
}

// What is wrong with a prompt is said alike, and before anybody is asked.
func TestPromptsAreRefusedAlike(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "there is no prompt: give --prompt, --messages or --tokens"},
		{[]string{"--prompt", "-"}, "--prompt -: it is empty"},
		{[]string{"--prompt", "@/no/such/file"}, "--prompt: open /no/such/file"},
		{[]string{"--messages", "Hello"}, "--messages: want a JSON array such as"},
		{[]string{"--messages", "[]"}, "--messages: want a JSON array such as"},
		{[]string{"--tokens", "-"}, "--tokens: there are no token ids"},
		{[]string{"--tokens", "[1,2"}, "--tokens: the bracket is not closed"},
		{[]string{"--tokens", "ids.json"}, `--tokens: "ids.json" is no token id (a file is named by @`},
		{[]string{"--tokens", "1", "--prompt", "Hello"}, "can't be used together"},
		{[]string{"--tokens", "1", "--frontend", "127.0.0.1:8080"}, "--frontend \"127.0.0.1:8080\": want http://host:port"},
		{[]string{"Hello"}, "unexpected argument Hello"},
	} {
		for command := range asking {
			var out, errOut bytes.Buffer
			args := append([]string{command, "--model=m"}, c.args...)
			code := run(t.Context(), args, strings.NewReader(""), &out, &errOut)
			if code != exitUsage || !strings.Contains(errOut.String(), c.want) || !strings.Contains(errOut.String(), `Run "warmroute `+command) {
				t.Errorf("%v: exit code %d, %s, want … %s", args, code, errOut.String(), c.want)
			}
		}
	}
}

// What the frontend answers is explained alike.
func TestRefusalsAreExplainedAlike(t *testing.T) {
	status, answer := 0, ""
	frontend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = fmt.Fprint(w, answer)
	}))
	defer frontend.Close()
	for _, c := range []struct {
		status       int
		answer, want string
	}{
		{401, `{"error":{"message":"who are you?","code":"unauthorized"}}`, "who are you? (give --token, --token-file or WARMROUTE_TOKEN)"},
		{404, `{"error":{"message":"no model m","code":"model_not_found"}}`, "no model m (warmroute workers lists the models)"},
		{404, `page not found`, "Not Found (is --frontend right?)"},
		{200, `<html>`, "does not answer as warmroute does"},
		{499, ``, "status 499"},
		{503, `{"error":{"message":"draw\u001b[2J\nhere","code":"overloaded"}}`, "draw [2J here"},
		{200, `{"state":"` + strings.Repeat("x", answerLimit), "longer than 64 MiB"},
	} {
		status, answer = c.status, c.answer
		for command := range asking {
			var out, errOut bytes.Buffer
			code := run(t.Context(), []string{command, "--model=m", "--tokens=1", "--frontend", frontend.URL}, nil, &out, &errOut)
			if code != exitFailed || !strings.Contains(errOut.String(), c.want) {
				t.Errorf("%s: %d %s: exit code %d, %s, want … %s", command, c.status, c.answer, code, errOut.String(), c.want)
			}
		}
	}
}

func TestParseTokens(t *testing.T) {
	for text, want := range map[string][]uint32{
		"[1, 2,3]\n": {1, 2, 3}, "1 2\n3\t4": {1, 2, 3, 4}, "4294967295": {4294967295},
		"": nil, "[]": nil, "1 -2": nil, "4294967296": nil, "[[1]]": nil, "1.5": nil, "[1": nil, "1]": nil,
	} {
		got, err := parseTokens(text)
		if !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%q: %v, %v, want %v", text, got, err, want)
		}
	}
}
