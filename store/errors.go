package store

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Every error of this package wraps at most one of these. One that wraps none says nothing
// about Redis: the caller's context ended, or this process's own connection pool was full.
var (
	// ErrUnavailable means that Redis, or the part of it that was asked, cannot answer now.
	ErrUnavailable = errors.New("index unavailable")
	// ErrCorrupt means that Redis answered with something that is no index.
	ErrCorrupt = errors.New("index corrupt")
	// ErrInvalid means that the caller asked for something impossible.
	ErrInvalid = errors.New("invalid index request")
)

// ErrRemoved means that the stream was removed on purpose. It wraps [ErrInvalid].
var ErrRemoved = fmt.Errorf("the worker was unregistered: %w", ErrInvalid)

// Reasons, the closed list of label values that [Reason] returns.
const (
	ReasonConnection    = "connection"
	ReasonTimeout       = "timeout"
	ReasonLoading       = "loading"
	ReasonClusterDown   = "cluster_down"
	ReasonPoolExhausted = "pool_exhausted"
	ReasonCorrupt       = "corrupt"
	ReasonRefused       = "refused"  // writes only: full, a replica, or a failed save
	ReasonCanceled      = "canceled" // the caller hung up: not a failure of the index
	ReasonInvalid       = "invalid"
)

// Reason is why err happened, as a metric label.
func Reason(err error) string {
	var f *failure
	if errors.As(err, &f) {
		return f.reason
	}
	switch {
	case errors.Is(err, ErrInvalid):
		return ReasonInvalid
	case errors.Is(err, ErrCorrupt):
		return ReasonCorrupt
	case errors.Is(err, context.Canceled):
		return ReasonCanceled
	case errors.Is(err, context.DeadlineExceeded):
		return ReasonTimeout
	}
	return ReasonConnection
}

// ConflictError says that a pool exists with another configuration. It wraps [ErrInvalid].
type ConflictError struct {
	Field string // "block_size"
	Have  string // the pool's value
	Want  string // the caller's value
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("the pool has %s %s, not %s", e.Field, e.Have, e.Want)
}

// Unwrap makes a conflict an [ErrInvalid].
func (e *ConflictError) Unwrap() error { return ErrInvalid }

// failure is a classified error of Redis or of the way to it.
type failure struct {
	kind   error // a sentinel or nil
	reason string
	err    error
}

func (f *failure) Error() string {
	if f.kind == nil {
		return f.err.Error()
	}
	return f.kind.Error() + ": " + f.err.Error()
}

func (f *failure) Unwrap() []error {
	if f.kind == nil {
		return []error{f.err}
	}
	return []error{f.kind, f.err}
}

// overload is an error of this process's own making: it must not count against Redis, whatever it was taken for before.
func overload(err error) error {
	var f *failure
	if errors.As(err, &f) {
		err = f.err
	}
	return &failure{nil, ReasonPoolExhausted, err}
}

// replyClasses maps the first word of an error reply to what it means.
var replyClasses = map[string]struct {
	kind   error
	reason string
}{
	"LOADING":     {ErrUnavailable, ReasonLoading},
	"BUSY":        {ErrUnavailable, ReasonTimeout}, // a script runs too long
	"MASTERDOWN":  {ErrUnavailable, ReasonClusterDown},
	"CLUSTERDOWN": {ErrUnavailable, ReasonClusterDown},
	"TRYAGAIN":    {ErrUnavailable, ReasonClusterDown},
	"MOVED":       {ErrUnavailable, ReasonClusterDown},
	"ASK":         {ErrUnavailable, ReasonClusterDown},
	"READONLY":    {ErrUnavailable, ReasonRefused},
	"NOREPLICAS":  {ErrUnavailable, ReasonRefused},
	"UNBLOCKED":   {ErrUnavailable, ReasonClusterDown},
	"MISCONF":     {ErrUnavailable, ReasonRefused}, // writes refused after a failed save
	"OOM":         {ErrUnavailable, ReasonRefused}, // writes refused at maxmemory
	"NOAUTH":      {ErrUnavailable, ReasonConnection},
	"WRONGPASS":   {ErrUnavailable, ReasonConnection},
	"NOPERM":      {ErrUnavailable, ReasonConnection},
	"EXECABORT":   {ErrUnavailable, ReasonConnection}, // a command of the transaction was refused
	"NOSCRIPT":    {ErrUnavailable, ReasonConnection}, // flushed between the two tries
	"WRONGTYPE":   {ErrCorrupt, ReasonCorrupt},
	"WRSLOT":      {ErrCorrupt, ReasonCorrupt}, // our scripts' own
	"WRLOAD":      {ErrCorrupt, ReasonCorrupt},
	"WRCONFIG":    {ErrInvalid, ReasonInvalid},
	"WRARGV":      {ErrInvalid, ReasonInvalid},
}

// classify turns any error of go-redis into one of this package. caller is the context of
// whoever asked: if that is over, the error says nothing about Redis.
func classify(caller context.Context, err error) error {
	var known *failure
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known) || errors.Is(err, ErrInvalid) || errors.Is(err, ErrCorrupt):
		return err
	case caller.Err() != nil:
		return &failure{nil, ReasonCanceled, context.Cause(caller)}
	case errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted):
		return overload(err)
	case errors.Is(err, context.DeadlineExceeded):
		return &failure{ErrUnavailable, ReasonTimeout, err}
	}
	var netErr net.Error
	if errors.As(err, &netErr) && netErr.Timeout() {
		return &failure{ErrUnavailable, ReasonTimeout, err}
	}
	var reply redis.Error
	if errors.As(err, &reply) {
		word, rest, _ := strings.Cut(reply.Error(), " ")
		if c, ok := replyClasses[word]; ok {
			return &failure{c.kind, c.reason, err}
		}
		if strings.HasPrefix(rest, "max number of clients") || strings.HasPrefix(rest, "DB index") ||
			strings.HasPrefix(rest, "The user executing the script can't") || strings.HasPrefix(rest, "ACL failure in script") {
			return &failure{ErrUnavailable, ReasonConnection, err}
		}
		return &failure{ErrCorrupt, ReasonCorrupt, err} // an answer that no index gives
	}
	return &failure{ErrUnavailable, ReasonConnection, err}
}
