// Package zmtp is the client half of ZMTP 3.0 (the wire protocol of ZeroMQ) that following
// an engine's KV events needs: a SUB or a DEALER socket on one connection to one peer.
//
// # What it guarantees
//
//   - [Dial] returns after the peer's READY command was read: the caller knows when the
//     handshake is complete, and owns the decision when to dial again.
//   - Nothing that a peer sends panics or allocates more than a small constant beyond what has
//     really arrived. Frame length, frames per message and message size are bounded.
//   - A peer that stops in the middle of the handshake or of a message is given up after a
//     timeout. A connection whose other end vanished without a word (half-open TCP) is found by
//     TCP keep-alive in about 25 seconds.
//
// The NULL mechanism, tcp:// and ipc:// endpoints, and connecting (never binding) are all
// that it knows. It announces version 3.0, so peers send no heartbeats. The package knows nothing of
// Redis.
package zmtp
