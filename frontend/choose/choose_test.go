package choose

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/lua"
	"github.com/warmroute/warmroute/store/storetest"
)

// golden is a case of testdata/rankings.json.
type golden struct {
	Name      string `json:"name"`
	BlockSize int    `json:"block_size"`
	Tokens    int    `json:"tokens"`
	Weights   struct {
		PrefillScale          float64 `json:"prefill_scale"`
		Miss, Decode, Request float64
	}
	Busy       [3]int
	Candidates []struct {
		Credit float64
		Load   [3]int
	}
	Costs   []*float64
	Ranking []int
}

func (g *golden) ask() (Ask, []Candidate) {
	a := Ask{
		Request: Request{BlockSize: g.BlockSize, Tokens: g.Tokens}, Home: -1,
		Weights: Weights{PrefillScale: g.Weights.PrefillScale, Miss: g.Weights.Miss, Decode: g.Weights.Decode, Request: g.Weights.Request},
		Busy:    Load{g.Busy[0], g.Busy[1], g.Busy[2]},
	}
	var cs []Candidate
	for _, c := range g.Candidates {
		cs = append(cs, Candidate{Credit: c.Credit, Load: Load{c.Load[0], c.Load[1], c.Load[2]}})
	}
	return a, cs
}

func goldens(t *testing.T) []golden {
	t.Helper()
	text, err := os.ReadFile("testdata/rankings.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Cases []golden }
	if err := json.Unmarshal(text, &file); err != nil || len(file.Cases) < 15 {
		t.Fatalf("%d cases, %v", len(file.Cases), err)
	}
	return file.Cases
}

func TestGoldenRankings(t *testing.T) {
	for _, g := range goldens(t) {
		a, cs := g.ask()
		c := Choose(a, cs)
		for i, want := range g.Costs {
			if want == nil != math.IsNaN(c.Costs[i]) || want != nil && *want != c.Costs[i] {
				t.Errorf("%s: costs %v", g.Name, c.Costs)
			}
		}
		if got := Rank(c.Costs); !slices.Equal(got, g.Ranking) {
			t.Errorf("%s: ranking %v, want %v", g.Name, got, g.Ranking)
		}
		if c.AllBusy != (len(g.Ranking) == 0) || !c.AllBusy && c.Index != g.Ranking[0] {
			t.Errorf("%s: chosen %+v, want %v", g.Name, c, g.Ranking)
		}
	}
}

// With a weight of 1 on the miss, the cost is PrefillScale × max(0, queued + prompt − credit) + …, for credits within the prompt.
func TestCostWithoutAWeightOnTheMiss(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 1000 {
		q := Request{BlockSize: 16, Tokens: 16 * r.IntN(1000)}
		l := Load{r.IntN(50), 16 * r.IntN(5000), r.IntN(5000)}
		credit := float64(r.IntN(q.Tokens/16+1)*4) / 4
		got := Weights{PrefillScale: 2, Miss: 1, Decode: 1, Request: 3}.Cost(q, l, credit)
		want := 2*max(0, float64(l.PrefillTokens)/16+float64(q.Tokens)/16-credit) + float64(l.DecodeBlocks) + 3*float64(l.Requests)
		if got != want {
			t.Fatalf("%+v %+v %v: %v, want %v", q, l, credit, got, want)
		}
	}
}

// server calls select.lua on a server.
type server struct {
	*redis.Client
	t *testing.T
}

// choose lets the script choose among the candidates, with their loads in Redis.
func (s server) choose(a Ask, cs []Candidate) (index int, atHome, allBusy bool, cost float64) {
	s.t.Helper()
	ctx := s.t.Context()
	s.Del(ctx, "{p}load", "{p}session")
	keys := []string{"{p}load", "{p}leases", "{p}deadlines"}
	f := func(x float64) string { return strconv.FormatFloat(x, 'f', -1, 64) }
	i := strconv.Itoa
	args := []any{
		"", "0", i(a.Tokens), "0", i(a.BlockSize), f(a.Weights.PrefillScale), f(a.Weights.Miss), f(a.Weights.Decode), f(a.Weights.Request),
		f(a.Weights.Temperature), f(a.Random), i(a.Busy.Requests), i(a.Busy.PrefillTokens), i(a.Busy.DecodeBlocks), "1000", f(a.Slack), "100",
	}
	name := func(n int) string { return kvcache.WorkerRank{Worker: "w", Rank: n}.String() }
	for n, c := range cs {
		args = append(args, name(n), f(c.Credit))
		if c.Load != (Load{}) {
			s.HSet(ctx, "{p}load", name(n), i(c.Load.Requests)+" "+i(c.Load.PrefillTokens)+" "+i(c.Load.DecodeBlocks))
		}
	}
	if a.Tokens%2 == 0 { // so many others that the script reads only those that it needs
		for n := range 4 * len(cs) {
			s.HSet(ctx, "{p}load", "other/"+i(n), "1 1 1")
		}
	}
	if a.Home >= 0 {
		keys = append(keys, "{p}session")
		s.Set(ctx, "{p}session", name(a.Home), 0)
	}
	v, err := lua.Select.Run(ctx, s, keys, args...).Slice()
	if err != nil {
		s.t.Fatal(err)
	}
	cost, err = strconv.ParseFloat(v[4].(string), 64)
	if err != nil {
		s.t.Fatal(err)
	}
	return int(v[1].(int64)), v[2].(int64) == 1, v[0].(int64) == 1, cost
}

// Redis chooses as this package does: on the golden cases, and on random ones with ties, thresholds, sessions and lotteries.
func TestRedisChoosesAlike(t *testing.T) {
	_, fake := storetest.Miniredis(t)
	for name, url := range map[string]string{"miniredis": fake, "redis": storetest.Redis(t).URL} {
		t.Run(name, func(t *testing.T) {
			o, err := redis.ParseURL(url)
			if err != nil {
				t.Fatal(err)
			}
			s := server{redis.NewClient(o), t}
			defer s.Close()
			compare := func(what any, a Ask, cs []Candidate) {
				t.Helper()
				want := Choose(a, cs)
				index, atHome, allBusy, cost := s.choose(a, cs)
				if allBusy != want.AllBusy || !allBusy && (index != want.Index || atHome != want.AtHome || cost != want.Costs[index]) {
					t.Fatalf("%v: Redis chooses %d (at home %v, all busy %v, cost %v), Go %+v\n%+v\n%+v", what, index, atHome, allBusy, cost, want, a, cs)
				}
			}
			for _, g := range goldens(t) {
				a, cs := g.ask()
				compare(g.Name, a, cs)
			}
			r := rand.New(rand.NewPCG(7, 8))
			any := func(of ...float64) float64 { return of[r.IntN(len(of))] }
			for step := range 600 {
				a := Ask{
					Request: Request{BlockSize: 1 + r.IntN(64), Tokens: r.IntN(100_000)},
					Weights: Weights{any(0, 1, 4, r.Float64()), any(0, 1, 8, r.Float64()*10), any(0, 1, r.Float64()), any(0, 0, r.Float64()*50), any(0, 0, 0.1, r.Float64())},
					Home:    r.IntN(12) - 4, Slack: any(0, 10, r.Float64()*1000), Random: r.Float64(),
				}
				if r.IntN(3) == 0 {
					a.Busy = Load{r.IntN(20), r.IntN(50_000), r.IntN(5000)}
				}
				same := r.IntN(3) == 0 // all alike, so that they tie
				cs := make([]Candidate, 1+r.IntN(12))
				for i := range cs {
					cs[i] = Candidate{Credit: float64(r.IntN(4000)) / any(1, 4, 3)}
					if r.IntN(4) > 0 {
						cs[i].Load = Load{1 + r.IntN(20), r.IntN(50_000), r.IntN(5000)}
					}
					if same {
						cs[i] = cs[0]
					}
				}
				compare(step, a, cs)
			}
		})
	}
}

// The lottery's frequencies are those of the softmax, and a cold one takes the cheapest.
func TestLottery(t *testing.T) {
	cs := []Candidate{{Credit: 10}, {Credit: 5}, {Credit: 0}} // costs 0, 5, 10 × the weight: scaled 0, 0.5, 1
	a := Ask{Request: Request{BlockSize: 1, Tokens: 10}, Weights: Weights{PrefillScale: 3, Miss: 1, Temperature: 0.5}, Home: -1}
	const n = 30_000
	var got [3]int
	for i := range n {
		a.Random = float64(i) / n
		got[Choose(a, cs).Index]++
	}
	sum := 1 + math.Exp(-1) + math.Exp(-2)
	for i, k := range got {
		if want := n * math.Exp(-float64(i)) / sum; math.Abs(float64(k)-want) > 2 {
			t.Errorf("candidate %d: %d of %d draws, want %.0f", i, k, n, want)
		}
	}
	a.Weights.Temperature = 1e-9
	for i := range 100 {
		a.Random = float64(i) / 100
		if c := Choose(a, cs); c.Index != 0 {
			t.Fatalf("at next to no temperature %d is chosen", c.Index)
		}
	}
}

func TestTiesAreShared(t *testing.T) {
	cs := []Candidate{{Credit: 1}, {Credit: 5}, {Credit: 5}, {Credit: 2}, {Credit: 5}}
	var got [5]int
	for i := range 300 {
		a := Ask{Request: Request{BlockSize: 1, Tokens: 10}, Weights: Default, Home: -1, Random: float64(i) / 300}
		got[Choose(a, cs).Index]++
	}
	if got != [5]int{0, 100, 100, 0, 100} {
		t.Errorf("ties were shared as %v", got)
	}
}

func TestCredit(t *testing.T) {
	o := kvcache.Overlap{Device: 10, Host: 14, Disk: 22, Any: 25}
	if got := DefaultTiers.Credit(o); got != 10+0.75*4+0.25*8+3 {
		t.Errorf("credit %v", got)
	}
	if got := (Tiers{}).Credit(o); got != 10 {
		t.Errorf("credit of the device alone %v", got)
	}
	for _, c := range []struct {
		credit float64
		want   int
	}{{0, 100}, {2.5, 60}, {6, 4}, {6.2, 1}, {7, 0}} {
		if got := (Request{BlockSize: 16, Tokens: 100}).Prefill(c.credit); got != c.want {
			t.Errorf("prefill with a credit of %v: %d, want %d", c.credit, got, c.want)
		}
	}
}

// A queue that is longer by the slack is as dear as the slack says.
func TestSlack(t *testing.T) {
	r := Request{BlockSize: 16, Tokens: 4096}
	slack := Default.Slack(8192, r.BlockSize)
	idle, busy := Default.Cost(r, Load{}, 10), Default.Cost(r, Load{PrefillTokens: 8192}, 10)
	if missing := Default.Cost(r, Load{}, 10-8192/16/Default.Miss); busy != idle+slack || missing != busy {
		t.Errorf("slack %v; costs: idle %v, with a queue %v, with missing blocks %v", slack, idle, busy, missing)
	}
	if got := LeastRequests.Slack(8192, 16); got != 0 {
		t.Errorf("where only requests count the slack is %v", got)
	}
}

func TestOverride(t *testing.T) {
	var o Override
	err := json.Unmarshal([]byte(`{"overlap_score_credit": 2, "prefill_load_scale": 3, "router_temperature": 0.5,
		"decode_active_request_weight": 4, "host_cache_hit_weight": 0.5, "disk_cache_hit_weight": 0, "assume_kv_reuse": true}`), &o)
	if err != nil {
		t.Fatal(err)
	}
	w, tiers, err := o.Apply(Default, DefaultTiers)
	if want := (Weights{3, 2, Default.Decode, 4, 0.5}); err != nil || w != want || tiers != (Tiers{0.5, 0, DefaultTiers.Predicted}) {
		t.Errorf("%+v %+v %v", w, tiers, err)
	}
	if w, tiers, err := (*Override)(nil).Apply(Default, DefaultTiers); err != nil || w != Default || tiers != DefaultTiers {
		t.Errorf("no override: %+v %+v %v", w, tiers, err)
	}
	for _, bad := range []string{`{"router_temperature": -1}`, `{"prefill_load_scale": 1e10}`, `{"host_cache_hit_weight": 1.5}`, `{"overlap_score_credit": -0.1}`} {
		var o Override
		if err := errors.Join(json.Unmarshal([]byte(bad), &o)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := o.Apply(Default, DefaultTiers); err == nil {
			t.Errorf("%s is accepted", bad)
		}
	}
	if err := (Weights{Miss: math.NaN()}).Validate(); err == nil {
		t.Error("NaN is accepted")
	}
}

// A worker that leaves moves only what it had; a burst of one key spills in a fixed order and not beyond the share.
func TestBounded(t *testing.T) {
	workers := make([]kvcache.WorkerRank, 8)
	for i := range workers {
		workers[i] = kvcache.WorkerRank{Worker: "w" + strconv.Itoa(i/2), Rank: i % 2}
	}
	idle := make([]int, 8)
	var got [8]int
	for key := range uint64(8000) {
		i, spilled := Bounded(key, workers, idle, 1.25, 1)
		if got[i]++; spilled {
			t.Fatal("spilled on an idle fleet")
		}
		if j, _ := Bounded(key, workers[:7], idle[:7], 1.25, 1); i < 7 && j != i {
			t.Fatalf("key %d moves from %d to %d because 7 has gone", key, i, j)
		}
	}
	for i, n := range got {
		if n < 800 || n > 1200 {
			t.Errorf("candidate %d is the home of %d keys of 8000", i, n)
		}
	}
	load := make([]int, 8)
	for n := range 80 {
		i, spilled := Bounded(1, workers, load, 1.25, 1)
		if home, _ := Bounded(1, workers, idle, 1.25, 1); spilled != (i != home) {
			t.Fatalf("placed at %d, the home is %d, spilled %v", i, home, spilled)
		}
		load[i]++
		if share := 1.25 * float64(n+1) / 8; float64(load[i]) >= share+1 {
			t.Fatalf("%v after %d requests: more than the share of %v", load, n+1, share)
		}
	}
}
