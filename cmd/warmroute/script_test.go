package main

import (
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain lets the test binary be the warmroute command of the scripts.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"warmroute": main})
}

// TestScripts runs the command line as a user would; see testdata/*.txtar.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			vectors, err := filepath.Abs("../../indexer/wire/testdata/kv-event-vectors.json")
			env.Setenv("VECTORS", vectors)
			return err
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"redis": startRedis},
	})
}

// startRedis is the script command that starts a Redis and puts its URL into $REDIS.
func startRedis(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: redis")
	}
	url, stop, err := embeddedRedis()
	ts.Check(err)
	ts.Defer(stop)
	ts.Setenv("REDIS", url)
}
