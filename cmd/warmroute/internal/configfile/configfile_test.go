package configfile

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

var schema = Schema{
	"redis":         {},
	"lookup-budget": {},
	"shards":        {},
	"tls":           {},
	"tag":           {List: true},
	"worker":        {List: true, Fields: []string{"id", "url"}},
}

func TestParse(t *testing.T) {
	src := `# comment
redis: redis://localhost:6379
lookup-budget: 20ms
shards: 0x10
tls: true
tag: [a, "b c"]
worker:
  - id: w0
    url: http://10.0.0.1:8000
  - id=w1,url=http://10.0.0.2:8000
`
	got, err := Parse("f.yaml", []byte(src), schema)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Setting{
		"redis":         {2, []string{"redis://localhost:6379"}},
		"lookup-budget": {3, []string{"20ms"}},
		"shards":        {4, []string{"0x10"}},
		"tls":           {5, []string{"true"}},
		"tag":           {6, []string{"a", "b c"}},
		"worker":        {7, []string{"id=w0,url=http://10.0.0.1:8000", "id=w1,url=http://10.0.0.2:8000"}},
	}
	if !maps.EqualFunc(got, want, func(a, b Setting) bool { return reflect.DeepEqual(a, b) }) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

func TestParseEmpty(t *testing.T) {
	for _, src := range []string{"", "# nothing but a comment\n", "\n\n"} {
		if got, err := Parse("f.yaml", []byte(src), schema); err != nil || len(got) != 0 {
			t.Errorf("%q: got %v, %v", src, got, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for name, c := range map[string]struct{ src, want string }{
		"misspelt key":         {"redis: x\n\nlookup-budgte: 1ms\n", `f.yaml:3: unknown key "lookup-budgte" (did you mean "lookup-budget"?)`},
		"underscores":          {"lookup_budget: 1ms\n", `f.yaml:1: unknown key "lookup_budget" (did you mean "lookup-budget"?)`},
		"far from any key":     {"kubernetes: 1\n", `f.yaml:1: unknown key "kubernetes"`},
		"misspelt inner key":   {"worker:\n  - id: w0\n    ulr: x\n", `f.yaml:3: worker: unknown key "ulr" (did you mean "url"?)`},
		"key twice":            {"redis: a\nredis: b\n", `f.yaml:2: mapping key "redis" already defined`},
		"list for one value":   {"redis: [a, b]\n", "f.yaml:1: redis: want one value, not a list"},
		"mapping for a value":  {"redis: {url: a}\n", "f.yaml:1: redis: want a plain value, not a mapping"},
		"null":                 {"redis:\nshards: 1\n", "f.yaml:1: redis: has no value"},
		"comma inside":         {"worker:\n- id: a,b\n", "f.yaml:2: worker: id: a value here has no commas"},
		"list inside a worker": {"worker:\n- id: w\n  url: [a]\n", "f.yaml:3: worker: url: want a plain value"},
		"anchor":               {"redis: &a x\n", "f.yaml:1: redis: anchors, aliases and tags"},
		"not a mapping":        {"- redis\n", "f.yaml:1: want a mapping"},
		"two documents":        {"redis: a\n---\nredis: b\n", "f.yaml: more than one YAML document"},
		"syntax":               {"redis: a\ntag: [x\n", "f.yaml:2: sequence end token ']' not found"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse("f.yaml", []byte(c.src), schema)
			if err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("got  %v\nwant %s…", err, c.want)
			}
		})
	}
}

func TestRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "wr.yaml")
	if _, err := Read(path, schema); !os.IsNotExist(err) || !strings.Contains(err.Error(), path) {
		t.Errorf("missing file: %v", err)
	}
	if err := os.WriteFile(path, []byte("shards: 4\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := Read(path, schema); err != nil || got["shards"].Values[0] != "4" {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestNearest(t *testing.T) {
	candidates := []string{"listen", "redis", "shards", "admin-listen"}
	for name, want := range map[string]string{
		"lisen": "listen", "LISTEN": "listen", "admin_listen": "admin-listen", "shard": "shards", "reids": "redis",
		"zzzzzz": "", "": "",
	} {
		if got, ok := Nearest(name, candidates); got != want || ok != (want != "") {
			t.Errorf("Nearest(%q) = %q, %v; want %q", name, got, ok, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("redis: a\nworker:\n- id: w\n")
	f.Add("tag: [a, b]\nshards: 1")
	f.Fuzz(func(t *testing.T, src string) {
		got, err := Parse("f.yaml", []byte(src), schema)
		if err != nil {
			return
		}
		for key, s := range got {
			if shape, ok := schema[key]; !ok || s.Line < 1 || (!shape.List && len(s.Values) != 1) {
				t.Errorf("%q: key %q gave %+v", src, key, s)
			}
		}
	})
}
