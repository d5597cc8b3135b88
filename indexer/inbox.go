package indexer

import (
	"sync"
	"sync/atomic"
	"time"
)

// connection is one life of the live socket.
type connection struct {
	since time.Time // when its handshake was complete
	// base is the stream's watermark in Redis before the socket connected, -1 for none. Whatever the same engine process sends
	// on this connection is newer. known is false where Redis did not answer.
	base  int64
	known bool
	// reborn: the engine's host has refused connections since the last one, so another process listens now.
	reborn bool
	ended  atomic.Bool // nothing more will come
}

// arrival is one message of the live socket; without frames, the news that it is connected.
type arrival struct {
	conn   *connection
	at     time.Time
	frames [][]byte
}

func (a arrival) bytes() int {
	n := 64
	for _, f := range a.frames {
		n += len(f)
	}
	return n
}

// inbox is the bounded buffer between a stream's source and its worker. When it is full the oldest messages go, since the newest
// are the ones that describe the engine's cache; the worker sees the gap in the sequence numbers.
type inbox struct {
	maxMessages, maxBytes int
	ready                 chan struct{} // holds a token while there may be something to do

	mu    sync.Mutex
	items []arrival // from head on
	head  int
	bytes int
	lost  int // messages dropped so far
}

func newInbox(maxMessages, maxBytes int) *inbox {
	return &inbox{maxMessages: maxMessages, maxBytes: maxBytes, ready: make(chan struct{}, 1)}
}

// put adds a message and says whether others had to go for it.
func (b *inbox) put(a arrival) (overflow bool) {
	b.mu.Lock()
	b.items = append(b.items, a)
	b.bytes += a.bytes()
	for b.len() > 1 && (b.len() > b.maxMessages || b.bytes > b.maxBytes) {
		b.drop()
		b.lost++
		overflow = true
	}
	b.mu.Unlock()
	b.wake()
	return overflow
}

func (b *inbox) len() int { return len(b.items) - b.head }

func (b *inbox) drop() arrival {
	a := b.items[b.head]
	b.items[b.head] = arrival{}
	b.head++
	b.bytes -= a.bytes()
	if b.head == len(b.items) {
		b.items, b.head = b.items[:0], 0
	} else if b.head > 1024 && b.head > len(b.items)/2 {
		n := copy(b.items, b.items[b.head:])
		clear(b.items[n:])
		b.items, b.head = b.items[:n], 0
	}
	return a
}

// take returns the oldest message.
func (b *inbox) take() (arrival, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.len() == 0 {
		return arrival{}, false
	}
	return b.drop(), true
}

// size is how many messages wait and how many were dropped so far.
func (b *inbox) size() (waiting, lost int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.len(), b.lost
}

func (b *inbox) wake() {
	select {
	case b.ready <- struct{}{}:
	default:
	}
}
