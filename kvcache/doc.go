// Package kvcache holds the vocabulary that everything else shares: how a prompt becomes
// block hashes, who holds blocks, where, and what an answer of the index looks like. It does
// no I/O.
//
// # Block hashing
//
// A block hash names a whole prefix. Two prompts that begin with the same tokens (under the
// same adapter and salt) have the same hashes as far as they agree, on every worker and in
// every process. The values equal those of NVIDIA Dynamo, so its clients and its recorded
// hashes work unchanged:
//
//	local[i] = xxh3_64(tokens as u32 little-endian, then sorted multimodal hashes as u64; seed)
//	seed     = 1337 + xxh3_64(adapter; 0) + xxh3_64(salt; 1), a missing name adding nothing
//	block[0] = local[0]
//	block[i] = xxh3_64(block[i-1], local[i]; 1337)
//
// # Engine hashes
//
// Engines name blocks by hashes of their own, which cannot be compared across workers. They
// are [EngineHash] here and serve only to find a block again when the engine that stored it
// removes it or names it as a parent.
package kvcache
