package main

import (
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"
	"github.com/warmroute/warmroute/cmd/warmroute/internal/configfile"
)

const envPrefix = "WARMROUTE"

// loadConfigFile adds the configuration file, where one is named, as a source of flag values.
func loadConfigFile(ctx *kong.Context) error {
	path := os.Getenv(envPrefix + "_CONFIG")
	for _, flag := range ctx.Flags() {
		if flag.Name == "config" {
			if v, ok := ctx.FlagValue(flag).(string); ok && v != "" {
				path = v
			}
		}
	}
	if path == "" {
		return nil
	}
	file, err := configfile.Read(path, fileSchema(ctx.Model))
	if err != nil {
		return err
	}
	r := fileResolver{path, file}
	ctx.AddResolver(r)
	return r.check(ctx.Flags())
}

// settings calls f for every flag of every command that can also be a variable and a key.
func settings(app *kong.Application, f func(*kong.Flag)) {
	var visit func(*kong.Node)
	visit = func(n *kong.Node) {
		for _, flag := range n.Flags {
			if isSetting(flag) {
				f(flag)
			}
		}
		for _, child := range n.Children {
			visit(child)
		}
	}
	visit(app.Node)
}

// isSetting reports whether a flag can also be given by a variable and in the file. The others act
// once: a file that names the Redis in production must not make the demo or a benchmark use it.
func isSetting(flag *kong.Flag) bool { return len(flag.Envs) > 0 }

// isList reports that the flag takes several values.
func isList(flag *kong.Flag) bool { return flag.Target.Kind() == reflect.Slice }

// fileSchema allows the settings of all commands, so that one file can serve them all.
func fileSchema(app *kong.Application) configfile.Schema {
	schema := configfile.Schema{}
	settings(app, func(flag *kong.Flag) {
		if flag.Name == "config" {
			return
		}
		shape := configfile.Shape{List: isList(flag)}
		if w, ok := flag.Target.Interface().(workerList); ok {
			shape.Fields = w.Fields()
		}
		schema[flag.Name] = shape
	})
	return schema
}

// fileResolver gives kong the values of the file.
type fileResolver struct {
	path     string
	settings map[string]configfile.Setting
}

// Validate has nothing left to do: the file was checked when it was read.
func (fileResolver) Validate(*kong.Application) error { return nil }

// Resolve finds a flag's value. A variable that is set wins, which kong has applied already.
func (r fileResolver) Resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	s, ok := r.settings[flag.Name]
	if !ok || !isSetting(flag) || slices.ContainsFunc(flag.Envs, envIsSet) {
		return nil, nil
	}
	return kongValue(flag, s), nil
}

// check tries every value that the command reads, because only here is its place known.
func (r fileResolver) check(flags []*kong.Flag) error {
	for _, flag := range flags {
		s, ok := r.settings[flag.Name]
		if !ok || !isSetting(flag) {
			continue
		}
		trial := reflect.New(flag.Target.Type()).Elem()
		if err := flag.Parse(kong.Scan().PushTyped(kongValue(flag, s), kong.FlagValueToken), trial); err != nil {
			return fmt.Errorf("%s:%d: %w", r.path, s.Line, err)
		}
		if err := checkNumber(flag, trial.Interface()); err != nil {
			return fmt.Errorf("%s:%d: %s: %w", r.path, s.Line, flag.Name, err)
		}
		if flag.Enum != "" && !flag.EnumMap()[s.Values[0]] {
			return fmt.Errorf("%s:%d: %s: %q: want one of %s", r.path, s.Line, flag.Name, s.Values[0], strings.ReplaceAll(flag.Enum, ",", ", "))
		}
	}
	return nil
}

// checkNumber refuses numbers and times that mean nothing. The packages take zero for "the
// default", which nobody who writes 0 expects; where zero means zero, the flag is tagged zero.
func checkNumber(flag *kong.Flag, value any) error {
	var n int64
	switch v := value.(type) {
	case int:
		n = int64(v)
	case time.Duration:
		n = int64(v)
	default:
		return nil
	}
	switch {
	case n < 0:
		return fmt.Errorf("%v: cannot be negative", value)
	case n == 0 && flag.HasDefault && !flag.Tag.Has("zero"):
		return fmt.Errorf("%v: must be more than zero (default %s)", value, flag.Default)
	}
	return nil
}

func kongValue(flag *kong.Flag, s configfile.Setting) any {
	if !isList(flag) {
		return s.Values[0]
	}
	list := make([]any, len(s.Values))
	for i, v := range s.Values {
		list[i] = v
	}
	return list
}

// unsetEmptyVariables makes an empty variable count as not set, as container tools that can only
// blank a variable need it; kong would take it for a value, and refuse it where it is no number.
func unsetEmptyVariables(app *kong.Application) {
	settings(app, func(flag *kong.Flag) {
		for _, name := range flag.Envs {
			if os.Getenv(name) == "" {
				_ = os.Unsetenv(name) // fails on an empty name only
			}
		}
	})
}

func envIsSet(name string) bool {
	_, ok := os.LookupEnv(name)
	return ok
}

// warnUnknownVariables names the WARMROUTE_* variables that no command reads. They are not
// refused: a variable may be left over from another version on a machine that has to start.
func warnUnknownVariables(logger *slog.Logger, app *kong.Application, environ []string) {
	var known []string
	settings(app, func(flag *kong.Flag) { known = append(known, flag.Envs...) })
	slices.Sort(known)
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, envPrefix+"_") || slices.Contains(known, name) {
			continue
		}
		attrs := []any{"variable", name}
		if near, ok := configfile.Nearest(name, known); ok {
			attrs = append(attrs, "did_you_mean", near)
		}
		logger.Warn("unknown environment variable ignored", attrs...)
	}
}
