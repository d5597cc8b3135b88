package integration

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
)

// After evictions, lost events, a crashed engine, a killed indexer and a Redis that came back empty, the
// index holds exactly what the engines hold.
func TestIndexEqualsTheEnginesAfterTrouble(t *testing.T) {
	redis := startRedis(t)
	// Caches so small that most of what is computed is evicted again.
	e0, e1 := startEngine(t, "e0", "--blocks=300"), startEngine(t, "e1", "--blocks=300")
	first, _ := startIndexer(t, redis.url(), workers(e0, e1)...)
	_, second := startIndexer(t, redis.url(), workers(e0, e1)...)
	_, frontend := startFrontend(t, redis.url(), workers(e0, e1)...)

	n := 0
	ask := func(requests int) {
		for range requests {
			n++
			body := map[string]any{"model": model, "max_tokens": 20, "messages": []message{longPrompt(fmt.Sprint("trouble ", n/3)), {"user", fmt.Sprint("question ", n)}}}
			postJSON(t, frontend+"/v1/chat/completions", body, nil) // one that meets the crash may fail
		}
	}
	ask(12)
	postJSON(t, e0.base+"/sim/drop_events", map[string]any{"n": 3}, nil)
	ask(12)
	first.kill()
	ask(6)
	awaitSameBlocks(t, second, e0, e1)

	lifetime := e1.state().StartedMS
	if resp := postJSON(t, e1.base+"/sim/crash", map[string]any{"restart_after_ms": 200}, nil); resp.StatusCode != http.StatusAccepted {
		t.Fatalf("crash: %d", resp.StatusCode)
	}
	ask(12)
	eventually(t, "the engine is back and serves", func() bool {
		if status(t, e1.base+"/health") != http.StatusOK {
			return false
		}
		ask(1)
		s := e1.state()
		return s.StartedMS != lifetime && s.Ranks[0].Resident > 0
	})
	ask(12)
	awaitSameBlocks(t, second, e0, e1)

	redis.stop()
	ask(6)
	redis.start()
	ask(6)
	awaitSameBlocks(t, second, e0, e1)
	if stdout, stderr, code := output(t, "check", "--redis="+redis.url()); code != 0 {
		t.Errorf("check: exit %d, %s%s", code, stdout, stderr)
	}
}

// awaitSameBlocks waits until the index holds as many blocks of each engine as the engine does.
func awaitSameBlocks(t *testing.T, indexer string, engines ...*engine) {
	t.Helper()
	var held, indexed map[string]int
	defer func() { t.Logf("engines hold %v, the index %v", held, indexed) }()
	eventually(t, "the index holds what the engines hold", func() bool {
		held, indexed = map[string]int{}, indexedBlocks(t, indexer)
		for _, e := range engines {
			s := e.state()
			held[e.id] = s.Ranks[0].Resident
			if held[e.id] == 0 || held[e.id] != indexed[e.id] {
				return false
			}
		}
		return true
	})
}

// indexedBlocks counts the blocks of each worker in the index.
func indexedBlocks(t *testing.T, indexer string) map[string]int {
	t.Helper()
	blocks := map[string]int{}
	resp, err := http.Get(indexer + "/dump")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		if strings.TrimSpace(lines.Text()) == "" {
			continue
		}
		var e kvcache.RouterEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("%v: %.200s", err, lines.Text())
		}
		if e.Event.Data.Stored != nil {
			blocks[string(e.WorkerID)] += len(e.Event.Data.Stored.Blocks)
		}
	}
	return blocks
}
