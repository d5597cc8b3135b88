package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func tokens(t *testing.T, o TokenOptions) *Tokens {
	t.Helper()
	k, err := NewTokens(o)
	if err == nil {
		err = k.Load()
	}
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func file(t *testing.T, content string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// Which token passes where, for every set of roles that has tokens.
func TestWhoMayPass(t *testing.T) {
	const pass, unknown, other = 0, 401, 403
	for name, test := range map[string]struct {
		have string // roles with a token, which is called like the role
		want map[string][3]int
	}{
		// The figures are of client, query and admin routes.
		"none":    {"", map[string][3]int{"": {}, "client": {}, "x": {}}},
		"clients": {"client", map[string][3]int{"": {unknown, unknown, pass}, "client": {}, "x": {unknown, unknown, pass}}},
		"queries": {"query", map[string][3]int{"": {pass, unknown, pass}, "query": {}}},
		"admin":   {"admin", map[string][3]int{"": {pass, pass, unknown}, "admin": {}}},
		"clients, admin": {"client admin", map[string][3]int{
			"": {unknown, unknown, unknown}, "client": {pass, pass, other}, "admin": {other, pass, pass},
		}},
		"all": {"client query admin", map[string][3]int{
			"": {unknown, unknown, unknown}, "client": {pass, other, other}, "query": {other, pass, other}, "admin": {other, pass, pass}, "x": {unknown, unknown, unknown},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			values := func(role Role) (s Secrets) {
				if strings.Contains(test.have, role.String()) {
					s.Values = []string{role.String()}
				}
				return s
			}
			k := tokens(t, TokenOptions{Client: values(Client), Query: values(Query), Admin: values(Admin)})
			for token, want := range test.want {
				header := ""
				if token != "" {
					header = "Bearer " + token
				}
				for i, need := range []Role{Client, Query, Admin} {
					got := 0
					if r := k.Check(need, header); r != nil {
						got = r.Status
						if token != "" && strings.Contains(r.Message+r.Challenge, `"`+token+`"`) || !strings.HasPrefix(r.Challenge, `Bearer realm="warmroute"`) {
							t.Errorf("refused by %q, %q", r.Message, r.Challenge)
						}
					}
					if got != want[i] {
						t.Errorf("%q at a route of %v: %d, want %d", header, need, got, want[i])
					}
				}
			}
		})
	}
	var none *Tokens
	if none.Check(Admin, "") != nil || none.Known("Bearer x") {
		t.Error("no tokens at all, and somebody is refused")
	}
}

// A route of two roles takes tokens of either, and is open where one of them is.
func TestRouteOfTwoRoles(t *testing.T) {
	all := tokens(t, TokenOptions{Client: Secrets{Values: []string{"c"}}, Query: Secrets{Values: []string{"q"}}})
	for header, want := range map[string]bool{"Bearer c": true, "Bearer q": true, "Bearer x": false, "": false} {
		if got := all.Check(Client|Query, header) == nil; got != want {
			t.Errorf("%q passes: %v", header, got)
		}
	}
	if r := tokens(t, TokenOptions{Query: Secrets{Values: []string{"q"}}}).Check(Client|Query, ""); r != nil {
		t.Errorf("clients need no token, and are refused: %v", r.Message)
	}
}

func TestHeaders(t *testing.T) {
	k := tokens(t, TokenOptions{Client: Secrets{Values: []string{"one", "two"}}})
	for header, want := range map[string]bool{
		"Bearer one": true, "bearer two": true, "BEARER  one": true, "Bearer one ": true,
		"Basic one": false, "one": false, "Bearer": false, "Bearer ": false, "Bearer onetwo": false, "Bearer one two": false, "Bearer on": false, "Bearer one\x00": false,
	} {
		if got := k.Check(Client, header) == nil; got != want {
			t.Errorf("%q passes: %v, want %v", header, got, want)
		}
		if got := k.Known(header); got != want {
			t.Errorf("%q is known: %v, want %v", header, got, want)
		}
	}
}

func TestTokenFiles(t *testing.T) {
	k := tokens(t, TokenOptions{Admin: Secrets{Values: []string{"given"}, File: file(t, "# old, until March\nold\n\n  new\r\n")}})
	for _, token := range []string{"given", "old", "new"} {
		if r := k.Check(Admin, "Bearer "+token); r != nil {
			t.Errorf("%s: %s", token, r.Message)
		}
	}
	if k.Check(Admin, "Bearer # old, until March") == nil {
		t.Error("a comment is a token")
	}
	if marked, err := ReadTokens(file(t, "\ufeffone\r\ntwo\r\n")); err != nil || !slices.Equal(marked, []string{"one", "two"}) {
		t.Errorf("a file with a mark of its byte order: %q, %v", marked, err)
	}
	for name, content := range map[string]string{"empty": "", "UTF-16": "\xff\xfeg\x00e\x00h\x00e\x00i\x00m\x00", "only comments": "# a\n", "two words": "geheim nis\n", "not ASCII": "geheimnüs\n", "endless": strings.Repeat("geheim", 1<<20)} {
		k, err := NewTokens(TokenOptions{Query: Secrets{File: file(t, content)}})
		if err != nil {
			t.Fatal(err)
		}
		if err := k.Load(); err == nil || strings.Contains(err.Error(), "geheim") || !strings.Contains(err.Error(), "--query-token-file") {
			t.Errorf("%s: %v", name, err)
		}
	}
	k, err := NewTokens(TokenOptions{Query: Secrets{File: "/no/such/file"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Load(); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if _, err := NewTokens(TokenOptions{Client: Secrets{Values: []string{"geheim nis"}}}); err == nil || strings.Contains(err.Error(), "geheim") {
		t.Errorf("a token of two words: %v", err)
	}
}

// syncBuffer is a log that may be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// A token is replaced while the process runs; a file that is broken for a while opens nothing and closes nothing.
func TestRotation(t *testing.T) {
	name := file(t, "first\n")
	synctest.Test(t, func(t *testing.T) {
		var log syncBuffer
		k := tokens(t, TokenOptions{Client: Secrets{File: name}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); k.Run(ctx) }()
		write := func(content string) {
			t.Helper()
			if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			time.Sleep(6 * time.Second) // of the bubble
			synctest.Wait()
		}
		passes := func(want ...string) {
			t.Helper()
			for _, token := range []string{"", "first", "second"} {
				if got := k.Check(Client, "Bearer "+token) == nil; got != slices.Contains(want, token) {
					t.Errorf("%q passes: %v, want %v", token, got, want)
				}
			}
		}
		passes("first")
		write("first\nsecond\n")
		passes("first", "second")
		write("")
		passes("first", "second")
		write("second\n")
		passes("second")
		cancel()
		<-done
		if s := log.String(); strings.Count(s, "tokens have changed") != 2 || strings.Count(s, "tokens cannot be read") != 1 ||
			strings.Contains(s, "first") || strings.Contains(s, "second") {
			t.Errorf("log:\n%s", s)
		}
	})
}

// A file that went away keeps its own tokens, and holds up nobody else's: what leaks elsewhere can still be taken out.
func TestOneFileOfSeveralIsBroken(t *testing.T) {
	client, admin, worker := file(t, "leaked\n"), file(t, "admin\n"), file(t, "engine\nlater\n")
	k := tokens(t, TokenOptions{Client: Secrets{File: client}, Admin: Secrets{File: admin}, Worker: Secrets{File: worker}})
	if k.Worker() != "engine" || k.Check(Client, "Bearer engine") == nil {
		t.Errorf("workers are shown %q, and it must open nothing", k.Worker())
	}
	if err := os.Remove(admin); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{client: "fresh\n", worker: "later\n"} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.Load(); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "--admin-token-file") {
		t.Errorf("the error is %v", err)
	}
	if k.Check(Client, "Bearer leaked") == nil || k.Check(Client, "Bearer fresh") != nil || k.Check(Admin, "Bearer admin") != nil || k.Worker() != "later" {
		t.Errorf("what could be read does not count, or what could not does not stay; workers are shown %q", k.Worker())
	}
	if given := tokens(t, TokenOptions{Worker: Secrets{Values: []string{"given"}, File: worker}}); given.Worker() != "given" {
		t.Errorf("workers are shown %q", given.Worker())
	}
	if (*Tokens)(nil).Worker() != "" {
		t.Error("no tokens at all, and workers are shown one")
	}
}

// BenchmarkCheck is what a token costs a request, with eight of them known.
func BenchmarkCheck(b *testing.B) {
	var s Secrets
	for i := range 8 {
		s.Values = append(s.Values, fmt.Sprintf("%064d", i))
	}
	k, err := NewTokens(TokenOptions{Client: s})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if k.Check(Client, "Bearer "+s.Values[7]) != nil {
			b.Fatal("refused")
		}
	}
}
