package frontend

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/sim"
	"github.com/warmroute/warmroute/store"
)

// What the fallback is worth: conversations as in the demo, at simulated engines whose caches hold all of them
// together but not each, behind two frontends that a client asks in turn.

// oracle is an index that is always right: it looks into the engines.
type oracle struct {
	fakeIndex
	engines []*sim.Engine
	away    bool
}

func (x *oracle) Lookup(_ context.Context, _ kvcache.PoolID, blocks []kvcache.BlockHash, _ store.LookupOptions) (kvcache.OverlapScores, kvcache.IndexState, error) {
	out := kvcache.OverlapScores{Scores: map[kvcache.WorkerRank]kvcache.Overlap{}}
	if x.away {
		return out, kvcache.Degraded, store.ErrUnavailable
	}
	for i, e := range x.engines {
		held := map[kvcache.BlockHash]bool{}
		for _, b := range e.Resident(0) {
			held[b.Content] = true
		}
		n := 0
		for n < len(blocks) && held[blocks[n]] {
			n++
		}
		if n > 0 {
			out.Scores[kvcache.WorkerRank{Worker: fmt.Sprint("engine-", i)}] = kvcache.Overlap{Device: n, Host: n, Disk: n, Any: n}
		}
	}
	return out, kvcache.Exact, nil
}

type trial struct {
	fallback string
	away     bool          // the index
	sessions bool          // clients name their conversations
	perToken time.Duration // decoding
}

// worth is what the clients saw.
type worth struct {
	hitRatio float64 // cached of all prompt tokens
	ttft     float64 // mean, in ms
	spread   float64 // requests of the busiest engine over the mean
}

func (w trial) play(t testing.TB) worth {
	const engines, parallel, chats, turns = 4, 16, 48, 6
	ctx, cancel := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel()
	x := &oracle{fakeIndex: fakeIndex{blockSize: 16}, away: w.away}
	var workers []Worker
	for i := range engines {
		e, err := sim.New(sim.Options{
			Model: "llama", BlockSize: 16, Blocks: 1400, MaxModelLen: 8192, PrefillPerToken: 100 * time.Microsecond, DecodePerToken: w.perToken,
		})
		if err != nil {
			t.Fatal(err)
		}
		serving.Go(func() { _ = e.Run(ctx) })
		x.engines = append(x.engines, e)
		workers = append(workers, Worker{ID: fmt.Sprint("engine-", i), URL: e.URL()})
	}
	frontends := []*running{}
	for range 2 {
		frontends = append(frontends, start(t, Options{Index: x, Workers: workers, Fallback: w.fallback}))
	}

	var mu sync.Mutex
	var prompt, cached, asked int
	var ttft time.Duration
	busy := map[string]int{}
	var turn atomic.Int64
	chat := func(id, history string) (reply string) {
		f := frontends[turn.Add(1)%2]
		var header []string
		if w.sessions {
			header = []string{"x-session-id", id}
		}
		sent := time.Now()
		res, err := client.Do(f.request(ctx, "/v1/chat/completions",
			`{"model":"llama","max_tokens":24,"stream":true,"stream_options":{"include_usage":true},"messages":[`+history+`]}`, header...))
		if err != nil || res.StatusCode != 200 {
			t.Errorf("%v %v", res, err)
			return ""
		}
		defer func() { _ = res.Body.Close() }()
		var first time.Duration
		lines := bufio.NewScanner(res.Body)
		for lines.Scan() {
			data, ok := strings.CutPrefix(lines.Text(), "data: ")
			if !ok || data == "[DONE]" {
				continue
			}
			var chunk struct {
				Choices []struct{ Delta struct{ Content string } }
				Usage   *struct {
					Prompt  int `json:"prompt_tokens"`
					Details struct {
						Cached int `json:"cached_tokens"`
					} `json:"prompt_tokens_details"`
				}
			}
			if err := json.Unmarshal([]byte(data), &chunk); err != nil {
				t.Error(err)
				return ""
			}
			for _, c := range chunk.Choices {
				if first == 0 && c.Delta.Content != "" {
					first = time.Since(sent)
				}
				reply += c.Delta.Content
			}
			if u := chunk.Usage; u != nil {
				mu.Lock()
				asked++
				prompt += u.Prompt
				cached += u.Details.Cached
				ttft += first
				busy[res.Header.Get(headerWorker)]++
				mu.Unlock()
			}
		}
		if reply == "" {
			t.Error("an answer without text")
		}
		return reply
	}
	rng := rand.New(rand.NewPCG(1, 0))
	words := func(n int) string {
		var b strings.Builder
		for range n {
			b.WriteString(vocabulary[rng.IntN(len(vocabulary))])
			b.WriteByte(' ')
		}
		return b.String()
	}
	systems := make([]string, 6)
	for i := range systems {
		systems[i] = fmt.Sprintf(`{"role":"system","content":"You are assistant %d. %s"}`, i, words(160))
	}
	queue := make(chan []string, chats)
	for i := range chats {
		c := []string{systems[i%len(systems)]}
		for range turns {
			c = append(c, words(60))
		}
		queue <- c
	}
	close(queue)
	var clients sync.WaitGroup
	for range parallel {
		clients.Go(func() {
			for c := range queue {
				history := c[0]
				for _, question := range c[1:] {
					history += fmt.Sprintf(`,{"role":"user","content":%q}`, question)
					history += fmt.Sprintf(`,{"role":"assistant","content":%q}`, chat(c[1], history))
				}
			}
		})
	}
	clients.Wait()
	if asked == 0 {
		t.Fatal("nothing was measured")
	}
	most := 0
	for _, n := range busy {
		most = max(most, n)
	}
	return worth{
		hitRatio: float64(cached) / float64(prompt),
		ttft:     float64(ttft.Microseconds()) / 1000 / float64(asked),
		spread:   float64(most) * engines / float64(asked),
	}
}

