package store

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// parseURL reads the URL forms that [Options.URL] documents.
func parseURL(raw string) (*redis.UniversalOptions, error) {
	bad := func(why string) error { // the URL itself may hold a password
		return fmt.Errorf("redis URL: %s (want redis://[user:password@]host:port[/db], rediss://…, "+
			"redis+sentinel://host:port,…/master[/db] or redis+cluster://host:port,…): %w", why, ErrInvalid)
	}
	scheme, rest, ok := strings.Cut(raw, "://")
	if !ok {
		return nil, bad("no scheme")
	}
	// Several hosts are no URL: take the authority apart by hand.
	authority, tail := rest, ""
	if i := strings.IndexAny(rest, "/?"); i >= 0 {
		authority, tail = rest[:i], rest[i:]
	}
	userinfo, hosts := "", authority
	if i := strings.LastIndexByte(authority, '@'); i >= 0 {
		userinfo, hosts = authority[:i+1], authority[i+1:]
	}
	u, err := url.Parse("x://" + userinfo + "h" + tail)
	if err != nil {
		return nil, bad("not a URL")
	}
	o := &redis.UniversalOptions{}
	if u.User != nil {
		o.Username = u.User.Username()
		o.Password, _ = u.User.Password()
	}
	secure := strings.HasPrefix(scheme, "rediss")
	kind := strings.TrimPrefix(strings.TrimPrefix(scheme, "rediss"), "redis")
	if !strings.HasPrefix(scheme, "redis") {
		return nil, bad("unknown scheme " + strconv.Quote(scheme))
	}
	defaultPort := "6379"
	if kind == "+sentinel" {
		defaultPort = "26379"
	}
	for h := range strings.SplitSeq(hosts, ",") {
		if h == "" {
			return nil, bad("empty host")
		}
		if !strings.Contains(h, ":") || strings.HasSuffix(h, "]") {
			h += ":" + defaultPort
		}
		o.Addrs = append(o.Addrs, h)
	}
	path := strings.Trim(u.Path, "/")
	db := path
	switch kind {
	case "":
		if len(o.Addrs) > 1 {
			return nil, bad("several hosts need redis+sentinel:// or redis+cluster://")
		}
	case "+sentinel":
		o.MasterName, db, _ = strings.Cut(path, "/")
		if o.MasterName == "" {
			return nil, bad("a Sentinel URL names the master: redis+sentinel://host:port,…/master")
		}
	case "+cluster":
		if path != "" && path != "0" {
			return nil, bad("a cluster has no databases")
		}
		o.IsClusterMode = true
	default:
		return nil, bad("unknown scheme " + strconv.Quote(scheme))
	}
	if db != "" {
		if o.DB, err = strconv.Atoi(db); err != nil || o.DB < 0 {
			return nil, bad("the database is a number")
		}
	}
	q := u.Query()
	for k := range q {
		switch k {
		case "sentinel_username":
			o.SentinelUsername = q.Get(k)
		case "sentinel_password":
			o.SentinelPassword = q.Get(k)
		case "tls_skip_verify":
			if !secure {
				return nil, bad("tls_skip_verify needs rediss://")
			}
		default:
			return nil, bad("unknown parameter " + strconv.Quote(k))
		}
	}
	if secure {
		host, _, _ := strings.Cut(o.Addrs[0], ":")
		o.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: q.Get("tls_skip_verify") == "true"}
		if kind == "" {
			o.TLSConfig.ServerName = host
		}
	}
	return o, nil
}

// newClient makes a client whose every call ends within timeout. It retries nothing by itself:
// the link does that for lookups, the indexer for writes.
func newClient(o redis.UniversalOptions, opts Options, timeout time.Duration) redis.UniversalClient {
	o.Protocol = 2
	o.MaxRetries = -1 // 0 would mean 3
	o.DialerRetries = 1
	o.DialTimeout = 500 * time.Millisecond // a call dials no longer than its own deadline
	o.ReadTimeout = timeout
	o.WriteTimeout = timeout
	o.ContextTimeoutEnabled = true // else a deadline does not bound a command in flight
	o.PoolSize = opts.PoolSize
	o.PoolTimeout = timeout * 3 / 4 // before the deadline, so that a full pool is told from a slow Redis
	o.PipelinePoolSize = -1         // one pool for single commands and pipelines
	o.ConnMaxIdleTime = 5 * time.Minute
	o.DisableIdentity = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	o.Dialer = newDialer(o, opts)
	if o.IsClusterMode {
		// A moved slot is followed. The library counts a node that is dead or answers CLUSTERDOWN as a redirect too, and
		// would wait between them for longer than a lookup may take.
		o.MaxRedirects = 3
		o.MinRetryBackoff, o.MaxRetryBackoff = -1, -1
	}
	return redis.NewUniversalClient(&o)
}

// quietLibrary sends what go-redis would print on stderr to the first store's log, at debug level:
// the link reports an outage once, the library once per connection.
var quietLibrary sync.Once

type libraryLog struct{ s *Store }

func (l libraryLog) Printf(ctx context.Context, format string, v ...any) {
	l.s.log.DebugContext(ctx, "redis client", "message", fmt.Sprintf(format, v...))
}
