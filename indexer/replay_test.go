package indexer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

// answers scripts a publisher's replay sessions: what each sends, and whether END follows.
type answer struct {
	seqs []int64
	end  bool
	err  error
}

func TestAssemble(t *testing.T) {
	broken := errors.New("connection reset")
	for name, tc := range map[string]struct {
		start    int64
		answers  []answer
		limit    int
		asked    []int64
		want     []int64
		complete bool
		partial  bool
		fails    bool
	}{
		"all at once":           {0, []answer{{seqs: []int64{0, 1, 2}, end: true}}, 0, []int64{0}, []int64{0, 1, 2}, true, false, false},
		"nothing there":         {5, []answer{{end: true}}, 0, []int64{5}, nil, true, false, false},
		"evicted, from 0":       {0, []answer{{seqs: []int64{7, 8}, end: true}}, 0, []int64{0}, []int64{7, 8}, true, false, false},
		"evicted, from later":   {3, []answer{{seqs: []int64{7, 8}, end: true}, {seqs: []int64{7, 8}, end: true}}, 0, []int64{3, 3}, []int64{7, 8}, true, false, false},
		"dropped in the middle": {0, []answer{{seqs: []int64{0, 1, 4}, end: true}, {seqs: []int64{2, 3, 4}, end: true}}, 0, []int64{0, 2}, []int64{0, 1, 2, 3, 4}, true, false, false},
		"dropped, no END":       {0, []answer{{seqs: []int64{0, 1, 4}}, {seqs: []int64{2, 3, 4, 5}, end: true}}, 0, []int64{0, 2}, []int64{0, 1, 2, 3, 4, 5}, true, false, false},
		"burnt number": {0, []answer{{seqs: []int64{0, 1, 3}, end: true}, {seqs: []int64{3, 4}, end: true}}, 0, []int64{0, 2},
			[]int64{0, 1, 3, 4}, true, false, false},
		"two burnt numbers": {0, []answer{{seqs: []int64{0, 2, 4}, end: true}, {seqs: []int64{2, 4}, end: true}, {seqs: []int64{4}, end: true}}, 0,
			[]int64{0, 1, 3}, []int64{0, 2, 4}, true, false, false},
		"the hole moves": {0, []answer{{seqs: []int64{0, 2}, end: true}, {seqs: []int64{3}, end: true}, {seqs: []int64{3}, end: true}}, 0,
			[]int64{0, 1, 1}, []int64{0, 3}, true, false, false},
		"silent":           {0, []answer{{}, {}, {}}, 0, []int64{0, 0, 0}, nil, false, false, true},
		"refused":          {0, []answer{{err: broken}, {err: broken}, {err: broken}}, 0, []int64{0, 0, 0}, nil, false, false, true},
		"stops half-way":   {0, []answer{{seqs: []int64{0}}, {seqs: []int64{1}}, {}, {}, {}}, 0, []int64{0, 1, 2, 2, 2}, []int64{0, 1}, false, false, true},
		"more than fits":   {0, []answer{{seqs: []int64{0, 1, 2, 3}, end: true}}, 150, []int64{0}, []int64{0, 1, 2}, false, true, false},
		"older than asked": {5, []answer{{seqs: []int64{3, 4, 5, 6}, end: true}}, 0, []int64{5}, []int64{5, 6}, true, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			var asked []int64
			limit := tc.limit
			if limit == 0 {
				limit = 1 << 20
			}
			r, err := assemble(t.Context(), func(_ context.Context, start int64) ([]message, bool, error) {
				if len(asked) == len(tc.answers) {
					return nil, false, fmt.Errorf("asked once more, from %d", start)
				}
				a := tc.answers[len(asked)]
				asked = append(asked, start)
				var got []message
				for _, s := range a.seqs {
					got = append(got, message{seq: s})
				}
				return got, a.end, a.err
			}, tc.start, limit, time.Nanosecond)
			var got []int64
			for _, m := range r.messages {
				got = append(got, m.seq)
			}
			if !slices.Equal(asked, tc.asked) || !slices.Equal(got, tc.want) {
				t.Errorf("asked from %v and got %v, want %v and %v", asked, got, tc.asked, tc.want)
			}
			if r.complete != tc.complete || r.partial != tc.partial || (err != nil) != tc.fails {
				t.Errorf("complete %v, partial %v, error %v", r.complete, r.partial, err)
			}
		})
	}
}

func TestAssembleEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	_, err := assemble(ctx, func(context.Context, int64) ([]message, bool, error) {
		cancel()
		return nil, false, nil
	}, 0, 1, time.Nanosecond)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
