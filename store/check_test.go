package store_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// shardTag and poolTag also pin the key layout.
const (
	shardTag = "wr:1:{default:llama %7B3%7D%231#0}:"
	poolTag  = "wr:1:{default:llama %7B3%7D%231}:"
)

// damaged is a pool that a test damages, and what lookups of p should say.
type damaged struct {
	p       []kvcache.BlockHash
	a, b, d store.Stream // a has slot 0, b has slot 1
	full    map[kvcache.WorkerRank]kvcache.Overlap
}

func fillForDamage(t *testing.T, s *store.Store) damaged {
	t.Helper()
	x := damaged{p: chain(1, 100)}
	x.a, x.b = register(t, s, rank("a", 0)), register(t, s, rank("b", 0))
	c, e := register(t, s, rank("c", 1)), register(t, s, rank("e", 0))
	x.d = register(t, s, rank("d", 0))
	apply(t, s, &x.a, 0, store.Applied, storeAll("a", kvcache.Device, x.p...))
	apply(t, s, &x.b, 0, store.Applied, storeAll("b", kvcache.Host, x.p...))
	apply(t, s, &x.d, 0, store.Applied, storeAll("d", kvcache.Device, x.p[:50]...))
	apply(t, s, &x.a, 1, store.Applied, storeAll("a", kvcache.Device, x.p[0])) // a copy
	predict(t, s, c.WorkerRank, store.Applied, store.PredictOptions{TTL: time.Hour}, x.p...)
	// A generation that waits for the sweep, and a stream that was removed.
	var err error
	if x.d, _, err = s.Restart(t.Context(), x.d, 0, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	selects(t, s, asking("request", 0, 0))
	selects(t, s, asking("another", 0, 0))
	x.full = map[kvcache.WorkerRank]kvcache.Overlap{
		rank("a", 0): onDevice(100), rank("b", 0): {Host: 100, Disk: 100, Any: 100}, rank("c", 1): {Any: 100},
	}
	if x.a.Slot != 0 || x.b.Slot != 1 {
		t.Fatalf("slots %d and %d", x.a.Slot, x.b.Slot)
	}
	clean(t, s)
	want(t, s, x.p, x.full)
	return x
}

// testCheckFindsAndRepairsDamage plants each kind of damage: check names it, a repair mends it, the next check is clean, and
// lookups say what the sorted sets said before.
func testCheckFindsAndRepairsDamage(t *testing.T, url string) {
	ctx := t.Context()
	raw := client(t, url)
	const holders, slots, idle, version = shardTag + "holders", shardTag + "slots", shardTag + "idle", shardTag + "version"
	const top = shardTag + "top"
	const streamA, streamB = shardTag + "stream:a/0", shardTag + "stream:b/0"
	const blocksA = shardTag + "blocks:a/0:device"
	wrongType := func(key string) func(damaged) error {
		return func(damaged) error {
			if err := raw.Del(ctx, key).Err(); err != nil {
				return err
			}
			return raw.RPush(ctx, key, "x").Err()
		}
	}
	hdel := func(key, field string) func(damaged) error {
		return func(damaged) error { return raw.HDel(ctx, key, field).Err() }
	}
	hset := func(key, field, value string) func(damaged) error {
		return func(damaged) error { return raw.HSet(ctx, key, field, value).Err() }
	}
	zadd := func(key string, score float64, member string) func(damaged) error {
		return func(damaged) error { return raw.ZAdd(ctx, key, redis.Z{Score: score, Member: member}).Err() }
	}
	for _, damage := range []struct {
		name  string
		plant func(damaged) error
		says  string
		found int      // how many problems that makes; 0 = at least one
		lost  []string // worker ranks whose blocks cannot be saved
	}{
		{"holder lost", func(x damaged) error { return raw.HDel(ctx, holders, x.p[3].String()).Err() }, "holders of block", 1, nil},
		{"holders lost", func(damaged) error { return raw.Del(ctx, holders).Err() }, "holders of block", 100, nil},
		{"holder invented", hset(holders, "00000000000000ff", "\x01"), `holders of block "00000000000000ff"`, 1, nil},
		{"bit lost", func(x damaged) error { return raw.HSet(ctx, holders, x.p[0].String(), "\x20").Err() }, "holders of block", 1, nil},
		{"bits too many", func(x damaged) error { return raw.HSet(ctx, holders, x.p[60].String(), "\x21\x08\x07").Err() }, "holders of block", 1, nil},
		{"bit of a slot that nobody ever had", func(x damaged) error {
			return raw.HSet(ctx, holders, x.p[60].String(), "\x21\x08"+strings.Repeat("\x00", 100)+"\x01").Err()
		}, "holders of block", 1, nil},
		{"zeros at the end", func(x damaged) error { return raw.HSet(ctx, holders, x.p[60].String(), "\x21\x08\x00").Err() }, "holders of block", 1, nil},
		{"empty holder", hset(holders, "00000000000000ff", ""), `"00000000000000ff"`, 1, nil},
		{"no block hash", hset(holders, "nonsense", "x"), `"nonsense"`, 1, nil},
		{"member that is no block hash", zadd(blocksA, 5, "nonsense"), `"nonsense" with score 5`, 1, nil},
		{"member in capitals", zadd(blocksA, 5, "00000000000000FF"), `"00000000000000FF"`, 1, nil},
		{"score that is no engine hash", zadd(blocksA, 0.5, "00000000000000ff"), "with score 0.5", 0, nil},
		{"blocks lost", func(damaged) error { return raw.Del(ctx, blocksA).Err() }, "holders of block", 100, []string{"a/0"}},
		{"garbage in retired blocks", func(x damaged) error {
			return raw.ZAdd(ctx, retiredOf(t, raw), redis.Z{Score: 1, Member: "x"}).Err()
		}, "which is no block", 1, nil},

		{"slot of nobody", hset(slots, "9", "ghost/0"), "slot 9 belongs to ghost/0, which has no stream", 1, nil},
		{"slot of a stream that was removed", hset(slots, "9", "e/0"), "slot 9 belongs to e/0, which has no stream", 1, nil},
		{"slot of garbage", hset(slots, "9", "nonsense"), "slot 9 belongs to nonsense", 1, nil},
		{"slot that is no number", hset(slots, "x", "a/0"), `"x", which is no slot`, 1, nil},
		{"second slot of a stream", hset(slots, "9", "a/0"), "slot 9 belongs to a/0, whose stream has another slot", 0, nil},
		{"stream missing from the slot map", hdel(slots, "0"), "stream a/0 is missing from the slot map", 0, nil},
		{"slot map lost", func(damaged) error { return raw.Del(ctx, slots).Err() }, "missing from the slot map", 0, nil},
		{"two streams in one slot", func(x damaged) error {
			return errors.Join(raw.HSet(ctx, streamB, "slot", "0").Err(), raw.HDel(ctx, slots, "1").Err())
		}, "stream b/0 has the slot of a/0", 0, nil},
		{"two streams in one slot, of which the map knows neither", func(x damaged) error {
			return errors.Join(raw.HSet(ctx, streamB, "slot", "0").Err(), raw.Del(ctx, slots).Err())
		}, "stream b/0 has the slot of a/0", 0, nil},
		{"slots swapped", func(x damaged) error {
			return raw.HSet(ctx, slots, "0", "b/0", "1", "a/0").Err()
		}, "whose stream has another slot", 0, nil},
		{"generation lost", hdel(streamA, "gen"), "stream a/0 has lost its generation", 1, nil},
		{"generation is nonsense", hset(streamA, "gen", "soon"), "stream a/0 has lost its generation", 1, nil},
		{"slot of a stream lost", hdel(streamA, "slot"), "stream a/0 has lost its slot", 1, nil},
		{"slot of a stream lost everywhere", func(x damaged) error {
			return errors.Join(raw.HDel(ctx, slots, "0").Err(), raw.HDel(ctx, streamA, "slot").Err())
		}, "stream a/0 has lost its slot", 0, nil},
		{"watermark lost", hdel(streamA, "seq"), "stream a/0 has lost its watermark", 1, []string{"a/0"}},
		{"all but the registration lost", func(x damaged) error { return raw.HDel(ctx, streamA, "gen", "seq", "slot").Err() },
			"stream a/0 has lost its generation", 3, []string{"a/0"}},
		{"stream lost", func(x damaged) error { return raw.Del(ctx, streamA).Err() }, "a/0 has blocks and no stream", 0, []string{"a/0"}},
		{"version lost", func(x damaged) error { return raw.Del(ctx, version).Err() }, "the version is missing", 1, nil},
		{"version is nonsense", func(x damaged) error { return raw.Set(ctx, version, "x", 0).Err() }, "the version is missing", 1, nil},
		{"version fell", func(x damaged) error { return raw.Set(ctx, version, "7", 0).Err() }, "older than a stream", 1, nil},

		{"idle slots lost", func(x damaged) error { return raw.Del(ctx, idle).Err() }, "that no sweep would find", 0, nil},
		{"idle slot that is live", zadd(idle, 0, "0"), "slot 0 is idle and belongs to a/0", 1, nil},
		{"idle slot that is no number", zadd(idle, 0, "x"), `"x", which is no slot`, 1, nil},
		{"slot in neither map", func(x damaged) error { return raw.Set(ctx, top, "12", 0).Err() }, "slots are neither in the slot map nor idle", 1, nil},
		{"slot in neither map, below one that is", zadd(idle, 5, "12"), "slots are neither in the slot map nor idle", 2, nil},
		{"number of slots lost", func(x damaged) error { return raw.Del(ctx, top).Err() }, "the number of slots given out is missing or too low", 1, nil},
		{"number of slots fell", func(x damaged) error { return raw.Set(ctx, top, "2", 0).Err() }, "the number of slots given out is missing or too low", 1, nil},
		{"retired blocks of a slot that rests", func(x damaged) error {
			return raw.ZAddArgs(ctx, idle, redis.ZAddArgs{XX: true, Members: []redis.Z{{Score: 9e12, Member: slotOf(retiredOf(t, raw))}}}).Err()
		}, "that no sweep would find", 1, nil},
		{"retired blocks of a live slot", zadd(shardTag+"retired:0:device", 5, "00000000000000ff"), "slot 0 has blocks of an ended generation and belongs to a/0", 0, nil},
		{"retired blocks of a slot that nobody knows", zadd(shardTag+"retired:7:disk", 5, "00000000000000ff"), "slot 7 has blocks of an ended generation", 0, nil},
		{"blocks of nobody", zadd(shardTag+"blocks:ghost/0:device", 5, "00000000000000ff"), "ghost/0 has blocks and no stream", 1, nil},
		{"blocks of a stream that was removed", zadd(shardTag+"blocks:e/0:disk", 5, "00000000000000ff"), "e/0 has blocks and no stream", 1, nil},
		{"copies of nobody", hset(shardTag+"copies:ghost/0:device", "5", "1"), "ghost/0 has blocks and no stream", 1, nil},

		{"holders of the wrong type", wrongType(holders), "is a list instead of a hash", 0, nil},
		{"slot map of the wrong type", wrongType(slots), "is a list instead of a hash", 0, nil},
		{"idle slots of the wrong type", wrongType(idle), "is a list instead of a zset", 0, nil},
		{"version of the wrong type", wrongType(version), "is a list instead of a string", 0, nil},
		{"number of slots of the wrong type", wrongType(top), "is a list instead of a string", 0, nil},
		{"stream of the wrong type", wrongType(streamA), "is a list instead of a hash", 0, []string{"a/0"}},
		{"blocks of the wrong type", wrongType(blocksA), "is a list instead of a zset", 0, []string{"a/0"}},
		{"predictions of the wrong type", wrongType(shardTag + "blocks:c/1:predicted"), "is a list instead of a zset", 0, []string{"c/1"}},
		{"copies of the wrong type", wrongType(shardTag + "copies:a/0:device"), "is a list instead of a hash", 1, nil},
		{"retired blocks of the wrong type", func(damaged) error { return wrongType(retiredOf(t, raw))(damaged{}) }, "is a list instead of a zset", 0, nil},

		{"pool that is not listed", func(damaged) error { return raw.SRem(ctx, "wr:1:pools", testPool.String()).Err() }, "the pool is missing from the list of pools", 1, nil},
		{"list of pools lost", func(damaged) error { return raw.Del(ctx, "wr:1:pools").Err() }, "the pool is missing from the list of pools", 1, nil},
		{"list of pools of the wrong type", wrongType("wr:1:pools"), "key wr:1:pools is no set", 2, nil},
		{"name in the list of pools that is none", func(damaged) error { return raw.SAdd(ctx, "wr:1:pools", "nonsense").Err() }, `the list of pools has "nonsense", which is none`, 1, nil},

		{"sums lost", func(damaged) error { return raw.Del(ctx, poolTag+"load").Err() }, "sums of 0 requests and 0 that are none, 2 leases, 2 deadlines", 1, nil},
		{"leases lost", func(damaged) error { return raw.Del(ctx, poolTag+"leases").Err() }, "sums of 2 requests and 0 that are none, 0 leases, 2 deadlines", 1, nil},
		{"deadlines lost", func(damaged) error { return raw.Del(ctx, poolTag+"deadlines").Err() }, "sums of 2 requests and 0 that are none, 2 leases, 0 deadlines", 1, nil},
		{"sums are nonsense", hset(poolTag+"load", "w0/0", "x"), "that are none, 2 leases", 1, nil},
		{"sums of the wrong type", wrongType(poolTag + "load"), "what is under way: a key has the wrong type", 1, nil},
		{"place of nobody", hset(poolTag+"workers", "ghost", "0"), `worker "ghost" is placed on shard "0" and has no stream`, 1, nil},
		{"place lost", hdel(poolTag+"workers", "a"), "worker a is not placed on shard 0", 1, nil},
		{"place on a shard that is not", hset(poolTag+"workers", "a", "7"), "worker a is not placed on shard 0", 1, nil},
	} {
		t.Run(damage.name, func(t *testing.T) {
			flush(t, url)
			s := open(t, url)
			x := fillForDamage(t, s)
			if err := damage.plant(x); err != nil {
				t.Fatal(err)
			}
			r, err := s.Check(ctx, testPool, false)
			if err != nil || r.Repaired != 0 || r.Found == 0 || damage.found > 0 && r.Found != damage.found || !strings.Contains(strings.Join(r.Problems, "\n"), damage.says) {
				t.Fatalf("check: %+v, %v", r, err)
			}
			parts, err := s.CheckInParts(ctx, testPool, false, 7)
			if slices.Sort(r.Problems); err != nil || parts.Found <= 100 && !slices.Equal(slices.Sorted(slices.Values(parts.Problems)), r.Problems) {
				t.Fatalf("check in parts: %+v, %v, in one: %+v", parts, err, r)
			}
			if parts.Problems, r.Problems = nil, nil; !reflect.DeepEqual(parts, r) {
				t.Fatalf("check in parts: %+v, in one: %+v", parts, r)
			}
			if r, err = s.CheckInParts(ctx, testPool, true, 1+rand.Int64N(200)); err != nil || r.Found == 0 || r.Repaired != r.Found {
				t.Fatalf("repair: %+v, %v", r, err)
			}
			clean(t, s)
			for _, lost := range damage.lost {
				w, err := kvcache.ParseWorkerRank(lost)
				if err != nil {
					t.Fatal(err)
				}
				delete(x.full, w)
			}
			want(t, s, x.p, x.full)
			want(t, open(t, url), x.p, x.full)
			// The index goes on: slots are given out, generations end, nothing is left over.
			f := register(t, s, rank("f", 0))
			apply(t, s, &f, 0, store.Applied, storeAll("f", kvcache.Device, x.p[:7]...))
			x.full[f.WorkerRank] = onDevice(7)
			want(t, s, x.p, x.full)
			streams, err := s.Streams(ctx, testPool)
			if err != nil {
				t.Fatal(err)
			}
			for _, st := range streams {
				if o, err := s.Remove(ctx, st); err != nil || o != store.Applied {
					t.Fatalf("remove %v: %v %v", st.WorkerRank, o, err)
				}
			}
			sweepAll(t, s)
			if r := clean(t, s); r.Holders != 0 || r.Blocks != 0 || r.Retired != 0 {
				t.Fatalf("left over: %+v", r)
			}
		})
	}
	if _, err := open(t, url).Check(ctx, kvcache.PoolID{Model: "none"}, false); !errors.Is(err, store.ErrInvalid) {
		t.Fatalf("check of no pool: %v", err)
	}
}

// retiredOf is the key of the blocks that wait for the sweep.
func retiredOf(t *testing.T, raw redis.UniversalClient) string {
	t.Helper()
	for slot := range 20 {
		key := fmt.Sprintf("%sretired:%d:device", shardTag, slot)
		if raw.Exists(t.Context(), key).Val() == 1 {
			return key
		}
	}
	t.Fatal("no retired blocks")
	return ""
}

func slotOf(retired string) string {
	parts := strings.Split(retired, ":")
	return parts[len(parts)-2]
}

// A worker belongs to one shard: streams that it has elsewhere are ended.
func TestCheckMovesAWorkerToItsShard(t *testing.T) {
	_, url := storetest.Miniredis(t)
	s := open(t, url, func(o *store.Options) { o.Shards = 2; o.WriteTimeout = time.Second })
	a, b := register(t, s, rank("a", 0)), register(t, s, rank("b", 0))
	p := chain(1, 5)
	apply(t, s, &a, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	apply(t, s, &b, 0, store.Applied, storeAll("b", kvcache.Device, p...))
	raw := client(t, url)
	if err := raw.HSet(t.Context(), poolTag+"workers", "a", b.Shard).Err(); err != nil {
		t.Fatal(err)
	}
	other := register(t, s, rank("a", 1))
	apply(t, s, &other, 0, store.Applied, storeAll("a", kvcache.Device, p...))
	r, err := s.Check(t.Context(), testPool, false)
	if err != nil || r.Found != 1 || !strings.Contains(r.Problems[0], "has stream a/0 on shard") {
		t.Fatalf("%+v %v", r, err)
	}
	if r, err = s.Check(t.Context(), testPool, true); err != nil || r.Found != 1 || r.Repaired != 1 {
		t.Fatalf("%+v %v", r, err)
	}
	clean(t, s)
	want(t, s, p, map[kvcache.WorkerRank]kvcache.Overlap{rank("a", 1): onDevice(5), rank("b", 0): onDevice(5)})
}

// Check takes nothing that the index does for damage, and repairs nothing away.
func TestCheckDuringTraffic(t *testing.T) {
	for name, url := range map[string]string{"redis": storetest.Redis(t).URL, "cluster": storetest.Cluster(t).URL} {
		t.Run(name, func(t *testing.T) {
			writer := open(t, url, func(o *store.Options) { o.Shards, o.SlotRest = 2, time.Millisecond })
			register(t, writer, rank("w", 0))
			stop := make(chan struct{})
			var wg sync.WaitGroup
			for worker := range 4 {
				wg.Go(func() {
					name := fmt.Sprintf("w%d", worker)
					w := rank(name, 0)
					st := register(t, writer, w)
					for i := 0; ; i++ {
						select {
						case <-stop:
							return
						default:
						}
						var err error
						switch i % 20 {
						case 17:
							st, _, err = writer.Restart(t.Context(), st, -1, 0)
						case 18:
							for more := true; more && err == nil; {
								_, more, err = writer.Sweep(t.Context(), testPool, 100)
							}
						case 19:
							if _, err = writer.Remove(t.Context(), st); err == nil {
								st, _, err = writer.Register(t.Context(), st.StreamID, store.Registration{BlockSize: 16})
							}
						case 5:
							_, err = writer.Predict(t.Context(), testPool, w, chain(uint32(i%3), 50), store.PredictOptions{TTL: time.Duration(i%2)*time.Hour + time.Millisecond})
						default:
							var b store.Batch
							b.Message(st.Seq + 1)
							for k, h := range chain(uint32(i%7), 60) {
								if k%3 == 2 && i%2 == 0 {
									b.Remove(kvcache.Tier(i%3), engine(name, h))
								} else {
									b.Store(kvcache.Tier(i%3), h, engine(name, h))
								}
							}
							_, st.Seq, err = writer.Apply(t.Context(), st, &b)
						}
						if err != nil {
							t.Errorf("step %d: %v", i, err)
							return
						}
					}
				})
			}
			s := open(t, url)
			for i := range 30 {
				r, err := s.Check(t.Context(), testPool, i%2 == 1)
				if err != nil || r.Found != 0 {
					t.Errorf("check %d during traffic: %+v %v", i, r, err)
				}
			}
			close(stop)
			wg.Wait()
			clean(t, s)
		})
	}
}
