package frontend

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
)

// quota is a number of things of which only so many may be taken. Who gets none is turned
// away at once: nobody waits, so half-read bodies cannot wait for each other.
type quota struct {
	limit int64
	used  atomic.Int64
}

func (q *quota) take(n int64) bool {
	if q.used.Add(n) <= q.limit {
		return true
	}
	q.used.Add(-n)
	return false
}

func (q *quota) give(n int64) { q.used.Add(-n) }

// heldBody is a request body in memory, counted until it is dropped.
type heldBody struct {
	bytes []byte
	drop  func() // may be called more than once
}

const bodyChunk = 64 << 10

// readBody reads the whole body: only after that does the server notice a client that leaves.
func (f *Frontend) readBody(c *gin.Context) (heldBody, error) {
	if e := c.GetHeader("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return heldBody{}, refuse(http.StatusUnsupportedMediaType, "unsupported_encoding", "a request body with a Content-Encoding is not supported")
	}
	tooLarge := &apiError{
		status: http.StatusRequestEntityTooLarge, kind: "invalid_request_error", code: "request_too_large",
		message: fmt.Sprintf("the request body exceeds the limit of %d bytes", f.o.MaxBody),
	}
	length := c.Request.ContentLength
	if length > f.o.MaxBody {
		return heldBody{}, tooLarge
	}
	var taken int64
	drop := sync.OnceFunc(func() { f.buffered.give(taken) })
	reserve := func(n int64) bool {
		if n <= taken {
			return true
		}
		if !f.buffered.take(n - taken) {
			return false
		}
		taken = n
		return true
	}
	conn := http.NewResponseController(c.Writer)
	// Unsupported only by test recorders. Where it fails, the server gives the rest no more time than that.
	_ = conn.SetReadDeadline(time.Now().Add(f.o.BodyTimeout))

	var b bytes.Buffer
	// What is announced is not there yet: an announcement alone takes no memory, or a few clients that send nothing
	// would keep everybody out.
	if room := max(length, 512); !reserve(min(room, bodyChunk)) {
		return heldBody{}, errBuffersFull
	} else {
		b.Grow(int(min(room, bodyChunk)) + bytes.MinRead)
	}
	limited := io.LimitReader(http.MaxBytesReader(c.Writer, c.Request.Body, f.o.MaxBody), 0).(*io.LimitedReader)
	for {
		limited.N = bodyChunk
		n, err := b.ReadFrom(limited)
		if err == nil && !reserve(int64(b.Len())) {
			err = errBuffersFull
		}
		if err == nil && n < bodyChunk {
			_ = conn.SetReadDeadline(time.Time{})
			c.Set(keyBodyRead, true)
			return heldBody{b.Bytes(), drop}, nil
		}
		if err != nil {
			drop()
			var over *http.MaxBytesError
			var network net.Error
			switch {
			case errors.As(err, &over):
				return heldBody{}, tooLarge
			case errors.Is(err, os.ErrDeadlineExceeded):
				return heldBody{}, refuse(http.StatusRequestTimeout, "request_timeout", "the request body did not arrive in time")
			case errors.Is(err, errBuffersFull):
				return heldBody{}, errBuffersFull
			case errors.As(err, &network) || errors.Is(err, io.ErrUnexpectedEOF):
				return heldBody{}, errClientGone
			}
			return heldBody{}, refuse(http.StatusBadRequest, "invalid_request", "the request body is not chunked as HTTP wants it")
		}
	}
}
