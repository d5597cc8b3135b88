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

	"github.com/redis/go-redis/v9"
)

//go:embed *.lua
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
)

func load(name string) *redis.Script {
	src, err := files.ReadFile(name)
	if err != nil {
		panic(err) // cannot happen: the name is a constant and the file is embedded
	}
	return redis.NewScript(string(src))
}
