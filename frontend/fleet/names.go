package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"
)

// resolution is what a host:port name stands for. The addresses last found stay until others are.
type resolution struct {
	host    string
	port    uint16
	workers []*state
	status  Status
}

func newResolution(name string) (*resolution, error) {
	host, port, err := net.SplitHostPort(name)
	if err != nil || host == "" {
		return nil, fmt.Errorf("worker name %q: want host:port", name)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return nil, fmt.Errorf("worker name %q: want a port from 1 to 65535", name)
	}
	return &resolution{host: host, port: uint16(n)}, nil
}

func (f *Fleet) followNames(ctx context.Context) {
	follow(ctx, f.o.NamesInterval, min(f.o.Interval, f.o.NamesInterval), f.o.NamesInterval, func(ctx context.Context) error {
		added, err := f.resolve(ctx)
		if len(added) > 0 {
			f.pollAll(ctx, added)
		}
		return err
	})
}

// resolve looks up every name and returns the workers that are new. Its error is logged already.
func (f *Fleet) resolve(ctx context.Context) (added []Key, err error) {
	var errs []error
	for _, name := range f.o.Names {
		f.mu.Lock()
		r := f.resolved[name]
		f.mu.Unlock()
		workers, err := f.lookUp(ctx, r)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		errs = append(errs, err)
		cause := ""
		if err != nil {
			cause = "resolver"
		}
		f.mu.Lock()
		if err == nil {
			r.workers = workers
		}
		changed, lasted := r.status.turn(cause)
		came, gone := f.reconcile()
		f.mu.Unlock()
		switch {
		case changed && err != nil:
			f.o.Logger.Warn("a worker name does not resolve, its last addresses stay", "name", name, "error", err)
		case changed:
			f.o.Logger.Info("a worker name resolves again", "name", name, "away_for", lasted.Round(time.Millisecond))
		}
		f.announce(came, gone)
		added = append(added, came...)
	}
	return added, errors.Join(errs...)
}

// lookUp makes a worker of each address, by name "address:port". The name of an IPv6 address is written
// out, because a worker's name has no brackets.
func (f *Fleet) lookUp(ctx context.Context, r *resolution) ([]*state, error) {
	ctx, cancel := context.WithTimeout(ctx, f.o.Timeout)
	defer cancel()
	addrs, err := f.o.Resolver.LookupNetIP(ctx, "ip", r.host)
	if err != nil {
		return nil, err
	}
	var out []*state
	for _, a := range addrs {
		a = a.Unmap().WithZone("")
		at := netip.AddrPortFrom(a, r.port)
		w, err := newState(Worker{ID: a.StringExpanded() + ":" + strconv.Itoa(int(r.port)), URL: "http://" + at.String()}, SourceDNS)
		if err != nil {
			return nil, err
		}
		out = append(out, w)
	}
	if len(out) == 0 {
		return nil, errors.New("no addresses")
	}
	return out, nil
}
