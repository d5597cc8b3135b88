package indexer

import "testing"

func TestCursor(t *testing.T) {
	type step struct {
		connect bool
		n       int64 // newest number before the connection, or the live number
		want    verdict
	}
	see := func(n int64, v verdict) step { return step{n: n, want: v} }
	connect := func(n int64) step { return step{connect: true, n: n} }
	for name, steps := range map[string][]step{
		"in order":                        {see(0, inOrder), see(1, inOrder), see(2, inOrder)},
		"duplicate":                       {see(0, inOrder), see(0, duplicate), see(1, inOrder)},
		"gap":                             {see(0, inOrder), see(2, ahead)},
		"join":                            {see(5, ahead)},
		"restart":                         {see(0, inOrder), see(1, inOrder), see(0, restarted)},
		"reconnect, same engine":          {see(0, inOrder), connect(0), see(1, inOrder)},
		"reconnect, gap":                  {see(0, inOrder), connect(0), see(4, ahead)},
		"reconnect, equal number":         {see(0, inOrder), see(1, inOrder), connect(1), see(1, restarted)},
		"reconnect, lower number":         {see(0, inOrder), see(1, inOrder), connect(1), see(0, restarted)},
		"Redis knows a higher number":     {connect(100), see(50, restarted)},
		"Redis knows it":                  {connect(100), see(101, ahead)}, // the stream takes done from Redis at registration
		"older than Redis, but seen live": {connect(-1), see(0, inOrder), see(1, inOrder), connect(-1), see(1, restarted)},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCursor()
			for i, s := range steps {
				if s.connect {
					c.connected(s.n)
					continue
				}
				if got := c.see(s.n); got != s.want {
					t.Fatalf("step %d: %d is %d, want %d", i, s.n, got, s.want)
				}
				if s.want == inOrder {
					c.finish(newMessage(s.n, nil))
				}
			}
		})
	}
}

func TestCursorKnowsAMessageAgain(t *testing.T) {
	c := newCursor()
	c.finish(newMessage(7, []byte("a")))
	for _, tc := range []struct {
		m    message
		want bool
	}{{newMessage(7, []byte("a")), true}, {newMessage(7, []byte("b")), false}, {newMessage(8, []byte("b")), true}} {
		if got := c.same(tc.m); got != tc.want {
			t.Errorf("%d %s: %v", tc.m.seq, tc.m.payload, got)
		}
	}
	c.renewed(-1)
	if !c.same(newMessage(7, []byte("b"))) {
		t.Error("a digest outlives its engine")
	}
}

func TestInbox(t *testing.T) {
	a := func(n int) arrival { return arrival{frames: [][]byte{make([]byte, n)}} }
	b := newInbox(3, 1<<20)
	for i := range 3 {
		if b.put(a(i)) {
			t.Fatal("overflow below the limit")
		}
	}
	if !b.put(a(3)) {
		t.Error("no overflow above the limit")
	}
	for want := 1; want <= 3; want++ { // the oldest is gone
		if got, ok := b.take(); !ok || len(got.frames[0]) != want {
			t.Fatalf("got %v, want %d", got, want)
		}
	}
	if _, ok := b.take(); ok || b.bytes != 0 {
		t.Errorf("an empty inbox has %d bytes", b.bytes)
	}
	b = newInbox(1000, 10_000)
	for range 500 {
		b.put(a(1000))
	}
	if n, lost := b.size(); n > 10 || n+lost != 500 || b.bytes > 10_000 {
		t.Errorf("%d messages of %d bytes wait, %d lost", n, b.bytes, lost)
	}
	b.put(a(20_000)) // larger than the bound: kept alone rather than lost for ever
	if n, _ := b.size(); n != 1 {
		t.Errorf("%d messages", n)
	}
	// A long life costs no more memory than its fullest moment.
	b = newInbox(2000, 1<<30)
	for i := range 100_000 {
		b.put(a(0))
		if i >= 100 {
			b.take()
		}
	}
	if cap(b.items) > 16_000 {
		t.Errorf("room for %d messages is held for %d", cap(b.items), b.len())
	}
}
