package model

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

var (
	seeds = flag.Int("model.seeds", 5, "how many random histories to play")
	first = flag.Uint64("model.first", 0, "the first one's seed")
	steps = flag.Int("model.steps", 10_000, "steps of each")
)

// restEvery is how many steps lie between two comparisons.
const restEvery = 1000

func TestIndexEqualsTheModel(t *testing.T) {
	n := *steps
	if testing.Short() {
		n = min(n, 2*restEvery)
	}
	for seed := *first; seed < *first+uint64(*seeds); seed++ {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			w := newWorld(t, seed)
			defer func() {
				if t.Failed() {
					w.explain()
					t.Logf("the last steps:\n%s\nthe indexers' last words:\n%s", strings.Join(w.diary, "\n"), &w.journal)
				}
			}()
			w.reader = newReader(w)
			for step := 1; step <= n; step++ {
				w.step()
				if step%restEvery == 0 || step == n {
					w.rest(step)
				}
			}
			w.reader.stop()
		})
	}
}

// rest lets the world come to rest and compares.
func (w *world) rest(step int) {
	w.t.Helper()
	w.ensure(w.rng.IntN(numIndexers))
	for _, e := range w.engines {
		if e.vague && w.rng.IntN(2) == 0 {
			w.restartEngine(e)
		}
		e.publish(e.work()...) // nobody can miss a message after which none comes
		e.publish(e.sign())
	}
	w.eventually(step, "the index equals the model", func() error { return errors.Join(w.compare(), w.lookups()) })
	w.eventually(step, "the check is clean", func() error {
		r, err := w.store.Check(w.t.Context(), pool, false)
		if err == nil && r.Found > 0 {
			err = fmt.Errorf("%q", r.Problems)
		}
		return err
	})
	if err := errors.Join(w.reader.fault(), w.journal.damaged()); err != nil {
		w.t.Fatalf("step %d: %v", step, err)
	}
}

// lookups says which lookup differs from the model's.
func (w *world) lookups() error {
	for _, e := range w.engines {
		for prompt := range prompts {
			scores, state, err := w.store.Lookup(w.t.Context(), pool, hashes(prompt, depth), store.LookupOptions{})
			if err != nil || state != kvcache.Exact {
				return fmt.Errorf("lookup: %v %w", state, err)
			}
			got, want := scores.Scores[kvcache.WorkerRank{Worker: e.id}], e.overlap(prompt)
			more := got.Device > want.Device || got.Host > want.Host || got.Disk > want.Disk || got.Any > want.Any
			if more || got != want && !e.vague {
				return fmt.Errorf("%s has %+v of prompt %d, the lookup says %+v", e.id, want, prompt, got)
			}
		}
	}
	return nil
}

