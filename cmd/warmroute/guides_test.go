package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/cmd/warmroute/internal/configfile"
)

// The commands and configurations in the documents are understood by the program.
func TestDocumentsCommandsParse(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	guides, err := filepath.Glob("../../docs/guides/*.md")
	if err != nil || len(guides) < 4 {
		t.Fatalf("guides: %v, %v", guides, err)
	}
	appendix, err := filepath.Glob("../../docs/appendix/*.md")
	if err != nil || len(appendix) == 0 {
		t.Fatalf("appendix: %v, %v", appendix, err)
	}
	block := regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```")
	commands, files := 0, 0
	t.Setenv("REDIS", "redis://127.0.0.1:6379")
	for _, page := range slices.Concat(pages, guides, appendix) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range block.FindAllStringSubmatch(string(text), -1) {
			if m[1] == "yaml" && strings.HasPrefix(m[2], "worker:") {
				files++
				if _, err := configfile.Parse(page, []byte(m[2]), fileSchema(parser(t).Model)); err != nil {
					t.Error(err)
				}
				continue
			}
			for line := range strings.Lines(strings.ReplaceAll(m[2], "\\\n", " ")) {
				command, ok := strings.CutPrefix(line, "warmroute ")
				if command, _, _ = strings.Cut(command, " #"); !ok || strings.ContainsAny(command, "<…'|") {
					continue // for the reader to complete, or for the shell to read
				}
				commands++
				args := strings.Fields(os.ExpandEnv(strings.ReplaceAll(command, `"`, "")))
				if _, _, err := parse(args, &stdio{Out: io.Discard, Err: io.Discard}, nil); err != nil {
					t.Errorf("%s: warmroute %s: %v", page, strings.TrimSpace(command), err)
				}
			}
		}
	}
	if commands < 8 || files < 3 {
		t.Errorf("only %d commands and %d configurations found", commands, files)
	}
}
