package integration

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/store/redisproc"
)

// The tables of docs/reliability.md name tests that exist, down to the case of a suite and the fault of the outage test, and have a row for
// each kind of areas that other systems have met.
func TestReliabilityNamesTests(t *testing.T) {
	page, err := os.ReadFile("../docs/reliability.md")
	if err != nil {
		t.Fatal(err)
	}
	tests, cases, faults := map[string]bool{}, map[string]bool{}, append(redisproc.Faults(), "pool", "hangup")
	function := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	err = filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && entry.Name() != "..":
			return fs.SkipDir
		case !strings.HasSuffix(path, ".go"):
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if strings.HasSuffix(path, "_test.go") {
			for _, m := range function.FindAllStringSubmatch(string(source), -1) {
				tests[m[1]] = true
			}
		}
		if strings.HasPrefix(path, "../store/") && strings.HasSuffix(path, "_test.go") {
			for _, m := range regexp.MustCompile(`\{"(\w+)(?:/[^"]*)?", (?:test|func)`).FindAllStringSubmatch(string(source), -1) {
				cases[m[1]] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for line := range strings.Lines(string(page)) {
		if !regexp.MustCompile(`^\| [A-Z]\d\d`).MatchString(line) {
			continue
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if len(cells) != 3 {
			t.Fatalf("%d cells, want 3: %.80s", len(cells), line)
		}
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[2], -1) {
			name, rest, _ := strings.Cut(m[1], "/")
			if name == "*" {
				name, rest = "TestConformance", m[1]
			}
			if !strings.HasPrefix(name, "Test") && !strings.HasPrefix(name, "Fuzz") {
				continue
			}
			named++
			if !tests[name] {
				t.Errorf("%s: there is no %s", cells[0], name)
			}
			last := rest[strings.LastIndexByte(rest, '/')+1:]
			if name == "TestFaults" && last != "" && !slices.Contains(faults, last) || name == "TestConformance" && strings.Contains(rest, "*") && !cases[last] {
				t.Errorf("%s: %s has no %s", cells[0], name, last)
			}
		}
	}
	if named < 150 {
		t.Errorf("only %d tests named", named)
	}
}
