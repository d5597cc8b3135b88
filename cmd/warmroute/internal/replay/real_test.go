package replay

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// The same trace through real frontends, real HTTP, real events and a real Redis: every request is answered, by the engine that the
// frontend names, and what conversations have in common is found where it was put.
func TestRealTime(t *testing.T) {
	storetest.Require(t, redisproc.Program, "apt-get install redis-server")
	o := options(conversations(t)[:120], KV)
	o.Frontends, o.TokenTime = 3, time.Millisecond
	done := 0
	o.Progress = func(int, int) { done++ }
	virtual := run(t, o)
	done = 0
	r, err := RunReal(t.Context(), o, 30, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Outcomes) != 120 || done != 120 || r.Frontends != 3 {
		t.Fatalf("%d outcomes, progress %d: %+v", len(r.Outcomes), done, r)
	}
	workers := map[int]int{}
	for _, x := range r.Outcomes {
		if workers[x.Worker]++; x.TTFT <= 0 || x.Hits > x.Blocks || x.Worker < 0 || x.Worker >= o.Workers {
			t.Fatalf("%+v", x)
		}
	}
	if len(workers) != o.Workers {
		t.Errorf("requests by worker: %v", workers)
	}
	if r.HitRatio < 0.2 { // a slow machine routes by what it knows late
		t.Errorf("hit ratio %.3f, in virtual time %.3f", r.HitRatio, virtual.HitRatio)
	}
}

func TestRealTimeRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Options)
		speed  float64
		want   string
	}{
		"a trap":               {func(o *Options) { o.Policy = LongestPrefix }, 1, "trap"},
		"sessions":             {func(o *Options) { o.Sessions = true }, 1, "virtual time only"},
		"no speed":             {func(*Options) {}, 0, "speed"},
		"a prompt too long":    {func(o *Options) { o.CacheBlocks = 2 }, 1, "more than a cache of 2 blocks holds"},
		"what is wrong anyway": {func(o *Options) { o.Rate = 0 }, 1, "rate"},
	} {
		o := Options{
			Trace: []Request{{Input: 1024, Output: 1, Blocks: []uint64{1, 2}}}, Policy: KV, Weights: choose.Default,
			Workers: 1, CacheBlocks: 10, Rate: 1, Load: 1, Frontends: 1,
		}
		c.change(&o)
		if _, err := RunReal(t.Context(), o, c.speed, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	storetest.Require(t, redisproc.Program, "apt-get install redis-server")
	ctx, cancel := context.WithCancel(t.Context())
	o := options(conversations(t), KV)
	o.Progress = func(done, _ int) {
		if done == 3 {
			cancel()
		}
	}
	if _, err := RunReal(ctx, o, 30, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a replay that was stopped has a result")
	}
}

func TestReadAnswer(t *testing.T) {
	const text, usage = `data: {"choices":[{"text":"a"}]}` + "\n\n", `data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":512}}}` + "\n\n"
	if a, err := readAnswer(strings.NewReader(text + usage + "data: [DONE]\n")); err != nil || a.cached != 512 || a.first.IsZero() {
		t.Errorf("%+v %v", a, err)
	}
	for name, broken := range map[string]string{
		"no end": text + usage, "no token": usage + "data: [DONE]\n", "no usage": text + "data: [DONE]\n",
		"an error": text + `data: {"error":{"message":"gone"}}` + "\n", "no JSON": "data: {\n", "nothing": "",
	} {
		if a, err := readAnswer(strings.NewReader(broken)); err == nil {
			t.Errorf("%s: %+v", name, a)
		}
	}
}
