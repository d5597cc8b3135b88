package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

type versionCmd struct{}

// Help is the long form of the command's help.
func (versionCmd) Help() string {
	return `Version, commit, Go version and platform, on one line: what a report of a fault should begin with.

Example:

    warmroute version

Exit codes: 0 printed.`
}

// Run prints one line: version, commit, Go version and platform.
func (versionCmd) Run(std *stdio) error {
	_, err := fmt.Fprintf(std.Out, "warmroute %s (%s, %s/%s)\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}

// version is the module's version where the binary was installed by one, else "devel", with
// the commit where it is known.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	v := info.Main.Version
	if v == "" || v == "(devel)" {
		v = "devel"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 && v == "devel" {
			v += "-" + s.Value[:12]
		}
	}
	return v
}
