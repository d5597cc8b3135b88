// Command warmroute sends LLM requests to the worker whose KV cache is warm.
//
// One binary holds every part: indexer, frontend, simulated engine, and the tools to look into
// a running index. Each command explains itself with --help. Exit codes: 0 done, 1 failed or
// what it looked at is not well (differences, problems), 2 wrong flags or configuration.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, drain := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2) // or one that follows at once would be missed
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		drain()
		<-signals
		os.Exit(130) // as a shell says of a program that was interrupted
	}()
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
