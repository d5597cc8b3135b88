package integration

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// All of warmroute under the users of the page, with an engine that crashes and one that leaves: Redis denies nothing.
func TestWholeCycleUnderACLUsers(t *testing.T) {
	a := startACL(t)
	e0, e1 := startEngine(t, "e0"), startEngine(t, "e1")
	_, indexer := startIndexer(t, as(indexerUser, a.URL), workers(e0, e1)...)
	_, frontend := startFrontend(t, as(frontendUser, a.URL)) // learns of the engines from the index
	eventually(t, "the frontend knows both engines", func() bool {
		var list struct{ Workers []struct{ Healthy bool } }
		getJSON(t, frontend+"/workers", &list)
		return len(list.Workers) == 2 && list.Workers[0].Healthy && list.Workers[1].Healthy
	})
	for _, name := range []string{"figs", "dates", "quinces", "medlars"} {
		system, question := longPrompt(name), message{"user", "what is it?"}
		first := chat(t, frontend, system, question)
		if first.state != "exact" {
			t.Errorf("index state %q, want exact", first.state)
		}
		awaitOverlap(t, frontend, first.worker, first, system, question)
		if again := chat(t, frontend, system, question); again.overlap == 0 {
			t.Errorf("the second time: %+v", again)
		}
	}
	// A prediction makes a worker look warm before its events have come.
	postJSON(t, e0.base+"/v1/completions", map[string]any{"model": model, "prompt": longPrompt("plums").Content, "max_tokens": 1}, nil)
	eventually(t, "the dump has what the engine stored", func() bool { return strings.Contains(get(t, frontend+"/dump"), `"worker_id":"e0"`) })
	lifetime := e0.state().StartedMS
	postJSON(t, e0.base+"/sim/crash", map[string]any{"restart_after_ms": 100}, nil)
	eventually(t, "the engine is back", func() bool {
		resp, err := http.Get(e0.base + "/sim/state")
		if err != nil {
			return false // crashed
		}
		defer func() { _ = resp.Body.Close() }()
		var s state
		return json.NewDecoder(resp.Body).Decode(&s) == nil && s.StartedMS > lifetime
	})
	postJSON(t, e0.base+"/v1/completions", map[string]any{"model": model, "prompt": longPrompt("sloes").Content, "max_tokens": 1}, nil)
	eventually(t, "what it held is swept", func() bool {
		return regexp.MustCompile(`(?m)^warmroute_swept_blocks_total\{.*\} [1-9]`).MatchString(get(t, indexer+"/metrics"))
	})
	postJSON(t, indexer+"/unregister", map[string]any{"instance_id": "e1", "modelname": model}, nil)
	if stdout, stderr, code := output(t, "check", "--redis="+as(checkUser, a.URL)); code != 0 {
		t.Errorf("check: exit %d, %s%s", code, stdout, stderr)
	}
	if denied := a.denied(); len(denied) > 0 {
		t.Errorf("Redis has denied %q", denied)
	}
}

// A frontend that lacks a grant serves all the same, says what it lacks, and is well again as soon as it is granted.
func TestFrontendServesWithoutAGrant(t *testing.T) {
	a := startACL(t)
	e0 := startEngine(t, "e0")
	startIndexer(t, as(indexerUser, a.URL), workers(e0)...)
	p, frontend := startFrontend(t, as(frontendUser, a.URL), workers(e0)...)
	system, question := longPrompt("olives"), message{"user", "what is it?"}
	awaitOverlap(t, frontend, "e0", chat(t, frontend, system, question), system, question)
	for _, command := range readerGrants {
		a.setUser(frontendUser, "-"+command)
		said := false
		eventually(t, "the frontend says that it lacks "+command, func() bool {
			chat(t, frontend, system, question) // fails the test on anything but a good answer
			overlaps(t, frontend, system, question)
			status(t, frontend+"/dump")
			said = slices.ContainsFunc(p.log(), func(line string) bool {
				return strings.Contains(line, "NOPERM") && strings.Contains(line, "'"+command+"'")
			})
			return said
		})
		a.setUser(frontendUser, "+"+command)
		eventually(t, "the frontend is well again with "+command, func() bool {
			return chat(t, frontend, system, question).state == "exact" && status(t, frontend+"/dump") == 200
		})
	}
}

