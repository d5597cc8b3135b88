package store

import "context"

// leases compares the sums of what is under way with the leases that they are made of. Where one of the keys was lost they differ until a
// frontend next renews its leases, or for as long as there is none; a repair does the same at once. What has the wrong type is
// dropped, and every frontend reserves what it has under way again with its next renewal.
func (c *check) leases(ctx context.Context) error {
	v, err := scripts.sums.run(ctx, c.s.write, []string{loadKey(c.p.id), leasesKey(c.p.id), deadlinesKey(c.p.id)}, boolArg(c.repair))
	if err != nil {
		return err
	}
	if len(v) != 5 {
		return errShortReply
	}
	switch v[0] {
	case "0":
		return nil
	case "1":
		c.r.problem(c.repair, "what is under way: sums of %s requests and %s that are none, %s leases, %s deadlines", v[1], v[2], v[3], v[4])
	default:
		c.r.problem(c.repair, "what is under way: a key has the wrong type")
	}
	return nil
}
