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
	"slices"
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
	// Worker is what the process shows to workers: nobody gets in by it. The first value counts, or else the first of the file.
	Worker Secrets
	// Interval is the time between two looks at the files. Default 5 s.
	Interval time.Duration
	// Logger gets a line when tokens change, and when a file cannot be read. Default: discard.
	Logger *slog.Logger
}

// Tokens are the bearer tokens that a process knows. A nil *Tokens knows none and asks for none.
type Tokens struct {
	o    TokenOptions
	read [sources][]string // what each file had when it could be read last
	set  atomic.Pointer[tokenSet]
}

// sources are the roles, and then what workers are shown.
const sources = 4

func (o *TokenOptions) secrets() [sources]Secrets {
	return [...]Secrets{o.Client, o.Query, o.Admin, o.Worker}
}

// setting is where the tokens of a source come from.
func setting(source int) string {
	if source < len(roles) {
		return roles[source].setting
	}
	return "--worker-token"
}

// tokenSet never changes.
type tokenSet struct {
	asked   Role // those that a token is asked for
	entries []tokenEntry
	worker  string
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
	for i, s := range o.secrets() {
		for _, v := range s.Values {
			if !isToken(v) {
				return nil, fmt.Errorf("%s: %w", setting(i), errNoToken)
			}
		}
	}
	t.publish()
	return t, nil
}

// publish makes those known that were given or read.
func (t *Tokens) publish() {
	var all [sources][]string
	for i, s := range t.o.secrets() {
		all[i] = slices.Concat(s.Values, t.read[i])
	}
	t.set.Store(newTokenSet(all))
}

func newTokenSet(all [sources][]string) *tokenSet {
	s := &tokenSet{}
	if shown := all[len(roles)]; len(shown) > 0 {
		s.worker = shown[0]
	}
	tokens := all[:len(roles)]
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

// Load reads the files. The tokens of one that cannot be read stay as they were; the error is of all of those.
func (t *Tokens) Load() error {
	var failed []error
	for i, s := range t.o.secrets() {
		if s.File == "" {
			continue
		}
		list, err := ReadTokens(s.File)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s-file: %w", setting(i), err))
			continue
		}
		t.read[i] = list
	}
	t.publish()
	return errors.Join(failed...)
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
	lines := bufio.NewScanner(bytes.NewReader(bytes.TrimPrefix(text, []byte("\ufeff")))) // some editors begin a file so
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
	if t == nil || t.o.Client.File+t.o.Query.File+t.o.Admin.File+t.o.Worker.File == "" {
		return
	}
	tick := time.NewTicker(t.o.Interval)
	defer tick.Stop()
	failing := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		before, said := t.set.Load(), ""
		if err := t.Load(); err != nil {
			if said = err.Error(); said != failing {
				t.o.Logger.Warn("tokens cannot be read, those known stay", "error", err)
			}
		}
		failing = said
		if after := t.set.Load(); !before.equal(after) {
			t.o.Logger.Info("tokens have changed", "known", len(after.entries))
		}
	}
}

func (s *tokenSet) equal(o *tokenSet) bool {
	return s.worker == o.worker && slices.Equal(s.entries, o.entries)
}

// Asks tells whether a token is asked for where one of a role is wanted.
func (t *Tokens) Asks(r Role) bool { return t != nil && r&^t.set.Load().asked == 0 }

// Worker is the token that workers are shown now; "" where there is none.
func (t *Tokens) Worker() string {
	if t == nil {
		return ""
	}
	return t.set.Load().worker
}

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