// readerGrants are those that security-acl.md says are enough to look up.
var readerGrants = []string{"get", "hgetall", "hmget", "smembers", "zcard", "zrangebyscore"}

// A frontend that may only read looks up all the same, chooses by its own load, and says that it does.
func TestFrontendThatMayOnlyRead(t *testing.T) {
	a := startACL(t)
	e0 := startEngine(t, "e0")
	startIndexer(t, as(indexerUser, a.URL), workers(e0)...)
	lines, _ := aclLines(t)
	for _, command := range grants(lines[frontendUser]) {
		if !slices.Contains(readerGrants, command) {
			a.setUser(frontendUser, "-"+command)
		}
	}
	p, frontend := startFrontend(t, as(frontendUser, a.URL), workers(e0)...)
	system, question := longPrompt("figs"), message{"user", "what is it?"}
	first := chat(t, frontend, system, question)
	awaitOverlap(t, frontend, "e0", first, system, question)
	if again := chat(t, frontend, system, question); again.state != "exact" || again.overlap == 0 {
		t.Errorf("%+v", again)
	}
	eventually(t, "the frontend says that it cannot count load", func() bool {
		return slices.ContainsFunc(p.log(), func(line string) bool {
			return strings.Contains(line, "index link down") && strings.Contains(line, " leases") && strings.Contains(line, "NOPERM")
		})
	})
}

// An indexer that lacks a grant says so, and what it could not write is not lost; requests go on.
func TestIndexerWaitsForAGrant(t *testing.T) {
	a := startACL(t)
	e0 := startEngine(t, "e0")
	p, _ := startIndexer(t, as(indexerUser, a.URL), workers(e0)...)
	_, frontend := startFrontend(t, as(frontendUser, a.URL), workers(e0)...)
	for i, command := range []string{"evalsha", "hset"} {
		system, question := longPrompt(fmt.Sprint("peaches ", i)), message{"user", "what is it?"}
		a.setUser(indexerUser, "-"+command)
		first := chat(t, frontend, system, question)
		if i == 0 {
			p.awaitLine("the index does not answer, events wait in the buffer", "NOPERM", "'evalsha'")
		} else {
			p.awaitLine("the index does not answer, events wait in the buffer", "script")
		}
		if second := chat(t, frontend, system, question); second.cached == 0 {
			t.Errorf("a request meanwhile: %+v", second)
		}
		a.setUser(indexerUser, "+"+command)
		eventually(t, "the indexer can write again", func() bool {
			n := 0
			for _, line := range p.log() {
				if strings.Contains(line, "the index answers again") {
					n++
				}
			}
			return n == i+1
		})
		awaitOverlap(t, frontend, "e0", first, system, question)
	}
}

// A wrong password is no reason not to start or not to serve.
func TestWrongPasswordIsSaid(t *testing.T) {
	a := startACL(t)
	e0 := startEngine(t, "e0")
	p, frontend := startFrontend(t, strings.Replace(as(frontendUser, a.URL), "PASSWORD", "WRONG", 1), workers(e0)...)
	if got := chat(t, frontend, longPrompt("kiwis"), message{"user", "what is it?"}); got.state != "degraded" {
		t.Errorf("index state %q, want degraded", got.state)
	}
	p.awaitLine("index link down", "WRONGPASS")
	if log := strings.Join(p.log(), "\n"); strings.Contains(log, "FRONTEND-WRONG") {
		t.Error("the log tells the password")
	}
}

