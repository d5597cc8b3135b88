package integration

import (
	"net/http"
	"strings"
	"testing"
)

// The main job with every part in its own process: two indexers that follow the same engines, two
// frontends that share nothing but Redis.
func TestConversationGoesToItsWarmWorkerThroughAnyFrontend(t *testing.T) {
	redis := startRedis(t)
	e0, e1, e2 := startEngine(t, "e0"), startEngine(t, "e1"), startEngine(t, "e2")
	startIndexer(t, redis.url(), workers(e0, e1, e2)...)
	startIndexer(t, redis.url(), workers(e0, e1, e2)...)
	_, frontend0 := startFrontend(t, redis.url(), workers(e0, e1, e2)...)
	_, frontend1 := startFrontend(t, redis.url()) // learns of the engines from the index

	for _, name := range []string{"apples", "pears", "plums"} {
		system, question := longPrompt(name), message{"user", "what is it?"}
		first := chat(t, frontend0, system, question)
		if first.state != "exact" || first.worker == "" {
			t.Fatalf("first turn: %+v", first)
		}
		awaitOverlap(t, frontend1, first.worker, first, system, question)

		second := chat(t, frontend1, system, question, message{"assistant", first.text}, message{"user", "are you sure?"})
		if second.worker != first.worker || second.state != "exact" {
			t.Errorf("second turn went to %s (%s), the first to %s", second.worker, second.state, first.worker)
		}
		if second.overlap < first.prompt/16 || second.cached < second.overlap*16 || second.overlap > second.blocks {
			t.Errorf("second turn: overlap %d of %d blocks, %d tokens cached, after a prompt of %d tokens", second.overlap, second.blocks, second.cached, first.prompt)
		}
	}

	stdout, stderr, code := output(t, "check", "--redis="+redis.url())
	if code != 0 || !strings.HasPrefix(stdout, "default:sim-model: sound (3 streams") {
		t.Errorf("check: exit %d, %s%s", code, stdout, stderr)
	}
}

func TestWorkersRegisterAndLeaveAtRunTime(t *testing.T) {
	redis := startRedis(t)
	e0 := startEngine(t, "e0")
	_, indexer := startIndexer(t, redis.url())
	p := start(t, "frontend", "--redis="+redis.url(), "--listen=127.0.0.1:0", "--poll-interval=100ms")
	frontend := p.url("frontend")
	if got := status(t, frontend+"/ready"); got != http.StatusServiceUnavailable {
		t.Errorf("ready without a worker: %d, want 503", got)
	}

	registration := map[string]any{
		"instance_id": e0.id, "endpoint": e0.events, "replay_endpoint": e0.replay, "modelname": model, "url": e0.base, "block_size": 16,
	}
	if resp := postJSON(t, indexer+"/register", registration, nil); resp.StatusCode != http.StatusCreated {
		t.Fatalf("register: %d, want 201", resp.StatusCode)
	}
	awaitReady(t, frontend)
	system, question := longPrompt("cherries"), message{"user", "what is it?"}
	first := chat(t, frontend, system, question)
	awaitOverlap(t, frontend, "e0", first, system, question)

	leaving := map[string]any{"instance_id": e0.id, "modelname": model}
	if resp := postJSON(t, indexer+"/unregister", leaving, nil); resp.StatusCode != http.StatusOK {
		t.Fatalf("unregister: %d, want 200", resp.StatusCode)
	}
	eventually(t, "the frontend forgets the worker", func() bool {
		return status(t, frontend+"/ready") == http.StatusServiceUnavailable
	})
}

func TestSecondIndexerWithAnotherBlockSizeIsRefused(t *testing.T) {
	redis := startRedis(t)
	e0 := startEngine(t, "e0")
	_, first := startIndexer(t, redis.url(), workers(e0)...)
	eventually(t, "the pool exists", func() bool {
		_, _, code := output(t, "check", "--redis="+redis.url(), "--pool=default:sim-model")
		return code == 0
	})

	// At run time, by the admin surface.
	registration := map[string]any{"instance_id": "e1", "endpoint": e0.events, "modelname": model, "block_size": 32}
	var refusal struct{ Error struct{ Message string } }
	resp := postJSON(t, first+"/register", registration, &refusal)
	if resp.StatusCode != http.StatusConflict || !strings.Contains(refusal.Error.Message, "16") || !strings.Contains(refusal.Error.Message, "32") {
		t.Errorf("register: %d %q, want 409 and both block sizes", resp.StatusCode, refusal.Error.Message)
	}

	// By configuration.
	second, _ := startIndexer(t, redis.url(), "--worker="+strings.Replace(e0.spec(), "block-size=16", "block-size=32", 1))
	second.awaitLine("16", "32", "block")
}

func TestServeNeedsNoRedis(t *testing.T) {
	e0, e1 := startEngine(t, "e0"), startEngine(t, "e1")
	_, url := startServe(t, workers(e0, e1)...)
	system := longPrompt("grapes")
	question := message{"user", "what is it?"}
	first := chat(t, url, system, question)
	awaitOverlap(t, url, first.worker, first, system, question)
	if second := chat(t, url, system, question); second.worker != first.worker || second.cached == 0 {
		t.Errorf("the same prompt went to %s and then to %s with %d tokens cached", first.worker, second.worker, second.cached)
	}
}
