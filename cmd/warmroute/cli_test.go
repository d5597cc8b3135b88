package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/warmroute/warmroute/cmd/warmroute/internal/configfile"
)

func parser(t *testing.T) *kong.Kong {
	t.Helper()
	app, err := newParser(&cli{}, &stdio{Out: io.Discard, Err: io.Discard})
	if err != nil {
		t.Fatal(err)
	}
	return app
}

func TestExitCodes(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	for name, c := range map[string]struct {
		want int
		args []string
	}{
		"done":                 {exitOK, []string{"version"}},
		"nothing asked":        {exitOK, nil},
		"help":                 {exitOK, []string{"decode", "--help"}},
		"failed":               {exitFailed, []string{"check", "--redis=redis://127.0.0.1:1"}},
		"address taken":        {exitFailed, []string{"sim", "--http-listen", taken.Addr().String()}},
		"unknown command":      {exitUsage, []string{"serv"}},
		"unknown flag":         {exitUsage, []string{"version", "--loud"}},
		"bad value":            {exitUsage, []string{"frontend", "--retries=many"}},
		"refused by the parts": {exitUsage, []string{"sim", "--ranks=-1"}},
		"no such file":         {exitUsage, []string{"version", "--config=/no/such/file"}},
		"bench of a cluster":   {exitUsage, []string{"bench", "apply", "--redis=redis+cluster://127.0.0.1:1"}},
		"no such dump":         {exitUsage, []string{"load", "--redis=redis://127.0.0.1:1", "--pool=default:m", "/no/such/file"}},
		"no such trace":        {exitUsage, []string{"replay", "/no/such/file"}},
		"no such prompt":       {exitUsage, []string{"query", "--model=m", "--prompt=@/no/such/file"}},
		"no address":           {exitUsage, []string{"sim", "--http-listen=here"}},
		"no server":            {exitUsage, []string{"workers", "--indexer=here"}},
		"cluster of nothing":   {exitUsage, []string{"check", "--redis=redis+cluster://"}},
	} {
		t.Run(name, func(t *testing.T) {
			var out, errOut bytes.Buffer
			if got := run(t.Context(), c.args, strings.NewReader(""), &out, &errOut); got != c.want {
				t.Errorf("exit code %d, want %d: %s", got, c.want, errOut.String())
			}
			if (c.want != exitOK) != strings.HasPrefix(errOut.String(), "warmroute: ") {
				t.Errorf("standard error: %q", errOut.String())
			}
		})
	}
}

// Every setting has the same name as flag, variable and key, and says what it is.
func TestSettingsHaveOneName(t *testing.T) {
	help := map[string]string{}
	settings(parser(t).Model, func(flag *kong.Flag) {
		want := "WARMROUTE_" + strings.ToUpper(strings.ReplaceAll(flag.Name, "-", "_"))
		if len(flag.Envs) != 1 || flag.Envs[0] != want {
			t.Errorf("--%s is %v as a variable, want %s", flag.Name, flag.Envs, want)
		}
		if flag.Help == "" {
			t.Errorf("--%s has no help", flag.Name)
		}
		// A name that meant two things could not be set for both in one file.
		if before, ok := help[flag.Name]; ok && before != flag.Help {
			t.Errorf("--%s is both %q and %q", flag.Name, before, flag.Help)
		}
		help[flag.Name] = flag.Help
	})
	if len(help) < 40 {
		t.Errorf("only %d settings found", len(help))
	}
}

func TestReadmeConfigurationIsValid(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(readme, -1)
	if len(blocks) == 0 {
		t.Fatal("no configuration in the README")
	}
	for _, b := range blocks {
		if _, err := configfile.Parse("README.md", b[1], fileSchema(parser(t).Model)); err != nil {
			t.Error(err)
		}
		path := filepath.Join(t.TempDir(), "wr.yaml")
		if err := os.WriteFile(path, b[1], 0o600); err != nil {
			t.Fatal(err)
		}
		for _, command := range []string{"serve", "indexer", "frontend"} {
			if _, _, err := parse([]string{command, "--config", path}, &stdio{Out: io.Discard, Err: io.Discard}, nil); err != nil {
				t.Errorf("%s: %v", command, err)
			}
		}
	}
}

