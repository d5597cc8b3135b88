package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"
)

// profileOptions are those of the port that serves profiles of the process.
type profileOptions struct {
	PprofListen   address `placeholder:"ADDR" help:"Serve profiles of this process for go tool pprof at this loopback address, such as 127.0.0.1:6060 (default: nowhere)." group:"Traces and profiles"`
	PprofInsecure bool    `help:"Let --pprof-listen be an address that other machines reach." group:"Traces and profiles"`
}

// services are none, or the one that serves profiles. It binds the address.
func (o profileOptions) services() ([]service, error) {
	if o.PprofListen == "" {
		return nil, nil
	}
	addr, err := net.ResolveTCPAddr("tcp", string(o.PprofListen))
	if err != nil {
		return nil, usagef("--pprof-listen: %w", err)
	}
	if !o.PprofInsecure && !addr.IP.IsLoopback() { // no address at all means every interface
		return nil, usagef("--pprof-listen %q can be reached from other machines, and asks for no token: listen on loopback, or allow it all the same (--pprof-insecure)", o.PprofListen)
	}
	l, err := net.ListenTCP("tcp", addr)
	if err != nil {
		return nil, setupError(fmt.Errorf("pprof: %w", err), "--pprof-listen")
	}
	return []service{{"pprof", l.Addr().String(), func(ctx context.Context) error { return serveProfiles(ctx, l) }}}, nil
}

// serveProfiles serves until ctx ends. There is no /debug/pprof/cmdline: flags may hold tokens.
func serveProfiles(ctx context.Context, l net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	defer context.AfterFunc(ctx, func() { _ = s.Close() })() // a profile that is being taken is of no use any more
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("pprof: %w", err)
	}
	return nil
}
