package store

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// leases compares the sums of what is under way with the leases that they are made of, atomically. Where one of the keys was lost, what is
// left would count for ever; a repair drops all of it, and every frontend reserves what it has under way again with its next renewal.
func (c *check) leases(ctx context.Context) error {
	keys := []string{loadKey(c.p.id), leasesKey(c.p.id), deadlinesKey(c.p.id)}
	tx := c.s.write.TxPipeline()
	load, leases, deadlines := tx.HGetAll(ctx, keys[0]), tx.HLen(ctx, keys[1]), tx.ZCard(ctx, keys[2])
	what := "a key of the wrong type"
	switch _, err := tx.Exec(ctx); {
	case err == nil:
		requests, unreadable := 0, 0
		for _, text := range load.Val() {
			l, err := parseLoad(text)
			if err != nil {
				unreadable++
			}
			requests += l.Requests
		}
		if unreadable == 0 && int64(requests) == leases.Val() && leases.Val() == deadlines.Val() {
			return nil
		}
		what = fmt.Sprintf("sums of %d requests and %d that are none, %d leases, %d deadlines", requests, unreadable, leases.Val(), deadlines.Val())
	case !redis.HasErrorPrefix(err, "WRONGTYPE"):
		return err
	}
	if c.repair {
		if err := c.s.write.Unlink(ctx, keys...).Err(); err != nil {
			return err
		}
	}
	c.r.problem(c.repair, "what is under way: %s", what)
	return nil
}
