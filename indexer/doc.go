// Package indexer follows the KV-cache events of inference engines and keeps the index in Redis
// equal to what the engines hold, or knows that it is not.
//
// Each publisher (one rank of one worker) is a stream of its own: a source that reads the live
// socket into a bounded buffer, and one goroutine that orders, decodes, translates and applies. A
// slow worker, or one that sends rubbish, never delays another.
//
// # Guarantees
//
//   - Events take effect in the order of their sequence numbers, each once, with any number of
//     indexers at work: the store decides by generation and watermark.
//   - A missing store is accepted, a missing removal is not: wherever events may have been lost (a gap that
//     replay cannot close, a restarted engine, an undecodable batch, a panic in this code) the stream's
//     blocks leave the index and it fills again.
//   - Only what is certain is indexed: blocks of the pool's size whose tokens are all there. Orphans wait for their
//     parent within bounds.
//   - Everything that grows has a bound: buffers, replays, remembered parents, orphans, request bodies.
//
// # When Redis is away
//
// The indexer starts, listens and subscribes all the same. Streams keep reading into their buffers
// and retry with exponential backoff and jitter, for ever. A buffer that overflows loses its oldest
// messages, which is a gap like any other: replayed from the engine when Redis is back, where the engine
// still has it.
package indexer
