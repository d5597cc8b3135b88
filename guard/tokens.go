package guard

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

// Role is what a token may be used for. Roles are bits: a route that takes any of two wants both.
type Role uint8

// The roles. A route is asked a token for where tokens of its role are known; queries without tokens of their own take those of
// clients.
const (
	Client Role = 1 << iota // has engines work: OpenAI's routes
	Query                   // reads the index and the state of the fleet
	Admin                   // changes the index; may read it too
)

// roles are all of them, with the setting that each has its tokens from.
var roles = []struct {
	Role
	name, setting, of string
}{
	{Client, "client", "--token", "of clients"},
	{Query, "query", "--query-token", "for queries"},
	{Admin, "admin", "--admin-token", "of the administrator"},
}

// text joins what a part of the table says of the roles in r.
func (r Role) text(part func(i int) string, sep string) string {
	var out []string
	for i := range roles {
		if r&roles[i].Role != 0 {
			out = append(out, part(i))
		}
	}
	return strings.Join(out, sep)
}

// String names the roles, as in "client query".
func (r Role) String() string { return r.text(func(i int) string { return roles[i].name }, " ") }

// describe is "of clients (--token)".
func (r Role) describe() string {
	return r.text(func(i int) string { return roles[i].of }, " or ") + " (" + r.text(func(i int) string { return roles[i].setting }, ", ") + ")"
}

// Secrets are the tokens of one role.
type Secrets struct {
	// Values are tokens. Several serve while one replaces another.
	Values []string
	// File, if set, has more of them, one per line; lines that are empty or begin with # do not count. It must have one at least.
	File string
}

// TokenOptions configures Tokens.
type TokenOptions struct {
	// Client, Query and Admin are the tokens of each role. Default: none.
	Client, Query, Admin Secrets
	// Interval is the time between two looks at the files. Default 5 s.
	Interval time.Duration
	// Logger gets a line when tokens change, and when a file cannot be read. Default: discard.
	Logger *slog.Logger
}

// Tokens are the bearer tokens that a process knows. A nil *Tokens knows none and asks for none.
type Tokens struct {
	o   TokenOptions
	set atomic.Pointer[tokenSet]
}

// tokenSet never changes.
type tokenSet struct {
	asked   Role // those that a token is asked for
	entries []tokenEntry
}

type tokenEntry struct {
	digest [sha256.Size]byte
	grants Role
}

// NewTokens makes Tokens of the values. Those of files come with [Tokens.Load], which is to be called before anybody is let in.
func NewTokens(o TokenOptions) (*Tokens, error) {
	if o.Interval <= 0 {
		o.Interval = 5 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	t := &Tokens{o: o}
	values := [][]string{o.Client.Values, o.Query.Values, o.Admin.Values}
	for i, list := range values {
		for _, v := range list {
			if !isToken(v) {
				return nil, fmt.Errorf("%s: %w", roles[i].setting, errNoToken)
			}
		}
	}
	t.set.Store(newTokenSet(values))
	return t, nil
}

func newTokenSet(tokens [][]string) *tokenSet {
	s := &tokenSet{}
	grants := []Role{Client, Query, Admin | Query}
	for i, list := range tokens {
		if len(list) > 0 {
			s.asked |= roles[i].Role
		}
	}
	if s.asked&(Client|Query) == Client {
		s.asked |= Query
		grants[0] |= Query
	}
	for i, list := range tokens {
		for _, v := range list {
			s.entries = append(s.entries, tokenEntry{sha256.Sum256([]byte(v)), grants[i]})
		}
	}
	return s
}

var errNoToken = errors.New("a token is printable ASCII without spaces, at most 4096 bytes")

func isToken(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return s != "" && len(s) <= 4096
}

// Load reads the files. With an error, the tokens stay as they were.
func (t *Tokens) Load() error {
	next := make([][]string, len(roles))
	for i, s := range []Secrets{t.o.Client, t.o.Query, t.o.Admin} {
		next[i] = s.Values
		if s.File == "" {
			continue
		}
		more, err := ReadTokens(s.File)
		if err != nil {
			return fmt.Errorf("%s-file: %w", roles[i].setting, err)
		}
		next[i] = append(more, s.Values...)
	}
	t.set.Store(newTokenSet(next))
	return nil
}

// ReadTokens reads a file of tokens; see [Secrets.File]. Its errors have no part of the content.
func ReadTokens(name string) ([]string, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	const limit = 1 << 20
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && len(text) > limit {
		err = fmt.Errorf("%s is longer than %d bytes", name, limit)
	}
	if err != nil {
		return nil, err
	}
	var tokens []string
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if !isToken(line) {
			return nil, fmt.Errorf("%s:%d: %w", name, n, errNoToken)
		}
		tokens = append(tokens, line)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(tokens) == 0 {
		return nil, fmt.Errorf("%s has no token", name)
	}
	return tokens, nil
}

// Run looks at the files again and again until ctx ends, so that tokens can be changed while the process runs.
func (t *Tokens) Run(ctx context.Context) {
	if t == nil || t.o.Client.File+t.o.Query.File+t.o.Admin.File == "" {
		return
	}
	tick := time.NewTicker(t.o.Interval)
	defer tick.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		before := t.set.Load()
		err := t.Load()
		switch after := t.set.Load(); {
		case err != nil && !failing:
			t.o.Logger.Warn("tokens cannot be read, those known stay", "error", err)
		case err == nil && !before.equal(after):
			t.o.Logger.Info("tokens have changed", "known", len(after.entries))
		}
		failing = err != nil
	}
}

