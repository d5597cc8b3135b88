// Package lua holds the scripts that change the index in Redis, one file each.
//
// Every script validates before it writes, touches only keys that it is given, all of one hash
// tag, takes numbers as strings and returns numbers, codes and strings. The header of each file
// is its contract; a test reads it and compares it with the code. Scripts use only what both
// Redis (6.2 and later) and miniredis have, and are idempotent: a repetition after a lost reply
// does nothing.
package lua

import (
	"embed"
	"regexp"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed *.lua *.inc
var files embed.FS

// The scripts. store is their only caller.
var (
	Assign   = load("assign.lua")
	Register = load("register.lua")
	Apply    = load("apply.lua")
	Retire   = load("retire.lua")
	Sweep    = load("sweep.lua")
	Touch    = load("touch.lua")
	Verify   = load("verify.lua")
	Select   = load("select.lua")
	Lease    = load("lease.lua")
	Predict  = load("predict.lua")
	Uses     = load("uses.lua")
	Mend     = load("mend.lua")
	Orphans  = load("orphans.lua")
	Sums     = load("sums.lua")
)

func load(name string) *redis.Script {
	return redis.NewScript(source(name))
}

// source is a script as Redis gets it, with what it includes.
func source(name string) string {
	src, err := files.ReadFile(name)
	if err != nil {
		panic(err) // cannot happen: the name is a constant and the file is embedded
	}
	return include.ReplaceAllStringFunc(string(src), func(line string) string {
		return source(strings.TrimPrefix(line, "--#include "))
	})
}

var include = regexp.MustCompile(`(?m)^--#include \S+$`)
