package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
)

// serviceExits ends the help of every command that runs until it is told to end.
const serviceExits = `Exit codes: 0 a signal ended it; 1 it cannot listen where it is told to, or a part of it ended by itself; 2 wrong flags, variables
or configuration.`

// service is a part that listens and runs until it is told to end.
type service struct {
	name string
	addr string
	run  func(context.Context) error
}

// runServices runs services until ctx ends or one of them does. They end in the given order,
// each after the one before is done: what others depend on comes last.
func runServices(ctx context.Context, logger *slog.Logger, services ...service) error {
	defer runtime.KeepAlive(ballast())
	g, failed := errgroup.WithContext(ctx)
	stop := failed.Done()
	for _, s := range services {
		logger.Info("listening", "service", s.name, "addr", s.addr)
		running, cancel := context.WithCancel(context.WithoutCancel(ctx))
		before, done := stop, make(chan struct{})
		g.Go(func() error {
			<-before
			cancel()
			return nil
		})
		g.Go(func() error {
			defer close(done)
			if err := s.run(running); err != nil {
				return err
			}
			if running.Err() == nil {
				return fmt.Errorf("%s ended by itself", s.name)
			}
			return nil
		})
		stop = done
	}
	err := g.Wait()
	logger.Info("ended")
	return err
}

// ballast makes the garbage collector wait for 32 MiB more: a service lives on a few MiB and makes some hundred KiB of
// garbage with every long prompt, so that it would run ten times a second for next to nothing. Nobody touches it, so it is
// no memory but address space. Who sets GOGC or GOMEMLIMIT knows better.
func ballast() []byte {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	return make([]byte, 16<<20)
}

// newRegistry takes the metrics of everything in this process, and those of the process itself.
func newRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// address is where a service listens.
type address string

// UnmarshalText reads host:port, or :port for every interface.
func (a *address) UnmarshalText(text []byte) error {
	if _, _, err := net.SplitHostPort(string(text)); err != nil {
		return fmt.Errorf("listen address %q: want host:port, or :port for every interface", text)
	}
	*a = address(text)
	return nil
}

// setupError sorts the errors of constructors: an address that cannot be bound is a failure, and
// the flags that choose another are named; anything else that they refuse is configuration.
func setupError(err error, flags ...string) error {
	var network *net.OpError
	if errors.As(err, &network) {
		return fmt.Errorf("%w (another address: %s)", err, strings.Join(flags, ", "))
	}
	return usagef("%w", err)
}
