// Command warmroute sends LLM requests to the worker whose KV cache is warm.
//
// One binary holds every part: indexer, frontend, simulated engine, and the tools to look into
// a running index. Each command explains itself with --help. Exit codes: 0 done, 1 failed or
// found what it looks for (differences, problems), 2 wrong flags or configuration.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the first signal drains, the second ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
