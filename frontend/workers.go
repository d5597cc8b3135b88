package frontend

import (
	"crypto/rand"
	"encoding/hex"
	"net"
	"net/netip"
	"strconv"

	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/guard"
)

// workerGone drops what is kept of a worker that left the fleet.
func (f *Frontend) workerGone(k fleet.Key) {
	f.breakers.Forget(k)
	if f.fleet.Snapshot().HasID(k.ID) { // another tenant's
		return
	}
	f.inFlight.Forget(k.ID)
	f.tokenizer.forget(k.ID)
	f.judge.Forget(k.ID)
	f.metrics.workerRequests.DeleteLabelValues(k.ID)
}

func (f *Frontend) breakerChanged(k fleet.Key, open bool) {
	if open {
		f.o.Logger.Warn("worker fails its requests, it gets no more for a while", "worker", k.String())
	} else {
		f.o.Logger.Info("worker serves requests again", "worker", k.String())
	}
}

func (f *Frontend) judged(worker string, disagrees bool, share float64) {
	if disagrees {
		f.o.Logger.Warn("a worker's answers say that its cache differs from the index", "worker", worker,
			"cached_minus_predicted", share, "hint", "less: entries that are stale; more: events that are lost")
	} else {
		f.o.Logger.Info("a worker's answers agree with the index again", "worker", worker)
	}
}

// workersIn counts the workers in a state of warmroute_workers.
func (f *Frontend) workersIn(state string) int {
	s := f.fleet.Snapshot()
	switch state {
	case workersUnhealthy:
		return s.Count(fleet.Unhealthy)
	case workersDraining:
		return s.Count(fleet.Draining)
	}
	n := 0
	for _, w := range s.Nodes() {
		if w.State == fleet.Healthy && f.breakers.Open(w.Key()) == (state == workersOpen) {
			n++
		}
	}
	return n
}

// newName is one that nobody else has, and that nobody guesses.
func newName() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// nextID names the reservation of a proxied request. No client is told: who knows one knows the next, and may end it.
func (f *Frontend) nextID() string {
	return f.instance + "-" + strconv.FormatUint(f.requests.Add(1), 36)
}

// warnOfFiles tells an operator that the limit of open files is reached before those of connections and requests: each request has
// a connection to a worker.
func (f *Frontend) warnOfFiles(limit uint64) {
	const others = 200 // Redis, polls, listeners, the log
	if need := uint64(f.o.MaxConnections + f.o.MaxInFlight + others); limit > 0 && limit < need {
		f.o.Logger.Warn("the limit of open files is lower than the connections need: raise it, or lower --max-in-flight and --max-connections",
			"limit", limit, "needed", need)
	}
}

// warnOfExposure tells an operator that anybody who reaches the port may use the workers.
func (f *Frontend) warnOfExposure() {
	if f.o.Tokens.Asks(guard.Client) {
		return
	}
	host, _, err := net.SplitHostPort(f.Addr())
	ip, err2 := netip.ParseAddr(host)
	if err == nil && err2 == nil && !ip.IsLoopback() {
		f.o.Logger.Warn("the frontend can be reached from other machines and asks for no token: anybody there may use the workers",
			"listen", f.Addr(), "set", "--token")
	}
}
