package store

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/warmroute/warmroute/kvcache"
)

// leases is the way to what is under way in one pool.
type leases struct {
	store *Store
	pool  kvcache.PoolID
	link  *link
	gate  gate
}

// leases finds or makes the way to a pool's leases. The pool need not be known to Redis: its workers may be those of
// a frontend's own configuration. Pools come from there, never from clients, so nothing is forgotten.
func (s *Store) leases(id kvcache.PoolID) *leases {
	if id.Tenant == "" {
		id.Tenant = kvcache.DefaultTenant
	}
	s.mu.RLock()
	l := s.leased[id]
	s.mu.RUnlock()
	if l != nil {
		return l
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.leased[id]; l != nil {
		return l
	}
	l = &leases{store: s, pool: id, gate: s.gate}
	if l.gate == nil { // a cluster: the pool's node has connections of its own
		l.gate = make(gate, s.opts.PoolSize)
	}
	l.link = newLink(s, id.String()+" "+leasesOfPool, func(ctx context.Context) error {
		_, err := scripts.lease.run(ctx, s.read, l.keys(), "probe")
		return classify(context.WithoutCancel(ctx), err)
	})
	s.leased[id] = l
	return l
}

// leasesOfPool ends the name of the link to a pool's leases: "<pool> leases".
const leasesOfPool = "leases"

func (l *leases) keys() []string {
	return []string{loadKey(l.pool), leasesKey(l.pool), deadlinesKey(l.pool)}
}

// PrefillDone says that a reservation's prompt is computed, and renews it. ok is false where there is no such
// lease any more.
func (s *Store) PrefillDone(ctx context.Context, id kvcache.PoolID, lease string) (ok bool, err error) {
	return s.changeLease(ctx, id, "prefilled", lease)
}

// OutputBlock says that a reservation occupies one more block, and renews it. It is not idempotent: a repetition
// after a lost reply counts a block more, until the lease ends.
func (s *Store) OutputBlock(ctx context.Context, id kvcache.PoolID, lease string) (ok bool, err error) {
	return s.changeLease(ctx, id, "output", lease)
}

// Release ends a reservation. To end one twice, or after its time, is harmless.
func (s *Store) Release(ctx context.Context, id kvcache.PoolID, lease string) (ok bool, err error) {
	return s.changeLease(ctx, id, "free", lease)
}

// ReleaseAll ends any number of reservations, in calls of 1,000.
func (s *Store) ReleaseAll(ctx context.Context, id kvcache.PoolID, ids ...string) error {
	for some := range slices.Chunk(ids, idsPerCall) {
		if _, _, err := s.changeLeases(ctx, id, "free", some); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) changeLease(ctx context.Context, id kvcache.PoolID, op, lease string) (bool, error) {
	if !printable(lease, MaxLeaseID) {
		return false, nil // there cannot be one
	}
	found, _, err := s.changeLeases(ctx, id, op, []string{lease})
	return err == nil && found[0], err
}

// Renew lets reservations live on, each for the length that it was made with, and returns those that have ended.
// It takes any number of them, in calls of 1,000.
func (s *Store) Renew(ctx context.Context, id kvcache.PoolID, ids ...string) (ended []string, err error) {
	for some := range slices.Chunk(ids, idsPerCall) {
		found, _, err := s.changeLeases(ctx, id, "renew", some)
		if err != nil {
			return ended, err
		}
		for i, ok := range found {
			if !ok {
				ended = append(ended, some[i])
			}
		}
	}
	return ended, nil
}

// changeLeases runs lease.lua. It is not on the way of a request, but nor does it wait while the link is down: what is
// not said then, the end of the lease says.
func (s *Store) changeLeases(ctx context.Context, id kvcache.PoolID, op string, ids []string) (found []bool, reaped int, err error) {
	l := s.leases(id)
	if err := l.link.check(); err != nil {
		return nil, 0, err
	}
	bounded, cancel := s.bound(ctx)
	defer cancel()
	args := make([]any, 0, 1+len(ids))
	args = append(args, op)
	for _, id := range ids {
		args = append(args, id)
	}
	v, err := scripts.lease.run(bounded, s.write, l.keys(), args...)
	if err == nil && len(v) != len(args) {
		err = errShortReply
	}
	if err != nil {
		return nil, 0, s.writeFailed(ctx, fmt.Errorf("%s lease: %w", op, err))
	}
	if reaped, err = strconv.Atoi(v[0]); err != nil {
		return nil, 0, fmt.Errorf("%s lease: reply %q: %w", op, v[0], ErrCorrupt)
	}
	found = make([]bool, len(ids))
	for i := range found {
		found[i] = v[1+i] == "1"
	}
	return found, reaped, nil
}

// Reap frees the leases of a pool that have ended. Whatever else is done with leases frees some first, so this is for a pool
// that nobody uses.
func (s *Store) Reap(ctx context.Context, id kvcache.PoolID) error {
	for reaped := reapedPerCall; reaped == reapedPerCall; {
		var err error
		if _, reaped, err = s.changeLeases(ctx, id, "renew", nil); err != nil {
			return err
		}
	}
	return nil
}

// Loads is what every worker rank of a pool has under way; one without a lease is absent. Leases that have
// ended are freed first, all of them.
func (s *Store) Loads(ctx context.Context, id kvcache.PoolID) (map[kvcache.WorkerRank]Load, error) {
	if err := s.Reap(ctx, id); err != nil {
		return nil, err
	}
	bounded, cancel := s.bound(ctx)
	defer cancel()
	v, err := s.write.HGetAll(bounded, loadKey(id)).Result()
	if err != nil {
		return nil, classify(ctx, fmt.Errorf("read loads: %w", err))
	}
	out := make(map[kvcache.WorkerRank]Load, len(v))
	for name, text := range v {
		w, err := kvcache.ParseWorkerRank(name)
		if err != nil {
			return nil, fmt.Errorf("read loads: %w: %w", err, ErrCorrupt)
		}
		if out[w], err = parseLoad(text); err != nil {
			return nil, fmt.Errorf("read loads: %w", err)
		}
	}
	return out, nil
}
