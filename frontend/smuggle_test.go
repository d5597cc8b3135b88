package frontend

import (
	"net/http"
	"slices"
	"strconv"
	"testing"
)

// A worker gets no header that nobody has looked at: a second one of a name, or one that follows the body.
func TestHeadersThatHide(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Index: &fakeIndex{blockSize: 16}, Workers: []Worker{e.worker()}, Tokens: tokens(t, "", "query", "admin")})
	const body = `{"model":"llama","prompt":[1,2]}`
	begin := "POST " + completions + " HTTP/1.1\r\nHost: x\r\n"
	for _, say := range []string{
		begin + "Authorization: Basic x\r\nAuthorization: Bearer query\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body,
		begin + "Trailer: Authorization, X-Data-Parallel-Rank\r\nTransfer-Encoding: chunked\r\n\r\n" + strconv.FormatInt(int64(len(body)), 16) + "\r\n" + body +
			"\r\n0\r\nAuthorization: Bearer query\r\nX-Data-Parallel-Rank: 7\r\n\r\n",
	} {
		if s := f.raw(t, say).status(); s != 200 {
			t.Fatalf("status %d of %q", s, say)
		}
	}
	// Nor may a client take the request's id away, by the header that names others for the next hop alone, or bring a second one.
	c := f.raw(t, begin+"Connection: X-Request-Id\r\nX-Request-Id: one\r\nX-Request-Id: two\r\nContent-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body)
	res, err := http.ReadResponse(c.in, nil)
	if err != nil {
		t.Fatal(err)
	}
	if id := res.Header.Values("X-Request-Id"); !slices.Equal(id, []string{"one"}) {
		t.Errorf("the answer has the ids %q", id)
	}
	if id := e.requests[2].Header.Values("X-Request-Id"); !slices.Equal(id, []string{"one"}) {
		t.Errorf("the worker got the ids %q", id)
	}
	for i, r := range e.requests {
		if a := r.Header.Values("Authorization"); a != nil {
			t.Errorf("request %d: the worker got %q", i, a)
		}
		if len(r.Trailer) > 0 || r.ContentLength != int64(len(body)) || string(e.bodies[i]) != body {
			t.Errorf("request %d: trailers %v, length %d, body %q", i, r.Trailer, r.ContentLength, e.bodies[i])
		}
	}
}

// Lengths that contradict each other, or are none, end the connection, and no worker hears of them.
func TestBodiesWithoutAClearEnd(t *testing.T) {
	e := newEngine(t, "w1")
	f := start(t, Options{Workers: []Worker{e.worker()}})
	const next = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n" // which nobody may take for a request
	for header, want := range map[string]int{
		"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}":                           400,
		"Content-Length: -1\r\n\r\n{}":                                               400,
		"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n":                               501,
		"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n": 501,
		"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n":                    400,
		"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n":                    400,
		"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n":                     400,
		"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{":                   400,
		"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n":                               400,
	} {
		c := f.raw(t, "POST "+completions+" HTTP/1.1\r\nHost: x\r\n"+header+next)
		if s := c.status(); s != want {
			t.Errorf("%q: status %d, want %d", header, s, want)
		}
		if s := c.status(); s != 0 {
			t.Errorf("%q: what follows is answered with %d", header, s)
		}
	}
	if len(e.requests) != 0 {
		t.Errorf("the worker got %d requests", len(e.requests))
	}
	f.wantIdle()
}
