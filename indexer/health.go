package indexer

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"syscall"
	"time"

	"github.com/warmroute/warmroute/guard"
)

// health is what a worker's HTTP server said last.
type health uint8

const (
	healthUnknown health = iota
	healthOK
	healthBad    // it says that the engine is not well, or its host says that nobody listens: no doubt about the way there
	healthSilent // no answer of any kind: dead, or out of this indexer's reach
)

const (
	healthTimeout = 3 * time.Second
	healthChecks  = 256 // at one time
)

// healthCheck asks a worker how it is. The error says why it is not well.
type healthCheck func(ctx context.Context, base string) (health, error)

// newWorkerClient makes the client for questions to workers. No proxy is in between, which would dial for us without asking whether it may.
func newWorkerClient(networks *guard.Networks, own []string) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext: networks.Dial(net.Dialer{}, own...), MaxIdleConnsPerHost: 1, MaxResponseHeaderBytes: 1 << 20,
			IdleConnTimeout: 4 * time.Second, // engines close idle connections after 5 s
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// newHealthCheck asks GET /health. An engine that answers anything but a server error is alive.
func newHealthCheck(client *http.Client) healthCheck {
	return func(ctx context.Context, base string) (health, error) {
		ctx, cancel := context.WithTimeout(ctx, healthTimeout)
		defer cancel()
		u, err := url.JoinPath(base, "health")
		if err != nil {
			return healthUnknown, err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
		if err != nil {
			return healthUnknown, err
		}
		res, err := client.Do(req)
		if err != nil {
			return healthOfError(err), err
		}
		defer func() { _ = res.Body.Close() }()
		_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 4<<10)) // so that the connection can be used again
		if res.StatusCode >= 500 {
			return healthBad, errors.New("GET /health: status " + res.Status)
		}
		return healthOK, nil
	}
}

// healthOfError tells a host that refuses from one that says nothing.
func healthOfError(err error) health {
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) {
		return healthBad
	}
	return healthSilent
}

// checkHealth asks every worker that has a URL how it is, once per lease interval.
func (ix *Indexer) checkHealth(ctx context.Context) {
	tick := time.NewTicker(ix.opts.LeaseInterval)
	defer tick.Stop()
	for {
		ix.checkOnce(ctx)
		ix.judge(time.Now())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// checkOnce is one round of checks: one for all streams of a URL.
func (ix *Indexer) checkOnce(ctx context.Context) {
	of := map[string][]*stream{}
	for _, s := range ix.all() {
		if s.reg.URL != "" {
			of[s.reg.URL] = append(of[s.reg.URL], s)
		}
	}
	slots := make(chan struct{}, healthChecks)
	var checks sync.WaitGroup
	for base, streams := range of {
		slots <- struct{}{}
		checks.Go(func() {
			defer func() { <-slots }()
			h, err := ix.health(ctx, base)
			if ctx.Err() != nil {
				return // we are going away, not the worker
			}
			for _, s := range streams {
				s.checked(h, err)
			}
			if h == healthOK {
				ix.checkWork(ctx, base, streams)
			}
		})
	}
	checks.Wait()
}
