package monitoring

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "write dashboard.json")

func TestDashboardIsUpToDate(t *testing.T) {
	want, err := Dashboard()
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile("dashboard.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile("dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("dashboard.json is not what dashboard.go makes: run make docs")
	}
}

// Panels have what a reader needs, fit beside each other, and no two are on the same place.
func TestDashboardLayout(t *testing.T) {
	text, err := Dashboard()
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			ID                       int
			Type, Title, Description string
			GridPos                  struct{ X, Y, W, H int }
			Targets                  []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	taken, ids, titles := map[[2]int]string{}, map[int]bool{}, map[string]bool{}
	for _, p := range board.Panels {
		if ids[p.ID] || titles[p.Title] {
			t.Errorf("panel %q or its id %d exists twice", p.Title, p.ID)
		}
		ids[p.ID], titles[p.Title] = true, true
		if p.Type != "row" && (p.Description == "" || len(p.Targets) == 0) {
			t.Errorf("panel %q: description %q, %d queries", p.Title, p.Description, len(p.Targets))
		}
		for _, q := range p.Targets {
			if q.Expr == "" || q.LegendFormat == "" {
				t.Errorf("panel %q has a query without expression or legend", p.Title)
			}
		}
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("panel %q at %d,%d is in the way of %q or of the edge", p.Title, x, y, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
	}
	if len(titles) < 25 {
		t.Errorf("only %d panels", len(titles))
	}
}
