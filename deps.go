//go:build deps

// Temporary: keeps go.mod and go.sum complete while the packages are being written.
package deps

import (
	_ "github.com/alecthomas/kong"
	_ "github.com/alicebob/miniredis/v2"
	_ "github.com/cenkalti/backoff/v4"
	_ "github.com/gin-gonic/gin"
	_ "github.com/go-zeromq/zmq4"
	_ "github.com/goccy/go-yaml"
	_ "github.com/prometheus/client_golang/prometheus"
	_ "github.com/prometheus/client_golang/prometheus/collectors"
	_ "github.com/prometheus/client_golang/prometheus/promauto"
	_ "github.com/prometheus/client_golang/prometheus/promhttp"
	_ "github.com/prometheus/client_golang/prometheus/testutil"
	_ "github.com/redis/go-redis/v9"
	_ "github.com/rogpeppe/go-internal/testscript"
	_ "github.com/schollz/progressbar/v3"
	_ "github.com/vmihailenco/msgpack/v5"
	_ "github.com/zeebo/xxh3"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sync/singleflight"
	_ "golang.org/x/term"
)
