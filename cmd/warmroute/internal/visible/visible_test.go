package visible_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/visible"
	"github.com/warmroute/warmroute/store/storetest"
)

func TestEveryBlockBecomesVisible(t *testing.T) {
	r, err := visible.Run(t.Context(), visible.Options{
		Redis: storetest.Redis(t).URL, Workers: 3, Rate: 1000, Time: time.Second, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil || r.Samples == 0 || r.Blocks < r.Samples*16 || r.P50 <= 0 || r.P99 < r.P50 || r.Max < r.P99 {
		t.Fatalf("%+v %v", r, err)
	}
}
