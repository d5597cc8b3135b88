// Package wire reads what engines say about their KV caches: the frames of the live stream
// and of a replay, and the MessagePack batches of events in them, in every form that vLLM,
// SGLang and TensorRT-LLM have sent. It also writes batches, for simulated engines and tests.
//
// # Guarantees
//
// [Decode] never panics and never allocates more than a fixed multiple of the payload's
// length, whatever the payload claims. A payload whose structure is broken, or whose frame
// is not that of a batch, is refused as a whole with an [*Error]. An event that is broken
// costs that event alone and is reported in [Batch.Skipped]. All errors come from the closed
// list that [Codes] returns, so that they can be metric labels.
//
// # Memory
//
// A decoded batch points into its payload where values are kept as they came ([Opaque] lists
// and binary hashes), so the payload must not be changed while the batch is in use.
//
// # Redis
//
// This package does no I/O: with Redis away it behaves the same.
package wire