// compare says how index and engines differ.
func (w *world) compare() error {
	streams, err := w.store.Streams(w.t.Context(), pool)
	if err != nil {
		return err
	}
	for _, e := range w.engines {
		i := slices.IndexFunc(streams, func(s store.Stream) bool { return s.Worker == e.id })
		if i < 0 {
			return fmt.Errorf("%s is not known", e.id)
		}
		if streams[i].Seq != e.next-1 {
			return fmt.Errorf("%s is at message %d, the index at %d", e.id, e.next-1, streams[i].Seq)
		}
	}
	indexed := map[string]map[string]bool{}
	err = w.store.Dump(w.t.Context(), pool, func(v kvcache.RouterEvent) error {
		id := string(v.WorkerID)
		if indexed[id] == nil {
			indexed[id] = map[string]bool{}
		}
		tier, _ := v.StorageTier.Tier()
		for _, b := range v.Event.Data.Stored.Blocks {
			indexed[id][fmt.Sprintf("%v %v", tier, b.BlockHash)] = true
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, e := range w.engines {
		held := e.resident()
		for b := range indexed[e.id] {
			if !held[b] {
				return fmt.Errorf("%s does not hold %s, the index says it does", e.id, b)
			}
		}
		if got, want := len(indexed[e.id]), len(held); got != want && !e.vague {
			return fmt.Errorf("%s holds %d blocks, the index knows %d", e.id, want, got)
		}
	}
	return nil
}

// eventually waits for something to be true of the index.
func (w *world) eventually(step int, what string, ask func() error) {
	w.t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ask()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			w.t.Fatalf("step %d: a minute after the last event it is not true that %s: %v", step, what, err)
		}
	}
}

// reader looks up, all the time, the blocks that only one process of an engine had. What it sees of an engine must never go
// back to an earlier process, unless Redis itself went back.
type reader struct {
	w      *world
	store  *store.Store
	ended  sync.WaitGroup
	cancel context.CancelFunc

	mu    sync.Mutex
	seen  map[string]int // newest process of each engine that a lookup has credited
	epoch int            // losses of data by Redis
	lost  bool           // one is in progress
	err   error
}

func newReader(w *world) *reader {
	ctx, cancel := context.WithCancel(w.t.Context())
	r := &reader{w: w, store: w.open(w.redis.URL), cancel: cancel, seen: map[string]int{}}
	r.ended.Go(func() { r.run(ctx) })
	w.t.Cleanup(r.stop)
	return r
}

func (r *reader) stop() { r.cancel(); r.ended.Wait() }

func (r *reader) fault() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// losing runs what makes Redis go back.
func (r *reader) losing(f func()) {
	r.mu.Lock()
	r.lost = true
	r.mu.Unlock()
	f()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost, r.seen = false, map[string]int{}
	r.epoch++
}

func (r *reader) run(ctx context.Context) {
	// The engines' lives are the test's to change, so the reader keeps its own view: a few lives around the one that it has seen.
	for ctx.Err() == nil {
		for _, e := range r.w.engines {
			r.mu.Lock()
			from, epoch := r.seen[e.id], r.epoch
			r.mu.Unlock()
			for life := max(1, from-2); life <= from+10; life++ {
				scores, _, err := r.store.Lookup(ctx, pool, hashes(e.own(life), 1), store.LookupOptions{})
				if err != nil || scores.Scores[kvcache.WorkerRank{Worker: e.id}].Any == 0 {
					continue
				}
				r.mu.Lock()
				switch {
				case r.lost || r.epoch != epoch:
				case life > r.seen[e.id]:
					r.seen[e.id] = life
				case life < from && r.err == nil: // from was seen before this lookup began
					st, _, _ := r.store.Stream(ctx, store.StreamID{Pool: pool, WorkerRank: kvcache.WorkerRank{Worker: e.id}})
					r.err = fmt.Errorf("%s: a lookup credits %s with a block of its process %d after one has shown process %d (now generation %d, epoch %d, message %d, slot %d)",
						time.Now().Format("15:04:05.000"), e.id, life, from, st.Generation, st.Epoch, st.Seq, st.Slot)
				}
				r.mu.Unlock()
			}
		}
	}
}

var between = regexp.MustCompile(`missing from the list of pools|placed on shard`)

// journal keeps the last lines of the indexers' logs.
type journal struct {
	mu     sync.Mutex
	lines  []string
	damage []string // what the indexers' checks have found
}

func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	// Lists that are not of a shard are compared in several steps: a Redis that is emptied in between makes them differ.
	if strings.Contains(string(b), "the index was damaged") && !between.Match(b) {
		j.damage = append(j.damage, string(b))
	}
	j.lines = append(j.lines, string(b))
	if len(j.lines) > 150 {
		j.lines = j.lines[1:]
	}
	return len(b), nil
}

// damaged says what the indexers' checks have found. Nothing that happens here damages the index, so that was no damage.
func (j *journal) damaged() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.damage) > 0 {
		return fmt.Errorf("a check found damage: %q", j.damage)
	}
	return nil
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines, "")
}

// logger writes an indexer's log to the journal.
func (j *journal) logger(i int) *slog.Logger {
	return slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{Level: slog.LevelInfo})).With("indexer", i)
}
