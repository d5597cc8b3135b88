package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
	"unicode"

	"github.com/warmroute/warmroute/kvcache"
)

// server is a running frontend or indexer that a command asks.
type server struct {
	flag, url, token string // flag names it in errors
	err              error  // the token cannot be read
}

// base is the URL that paths are put after.
func (s server) base() (string, error) {
	if s.err != nil {
		return "", s.err
	}
	base, err := url.Parse(s.url)
	if err != nil || base.Host == "" || base.Scheme != "http" && base.Scheme != "https" {
		return "", usagef("%s %q: want http://host:port", s.flag, s.url)
	}
	return strings.TrimSuffix(base.String(), "/"), nil
}

// answerLimit bounds what is read of one answer, or one file.
const answerLimit = 64 << 20

// readAll reads to the end, or fails where that is further than answerLimit.
func readAll(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, answerLimit+1))
	if err == nil && len(b) > answerLimit {
		err = fmt.Errorf("it is longer than %d MiB", answerLimit>>20)
	}
	return b, err
}

// ask sends a request, body nil for a GET, and decodes the answer into v. Errors say what to try next.
func (s server) ask(ctx context.Context, path string, body, v any) error {
	base, err := s.base()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	method, content := http.MethodGet, io.Reader(nil)
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return err
		}
		method, content = http.MethodPost, bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, base+path, content)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if s.token != "" {
		req.Header.Set("Authorization", "Bearer "+s.token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return s.away(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := readAll(resp.Body)
	if err != nil {
		return fmt.Errorf("%s%s: %w (is %s right?)", s.url, path, err, s.flag)
	}
	if resp.StatusCode != http.StatusOK {
		return refused(s, path, resp.StatusCode, text)
	}
	if err := json.Unmarshal(text, v); err != nil {
		return s.notOurs(path, err)
	}
	return nil
}

// notOurs is an answer that can be no warmroute's.
func (s server) notOurs(path string, err error) error {
	if err == nil {
		err = errors.New("a needed part is missing")
	}
	return fmt.Errorf("%s%s does not answer as warmroute does: %w (is %s right?)", s.url, path, err, s.flag)
}

// away is the error of a server that cannot be asked.
func (s server) away(err error) error {
	return fmt.Errorf("%w (does it run there? %s says where to ask)", err, s.flag)
}

// saysNothing is the error where the index is not what it should be.
func saysNothing(state kvcache.IndexState, reason string, frontend server) error {
	if reason != "" {
		reason = " (" + reason + ")"
	}
	return fmt.Errorf("the index is %s%s: %s/ready says more", state, reason, frontend.url)
}

// refused explains an answer that is an error.
func refused(s server, path string, status int, text []byte) error {
	var answer struct {
		Error struct{ Message, Code string }
	}
	if json.Unmarshal(text, &answer) != nil || answer.Error.Message == "" {
		return fmt.Errorf("%s%s: status %d %s (is %s right?)", s.url, path, status, http.StatusText(status), s.flag)
	}
	hint := ""
	switch {
	case status == http.StatusUnauthorized:
		hint = " (give --token, --token-file or WARMROUTE_TOKEN)"
	case status == http.StatusForbidden && answer.Error.Code == "insufficient_scope":
		hint = " (give --query-token, --query-token-file or WARMROUTE_QUERY_TOKEN)"
	case status == http.StatusNotFound && strings.Contains(answer.Error.Code, "model"):
		hint = " (warmroute workers lists the models)"
	}
	return errors.New(printable(answer.Error.Message) + hint)
}

// printable is a text of elsewhere without what a terminal would obey.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
}

// tinted colours text where a person looks at it: on a terminal, unless NO_COLOR is set.
type tinted struct{ on bool }

func tintFor(w io.Writer) tinted {
	return tinted{isTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
}

func (t tinted) paint(code, text string) string {
	if !t.on {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (t tinted) good(text string) string { return t.paint("32", text) }
func (t tinted) bad(text string) string  { return t.paint("31", text) }
func (t tinted) dim(text string) string  { return t.paint("2", text) }