// The command lines in the help are there to be copied.
func TestExamplesInHelpParse(t *testing.T) {
	examples := 0
	_ = kong.Visit(parser(t).Model.Node, func(v kong.Visitable, next kong.Next) error {
		node, ok := v.(*kong.Node)
		if !ok {
			return next(nil)
		}
		text := strings.ReplaceAll(node.Detail, "\\\n", " ")
		for line := range strings.Lines(text) {
			_, command, ok := strings.Cut(line, "warmroute ")
			if !strings.HasPrefix(line, "    ") || !ok {
				continue
			}
			command, _, _ = strings.Cut(command, "<")
			args := shellWords(command)
			for i, a := range args { // files of the reader
				if a == "--config" || a == "--vectors" {
					args[i+1] = filepath.Join(t.TempDir(), "empty.yaml")
					if err := os.WriteFile(args[i+1], nil, 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			if _, _, err := parse(args, &stdio{Out: io.Discard, Err: io.Discard}, nil); err != nil {
				t.Errorf("warmroute %s: %v", command, err)
			}
			examples++
		}
		return next(nil)
	})
	if examples < 10 {
		t.Errorf("only %d examples found", examples)
	}
}

// Every command says how it is used and how it ends.
func TestEveryCommandHasAnExample(t *testing.T) {
	var visit func(n *kong.Node)
	visit = func(n *kong.Node) {
		for _, child := range n.Children {
			for _, want := range []string{"\nExample", "\n    ", "\nExit codes: 0 "} {
				if !strings.Contains(child.Detail, want) {
					t.Errorf("%s: no %q in its help", child.FullPath(), want)
				}
			}
			visit(child)
		}
	}
	visit(parser(t).Model.Node)
}

// shellWords splits a line like a shell, as far as the examples need it: white space and quotes.
func shellWords(line string) (words []string) {
	for _, m := range regexp.MustCompile(`(?:[^\s'"]+|'[^']*'|"[^"]*")+`).FindAllString(line, -1) {
		words = append(words, strings.NewReplacer("'", "", `"`, "").Replace(regexp.MustCompile(`'[^']*'`).ReplaceAllStringFunc(m, func(q string) string {
			return strings.ReplaceAll(q[1:len(q)-1], `"`, "\x00")
		})))
	}
	for i, w := range words {
		words[i] = strings.ReplaceAll(w, "\x00", `"`)
	}
	return words
}

func TestServicesEndInOrder(t *testing.T) {
	logger := slog.New(slog.DiscardHandler)
	untilTold := func(ctx context.Context, name string, log chan<- string) error {
		<-ctx.Done()
		log <- name
		return nil
	}
	log := make(chan string, 2)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := runServices(ctx, logger,
		service{"front", "", func(ctx context.Context) error { return untilTold(ctx, "front", log) }},
		service{"back", "", func(ctx context.Context) error { return untilTold(ctx, "back", log) }})
	if first, second := <-log, <-log; err != nil || first != "front" || second != "back" {
		t.Errorf("%s ended before %s, %v", first, second, err)
	}

	// One that fails ends the others, in the same order, and its error is the reason.
	boom := errors.New("boom")
	err = runServices(t.Context(), logger,
		service{"front", "", func(ctx context.Context) error { return untilTold(ctx, "front", log) }},
		service{"back", "", func(context.Context) error { return boom }})
	if got := <-log; !errors.Is(err, boom) || got != "front" {
		t.Errorf("%v, ended %s", err, got)
	}
	err = runServices(t.Context(), logger, service{"front", "", func(context.Context) error { return nil }})
	if err == nil || !strings.Contains(err.Error(), "front ended by itself") {
		t.Errorf("a service that ends without being told: %v", err)
	}
}

func TestQuietLogger(t *testing.T) {
	for level, want := range map[slog.Level]int{slog.LevelInfo: 1, slog.LevelDebug: 3} {
		var b bytes.Buffer
		o := logOptions{Level: level, Format: "text"}
		l := o.quiet(o.logger(&b)).With("a", 1).WithGroup("g")
		l.Debug("x")
		l.Warn("x")
		l.Error("x")
		if got := strings.Count(b.String(), "\n"); got != want {
			t.Errorf("level %v: %d lines, want %d: %s", level, got, want, b.String())
		}
	}
}
