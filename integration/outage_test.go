package integration

import (
	"bufio"
	"net/http"
	"strings"
	"syscall"
	"testing"
)

func TestRequestsAreServedWhileRedisIsAway(t *testing.T) {
	redis := startRedis(t)
	e0, e1 := startEngine(t, "e0"), startEngine(t, "e1")
	startIndexer(t, redis.url(), workers(e0, e1)...)
	_, frontend := startFrontend(t, redis.url(), workers(e0, e1)...)
	system, question := longPrompt("figs"), message{"user", "what is it?"}
	first := chat(t, frontend, system, question)
	awaitOverlap(t, frontend, first.worker, first, system, question)

	redis.stop()
	eventually(t, "answers say that the index is away", func() bool {
		return chat(t, frontend, system, question).state == "degraded" // and chat fails the test on anything but a good answer
	})
	var ready struct{ Degraded bool }
	if getJSON(t, frontend+"/ready", &ready); !ready.Degraded || status(t, frontend+"/ready") != http.StatusOK {
		t.Errorf("ready: %+v, want 200 and degraded", ready)
	}
	late, lateURL := startFrontend(t, redis.url(), workers(e0, e1)...)
	if a := chat(t, lateURL, system, question); a.state != "degraded" {
		t.Errorf("a frontend that starts without Redis: %+v", a)
	}
	late.terminate()

	redis.start() // empty: everything has to come back from the engines
	awaitOverlap(t, frontend, first.worker, first, system, question)
	if a := chat(t, frontend, system, question); a.state != "exact" || a.overlap == 0 {
		t.Errorf("after Redis is back: %+v", a)
	}
	if stdout, stderr, code := output(t, "check", "--redis="+redis.url()); code != 0 {
		t.Errorf("check: exit %d, %s%s", code, stdout, stderr)
	}
}

func TestEverythingStartsWithoutRedis(t *testing.T) {
	redis := startRedis(t)
	redis.stop()
	e0 := startEngine(t, "e0")
	startIndexer(t, redis.url(), workers(e0)...)
	_, frontend := startFrontend(t, redis.url(), workers(e0)...)
	system, question := longPrompt("dates"), message{"user", "what is it?"}
	first := chat(t, frontend, system, question)
	if first.state != "degraded" {
		t.Errorf("index state %q, want degraded", first.state)
	}
	redis.start()
	awaitOverlap(t, frontend, "e0", first, system, question)
}

func TestSIGTERMLetsStreamsFinish(t *testing.T) {
	for _, command := range []string{"serve", "frontend"} {
		t.Run(command, func(t *testing.T) {
			e0 := startEngine(t, "e0", "--decode-per-token=40ms")
			var p *process
			var url string
			if command == "serve" {
				p, url = startServe(t, workers(e0)...)
			} else {
				p, url = startFrontend(t, startRedis(t).url(), workers(e0)...)
			}
			body := `{"model": "sim-model", "stream": true, "max_tokens": 40, "messages": [{"role": "user", "content": "a long story"}]}`
			resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = resp.Body.Close() }()
			events := bufio.NewScanner(resp.Body)
			if !events.Scan() {
				t.Fatalf("no first event: %v", events.Err())
			}
			p.signal(syscall.SIGTERM)
			p.awaitLog("draining")
			last := ""
			for events.Scan() {
				if events.Text() != "" {
					last = events.Text()
				}
			}
			if events.Err() != nil || last != "data: [DONE]" {
				t.Errorf("the stream ended with %q, %v", last, events.Err())
			}
			if code := p.exitCode(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
		})
	}
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	e0 := startEngine(t, "e0")
	p, url := startServe(t, append(workers(e0), "--drain-delay=1h")...)
	p.signal(syscall.SIGTERM)
	p.awaitLog("draining")
	if got := status(t, url+"/ready"); got != http.StatusServiceUnavailable {
		t.Errorf("ready while draining: %d, want 503", got)
	}
	p.signal(syscall.SIGTERM)
	if code := p.exitCode(); code == 0 {
		t.Error("exit code 0 after a forced end")
	}
}

func TestIndexerAndEngineEndOnSIGTERM(t *testing.T) {
	redis := startRedis(t)
	e0 := startEngine(t, "e0")
	p, _ := startIndexer(t, redis.url(), workers(e0)...)
	p.terminate()
	e0.terminate()
}
