package integration

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// The users of docs/security-acl.md.
const (
	frontendUser = "warmroute-frontend"
	indexerUser  = "warmroute-indexer"
	checkUser    = "warmroute-check"
	sentinelUser = "warmroute-sentinel"
)

// aclLines are the ACL SETUSER commands of docs/security-acl.md, by user, and the further grants of a cluster.
func aclLines(t *testing.T) (lines map[string][]string, cluster []string) {
	t.Helper()
	text, err := os.ReadFile("../docs/security-acl.md")
	if err != nil {
		t.Fatal(err)
	}
	lines = map[string][]string{}
	for _, m := range regexp.MustCompile("ACL SETUSER (warmroute-[a-z]+) (reset [^\n`]*)").FindAllStringSubmatch(string(text), -1) {
		lines[m[1]] = strings.Fields(m[2])
	}
	if m := regexp.MustCompile("(?m)^\\| Cluster \\| `([^`]*)`").FindStringSubmatch(string(text)); m != nil {
		cluster = strings.Fields(m[1])
	}
	if len(lines) != 4 || len(cluster) == 0 {
		t.Fatalf("security-acl.md: found the users %v and the grants of a cluster %q", lines, cluster)
	}
	return lines, cluster
}

// grants are the commands of a line.
func grants(line []string) []string {
	var out []string
	for _, word := range line {
		if command, ok := strings.CutPrefix(word, "+"); ok {
			out = append(out, command)
		}
	}
	return out
}

// secret is a user's password in the tests and in the page.
func secret(user string) string {
	return strings.ToUpper(strings.TrimPrefix(user, "warmroute-")) + "-PASSWORD"
}

// as is the URL of a server for a user.
func as(user, url string) string {
	scheme, rest, _ := strings.Cut(url, "://")
	return scheme + "://" + user + ":" + secret(user) + "@" + rest
}

// admin is a server seen with all rights.
type admin struct {
	t *testing.T
	*redisproc.Server
	run func(args ...any) (any, error)
}

func newAdmin(t *testing.T, s *redisproc.Server) *admin {
	c := s.Client()
	t.Cleanup(func() { _ = c.Close() })
	return &admin{t, s, func(args ...any) (any, error) { return c.Do(t.Context(), args...).Result() }}
}

func (a *admin) do(args ...any) any {
	a.t.Helper()
	v, err := a.run(args...)
	if err != nil {
		a.t.Fatalf("%v: %v", args, err)
	}
	return v
}

func (a *admin) setUser(user string, rules ...string) {
	a.t.Helper()
	args := []any{"ACL", "SETUSER", user}
	for _, r := range rules {
		args = append(args, r)
	}
	a.do(args...)
}

// denied lists what Redis has denied since the last reset: "user object", the object being a command or key.
func (a *admin) denied() []string {
	a.t.Helper()
	var out []string
	for _, entry := range a.do("ACL", "LOG").([]any) {
		fields := entry.([]any)
		of := func(name string) any {
			for i := 0; i+1 < len(fields); i += 2 {
				if fields[i] == name {
					return fields[i+1]
				}
			}
			return nil
		}
		out = append(out, fmt.Sprint(of("username"), " ", of("object")))
	}
	return out
}

// contents are all keys with what they hold.
func (a *admin) contents() map[string]string {
	a.t.Helper()
	all := map[string]string{}
	for _, key := range a.do("KEYS", "*").([]any) {
		all[key.(string)] = a.do("DUMP", key).(string)
	}
	return all
}

// startACL starts a server with the users of the page.
func startACL(t *testing.T) *admin {
	t.Helper()
	a := newAdmin(t, storetest.Redis(t).Server)
	lines, _ := aclLines(t)
	for _, user := range []string{frontendUser, indexerUser, checkUser} {
		a.setUser(user, lines[user]...)
	}
	return a
}

