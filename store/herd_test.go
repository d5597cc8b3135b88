package store

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// C06: 200 processes lose Redis in the same moment. After the first second their probes come evenly, not in waves: each
// pause is drawn anew from all of its range.
func TestProbesOfAFleetAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const fleet, bin = 200, 100 * time.Millisecond
		start := time.Now()
		var mu sync.Mutex
		bins := map[time.Duration]int{}
		for range fleet {
			l, _ := testLink(t, &probeScript{})
			l.probe = func(context.Context) error {
				mu.Lock()
				defer mu.Unlock()
				bins[time.Since(start)/bin]++
				return errAway
			}
			_ = l.report(t.Context(), errAway)
		}
		time.Sleep(time.Minute) // the bubble's clock
		mu.Lock()
		defer mu.Unlock()
		most, all := 0, 0
		for at := 2 * time.Second / bin; at < time.Minute/bin; at++ {
			most, all = max(most, bins[at]), all+bins[at]
		}
		mean := all / int(58*time.Second/bin)
		if mean < fleet/8 || mean > fleet/2 || most > 2*mean {
			t.Errorf("%d probes in the busiest 100 ms, %d on average", most, mean)
		}
	})
}
