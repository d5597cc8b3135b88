package store_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// BenchmarkSelect measures one choice by the shared loads, reservation included, on a real Redis, beside a PING and a bare HMGET
// of the candidates' loads, the three in turn. Every candidate has a load.
//
//	p50-µs, p99-µs   of the choice
//	x-ping, x-hmget  its median in medians of the others
//	redis-µs         what Redis spends on it (INFO commandstats, the release not counted)
func BenchmarkSelect(b *testing.B) {
	for _, n := range []int{8, 64, 256} {
		b.Run(fmt.Sprintf("candidates=%d", n), func(b *testing.B) {
			r := storetest.Redis(b)
			s := open(b, r.URL)
			raw := client(b, r.URL)
			a := store.Ask{
				Lease: time.Hour, BlockSize: 16, PromptTokens: 8192, DecodeBlocks: 512,
				Weights: store.Weights{PrefillScale: 4, Miss: 8, Decode: 1},
			}
			fields := make([]string, n)
			for i := range n {
				w := kvcache.WorkerRank{Worker: fmt.Sprintf("10.0.%d.%d:8000", i/256, i%256)}
				fields[i] = w.String()
				a.Candidates = append(a.Candidates, store.Candidate{WorkerRank: w, Credit: float64(i%7) * 60.25})
			}
			tag := "wr:1:{default:llama %7B3%7D%231}"
			for i := range 4 * n {
				a.ID = "warm" + strconv.Itoa(i)
				one := a
				one.Candidates = a.Candidates[i%n : i%n+1]
				selects(b, s, one)
			}
			if err := raw.ConfigResetStat(b.Context()).Err(); err != nil {
				b.Fatal(err)
			}
			var choice, ping, hmget []time.Duration
			timed := func(to *[]time.Duration, f func() error) {
				start := time.Now()
				if err := f(); err != nil {
					b.Fatal(err)
				}
				*to = append(*to, time.Since(start))
			}
			b.ResetTimer()
			for i := range b.N {
				a.ID = strconv.Itoa(i)
				timed(&choice, func() error { _, err := s.Select(b.Context(), testPool, a); return err })
				timed(&ping, func() error { return raw.Ping(b.Context()).Err() })
				timed(&hmget, func() error { return raw.HMGet(b.Context(), tag+":load", fields...).Err() })
			}
			b.StopTimer()
			us := func(d []time.Duration, q float64) float64 {
				slices.Sort(d)
				return float64(d[min(int(q*float64(len(d))), len(d)-1)].Nanoseconds()) / 1e3
			}
			b.ReportMetric(us(choice, 0.5), "p50-µs")
			b.ReportMetric(us(choice, 0.99), "p99-µs")
			b.ReportMetric(us(choice, 0.5)/us(ping, 0.5), "x-ping")
			b.ReportMetric(us(choice, 0.5)/us(hmget, 0.5), "x-hmget")
			b.ReportMetric(scriptTime(b, raw), "redis-µs")
		})
	}
}

// scriptTime is the mean time of a script in µs.
func scriptTime(b *testing.B, raw redis.UniversalClient) float64 {
	info, err := raw.Info(b.Context(), "commandstats").Result()
	if err != nil {
		b.Fatal(err)
	}
	_, after, ok := strings.Cut(info, "cmdstat_evalsha:")
	_, after, ok2 := strings.Cut(after, "usec_per_call=")
	text, _, _ := strings.Cut(after, ",")
	us, err := strconv.ParseFloat(text, 64)
	if !ok || !ok2 || err != nil {
		b.Fatalf("no figure in %q", info)
	}
	return us
}
