package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	goparser "go/parser"
	"go/token"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

var update = flag.Bool("update", false, "write docs/configuration.md")

const configurationHead = `# Configuration

Every setting has one name and three ways to give it: the flag ` + "`--lookup-budget 20ms`, the variable `WARMROUTE_LOOKUP_BUDGET=20ms`, or the key\n`lookup-budget: 20ms`" + ` in the YAML
file that ` + "`--config` or `WARMROUTE_CONFIG`" + ` names. A flag wins over the variable, the variable over the file, the file over the default. One file
can serve all commands: each takes what it knows. A misspelt key is refused by name and line; an unknown variable is warned about; an empty variable counts as not set.
Secrets belong in variables or the file, where other users of the machine cannot read them.

This page is made from the program (` + "`make docs`" + `), and a test says when it is out of date. ` + "`warmroute <command> --help`" + ` says the same.
`

// configuration is docs/configuration.md.
func configuration(t *testing.T, app *kong.Application) []byte {
	t.Helper()
	type setting struct {
		flag     *kong.Flag
		commands []string
	}
	groups, byGroup := []string{}, map[string][]*setting{}
	seen := map[string]*setting{}
	var visit func(n *kong.Node, path string)
	visit = func(n *kong.Node, path string) {
		for _, f := range n.Flags {
			if !isSetting(f) {
				continue
			}
			s := seen[f.Name]
			if s == nil {
				s = &setting{flag: f}
				seen[f.Name] = s
				group := "General"
				if f.Group != nil {
					group = f.Group.Title
				}
				if byGroup[group] == nil {
					groups = append(groups, group)
				}
				byGroup[group] = append(byGroup[group], s)
			}
			s.commands = append(s.commands, path)
		}
		for _, child := range n.Children {
			visit(child, strings.TrimSpace(path+" "+child.Name))
		}
	}
	visit(app.Node, "")
	b := bytes.NewBufferString(configurationHead)
	for _, group := range groups {
		fmt.Fprintf(b, "\n## %s\n\n| setting | default | of | meaning |\n|---|---|---|---|\n", group)
		for _, s := range byGroup[group] {
			value := "none"
			if s.flag.HasDefault && s.flag.Default != "" {
				value = "`" + s.flag.Default + "`"
			}
			of := strings.Join(s.commands, ", ")
			if slices.Contains(s.commands, "") {
				of = "all"
			}
			help := s.flag.Help
			for _, suffix := range []string{" (default " + s.flag.Default + ")", " (default \"" + s.flag.Default + "\")", " (default: none)"} {
				help = strings.Replace(help, suffix, "", 1)
			}
			fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", s.flag.Name, value, of, strings.ReplaceAll(help, "|", "\\|"))
		}
		if group == "Workers" {
			b.WriteString("\nThe keys of one worker:\n\n| key | meaning |\n|---|---|\n")
			comments := workerComments(t)
			for _, f := range workerFields {
				meaning := comments[strings.ReplaceAll(f.key, "-", "")]
				if meaning == "" {
					t.Errorf("workerSpec does not say what %s is", f.key)
				}
				fmt.Fprintf(b, "| `%s` | %s |\n", f.key, meaning)
			}
		}
	}
	return b.Bytes()
}

// workerComments are the comments of the fields of workerSpec, by the lower-case name.
func workerComments(t *testing.T) map[string]string {
	t.Helper()
	f, err := goparser.ParseFile(token.NewFileSet(), "workers.go", nil, goparser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	comments := map[string]string{}
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != "workerSpec" {
			return true
		}
		for _, field := range spec.Type.(*ast.StructType).Fields.List {
			text := field.Comment.Text()
			if text == "" {
				text = field.Doc.Text()
			}
			comments[strings.ToLower(field.Names[0].Name)] = strings.ReplaceAll(strings.TrimSpace(text), "\n", " ")
		}
		return false
	})
	return comments
}

func TestConfigurationReferenceIsUpToDate(t *testing.T) {
	const page = "../../docs/configuration.md"
	want := configuration(t, parser(t).Model)
	if *update {
		if err := os.WriteFile(page, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("docs/configuration.md is not what the program's settings are: run make docs")
	}
}
