package indexer

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
	"github.com/warmroute/warmroute/store/storetest"
)

// offline is a stream without sockets, registered in a store of its own, that a test feeds by hand.
func offline(t *testing.T, st Store, size int) *stream {
	t.Helper()
	ix := newIndexer(t, Options{Store: st})
	s := newStream(ix, publisher{
		id:  store.StreamID{Pool: testPool, WorkerRank: kvcache.WorkerRank{Worker: "w"}},
		reg: store.Registration{BlockSize: size},
	})
	if err := s.register(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// say feeds one live message and applies it.
func (s *stream) say(t *testing.T, seq int64, payload []byte) {
	t.Helper()
	if err := s.live(t.Context(), newMessage(seq, payload)); err != nil {
		t.Fatal(err)
	}
	if err := s.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// doing names what a frame did to a stream, from what changed: the actions of the scenario file.
func doing(s *stream, feed func(), seq int64) []string {
	m := s.ix.metrics
	done, gen := s.cur.done, s.st.Generation
	duplicates := counter(m.events, "unknown", resultDuplicate)
	gaps, lost := counter(m.gaps, gapLive), counter(m.resets, resetGap)
	restarts, undecodable := counter(m.resets, resetRestart), counter(m.resets, resetUndecodable)
	clears := counter(m.resets, resetClear)
	feed()
	var out []string
	if counter(m.resets, resetRestart) > restarts {
		out = append(out, "restart", "invalidate")
	}
	if counter(m.events, "unknown", resultDuplicate) > duplicates {
		out = append(out, "drop:duplicate")
	}
	if counter(m.gaps, gapLive) > gaps {
		out = append(out, fmt.Sprintf("gap:%d", seq-done-1))
	}
	if counter(m.resets, resetGap) > lost {
		out = append(out, "invalidate")
	}
	if counter(m.resets, resetUndecodable) > undecodable {
		out = append(out, "undecodable", "invalidate")
	}
	if len(out) == 0 && s.st.Generation != gen && counter(m.resets, resetClear) == clears {
		out = append(out, fmt.Sprintf("join:%d", seq))
	}
	return out
}

func TestScenarios(t *testing.T) {
	b, err := os.ReadFile("testdata/kv-scenario-vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var scenarios []struct {
		Name   string
		Frames []struct {
			Seq     int64
			Payload string `json:"payload_hex"`
		}
		Actions  []string
		Resident map[string][]string
	}
	if err := json.Unmarshal(b, &scenarios); err != nil {
		t.Fatal(err)
	}
	if len(scenarios) == 0 {
		t.Fatal("no scenarios")
	}
	for _, sc := range scenarios {
		onBoth(t, sc.Name, func(t *testing.T, st *store.Store) {
			s := offline(t, st, 4)
			actions := []string{}
			for i, f := range sc.Frames {
				p, err := hex.DecodeString(f.Payload)
				if err != nil {
					t.Fatal(err)
				}
				for _, a := range doing(s, func() { s.say(t, f.Seq, p) }, f.Seq) {
					actions = append(actions, fmt.Sprintf("%s@%d", a, i))
				}
			}
			if !slices.Equal(actions, sc.Actions) {
				t.Errorf("actions %q, want %q", actions, sc.Actions)
			}
			var want []string
			for place, hashes := range sc.Resident {
				tier, _, _ := strings.Cut(place, "/")
				for _, h := range hashes {
					want = append(want, "w/0 "+tier+" "+h)
				}
			}
			slices.Sort(want)
			got := held(t, st, testPool)
			for h := range s.tr.orphans.byHash { // resident, and found once the parent is known
				got = append(got, "w/0 gpu "+h.String())
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("resident %q, want %q", got, want)
			}
			wantClean(t, st, testPool)
		})
	}
}

// onBoth runs a test on miniredis and on a real server.
func onBoth(t *testing.T, name string, f func(*testing.T, *store.Store)) {
	t.Run(name+"/miniredis", func(t *testing.T) { f(t, newStore(t)) })
	t.Run(name+"/redis", func(t *testing.T) { f(t, openStore(t, storetest.Redis(t).URL)) })
}

// Every event vector, good or bad, one after the other through one stream: nothing but those that say so is lost, and the
// index stays consistent.
func TestEventVectors(t *testing.T) {
	b, err := os.ReadFile("wire/testdata/kv-event-vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name    string
		Payload string `json:"payload_hex"`
	}
	if err := json.Unmarshal(b, &vectors); err != nil || len(vectors) == 0 {
		t.Fatal(err, len(vectors))
	}
	onBoth(t, "all", func(t *testing.T, st *store.Store) {
		s := offline(t, st, 16)
		for i, v := range vectors {
			p, err := hex.DecodeString(v.Payload)
			if err != nil {
				t.Fatal(err)
			}
			s.say(t, int64(i), p)
			if s.st.Seq != int64(i) {
				t.Fatalf("%s: the watermark is %d, want %d", v.Name, s.st.Seq, i)
			}
		}
		s.say(t, int64(len(vectors)), payload(cleared))
		if got := held(t, st, testPool); len(got) != 0 {
			t.Errorf("after a clear the index holds %q", got)
		}
		wantClean(t, st, testPool)
	})
}

// FuzzTranslate: whatever a publisher sends, nothing panics, what is remembered stays within its bounds, and every operation
// comes from a hash that the payload had room for.
func FuzzTranslate(f *testing.F) {
	b, err := os.ReadFile("wire/testdata/kv-event-vectors.json")
	if err != nil {
		f.Fatal(err)
	}
	var vectors []struct {
		Payload string `json:"payload_hex"`
	}
	if err := json.Unmarshal(b, &vectors); err != nil {
		f.Fatal(err)
	}
	for _, v := range vectors {
		p, err := hex.DecodeString(v.Payload)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(p, uint8(4))
	}
	f.Add(payload(stored(below(9), 1), removed(1), stored(nil, 8, 9), cleared, stored(below(9), 2)), uint8(4))
	f.Fuzz(func(t *testing.T, p []byte, size uint8) {
		batch, err := wire.Decode(p)
		if err != nil {
			return
		}
		tr := testTranslator(t, store.Registration{})
		tr.size = int(size)
		for range 2 {
			for _, h := range tr.needs(&batch) {
				if h%2 == 0 {
					tr.learn(h, kvcache.BlockHash(h))
				}
			}
			tr.message(&batch)
			if len(tr.ops) > 2*len(p) {
				t.Fatalf("%d operations out of %d bytes", len(tr.ops), len(p))
			}
			if o := tr.orphans; o.blocks > o.limit || len(tr.known.young)+len(tr.known.old) > tr.known.limit || len(tr.groups) > maxGroups {
				t.Fatalf("%d orphans, %d+%d known, %d groups", o.blocks, len(tr.known.young), len(tr.known.old), len(tr.groups))
			}
		}
	})
}

// The rest of the sequence machine, in the same terms.
func TestSequences(t *testing.T) {
	type frame struct {
		seq     int64
		payload []byte
	}
	for name, tc := range map[string]struct {
		frames  []frame
		actions []string
		want    []string
	}{
		"restart": {
			[]frame{{0, payload(stored(nil, 1))}, {1, payload(stored(below(1), 2))}, {0, payload(stored(nil, 3))}},
			[]string{"restart@2", "invalidate@2"}, gpu("w/0", 3),
		},
		"restart to a later number": {
			[]frame{{0, payload(stored(nil, 1))}, {1, payload()}, {2, payload()}, {1, payload(stored(nil, 3))}},
			[]string{"restart@3", "invalidate@3"}, gpu("w/0", 3),
		},
		"undecodable": {
			[]frame{{0, payload(stored(nil, 1))}, {1, []byte{0xc1}}, {2, payload(stored(nil, 2))}},
			[]string{"undecodable@1", "invalidate@1"}, gpu("w/0", 2),
		},
		"undecodable first": {
			[]frame{{0, nil}, {1, payload(stored(nil, 2))}},
			[]string{"undecodable@0", "invalidate@0"}, gpu("w/0", 2),
		},
		"two gaps": {
			[]frame{{0, payload(stored(nil, 1))}, {2, payload(stored(nil, 2))}, {3, payload(stored(nil, 3))}, {7, payload(stored(nil, 4))}},
			[]string{"gap:1@1", "invalidate@1", "gap:3@3", "invalidate@3"}, gpu("w/0", 4),
		},
		"join, then a restart": {
			[]frame{{9, payload(stored(nil, 1))}, {0, payload(stored(nil, 2))}},
			[]string{"join:9@0", "restart@1", "invalidate@1"}, gpu("w/0", 2),
		},
		"removal of the unknown": {[]frame{{0, payload(removed(5), stored(nil, 1))}}, []string{}, gpu("w/0", 1)},
		"clear keeps what follows in its batch": {
			[]frame{{0, payload(stored(nil, 1))}, {1, payload(stored(nil, 2), cleared, stored(nil, 3), cleared, stored(below(2), 4))}},
			[]string{}, gpu("w/0", 4),
		},
	} {
		t.Run(name, func(t *testing.T) {
			st := newStore(t)
			s := offline(t, st, 4)
			actions := []string{}
			for i, f := range tc.frames {
				for _, a := range doing(s, func() { s.say(t, f.seq, f.payload) }, f.seq) {
					actions = append(actions, fmt.Sprintf("%s@%d", a, i))
				}
			}
			if !slices.Equal(actions, tc.actions) {
				t.Errorf("actions %q, want %q", actions, tc.actions)
			}
			if got := held(t, st, testPool); !slices.Equal(got, tc.want) {
				t.Errorf("the index holds %q, want %q", got, tc.want)
			}
			wantClean(t, st, testPool)
		})
	}
}