func TestACLUsersInACluster(t *testing.T) {
	c := storetest.Cluster(t)
	lines, further := aclLines(t)
	var nodes []*admin
	for _, n := range c.Nodes {
		a := newAdmin(t, n)
		nodes = append(nodes, a)
		for _, user := range []string{frontendUser, indexerUser} {
			a.setUser(user, append(lines[user], further...)...)
		}
	}
	everywhere := func(f func(*admin)) {
		for _, a := range nodes {
			f(a)
		}
	}
	work := func() error {
		everywhere(func(a *admin) {
			a.do("FLUSHALL")
			a.do("SCRIPT", "FLUSH")
			a.do("ACL", "LOG", "RESET")
		})
		if err := indexerCycle(t.Context(), openStore(t, as(indexerUser, c.URL))); err != nil {
			return fmt.Errorf("indexer: %w", err)
		}
		s := openStore(t, as(indexerUser, c.URL))
		_, _, err := s.Register(t.Context(), store.StreamID{Pool: aclPool, WorkerRank: kvcache.WorkerRank{Worker: "v"}}, store.Registration{BlockSize: 4})
		if err != nil {
			return err
		}
		f := openStore(t, as(frontendUser, c.URL))
		if _, state, err := f.Lookup(t.Context(), aclPool, []kvcache.BlockHash{1}, store.LookupOptions{}); err != nil || state != kvcache.Exact {
			return fmt.Errorf("lookup: %s %w", state, err)
		}
		return migrating(t, nodes, f)
	}
	if err := work(); err != nil {
		t.Fatal(err)
	}
	everywhere(func(a *admin) {
		if denied := a.denied(); len(denied) > 0 {
			t.Errorf("%s has denied %q", a.Addr, denied)
		}
	})
	for _, grant := range further {
		if grant == "+command" { // asked for, and not missed
			continue
		}
		everywhere(func(a *admin) {
			for _, user := range []string{frontendUser, indexerUser} {
				a.setUser(user, append(lines[user], further...)...)
				a.setUser(user, "-"+strings.TrimPrefix(grant, "+"))
			}
		})
		if err := work(); err == nil || !strings.Contains(err.Error(), "NOPERM") {
			t.Errorf("without %s: %v, want NOPERM", grant, err)
		}
	}
}

// migrating asks for a pool whose slot is on its way to another node.
func migrating(t *testing.T, nodes []*admin, s *store.Store) error {
	t.Helper()
	slot := nodes[0].do("CLUSTER", "KEYSLOT", "{default:moving}").(int64)
	ids := make([]string, len(nodes))
	from := -1
	for i, a := range nodes {
		ids[i] = a.do("CLUSTER", "MYID").(string)
		if _, err := a.run("EXISTS", "{default:moving}"); err == nil {
			from = i
		}
	}
	to := (from + 1) % len(nodes)
	nodes[to].do("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[from])
	nodes[from].do("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to])
	defer nodes[from].do("CLUSTER", "SETSLOT", slot, "STABLE")
	defer nodes[to].do("CLUSTER", "SETSLOT", slot, "STABLE")
	if _, ok, err := s.PoolConfig(t.Context(), kvcache.PoolID{Tenant: kvcache.DefaultTenant, Model: "moving"}); ok || err != nil {
		return fmt.Errorf("pool of a moving slot: %v %w", ok, err)
	}
	return nil
}

// With a user of its own on the sentinel the store finds the master, and the next one after a failover.
func TestACLUsersUnderASentinel(t *testing.T) {
	lines, _ := aclLines(t)
	s := storetest.Sentinel(t)
	for _, n := range []*redisproc.Server{s.Master, s.Replica} {
		a := newAdmin(t, n)
		for _, user := range []string{frontendUser, indexerUser} {
			a.setUser(user, lines[user]...)
		}
	}
	watcher := newAdmin(t, s.Watcher)
	watcher.setUser(sentinelUser, lines[sentinelUser]...)
	url := as(indexerUser, s.URL) + "?sentinel_username=" + sentinelUser + "&sentinel_password=" + secret(sentinelUser)

	// What finds the master is needed; the rest finds the other sentinels, and brings word of a failover.
	const find = "sentinel|get-master-addr-by-name"
	watcher.setUser(sentinelUser, "-"+find)
	if err := indexerCycle(t.Context(), openStore(t, url)); err == nil || !strings.Contains(err.Error(), "NOPERM") || !strings.Contains(err.Error(), find) {
		t.Errorf("without %s: %v", find, err)
	}
	watcher.setUser(sentinelUser, lines[sentinelUser]...)
	watcher.do("ACL", "LOG", "RESET")

	ix := openStore(t, url)
	if err := indexerCycle(t.Context(), ix); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the sentinel takes the replica for a good one", func() bool {
		_, err := watcher.run("SENTINEL", "FAILOVER", "main")
		return err == nil
	})
	eventually(t, "the store has found the new master", func() bool {
		addr := watcher.do("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main").([]any)
		return net.JoinHostPort(addr[0].(string), addr[1].(string)) == s.Replica.Addr && indexerCycle(t.Context(), ix) == nil
	})
	if denied := watcher.denied(); len(denied) > 0 {
		t.Errorf("the sentinel has denied %q", denied)
	}
}