func openStore(t *testing.T, url string) *store.Store {
	t.Helper()
	s, err := store.New(store.Options{URL: url, WriteTimeout: 5 * time.Second, LookupBudget: 5 * time.Second, SlotRest: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

var aclPool = kvcache.PoolID{Tenant: kvcache.DefaultTenant, Model: "m"}

// indexerCycle does whatever an indexer does, until something fails.
func indexerCycle(ctx context.Context, s *store.Store) error {
	id := store.StreamID{Pool: aclPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}}
	st, _, err := s.Register(ctx, id, store.Registration{BlockSize: 4, URL: "http://127.0.0.1:1"})
	if err != nil {
		return err
	}
	var b store.Batch
	b.Message(0)
	b.Store(kvcache.Device, 1, 11)
	b.Store(kvcache.Device, 2, 12)
	b.Message(1)
	b.Store(kvcache.Device, 1, 11) // a second copy
	b.Message(2)
	b.Store(kvcache.Device, 2, 22) // another engine hash
	b.Message(3)
	b.Remove(kvcache.Device, 11) // the second copy
	b.Message(4)
	b.Remove(kvcache.Device, 22) // the block
	if o, _, err := s.Apply(ctx, st, &b); err != nil || o != store.Applied {
		return fmt.Errorf("apply: %v %w", o, err)
	}
	if _, ok, err := s.Resolve(ctx, st, []kvcache.EngineHash{11}); err != nil || !ok[0] {
		return fmt.Errorf("resolve: %v %w", ok, err)
	}
	if err := frontendReads(ctx, s); err != nil {
		return err
	}
	if _, err := s.Touch(ctx, st); err != nil {
		return err
	}
	st, ok, err := s.Stream(ctx, id)
	if err != nil || !ok {
		return fmt.Errorf("stream: %v %w", ok, err)
	}
	if st, _, err = s.Restart(ctx, st, -1, 0); err != nil {
		return err
	}
	for more := true; more; {
		if _, more, err = s.Sweep(ctx, aclPool, 100); err != nil {
			return err
		}
	}
	_, err = s.Remove(ctx, st)
	return err
}

// frontendReads are the administrative reads of frontends and indexers.
func frontendReads(ctx context.Context, s *store.Store) error {
	pools, err := s.Pools(ctx)
	if err != nil || len(pools) != 1 {
		return fmt.Errorf("pools: %v %w", pools, err)
	}
	streams, err := s.Streams(ctx, aclPool)
	if err != nil || len(streams) != 1 {
		return fmt.Errorf("streams: %v %w", streams, err)
	}
	blocks := 0
	err = s.Dump(ctx, aclPool, func(kvcache.RouterEvent) error { blocks++; return nil })
	if err != nil || blocks == 0 {
		return fmt.Errorf("dump: %d blocks %w", blocks, err)
	}
	return nil
}

// frontendCycle does whatever a frontend does, until something fails.
func frontendCycle(ctx context.Context, s *store.Store) error {
	scores, state, err := s.Lookup(ctx, aclPool, []kvcache.BlockHash{1}, store.LookupOptions{TreeSizes: true})
	if err != nil || state != kvcache.Exact || len(scores.Scores) != 1 {
		return fmt.Errorf("lookup: %s %v %w", state, scores, err)
	}
	if err := leaseCycle(ctx, s); err != nil {
		return err
	}
	for i := range 100 { // the first ones expire and are forgotten
		o, err := s.Predict(ctx, aclPool, kvcache.WorkerRank{Worker: "w"}, []kvcache.BlockHash{kvcache.BlockHash(7 + i)}, store.PredictOptions{TTL: time.Millisecond})
		if err != nil || o != store.Applied {
			return fmt.Errorf("predict: %v %w", o, err)
		}
	}
	return frontendReads(ctx, s)
}

// leaseCycle is the life of one reservation.
func leaseCycle(ctx context.Context, s *store.Store) error {
	c, err := s.Select(ctx, aclPool, store.Ask{
		ID: "r", Lease: time.Minute, BlockSize: 4, PromptTokens: 8, DecodeBlocks: 2, Session: "s", SessionTTL: time.Minute,
		Candidates: []store.Candidate{{WorkerRank: kvcache.WorkerRank{Worker: "w"}}}, Weights: store.Weights{PrefillScale: 1, Miss: 1},
	})
	if err != nil || !c.Held {
		return fmt.Errorf("select: %+v %w", c, err)
	}
	for name, change := range map[string]func(context.Context, kvcache.PoolID, string) (bool, error){
		"prefill done": s.PrefillDone, "output block": s.OutputBlock,
	} {
		if ok, err := change(ctx, aclPool, "r"); err != nil || !ok {
			return fmt.Errorf("%s: %v %w", name, ok, err)
		}
	}
	if ended, err := s.Renew(ctx, aclPool, "r"); err != nil || len(ended) > 0 {
		return fmt.Errorf("renew: %v %w", ended, err)
	}
	if loads, err := s.Loads(ctx, aclPool); err != nil || len(loads) != 1 {
		return fmt.Errorf("loads: %v %w", loads, err)
	}
	if ok, err := s.Release(ctx, aclPool, "r"); err != nil || !ok {
		return fmt.Errorf("release: %v %w", ok, err)
	}
	return nil
}

// fill puts one stream with one block into the index.
func fill(t *testing.T, a *admin) {
	t.Helper()
	s := openStore(t, a.URL)
	st, _, err := s.Register(t.Context(), store.StreamID{Pool: aclPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}}, store.Registration{BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	var b store.Batch
	b.Message(0)
	b.Store(kvcache.Device, 1, 11)
	if _, _, err := s.Apply(t.Context(), st, &b); err != nil {
		t.Fatal(err)
	}
}

// damage makes the index disagree with itself in every way that a check repairs.
func damage(a *admin) {
	const shard = "wr:1:{default:m#0}"
	a.do("HDEL", shard+":holders", "0000000000000001")
	a.do("HSET", shard+":holders", "0000000000000002", "\x01")
	a.do("HSET", shard+":slots", "7", "ghost/0")
	a.do("ZADD", shard+":blocks:w/0:device", "5", "nonsense")
	a.do("ZADD", shard+":blocks:ghost/0:device", "5", "0000000000000003")
	a.do("RPUSH", shard+":copies:w/0:host", "x")
	a.do("HSET", "wr:1:{default:m}:workers", "ghost", "0")
	// A second shard, on which the worker has no business.
	const other = "wr:1:{default:m#1}"
	a.do("HSET", "wr:1:{default:m}:config", "shards", "2")
	a.do("HSET", other+":stream:w/0", "gen", "5", "seq", "0", "slot", "0")
	a.do("HSET", other+":stream:w/1", "gen", "6", "slot", "1") // without a watermark
	a.do("HSET", other+":slots", "0", "w/0", "1", "w/1")
	a.do("ZADD", other+":blocks:w/1:device", "5", "0000000000000003")
	a.do("HSET", other+":holders", "0000000000000003", "\x10")
	a.do("SET", other+":version", "6")
	a.do("SREM", "wr:1:pools", aclPool.String())
	a.do("SADD", "wr:1:pools", "nonsense")
}

func checkCycle(ctx context.Context, s *store.Store) error {
	r, err := s.Check(ctx, aclPool, true)
	if err != nil || r.Found < 11 || r.Repaired != r.Found {
		return fmt.Errorf("check: %+v %w", r, err)
	}
	if r, err = s.Check(ctx, aclPool, false); err != nil || r.Found > 0 {
		return fmt.Errorf("check after the repair: %+v %w", r, err)
	}
	if pools, err := s.Pools(ctx); err != nil || len(pools) != 1 {
		return fmt.Errorf("pools: %v %w", pools, err)
	}
	return nil
}

// checkingIndexerCycle is an indexer's that repairs what it finds before anything else.
func checkingIndexerCycle(ctx context.Context, s *store.Store) error {
	if mine, err := s.CheckTurn(ctx, aclPool, time.Hour); err != nil || !mine {
		return fmt.Errorf("turn to check: %v %w", mine, err)
	}
	if err := checkCycle(ctx, s); err != nil {
		return err
	}
	streams, err := s.Streams(ctx, aclPool)
	if err != nil {
		return err
	}
	for _, st := range streams {
		if _, err := s.Remove(ctx, st); err != nil {
			return err
		}
	}
	st, _, err := s.Register(ctx, store.StreamID{Pool: aclPool, WorkerRank: kvcache.WorkerRank{Worker: "new"}}, store.Registration{BlockSize: 4})
	if err == nil {
		_, err = s.Remove(ctx, st)
	}
	if err != nil {
		return err
	}
	if ok, err := s.Announced(ctx, aclPool); err != nil || !ok {
		return fmt.Errorf("announced: %v %w", ok, err)
	}
	return indexerCycle(ctx, s)
}

// Each grant of the page is needed: without it something fails, with an error that says why, and Redis's log
// names the user and the command.
func TestEachGrantIsNeededAndItsLackIsClear(t *testing.T) {
	a := startACL(t)
	lines, _ := aclLines(t)
	for _, user := range []struct {
		name    string
		prepare func()
		cycle   func(context.Context, *store.Store) error
		spare   []string // used where allowed, and not missed
	}{
		{indexerUser, func() { fill(t, a); damage(a) }, checkingIndexerCycle, []string{"info"}},
		{frontendUser, func() { fill(t, a) }, frontendCycle, nil},
		{checkUser, func() { fill(t, a); damage(a) }, checkCycle, nil},
	} {
		t.Run(user.name, func(t *testing.T) {
			attempt := func() error {
				a.do("FLUSHALL")
				user.prepare()
				a.do("SCRIPT", "FLUSH")
				a.do("ACL", "LOG", "RESET")
				return user.cycle(t.Context(), openStore(t, as(user.name, a.URL)))
			}
			if err := attempt(); err != nil {
				t.Fatalf("with all grants: %v", err)
			}
			if denied := a.denied(); len(denied) > 0 {
				t.Errorf("with all grants Redis has denied %q", denied)
			}
			for _, command := range grants(lines[user.name]) {
				if slices.Contains(user.spare, command) {
					continue
				}
				a.setUser(user.name, "-"+command)
				err := attempt()
				denied := a.denied()
				a.setUser(user.name, "+"+command)
				switch {
				case err == nil:
					t.Errorf("%s is not needed", command)
				case errors.Is(err, store.ErrInvalid):
					t.Errorf("without %s: %v, which blames the caller", command, err)
				case !strings.Contains(err.Error(), "NOPERM") || !strings.Contains(err.Error(), "'"+command+"'"):
					if strings.Contains(err.Error(), "NOPERM") || !deniedIn(err.Error()) {
						t.Errorf("without %s the error is not clear: %v", command, err)
					}
				}
				if !slices.Contains(denied, user.name+" "+command) {
					t.Errorf("without %s: %v, and ACL LOG has %q", command, err, denied)
				}
			}
			a.setUser(user.name, "resetkeys", "~elsewhere:*")
			err := attempt()
			a.setUser(user.name, "resetkeys", "~wr:1:*")
			if err == nil || !strings.Contains(err.Error(), "NOPERM") || !strings.Contains(err.Error(), "keys") {
				t.Errorf("without the keys: %v", err)
			}
		})
	}
}

// deniedIn says whether an error is one of a missing grant. Of a command in a script, Redis before 7.2 tells only that there is one; of
// one in a transaction the same.
func deniedIn(text string) bool {
	return slices.ContainsFunc([]string{"NOPERM", "executing the script can't run this command", "ACL failure in script", "EXECABORT"},
		func(part string) bool { return strings.Contains(text, part) })
}

// sayAs sends commands as a user and returns the replies' first lines.
func sayAs(t *testing.T, a *admin, user string, commands ...string) []string {
	t.Helper()
	c, err := net.Dial("tcp", a.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(patience))
	replies := bufio.NewReader(c)
	var out []string
	for _, command := range append([]string{"AUTH " + user + " " + secret(user)}, commands...) {
		if _, err := fmt.Fprintf(c, "%s\r\n", command); err != nil {
			t.Fatal(err)
		}
		line, err := replies.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, strings.TrimSpace(line))
	}
	if out[0] != "+OK" {
		t.Fatalf("AUTH as %s: %s", user, out[0])
	}
	return out[1:]
}

// A frontend's user counts loads and predicts. It can neither delete nor rename, so that it ends nobody's blocks, nor register.
func TestFrontendUserCannotEndAnything(t *testing.T) {
	a := startACL(t)
	fill(t, a)
	lines, _ := aclLines(t)
	for _, category := range []string{"dangerous", "admin", "pubsub", "transaction"} {
		for _, command := range a.do("ACL", "CAT", category).([]any) {
			if slices.Contains(grants(lines[frontendUser]), command.(string)) {
				t.Errorf("%s is of category %s", command, category)
			}
		}
	}
	for _, command := range []string{"del", "unlink", "rename", "hvals", "sadd", "expire", "pexpire", "hincrby", "exists"} {
		if slices.Contains(grants(lines[frontendUser]), command) {
			t.Errorf("%s is granted", command)
		}
	}
	before := a.contents()
	s := openStore(t, as(frontendUser, a.URL))
	st, ok, err := openStore(t, as(indexerUser, a.URL)).Stream(t.Context(), store.StreamID{Pool: aclPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}})
	if err != nil || !ok {
		t.Fatalf("stream: %v %v", ok, err)
	}
	for name, write := range map[string]func() error{
		"register": func() error {
			other := store.StreamID{Pool: aclPool, WorkerRank: kvcache.WorkerRank{Worker: "x"}}
			_, _, err := s.Register(t.Context(), other, store.Registration{BlockSize: 4})
			return err
		},
		"restart": func() error { _, _, err := s.Restart(t.Context(), st, -1, 0); return err },
		"remove":  func() error { _, err := s.Remove(t.Context(), st); return err },
	} {
		if err := write(); err == nil || !deniedIn(err.Error()) {
			t.Errorf("%s: %v, want NOPERM", name, err)
		}
	}
	commands := []string{"SET x y", "DEL wr:1:{default:m}:config", "UNLINK wr:1:{default:m}:config", "FLUSHALL", "CONFIG GET *", "KEYS *", "GET other", "HGETALL other", "SUBSCRIBE wr:1:x", "ACL WHOAMI"}
	for i, reply := range sayAs(t, a, frontendUser, commands...) {
		if !strings.HasPrefix(reply, "-NOPERM") {
			t.Errorf("%s: %s", commands[i], reply)
		}
	}
	for _, user := range []string{indexerUser, checkUser} {
		commands := []string{"SET other y", "GET other", "HSET other a b", "FLUSHALL", "CONFIG SET maxmemory 1", "KEYS *", "PUBLISH a b", "SCRIPT FLUSH"}
		for i, reply := range sayAs(t, a, user, commands...) {
			if !strings.HasPrefix(reply, "-NOPERM") {
				t.Errorf("%s as %s: %s", commands[i], user, reply)
			}
		}
	}
	if after := a.contents(); !maps.Equal(after, before) {
		t.Errorf("the index has changed from %q to %q", before, after)
	}
}
