package integration

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Each of our cells in docs/comparison.md names tests that exist, or says that the thing is not offered; each of the others' cells has a
// public source with the version that was read, or says that nothing was found.
func TestComparisonIsBackedUp(t *testing.T) {
	text, err := os.ReadFile("../docs/comparison.md")
	if err != nil {
		t.Fatal(err)
	}
	link := regexp.MustCompile(`\[([^\]]+)\]\(([^)]+)\)`)
	reference := regexp.MustCompile(`\[([a-z]+-[a-z0-9]+)\]`)
	page, sources, _ := strings.Cut(string(text), "\n## Sources\n")
	defined := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\[([^\]]+)\]: (https://\S+)$`).FindAllStringSubmatch(sources, -1) {
		defined[m[1]] = true
		if !strings.Contains(page, "["+m[1]+"]") || !strings.Contains(sources, "| ["+m[1]+"] |") {
			t.Errorf("source %s is not cited, or not in the list", m[1])
		}
		if strings.Contains(m[2], "/blob/") && !regexp.MustCompile(`/blob/[0-9a-f]{40}/`).MatchString(m[2]) {
			t.Errorf("source %s does not say which commit was read: %s", m[1], m[2])
		}
	}
	rows := 0
	for line := range strings.Lines(page) {
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
			cited := reference.FindAllStringSubmatch(cell, -1)
			if len(cited) == 0 && !regexp.MustCompile(`^ ?not (found|applicable)`).MatchString(cell) {
				t.Errorf("%s: a cell without source: %s", feature, cell)
			}
			for _, c := range cited {
				if !defined[c[1]] {
					t.Errorf("%s: source %s is nowhere defined", feature, c[1])
				}
			}
		}
	}
	if rows < 12 {
		t.Errorf("only %d rows", rows)
	}
}
