package indexer

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/warmroute/warmroute/indexer/zmtp"
)

// stableAfter is how long something must hold before the next failure is waited for from the shortest time again.
const stableAfter = 30 * time.Second

// newBackoff waits from first to most, doubling, with full jitter, for ever.
func newBackoff(first, most time.Duration) *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(first), backoff.WithMaxInterval(most), backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(1), backoff.WithMaxElapsedTime(0))
}

// pause waits for the next interval of b, or for the end of ctx.
func pause(ctx context.Context, b *backoff.ExponentialBackOff) error {
	return sleep(ctx, next(b))
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

func next(b *backoff.ExponentialBackOff) time.Duration {
	d := b.NextBackOff()
	if d == backoff.Stop { // cannot be: there is no end. But then it must not become a busy loop.
		d = b.MaxInterval
	}
	return d
}

// source keeps a live connection to the publisher and puts what it says into the inbox.
func (s *stream) source(ctx context.Context, in *inbox) error {
	b := newBackoff(s.ix.timing.redial, 10*time.Second)
	refused := false
	for {
		up, err := s.connect(ctx, in, refused)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		s.disconnected(err)
		refused = up == 0 && refused || errors.Is(err, syscall.ECONNREFUSED)
		if up > stableAfter {
			b.Reset()
		}
		if err := pause(ctx, b); err != nil {
			return err
		}
	}
}

// connect is one connection from its dial to its end.
func (s *stream) connect(ctx context.Context, in *inbox, refused bool) (up time.Duration, err error) {
	c := &connection{base: -1, reborn: refused}
	// Before the dial: what arrives afterwards is newer than what is in Redis now, unless the engine has restarted.
	if st, ok, err := s.ix.opts.Store.Stream(ctx, s.id); err == nil {
		c.known = true
		if ok {
			c.base = st.Seq
		}
	}
	o := s.dialling(s.reg.Endpoint)
	o.Topic = s.reg.Topic
	conn, err := zmtp.Dial(ctx, s.reg.Endpoint, zmtp.SocketSUB, o)
	if err != nil {
		return 0, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	defer c.ended.Store(true)
	c.since = time.Now()
	s.connected()
	in.put(arrival{conn: c})
	for {
		frames, err := conn.Recv()
		if err != nil {
			return time.Since(c.since), err
		}
		if len(frames) == 0 {
			continue
		}
		if in.put(arrival{conn: c, at: time.Now(), frames: frames}) {
			s.overflowed()
		}
	}
}

// connected, disconnected and overflowed keep the status and log transitions once.

func (s *stream) connected() {
	s.update(func(v *Status) { v.Connected, v.Error, s.signs.refused = true, "", false })
	s.log.Info("following KV events", "endpoint", s.reg.Endpoint)
}

func (s *stream) disconnected(err error) {
	was, before := false, ""
	s.update(func(v *Status) {
		was, before = v.Connected, v.Error
		v.Connected, v.Error, s.signs.refused = false, err.Error(), healthOfError(err) == healthBad
	})
	if was || before == "" {
		s.log.Warn("KV event publisher is away, dialling again", "endpoint", s.reg.Endpoint, "error", err)
	}
}

func (s *stream) overflowed() {
	first := false
	s.update(func(v *Status) { first, v.Overflow = !v.Overflow, true })
	if first {
		s.log.Warn("event buffer is full, dropping the oldest messages")
	}
}

// errAgain ends a worker's attempt without a fault: connect anew and begin from what Redis says.
var errAgain = errors.New("begin again")
