package lua_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/lua"
	"github.com/warmroute/warmroute/store/storetest"
)

func dial(t *testing.T, url string) *redis.Client {
	t.Helper()
	o, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	c := redis.NewClient(o)
	t.Cleanup(func() { c.Close() })
	return c
}

// servers are the two that must answer alike.
func servers(t *testing.T) (fake, real *redis.Client) {
	_, url := storetest.Miniredis(t)
	return dial(t, url), dial(t, storetest.Redis(t).URL)
}

var (
	applyKeys   = []string{"{s}stream", "{s}holders", "{s}b0", "{s}b1", "{s}b2", "{s}c0", "{s}c1", "{s}c2", "{s}b3"}
	predictKeys = []string{"{s}holders", "{s}stream", "{s}b3"}
	sweepKeys   = []string{"{s}holders", "{s}idle", "{s}r0", "{s}r1", "{s}r2", "{s}r3"}
)

// state is everything that a server holds, in a form that can be compared.
func state(t *testing.T, c *redis.Client) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, k := range c.Keys(t.Context(), "*").Val() {
		switch c.Type(t.Context(), k).Val() {
		case "hash":
			h := c.HGetAll(t.Context(), k).Val()
			for _, f := range slices.Sorted(maps.Keys(h)) {
				out[k] += fmt.Sprintf("%s=%x ", f, h[f])
			}
		case "zset":
			for _, z := range c.ZRangeWithScores(t.Context(), k, 0, -1).Val() {
				if strings.HasSuffix(k, "b3") { // a time
					z.Score = 0
				}
				out[k] += fmt.Sprintf("%v=%.0f ", z.Member, z.Score)
			}
		default:
			out[k] = c.Get(t.Context(), k).Val()
		}
	}
	return out
}

func reply(ctx context.Context, s *redis.Script, c *redis.Client, keys []string, args []any) string {
	v, err := s.Run(ctx, c, keys, args...).Result()
	if err != nil {
		word, _, _ := strings.Cut(strings.TrimPrefix(err.Error(), "ERR "), " ") // the first word is the contract
		return "error " + word
	}
	return fmt.Sprint(v)
}

