package integration

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/indexer/zmtp"
	"github.com/warmroute/warmroute/kvcache"
)

// streamState is a line of an indexer's GET /workers.
type streamState struct {
	Worker     string
	Connected  bool
	Registered bool
	Generation int64
	Watermark  int64
}

func streamsOf(t *testing.T, indexer string) map[string]streamState {
	t.Helper()
	var v struct{ Workers []streamState }
	getJSON(t, indexer+"/workers", &v)
	out := map[string]streamState{}
	for _, s := range v.Workers {
		out[s.Worker] = s
	}
	return out
}

// awaitFollowing waits until an indexer follows all engines as far as they have published, and returns their generations.
func awaitFollowing(t *testing.T, indexer string, engines ...*engine) map[string]int64 {
	t.Helper()
	generations := map[string]int64{}
	eventually(t, indexer+" follows the engines", func() bool {
		states := streamsOf(t, indexer)
		for _, e := range engines {
			s := states[e.id]
			if generations[e.id] = s.Generation; !s.Connected || !s.Registered {
				return false
			}
		}
		return true
	})
	return generations
}

// underLoad sends requests to a frontend from some clients until it is stopped.
func underLoad(t *testing.T, frontend string, clients int) (stop func() int) {
	t.Helper()
	var requests, failed atomic.Int64
	var running sync.WaitGroup
	done := make(chan struct{})
	for c := range clients {
		running.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-done:
					return
				default:
				}
				body := map[string]any{"model": model, "max_tokens": 20, "messages": []message{
					longPrompt(fmt.Sprint("client ", c, " subject ", n/3)), {"user", fmt.Sprint("question ", n)},
				}}
				if resp := postJSON(t, frontend+"/v1/chat/completions", body, nil); resp.StatusCode != http.StatusOK {
					failed.Add(1)
				}
				requests.Add(1)
			}
		})
	}
	stopped := false
	stop = func() int {
		if !stopped {
			stopped = true
			close(done)
			running.Wait()
			if n := failed.Load(); n > 0 {
				t.Errorf("%d of %d requests failed", n, requests.Load())
			}
		}
		return int(requests.Load())
	}
	t.Cleanup(func() { stop() })
	return stop
}