var vocabulary = strings.Fields(`cache block prefix prompt token worker index route score event replay
	shard warm cold batch stream queue model layer head page slot tier gate light river stone paper
	field cloud north south morning evening garden window bridge letter number answer question`)

func TestFallbackKeepsMostOfTheCacheWarm(t *testing.T) {
	exact := trial{}.play(t)
	hash := trial{away: true}.play(t)
	turns := trial{away: true, fallback: PolicyRoundRobin}.play(t)
	t.Logf("hit ratio: exact %.3f, conversation hash %.3f, round robin %.3f", exact.hitRatio, hash.hitRatio, turns.hitRatio)
	if hash.hitRatio < 0.6*exact.hitRatio || hash.hitRatio < turns.hitRatio {
		t.Error("the fallback is not worth its name")
	}
}

// BenchmarkOutage plays the conversations with the index, and without it by each fallback.
func BenchmarkOutage(b *testing.B) {
	decode := 5 * time.Millisecond
	for _, c := range []struct {
		name string
		trial
	}{
		{"index=exact", trial{perToken: decode}},
		{"index=away/fallback=conversation-hash/named=messages", trial{away: true, perToken: decode}},
		{"index=away/fallback=conversation-hash/named=session", trial{away: true, perToken: decode, sessions: true}},
		{"index=away/fallback=least-loaded", trial{fallback: PolicyLeastLoaded, away: true, perToken: decode}},
		{"index=away/fallback=round-robin", trial{fallback: PolicyRoundRobin, away: true, perToken: decode}},
		{"index=away/fallback=random", trial{fallback: PolicyRandom, away: true, perToken: decode}},
	} {
		b.Run(c.name, func(b *testing.B) {
			var sum worth
			n := 0.0
			for b.Loop() {
				w := c.play(b)
				sum.hitRatio += w.hitRatio
				sum.ttft += w.ttft
				sum.spread += w.spread
				n++
			}
			b.ReportMetric(sum.hitRatio/n, "hit-ratio")
			b.ReportMetric(sum.ttft/n, "ttft-ms")
			b.ReportMetric(sum.spread/n, "busiest/mean")
		})
	}
}
