package indexer

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/indexer/zmtp"
)

// warnOfExposure tells an operator what anybody may do who reaches the port.
func (ix *Indexer) warnOfExposure() {
	host, _, err := net.SplitHostPort(ix.Addr().String())
	if err != nil || isLoopback(host) {
		return
	}
	if !ix.opts.Tokens.Asks(guard.Admin) {
		ix.opts.Logger.Warn("the indexer can be reached from other machines and asks for no token of an administrator: anybody there may change the index, and have addresses dialled",
			"listen", ix.Addr().String(), "set", "--admin-token")
	}
	if !ix.opts.Tokens.Asks(guard.Query) {
		ix.opts.Logger.Warn("the indexer can be reached from other machines and asks for no token for queries: anybody there may read the index",
			"listen", ix.Addr().String(), "set", "--query-token")
	}
}

// places are where the configured workers' HTTP servers are, host:port as a transport dials them.
func (o Options) places() []string {
	var out []string
	for _, w := range o.Workers {
		if place, ok := guard.Place(w.URL); ok {
			out = append(out, place)
		}
	}
	return out
}

// mayFollow refuses a publisher at an address that workers may not have. Where the resolver does not answer soon, the dial will tell.
func (ix *Indexer) mayFollow(ctx context.Context, p *publisher) error {
	if s := ix.stream(p.id); s != nil && s.configured && s.reg.URL == p.reg.URL && s.reg.Endpoint == p.reg.Endpoint && s.reg.ReplayEndpoint == p.reg.ReplayEndpoint {
		return nil // the configuration says the same
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if place, ok := guard.Place(p.reg.URL); ok {
		host, _, err := net.SplitHostPort(place)
		if err == nil {
			err = ix.opts.Networks.Check(ctx, "tcp", host)
		}
		if err != nil {
			return fmt.Errorf("url: %w", err)
		}
	}
	for _, of := range []struct{ name, endpoint string }{{"endpoint", p.reg.Endpoint}, {"replay_endpoint", p.reg.ReplayEndpoint}} {
		if of.endpoint == "" {
			continue
		}
		network, host := dialled(of.endpoint)
		if err := ix.opts.Networks.Check(ctx, network, host); err != nil {
			return fmt.Errorf("%s: %w", of.name, err)
		}
	}
	return nil
}

// dialling are the options to dial one of the stream's endpoints with.
func (s *stream) dialling(endpoint string) zmtp.Options {
	if s.configured {
		return zmtp.Options{}
	}
	_, host := dialled(endpoint)
	return zmtp.Options{Control: s.ix.opts.Networks.Control(host)}
}

// dialled is the host, or the path of a socket, of an endpoint that was checked before.
func dialled(endpoint string) (network, host string) {
	network, host, _ = zmtp.ParseEndpoint(endpoint)
	if network == "tcp" {
		host, _, _ = net.SplitHostPort(host)
	}
	return network, host
}