// TestSameRepliesAndEffects runs the same calls on both servers: random ones, each also twice in a row and
// out of order, and bad ones. Replies and the whole state must be equal throughout.
func TestSameRepliesAndEffects(t *testing.T) {
	fake, real := servers(t)
	ctx := t.Context()
	for _, c := range []*redis.Client{fake, real} {
		if err := c.HSet(ctx, "{s}stream", "gen", "7", "seq", "-1", "slot", "5").Err(); err != nil {
			t.Fatal(err)
		}
	}
	both := func(s *redis.Script, keys []string, args ...any) string {
		t.Helper()
		a, b := reply(ctx, s, fake, keys, args), reply(ctx, s, real, keys, args)
		if a != b {
			t.Fatalf("miniredis answers %s, Redis %s\n%v", a, b, args)
		}
		return a
	}
	r := rand.New(rand.NewPCG(3, 4))
	hex := func(n int) string { return fmt.Sprintf("%016x", n) }
	seq := 0
	for step := range 300 {
		gen, first, last := "7", seq, seq+r.IntN(3)
		switch r.IntN(20) {
		case 0:
			gen = "6"
		case 1:
			first, last = seq+5, seq+6
		case 2:
			first, last = max(0, seq-4), max(0, seq-2)
		}
		args := []any{gen, strconv.Itoa(first), strconv.Itoa(last), []string{"", "", "s", "f"}[r.IntN(4)], "1700000000000"}
		var runs []any
		marks := ""
		for s := first; s <= last; s++ {
			if s > first {
				marks += " "
			}
			marks += fmt.Sprintf("%d:%d", s, 8+len(runs))
			tier := strconv.Itoa(r.IntN(3))
			kind := []string{"s", "s", "a", "r", "x"}[r.IntN(5)]
			var values []any
			start := r.IntN(1500)
			for b := start; b < start+1+r.IntN(700); b++ {
				score := strconv.FormatUint(uint64(b)*1000003%(1<<53), 10)
				if kind == "r" {
					values = append(values, score)
				} else {
					values = append(values, score, hex(b))
				}
			}
			runs = append(append(runs, kind+tier, strconv.Itoa(len(values))), values...)
		}
		args = append(append(args, marks, strconv.Itoa(step)), runs...)
		got := both(lua.Apply, applyKeys, args...)
		if got == fmt.Sprintf("[0 %d]", last) {
			seq = last + 1
			if again := both(lua.Apply, applyKeys, args...); again != fmt.Sprintf("[1 %d]", last) {
				t.Fatalf("the repetition answers %s", again)
			}
		}
		if step%3 == 0 {
			from := r.IntN(900)
			args := []any{"7", 1e9 + step*1000, 600, 480, 1 + r.IntN(1000), from}
			for b := from; b < from+r.IntN(900); b++ {
				args = append(args, hex(b))
			}
			for range 2 {
				both(lua.Predict, predictKeys, args...)
			}
			both(lua.Predict, predictKeys, append([]any{"6"}, args[1:]...)...)
			both(lua.Predict, append(predictKeys, "{s}none", "{s}none3"), "", "1", "", "", "500", "0")
		}
		if step%50 == 49 {
			if a, b := state(t, fake), state(t, real); !reflect.DeepEqual(a, b) {
				t.Fatalf("step %d: the states differ", step)
			}
		}
	}
	// An ended generation, swept in small steps.
	for _, c := range []*redis.Client{fake, real} {
		if err := c.Rename(ctx, "{s}b3", sweepKeys[5]).Err(); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			if c.Exists(ctx, applyKeys[2+i]).Val() == 1 {
				if err := c.Rename(ctx, applyKeys[2+i], sweepKeys[2+i]).Err(); err != nil {
					t.Fatal(err)
				}
			}
		}
		c.ZAdd(ctx, "{s}idle", redis.Z{Score: 0, Member: "5"})
	}
	if got := both(lua.Sweep, sweepKeys, "6", "10", "60000"); got != "[0 0]" {
		t.Fatalf("a slot that is not idle: %s", got)
	}
	for range 10000 {
		if strings.HasSuffix(both(lua.Sweep, sweepKeys, "5", "97", "60000"), " 0]") {
			break
		}
	}
	if n := real.HLen(ctx, "{s}holders").Val(); n != 0 {
		t.Fatalf("%d holders left after the sweep", n)
	}

	// What breaks the contract is refused before anything is written.
	before := state(t, real)
	next := strconv.Itoa(seq)
	for _, bad := range [][]any{
		{"7", next, next, "", "1", "", "", "s0"},
		{"7", next, next, "", "1", "", "", "s0", "x"},
		{"7", next, next, "", "1", "", "", "s3", "2", "1", hex(1)},
		{"7", next, next, "", "1", "", "", "q0", "2", "1", hex(1)},
		{"7", next, next, "", "1", "", "", "s0", "1", "1"},
		{"7", next, next, "", "1", "", "", "s0", "2", "1", hex(1), "r0", "5", "1"},
		{"7", next, next, "", "1", "", "", "s0", "0"},
	} {
		if got := both(lua.Apply, applyKeys, bad...); got != "error WRARGV" {
			t.Errorf("%v: %s", bad, got)
		}
	}
	for _, bad := range [][]any{
		{"7", "0", "1", "1", "1", "0"}, {"7", "1", "1", "2", "1", "0"}, {"7", "1", "x", "1", "1", "0"}, {"7", "1", "", "", "0", "0"},
		{"7", "1", "", "", "1001", "0"}, {"7", "1", "", "", "1", "-1"}, append([]any{"7", "1", "", "", "1", "0"}, make([]any, 1001)...),
	} {
		for i := range bad {
			bad[i] = cmp.Or(bad[i], any("x"))
		}
		if got := both(lua.Predict, predictKeys, bad...); got != "error WRARGV" {
			t.Errorf("predict %v: %s", bad, got)
		}
	}
	if got := both(lua.Predict, predictKeys[:2], "7", "1", "", "", "1", "0"); got != "error WRARGV" {
		t.Errorf("predict without a key: %s", got)
	}
	for _, bad := range [][]any{{"5", "0", "1"}, {"5", "1001", "1"}, {"5", "x", "1"}, {"5", "1", "x"}} {
		if got := both(lua.Sweep, sweepKeys, bad...); got != "error WRARGV" {
			t.Errorf("sweep %v: %s", bad, got)
		}
	}
	for _, bad := range [][]any{{"", "0", "0", "0"}, {"", "0", "x", "0", hex(1)}, {"", "0", "-1", "0", hex(1)}, {"", "0", "0", "4", hex(1)}} {
		if got := both(lua.Verify, []string{"{s}holders", "{s}version", "{s}b0"}, bad...); got != "error WRARGV" {
			t.Errorf("verify %v: %s", bad, got)
		}
	}
	for _, bad := range [][]any{{"0x", "1", "w"}, {"16", "0", "w"}, {"16", "x", "w"}} {
		if got := both(lua.Assign, []string{"{s}config", "{s}workers"}, bad...); got != "error WRCONFIG" {
			t.Errorf("assign %v: %s", bad, got)
		}
	}
	if after := state(t, real); !reflect.DeepEqual(before, after) {
		t.Fatal("a refused call changed the state")
	}
}
