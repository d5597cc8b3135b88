package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// activeLoads is GET /loads by worker.
func activeLoads(t *testing.T, frontend string) (byWorker map[string]int, all int) {
	t.Helper()
	res, err := http.Get(frontend + "/loads")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	var list []struct {
		Worker   string `json:"worker_id"`
		Requests int    `json:"active_requests"`
	}
	if err := json.NewDecoder(res.Body).Decode(&list); err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("/loads: %d, %v", res.StatusCode, err)
	}
	byWorker = map[string]int{}
	for _, l := range list {
		byWorker[l.Worker] += l.Requests
		all += l.Requests
	}
	return byWorker, all
}

// A frontend that is killed with 100 streams open leaves its load in Redis for the length of a lease and no longer, and
// the others spread their requests evenly meanwhile.
func TestKilledFrontendLeavesNoLoad(t *testing.T) {
	const streams, requests, lease = 100, 40, 3 * time.Second
	redis := startRedis(t)
	// Answers of ten minutes: the streams outlast the test.
	var engines []*engine
	for i := range 4 {
		engines = append(engines, startEngine(t, fmt.Sprint("e", i), "--decode-per-token=1s"))
	}
	startIndexer(t, redis.url(), workers(engines...)...)
	args := append(workers(engines...), "--load-lease="+lease.String(), "--predict-ttl=0s", "--lookup-budget=5s")
	victim, doomed := startFrontend(t, redis.url(), args...)
	_, other := startFrontend(t, redis.url(), args...)

	ctx, cancel := context.WithCancel(t.Context())
	var open sync.WaitGroup
	defer open.Wait()
	defer cancel()
	stream := func(frontend string, i int) {
		body := fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":600,"messages":[{"role":"user","content":"%d %s"}]}`, model, i, strings.Repeat("why? ", 40))
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, frontend+"/v1/chat/completions", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		open.Go(func() {
			if res, err := http.DefaultClient.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, res.Body)
				_ = res.Body.Close()
			}
		})
	}
	for i := range streams {
		stream(doomed, i)
	}
	eventually(t, "all streams count", func() bool { _, n := activeLoads(t, other); return n == streams })
	victim.kill()
	killed := time.Now()

	for i := range requests { // while the dead one's load is still there
		stream(other, streams+i)
	}
	eventually(t, "the dead frontend's load is gone, and the living one's is not", func() bool {
		_, n := activeLoads(t, other)
		return n == requests
	})
	t.Logf("the load of %d streams was gone %v after the kill, with leases of %v", streams, time.Since(killed).Round(10*time.Millisecond), lease)
	byWorker, _ := activeLoads(t, other)
	for w, n := range byWorker {
		if n < requests/len(engines)-5 || n > requests/len(engines)+5 {
			t.Errorf("%s has %d of %d requests: %v", w, n, requests, byWorker)
		}
	}
}
