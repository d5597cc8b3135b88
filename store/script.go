package store

import (
	"context"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"
	"github.com/warmroute/warmroute/lua"
)

// script is one script of package lua together with the way its replies are read.
type script struct{ *redis.Script }

var scripts = struct{ assign, register, apply, retire, sweep, touch, verify, selects, lease, predict, mend, orphans, uses, sums script }{
	script{lua.Assign}, script{lua.Register}, script{lua.Apply}, script{lua.Retire}, script{lua.Sweep}, script{lua.Touch}, script{lua.Verify},
	script{lua.Select}, script{lua.Lease}, script{lua.Predict}, script{lua.Mend}, script{lua.Orphans}, script{lua.Uses}, script{lua.Sums},
}

var errShortReply = fmt.Errorf("script reply too short: %w", ErrCorrupt)

// run calls the script by its hash, and with its text where the node does not know it: nothing
// depends on SCRIPT LOAD. The reply is a list of strings and numbers, returned as strings.
func (s script) run(ctx context.Context, c redis.Scripter, keys []string, args ...any) ([]string, error) {
	v, err := s.Run(ctx, c, keys, args...).Slice()
	if err != nil {
		return nil, err
	}
	out := make([]string, len(v))
	for i, x := range v {
		switch x := x.(type) {
		case string:
			out[i] = x
		case int64:
			out[i] = strconv.FormatInt(x, 10)
		default:
			return nil, fmt.Errorf("script reply: unexpected %T: %w", x, ErrCorrupt)
		}
	}
	return out, nil
}
