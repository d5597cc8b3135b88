package replay

import (
	"bytes"
	"cmp"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/store/redisproc"
	"github.com/warmroute/warmroute/store/storetest"
)

// conversations is a made-up trace: 400 requests of growing conversations that share their first block.
func conversations(t *testing.T) []Request {
	t.Helper()
	f, err := os.Open("testdata/conversations.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	trace, err := ReadTrace(f)
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

func options(trace []Request, policy string) Options {
	return Options{
		Trace: trace, Policy: policy, Weights: choose.Default, Workers: 4, CacheBlocks: 400, Rate: 10,
		TokenTime: 20 * time.Millisecond, Load: 1, Frontends: 1, State: Memory, Seed: 1, Predict: true,
	}
}

func run(t *testing.T, o Options) *Result {
	t.Helper()
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Outcomes) != len(o.Trace) {
		t.Fatalf("%d of %d requests have an outcome", len(r.Outcomes), len(o.Trace))
	}
	return r
}

// What the page about performance says of the policies holds on any trace of conversations.
func TestWhatPoliciesAreWorth(t *testing.T) {
	trace := conversations(t)
	by := map[string]*Result{}
	for _, p := range Policies {
		by[p] = run(t, options(trace, p))
		t.Logf("%-18s hit %.3f busiest %.2f TTFT %+v", p, by[p].HitRatio, by[p].Busiest, by[p].TTFT)
	}
	kv := by[KV]
	for p, r := range by {
		if p != KV && (r.TTFT.Mean <= kv.TTFT.Mean || r.TTFT.P99 <= kv.TTFT.P99) {
			t.Errorf("%s has times to the first token of %+v, kv of %+v", p, r.TTFT, kv.TTFT)
		}
	}
	if trap := by[LongestPrefix]; trap.Busiest < 3.9 {
		t.Errorf("longest prefix gives its busiest worker %.2f × the mean of 4: want all", trap.Busiest)
	}
	if by[RoundRobin].HitRatio >= by[ConversationHash].HitRatio {
		t.Error("a round robin hits as much as a conversation hash")
	}
}

// Frontends that share their loads choose as one; each by itself, they herd.
func TestFrontendsThatShare(t *testing.T) {
	trace := conversations(t)
	// Many chances, because a trace this short is noisy.
	mean := func(frontends int, own bool) (ttft, hits float64) {
		for seed := range uint64(8) {
			o := options(trace, KV)
			o.Frontends, o.OwnViews, o.Seed = frontends, own, seed
			r := run(t, o)
			ttft, hits = ttft+r.TTFT.Mean/8, hits+r.HitRatio/8
		}
		return ttft, hits
	}
	one, oneHits := mean(1, false)
	eight, eightHits := mean(8, false)
	alone, _ := mean(8, true)
	t.Logf("TTFT of 1 frontend %.3f, of 8 %.3f, of 8 with their own views %.3f", one, eight, alone)
	if eightHits < oneHits*0.97 || eight > one*1.05 {
		t.Errorf("8 frontends: hit ratio %.3f, TTFT %.3f; one: %.3f, %.3f", eightHits, eight, oneHits, one)
	}
	if alone < eight*1.05 {
		t.Errorf("8 frontends that know only their own load: TTFT %.3f, sharing it %.3f", alone, eight)
	}
}

// With the index and the loads in Redis, through the real store and its scripts, every single request fares as in
// memory.
func TestRedisGivesTheSame(t *testing.T) {
	storetest.Require(t, redisproc.Program, "apt-get install redis-server")
	trace := conversations(t)[:250]
	for _, policy := range []string{KV, LongestPrefix, LeastLoaded, ConversationHash} {
		for _, own := range []bool{false, true} {
			o := options(trace, policy)
			o.Predict, o.Frontends, o.OwnViews = policy != KV || own, 3, own
			o.Sessions, o.SessionSlack = policy == KV || own, 4096
			if policy == KV {
				o.Weights.Temperature, o.Weights.Request = 0.1, 0.5
			}
			memory := run(t, o)
			o.State = Redis
			redis := run(t, o)
			if !slices.Equal(memory.Outcomes, redis.Outcomes) {
				t.Errorf("%s, own views %v: in memory %+v, in Redis %+v", policy, own, memory.TTFT, redis.TTFT)
			}
		}
	}
}

// Conversations are told apart beyond their first block, and one that may cost any time stays where it began.
func TestSessions(t *testing.T) {
	of := func(blocks ...uint64) Request { return Request{Input: BlockTokens * len(blocks), Blocks: blocks} }
	got := sessions([]Request{of(0, 1), of(0, 2), of(0, 1, 3), of(0), of(0, 1, 3, 4), of(0, 2, 5), of(0, 1, 6), {Input: 600, Blocks: []uint64{0, 1}}})
	if want := []int{0, 1, 0, 2, 0, 1, 0, 3}; !slices.Equal(got, want) {
		t.Errorf("sessions %v, want %v", got, want)
	}
	o := options(conversations(t), KV)
	free := run(t, o)
	o.Sessions, o.SessionSlack = true, 1_000_000_000
	kept := run(t, o)
	at := map[int]int{}
	for i, session := range sessions(o.Trace) {
		if i > 0 && o.Trace[i].At == o.Trace[i-1].At || i+1 < len(o.Trace) && o.Trace[i].At == o.Trace[i+1].At {
			continue // outcomes are in the order of arrival
		}
		w := kept.Outcomes[i].Worker
		if home, ok := at[session]; ok && home != w {
			t.Fatalf("request %d: the session moves from %d to %d", i, home, w)
		}
		at[session] = w
	}
	if kept.HitRatio < free.HitRatio {
		t.Errorf("hit ratio %.3f, without sessions %.3f", kept.HitRatio, free.HitRatio)
	}
}

func TestEqualSeedsGiveEqualRuns(t *testing.T) {
	o := options(conversations(t), KV)
	o.Weights.Temperature = 0.5
	a, b := run(t, o), run(t, o)
	o.Seed++
	if c := run(t, o); !slices.Equal(a.Outcomes, b.Outcomes) || slices.Equal(a.Outcomes, c.Outcomes) {
		t.Error("runs of one seed differ, or runs of two do not")
	}
}

// One worker, by hand: 3 blocks and a half, then the same with one more whole block.
func TestTheModel(t *testing.T) {
	o := options([]Request{
		{At: 0, Input: 1792, Output: 10, Blocks: []uint64{1, 2, 3, 4}},
		{At: 0, Input: 2048, Output: 0, Blocks: []uint64{1, 2, 3, 5}},
		{At: time.Second, Input: 512, Output: 0, Blocks: []uint64{9}},
	}, KV)
	o.Workers, o.CacheBlocks, o.Rate = 1, 4, 2
	want := []Outcome{
		{Arrived: 0, TTFT: 1750 * time.Millisecond, Blocks: 4, Work: 3.5},
		{Arrived: 0, TTFT: 2250 * time.Millisecond, Blocks: 4, Hits: 3, Work: 1}, // waits, then computes one block
		{Arrived: time.Second, TTFT: 1750 * time.Millisecond, Blocks: 1, Work: 1},
	}
	if r := run(t, o); !slices.Equal(r.Outcomes, want) {
		t.Errorf("got  %+v\nwant %+v", r.Outcomes, want)
	} else if r.HitRatio != 3.0/9 || r.Busiest != 1 {
		t.Errorf("hit ratio %v, busiest %v", r.HitRatio, r.Busiest)
	}
	o.Load = 2 // the third comes after half a second
	if r := run(t, o); r.Outcomes[2].TTFT != 2250*time.Millisecond {
		t.Errorf("at twice the load: %+v", r.Outcomes[2])
	}
	o.DecodeCost, o.Load = 1, 1 // the first's answer is under way while the second's prompt is computed: twice the time
	if r := run(t, o); r.Outcomes[1].TTFT != 2750*time.Millisecond {
		t.Errorf("with decoding that costs: %+v", r.Outcomes[1])
	}
}

// The cache against a list that is searched from end to end.
func TestLRU(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	c := newLRU(20)
	var list []uint64 // used last first
	for range 2000 {
		prompt := make([]uint64, 1+r.IntN(25))
		for i := range prompt {
			prompt[i] = uint64(r.IntN(4)*100 + i)
		}
		depth := slices.IndexFunc(prompt, func(b uint64) bool { return !slices.Contains(list, b) })
		if depth < 0 {
			depth = len(prompt)
		}
		if got := c.prefix(prompt); got != depth {
			t.Fatalf("prefix %d, want %d", got, depth)
		}
		added, gone := c.use(prompt)
		before := list
		kept := prompt[:min(len(prompt), 20)]
		list = append(slices.Clone(kept), slices.DeleteFunc(slices.Clone(list), func(b uint64) bool { return slices.Contains(kept, b) })...)
		list = list[:min(len(list), 20)]
		for _, b := range added {
			if slices.Contains(before, b) {
				t.Fatalf("%d is said to be new", b)
			}
		}
		for _, b := range gone {
			if slices.Contains(list, b) {
				t.Fatalf("%d is said to be gone", b)
			}
		}
		if len(c.blocks) != len(list) || len(before)+len(added)-len(gone) != len(list) {
			t.Fatalf("%d blocks, want %d; %d new, %d gone", len(c.blocks), len(list), len(added), len(gone))
		}
		for _, b := range list {
			if c.blocks[b] == nil {
				t.Fatalf("%d is missing", b)
			}
		}
	}
}

func TestBadTraces(t *testing.T) {
	const good = `{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}` + "\n"
	for name, c := range map[string]struct{ text, want string }{
		"empty":             {"\n\n", "the trace is empty"},
		"not JSON":          {good + "{", "line 2: "},
		"no timestamp":      {`{"input_length": 1, "hash_ids": [0]}`, "line 1: timestamp"},
		"no prompt":         {`{"timestamp": 1, "input_length": 0, "hash_ids": []}`, "line 1: input_length"},
		"too few hashes":    {`{"timestamp": 1, "input_length": 513, "hash_ids": [0]}`, "line 1: 1 hash_ids for 513 tokens"},
		"back in time":      {good + strings.Replace(good, "5", "4", 1), "line 2: the timestamp is before"},
		"a hash below zero": {strings.Replace(good, "[0", "[-1", 1), "line 1: "},
	} {
		if _, err := ReadTrace(strings.NewReader(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	trace, err := ReadTrace(strings.NewReader(good + "\n" + strings.Replace(good, "5", "7.5", 1)))
	if err != nil || len(trace) != 2 || trace[0].At != 0 || trace[1].At != 2500*time.Microsecond || len(trace[0].whole()) != 1 {
		t.Errorf("%+v, %v", trace, err)
	}
}

func TestBadOptions(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"no trace": func(o *Options) { o.Trace = nil },
		"policy":   func(o *Options) { o.Policy = "best" },
		"state":    func(o *Options) { o.State = "disk" },
		"workers":  func(o *Options) { o.Workers = 0 },
		"cache":    func(o *Options) { o.CacheBlocks = 0 },
		"rate":     func(o *Options) { o.Rate = 0 },
		"load":     func(o *Options) { o.Load = -1 },
		"no end":   func(o *Options) { o.Rate = 1e-300 },
		"no load": func(o *Options) {
			o.Load = 1e-300
			o.Trace = append(o.Trace, Request{At: 1, Input: 1, Blocks: []uint64{1}})
		},
		"no time":    func(o *Options) { o.Load = math.Inf(1) },
		"long token": func(o *Options) { o.TokenTime = math.MaxInt64; o.Trace[0].Output = 2 },
		"frontends":  func(o *Options) { o.Frontends = 0 },
		"weight":     func(o *Options) { o.Weights.Miss = -1 },
		"decode":     func(o *Options) { o.DecodeCost = -1 },
		"token time": func(o *Options) { o.TokenTime = -1 },
	} {
		o := options([]Request{{Input: 1, Blocks: []uint64{1}}}, KV)
		change(&o)
		if _, err := Run(t.Context(), o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestPlotIsWellFormed(t *testing.T) {
	trace := conversations(t)
	var results []*Result
	for _, p := range []string{KV, LongestPrefix} {
		results = append(results, run(t, options(trace, p)))
	}
	var b bytes.Buffer
	if err := Plot(&b, results); err != nil {
		t.Fatal(err)
	}
	if i := strings.Index(b.String(), "%!"); i >= 0 {
		t.Fatalf("a value is missing: %s", b.String()[max(0, i-60):i+20])
	}
	lines, text := 0, ""
	for d := xml.NewDecoder(&b); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		switch x := token.(type) {
		case xml.StartElement:
			if x.Name.Local == "polyline" {
				lines++
			}
		case xml.CharData:
			text += string(x)
		}
	}
	if lines != 4 || !strings.Contains(text, "longest-prefix: hit ratio") || strings.Contains(text, "NaN") {
		t.Errorf("%d lines, texts %q", lines, text)
	}
	if w := results[0].Windows; len(w) < windows/2 || !slices.IsSortedFunc(w, func(a, b Window) int { return cmp.Compare(a.Start, b.Start) }) {
		t.Errorf("windows %+v", w)
	}
}