func (s *tokenSet) equal(o *tokenSet) bool {
	if len(s.entries) != len(o.entries) {
		return false
	}
	for i := range s.entries {
		if s.entries[i] != o.entries[i] {
			return false
		}
	}
	return true
}

// Asks tells whether a token is asked for where one of a role is wanted.
func (t *Tokens) Asks(r Role) bool { return t != nil && r&^t.set.Load().asked == 0 }

// Refusal is why a request may not pass.
type Refusal struct {
	Status    int    // 401: no token that is known; 403: one of another role
	Code      string // invalid_api_key or insufficient_scope
	Message   string
	Challenge string // for the header WWW-Authenticate
}

// Realm is what challenges of warmroute name, so that a page tells them from those of an engine behind it.
const Realm = `Bearer realm="warmroute"`

// Check says whether a request with this header Authorization may pass where any of the roles in need is wanted. Nil: it may.
func (t *Tokens) Check(need Role, authorization string) *Refusal {
	if !t.Asks(need) {
		return nil
	}
	token := bearer(authorization)
	has := t.set.Load().grants(token)
	switch {
	case has&need != 0:
		return nil
	case has != 0:
		return &Refusal{
			Status: http.StatusForbidden, Code: "insufficient_scope",
			Message:   "the token is of another role: this route takes one " + need.describe(),
			Challenge: Realm + `, error="insufficient_scope", scope="` + need.String() + `"`,
		}
	case token == "":
		return &Refusal{
			Status: http.StatusUnauthorized, Code: "invalid_api_key",
			Message:   "this route needs the header Authorization: Bearer with a token " + need.describe(),
			Challenge: Realm,
		}
	}
	return &Refusal{
		Status: http.StatusUnauthorized, Code: "invalid_api_key",
		Message:   "the token is not a known one: this route takes one " + need.describe(),
		Challenge: Realm + `, error="invalid_token"`,
	}
}

// Known tells whether a header Authorization holds one of the tokens, of whatever role: it is not for others to see.
func (t *Tokens) Known(authorization string) bool {
	return t != nil && authorization != "" && t.set.Load().grants(bearer(authorization)) != 0
}

// bearer is the token of a header; "" where there is none.
func bearer(authorization string) string {
	scheme, token, _ := strings.Cut(authorization, " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// grants are the roles of a token. The time that it takes tells nothing of the tokens that are known.
func (s *tokenSet) grants(token string) Role {
	digest := sha256.Sum256([]byte(token))
	has := 0
	for i := range s.entries {
		same := subtle.ConstantTimeCompare(digest[:], s.entries[i].digest[:])
		has |= subtle.ConstantTimeSelect(same, int(s.entries[i].grants), 0)
	}
	return Role(has)
}
