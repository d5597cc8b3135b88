package integration

import (
	"net/http"
	"testing"
)

// scores asks a frontend's index how many of the tokens each worker holds, under a model or an adapter.
func scores(t *testing.T, frontend, name string, tokens []int) map[string]int {
	t.Helper()
	var found struct {
		Scores map[string]map[string]int
	}
	if resp := postJSON(t, frontend+"/query", map[string]any{"model": name, "token_ids": tokens}, &found); resp.StatusCode != http.StatusOK {
		t.Fatalf("query: status %d", resp.StatusCode)
	}
	held := map[string]int{}
	for worker, ranks := range found.Scores {
		for _, n := range ranks {
			held[worker] = max(held[worker], n)
		}
	}
	return held
}

// complete has an engine compute a prompt of token ids, and so cache its full blocks.
func complete(t *testing.T, e *engine, name string, tokens []int) {
	t.Helper()
	if resp := postJSON(t, e.base+"/v1/completions", map[string]any{"model": name, "prompt": tokens, "max_tokens": 1}, nil); resp.StatusCode != http.StatusOK {
		t.Fatalf("completion at %s: status %d", e.id, resp.StatusCode)
	}
}

func numbers(from, n int) []int {
	tokens := make([]int, n)
	for i := range tokens {
		tokens[i] = from + i
	}
	return tokens
}

// Two engines name equal blocks differently, each by hashes of its own seed, and serve adapters: the index knows equal prefixes for equal,
// and different adapters for different, whatever the engines call them; and only full blocks count.
func TestEqualPrefixesOfUnlikeEngines(t *testing.T) {
	redis := startRedis(t)
	e0, e1 := startEngine(t, "w0", "--seed=1", "--lora=ad1,ad2"), startEngine(t, "w1", "--seed=2", "--lora=ad1,ad2")
	startIndexer(t, redis.url(), workers(e0, e1)...)
	_, frontend := startFrontend(t, redis.url(), append(workers(e0, e1), "--lookup-budget=5s")...)
	prompt := numbers(100, 40) // two full blocks and a half
	complete(t, e0, model, prompt)
	complete(t, e1, model, prompt)
	complete(t, e1, "ad1", prompt)
	eventually(t, "the index knows the blocks of both", func() bool {
		held := scores(t, frontend, model, prompt)
		return held["w0"] == 32 && held["w1"] == 32 && scores(t, frontend, "ad1", prompt)["w1"] == 32
	})
	if held := scores(t, frontend, "ad1", prompt); held["w0"] != 0 {
		t.Errorf("blocks of the base model count for an adapter: %v", held)
	}
	if held := scores(t, frontend, "ad2", prompt); len(held) != 0 {
		t.Errorf("blocks of one adapter count for another: %v", held)
	}
	for n, want := range map[int]int{1: 0, 15: 0, 16: 16, 17: 16, 31: 16, 32: 32, 33: 32} {
		if held := scores(t, frontend, model, prompt[:n]); held["w0"] != want || held["w1"] != want {
			t.Errorf("%d tokens: %v, want %d at both", n, held, want)
		}
	}
	if resp := postJSON(t, frontend+"/v1/completions", map[string]any{"model": model, "prompt": prompt[:15], "max_tokens": 1}, nil); resp.StatusCode != http.StatusOK ||
		resp.Header.Get("X-Kv-Prompt-Blocks") != "0" || resp.Header.Get("X-Kv-Index-State") == "degraded" {
		t.Errorf("a prompt shorter than a block: status %d, %v", resp.StatusCode, resp.Header)
	}
}

// A sleeping engine has dropped its cache and cannot say so before its next step: then it does, and the index forgets.
func TestSleepingEngineIsForgottenWithItsNextStep(t *testing.T) {
	redis := startRedis(t)
	e := startEngine(t, "w0")
	startIndexer(t, redis.url(), workers(e)...)
	_, frontend := startFrontend(t, redis.url(), append(workers(e), "--lookup-budget=5s")...)
	prompt, other := numbers(100, 64), numbers(5000, 64)
	complete(t, e, model, prompt)
	eventually(t, "the index knows the prompt", func() bool { return scores(t, frontend, model, prompt)["w0"] == 64 })
	for _, asleep := range []bool{true, false} {
		if resp := postJSON(t, e.base+"/sim/sleep", map[string]bool{"asleep": asleep}, nil); resp.StatusCode != http.StatusOK {
			t.Fatalf("sleep %v: status %d", asleep, resp.StatusCode)
		}
	}
	complete(t, e, model, other)
	eventually(t, "the index forgets what the engine lost", func() bool {
		return scores(t, frontend, model, prompt)["w0"] == 0 && scores(t, frontend, model, other)["w0"] == 64
	})
	if out, errOut, code := output(t, "check", "--redis="+redis.url()); code != 0 {
		t.Errorf("check: %s%s", out, errOut)
	}
}

// A worker and the only indexer die at the same moment: the next indexer has never heard of the worker, finds it in Redis, and lets its
// blocks go when its lease has ended. The other worker keeps its own.
func TestWorkerAndIndexerDieTogether(t *testing.T) {
	redis := startRedis(t)
	e0, e1 := startEngine(t, "w0"), startEngine(t, "w1")
	indexer, admin := startIndexer(t, redis.url())
	for _, e := range []*engine{e0, e1} {
		registration := map[string]any{
			"instance_id": e.id, "endpoint": e.events, "replay_endpoint": e.replay, "modelname": model, "url": e.base, "block_size": 16,
		}
		if resp := postJSON(t, admin+"/register", registration, nil); resp.StatusCode != http.StatusCreated {
			t.Fatalf("register: %d, want 201", resp.StatusCode)
		}
	}
	_, frontend := startFrontend(t, redis.url(), "--lookup-budget=5s")
	prompt := numbers(100, 64)
	complete(t, e0, model, prompt)
	complete(t, e1, model, prompt)
	eventually(t, "the index knows the prompt at both", func() bool {
		held := scores(t, frontend, model, prompt)
		return held["w0"] == 64 && held["w1"] == 64
	})
	e0.kill()
	indexer.kill()
	startIndexer(t, redis.url(), "--lease-grace=1s")
	eventually(t, "the dead worker's blocks leave", func() bool { return scores(t, frontend, model, prompt)["w0"] == 0 })
	if held := scores(t, frontend, model, prompt); held["w1"] != 64 {
		t.Errorf("the living worker: %v, want 64 tokens", held)
	}
	if out, errOut, code := output(t, "check", "--redis="+redis.url()); code != 0 {
		t.Errorf("check: %s%s", out, errOut)
	}
}
