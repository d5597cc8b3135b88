package integration

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Each of our cells in docs/comparison.md names tests that exist, or says that the thing is not offered; each of the others' cells has a
// public source, or says that none is known.
func TestComparisonIsBackedUp(t *testing.T) {
	text, err := os.ReadFile("../docs/comparison.md")
	if err != nil {
		t.Fatal(err)
	}
	link := regexp.MustCompile(`\[([^\]]+)\]\(([^)]+)\)`)
	rows := 0
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| | ") {
			continue
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if len(cells) != 9 {
			t.Fatalf("%d cells, want 9: %.80s", len(cells), line)
		}
		rows++
		feature, ours := strings.TrimSpace(cells[0]), strings.TrimSpace(cells[1])
		links := link.FindAllStringSubmatch(ours, -1)
		if len(links) == 0 && ours != "not offered" {
			t.Errorf("%s: our cell names no test: %s", feature, ours)
		}
		for _, l := range links {
			source, err := os.ReadFile(filepath.Join("../docs", l[2]))
			if err != nil || !strings.HasPrefix(l[1], "Test") || !strings.Contains(string(source), "func "+l[1]+"(") {
				t.Errorf("%s: there is no %s in %s", feature, l[1], l[2])
			}
		}
		for _, cell := range cells[2:] {
			sourced := regexp.MustCompile(`\]\(https://`).MatchString(cell)
			if !sourced && !regexp.MustCompile(`unknown|not applicable|^ ?no(ne)?[ ,]`).MatchString(cell) {
				t.Errorf("%s: a cell without source: %s", feature, cell)
			}
		}
	}
	if rows < 12 {
		t.Errorf("only %d rows", rows)
	}
}
