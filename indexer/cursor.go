package indexer

import "github.com/zeebo/xxh3"

// maxSeq is the largest sequence number taken: scripts compare watermarks as doubles.
const maxSeq = 1 << 53

// cursor is the sequence machine of one publisher.
type cursor struct {
	live int64 // newest number seen on the live socket of this engine process; -1 = none
	done int64 // newest number that was translated, live or replayed; -1 = none
	// base is the newest number that a new connection's first message must exceed, if it is from the same engine process.
	base  int64
	fresh bool // no message of this connection was seen yet

	// recent are the last messages of this engine process whose content is known, each at its number modulo the length: a live message
	// that was translated from a replay already has to be the same one.
	recent [64]content

	zero      uint64 // digest of message 0, of streams over HTTP
	zeroKnown bool
}

// content is a message in few bytes. A digest of 0 is an unknown one; seq -1 is before the first message.
type content struct {
	seq    int64
	digest uint64
}

var nothing = content{seq: -1}

func newCursor() cursor { return cursor{live: -1, done: -1, base: -1} }

// verdict is what a live number means.
type verdict int

const (
	inOrder   verdict = iota
	duplicate         // drop it
	restarted         // the engine has begun again: what is known of it is void
	ahead             // messages are missing before it
)

// see judges the next number of the live socket.
func (c *cursor) see(seq int64) verdict {
	fresh := c.fresh
	c.fresh = false
	switch {
	case fresh && seq <= c.base, !fresh && seq < c.live:
		c.live = seq
		return restarted
	case seq == c.live:
		return duplicate
	}
	c.live = seq
	return c.place(seq)
}

// place compares a number with what was translated.
func (c *cursor) place(seq int64) verdict {
	switch {
	case seq <= c.done:
		return duplicate
	case seq > c.done+1:
		return ahead
	}
	return inOrder
}

// connected begins a connection. newest is what is known to have been published before it.
func (c *cursor) connected(newest int64) {
	c.fresh, c.base = true, max(newest, c.live)
}

// reached goes on after a message that somebody else has applied.
func (c *cursor) reached(m content) {
	c.done = m.seq
	c.note(m)
}

func (c *cursor) note(m content) {
	if m.seq >= 0 && m.digest != 0 {
		c.recent[m.seq%int64(len(c.recent))] = m
	}
}

// at is what is known of message seq.
func (c *cursor) at(seq int64) content {
	if seq >= 0 {
		if was := c.recent[seq%int64(len(c.recent))]; was.seq == seq {
			return was
		}
	}
	return content{seq: seq}
}

// renewed begins a new engine process, of which done is applied.
func (c *cursor) renewed(done int64) {
	c.done, c.base = done, -1
	c.forget()
}

// forget drops what is known of messages that were another process's.
func (c *cursor) forget() { clear(c.recent[:]) }

// digest is a message's content in 64 bits, 0 for none: equal in all indexers.
func digest(payload []byte) uint64 { return max(xxh3.Hash(payload), 1) }

// finish notes that a message was translated.
func (c *cursor) finish(m message) {
	c.done = m.seq
	c.note(m.content())
}

// same says whether a message is the one that was translated under its number; true where that is not known.
func (c *cursor) same(m message) bool {
	was := c.at(m.seq)
	return was.digest == 0 || was.digest == m.digest
}

// first notes the content of message 0, and isFirst says whether it was that. A stream over HTTP has no connection
// whose end would tell of a restart.
func (c *cursor) first(content []byte) {
	c.zero, c.zeroKnown = digest(content), true
}

func (c *cursor) isFirst(content []byte) bool {
	return c.zeroKnown && digest(content) == c.zero
}