// heldBy is what an engine holds by its own account, which is all that it ever published: engine hashes, as the index keeps them.
func heldBy(t *testing.T, e *engine) map[uint64]bool {
	t.Helper()
	conn, err := zmtp.Dial(t.Context(), e.replay, zmtp.SocketDEALER, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.Send(wire.ReplayRequest(0)...); err != nil {
		t.Fatal(err)
	}
	copies := map[kvcache.EngineHash]int{}
	for next := uint64(0); ; next++ {
		frames, err := conn.Recv()
		if err != nil {
			t.Fatal(err)
		}
		r, err := wire.ParseReplay(frames)
		if err != nil {
			t.Fatal(err)
		}
		if r.Kind == wire.ReplyEnd {
			break
		}
		b, err := wire.Decode(r.Payload)
		if err != nil || r.Seq != next {
			t.Fatalf("message %d, want %d: %v", r.Seq, next, err)
		}
		for _, event := range b.Events {
			for _, h := range event.Hashes {
				if event.Kind == wire.Stored {
					copies[h]++
				} else if copies[h]--; copies[h] == 0 {
					delete(copies, h)
				}
			}
		}
	}
	held := map[uint64]bool{}
	for h := range copies {
		held[h.Score()] = true
	}
	return held
}

// indexedOf are the engine hashes of a worker's blocks in the index.
func indexedOf(t *testing.T, indexer, worker string) map[uint64]bool {
	t.Helper()
	resp, err := http.Get(indexer + "/dump")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	held := map[uint64]bool{}
	for lines := json.NewDecoder(resp.Body); lines.More(); {
		var e kvcache.RouterEvent
		if err := lines.Decode(&e); err != nil {
			t.Fatal(err)
		}
		if string(e.WorkerID) == worker && e.Event.Data.Stored != nil {
			for _, b := range e.Event.Data.Stored.Blocks {
				held[b.EngineHash.Score()] = true
			}
		}
	}
	return held
}

// Indexers die by SIGKILL one after the other under load, each at another moment of its life, and are replaced; then all are
// updated in turn. No generation ends, which is what a loss would cost, and at the end the index equals the caches.
func TestIndexersKilledInTurnLoseNothing(t *testing.T) {
	redis := startRedis(t)
	engines := []*engine{startEngine(t, "e0", "--blocks=600", "--duplicates"), startEngine(t, "e1", "--blocks=600")}
	_, frontend := startFrontend(t, redis.url(), workers(engines...)...)
	type indexer struct {
		*process
		url string
	}
	launch := func() indexer {
		p, url := startIndexer(t, redis.url(), workers(engines...)...)
		return indexer{p, url}
	}
	fleet := []indexer{launch(), launch()}
	before := awaitFollowing(t, fleet[0].url, engines...)
	awaitFollowing(t, fleet[1].url, engines...)
	stop := underLoad(t, frontend, 4)

	published := func() (n int64) {
		for _, e := range engines {
			n += e.state().Ranks[0].LastSeq
		}
		return n
	}
	more := func(messages int64) {
		t.Helper()
		from := published()
		eventually(t, "the engines publish", func() bool { return published() >= from+messages })
	}
	for round := range 6 {
		more(20)
		victim := round % len(fleet)
		fleet[victim].kill()
		more(20) // the other one alone
		fleet[victim] = launch()
		if round%2 == 0 {
			awaitFollowing(t, fleet[victim].url, engines...)
		} else {
			fleet[victim].url = fleet[victim].process.url("indexer")
			awaitFollowing(t, fleet[victim].url, engines...)
			more(5)
		}
	}
	for i := range fleet { // a rolling update
		next := launch()
		awaitFollowing(t, next.url, engines...)
		fleet[i].terminate()
		fleet[i] = next
		more(10)
	}
	requests := stop()
	awaitSameBlocks(t, fleet[0].url, engines...)
	for _, e := range engines {
		held := heldBy(t, e)
		eventually(t, "the index holds the very blocks of "+e.id, func() bool { return maps.Equal(held, indexedOf(t, fleet[1].url, e.id)) })
	}
	for id, generation := range awaitFollowing(t, fleet[0].url, engines...) {
		if generation != before[id] {
			t.Errorf("%s is in another generation than at first: something was lost", id)
		}
	}
	t.Logf("%d requests, %d messages, 6 indexers killed and 2 updated", requests, published())
	if stdout, stderr, code := output(t, "check", "--redis="+redis.url()); code != 0 {
		t.Errorf("check: exit %d, %s%s", code, stdout, stderr)
	}
}

// The only indexer dies with 100,000 blocks in the index and comes back: lookups are answered from Redis, so that no decision
// is blind meanwhile, and nothing is read anew from the engines.
func TestIndexerRestartLeavesNoDecisionBlind(t *testing.T) {
	const prompts, blocks, blockSize, asked = 50, 2_000, 16, 64
	redis := startRedis(t)
	engines := []*engine{startEngine(t, "e0", "--blocks=120000"), startEngine(t, "e1", "--blocks=120000")}
	_, frontend := startFrontend(t, redis.url(), append(workers(engines...), "--predict-ttl=0s", "--lookup-budget=2s")...) // a busy machine is no blindness
	ix, url := startIndexer(t, redis.url(), workers(engines...)...)
	awaitFollowing(t, url, engines...)
	prompt := func(p, blocks int) []int {
		tokens := make([]int, blocks*blockSize+1) // the last token is always computed
		for i := range tokens {
			tokens[i] = (p*7919 + i*31) % 30_000
		}
		return tokens
	}
	complete := func(p, blocks int) *http.Response {
		return postJSON(t, frontend+"/v1/completions", map[string]any{"model": model, "prompt": prompt(p, blocks), "max_tokens": 1}, nil)
	}
	for p := range prompts {
		if resp := complete(p, blocks); resp.StatusCode != http.StatusOK {
			t.Fatalf("prompt %d: status %d", p, resp.StatusCode)
		}
	}
	held := func() (n int) {
		for _, e := range engines {
			n += e.state().Ranks[0].Resident
		}
		return n
	}
	eventually(t, "all blocks are indexed", func() bool {
		n := 0
		for _, blocks := range indexedBlocks(t, url) {
			n += blocks
		}
		return n == held() && n >= prompts*blocks
	})
	before := awaitFollowing(t, url, engines...)

	decisions, blind := 0, 0
	decide := func() { // by what the index says, since a choice also weighs load
		var found struct {
			Scores map[string]map[string]int
		}
		resp := postJSON(t, frontend+"/query", map[string]any{"model": model, "token_ids": prompt(decisions%prompts, asked)}, &found)
		decisions++
		most := 0
		for _, ranks := range found.Scores {
			for _, n := range ranks {
				most = max(most, n)
			}
		}
		if resp.StatusCode != http.StatusOK || most != asked*blockSize {
			if blind++; blind < 5 {
				t.Logf("blind: %v %v", resp.Header, found)
			}
		}
	}
	for range 100 {
		decide()
	}
	ix.kill()
	for range 200 {
		decide()
	}
	ix = start(t, append([]string{"indexer", "--redis=" + redis.url(), "--admin-listen=127.0.0.1:0"}, workers(engines...)...)...)
	for range 200 {
		decide()
	}
	again := ix.url("indexer")
	for id, generation := range awaitFollowing(t, again, engines...) {
		if generation != before[id] {
			t.Errorf("%s is in another generation after the restart", id)
		}
	}
	for range 100 {
		decide()
	}
	t.Logf("%d blocks, %d decisions around the restart, %d blind", held(), decisions, blind)
	if blind > 0 {
		t.Errorf("%d of %d decisions were blind", blind, decisions)
	}
}

// A worker whose events go nowhere is reported by name soon after it has served.
func TestWorkerThatNeverPublishesIsReported(t *testing.T) {
	redis := startRedis(t)
	e, good := startEngine(t, "mute"), startEngine(t, "good")
	e.events, e.replay = "tcp://127.0.0.1:"+freePort(t), e.events // somebody else's port
	ix, url := startIndexer(t, redis.url(), workers(e, good)...)
	for _, e := range []*engine{e, good} {
		if resp := postJSON(t, e.base+"/v1/completions", map[string]any{"model": model, "prompt": longPrompt("x").Content, "max_tokens": 1}, nil); resp.StatusCode != http.StatusOK {
			t.Fatal(resp.Status)
		}
	}
	ix.awaitLine("has never published a KV event", `"worker":"mute/0"`)
	var v struct {
		Workers []struct {
			Worker string
			Silent bool
		}
	}
	getJSON(t, url+"/workers", &v)
	for _, w := range v.Workers {
		if w.Silent != (w.Worker == "mute") {
			t.Errorf("%+v", w)
		}
	}
}

// An engine killed with SIGKILL leaves the index within its lease, though nobody unregisters it, and its successor at the same
// address comes back by itself. The other engine stays.
func TestKilledEngineLeavesTheIndexAndReturns(t *testing.T) {
	redis := startRedis(t)
	dead, other := startEngine(t, "dead"), startEngine(t, "other")
	engines := []*engine{dead, other}
	var indexers []string
	for range 2 {
		_, url := startIndexer(t, redis.url(), append(workers(engines...), "--lease-grace=1s")...)
		awaitFollowing(t, url, engines...)
		indexers = append(indexers, url)
	}
	serve := func(e *engine, text string) {
		t.Helper()
		body := map[string]any{"model": model, "prompt": longPrompt(text).Content, "max_tokens": 1}
		if resp := postJSON(t, e.base+"/v1/completions", body, nil); resp.StatusCode != http.StatusOK {
			t.Fatal(resp.Status)
		}
	}
	serve(dead, "one")
	serve(other, "one")
	awaitSameBlocks(t, indexers[0], engines...)

	dead.kill()
	eventually(t, "the dead engine's blocks leave the index", func() bool {
		blocks := indexedBlocks(t, indexers[1])
		return blocks["dead"] == 0 && blocks["other"] > 0
	})
	again := startEngine(t, "dead", "--http-listen="+strings.TrimPrefix(dead.base, "http://"),
		"--events-listen="+dead.events, "--replay-listen="+dead.replay)
	serve(again, "two")
	awaitSameBlocks(t, indexers[0], again, other)
	awaitFollowing(t, indexers[1], again, other)
	if stdout, stderr, code := output(t, "check", "--redis="+redis.url()); code != 0 {
		t.Errorf("check: exit %d, %s%s", code, stdout, stderr)
	}
}
