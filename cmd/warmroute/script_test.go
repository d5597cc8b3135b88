package main

import (
	"os"
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
			for _, name := range []string{"REQUIRE_REDIS"} {
				env.Setenv(name, os.Getenv(name))
			}
			return nil
		},
	})
}
