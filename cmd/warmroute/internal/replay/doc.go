// Package replay sends the requests of a trace through frontends to simulated workers under a policy, and says what
// the policy was worth: how much of the prompts was cached, how evenly the work was spread, how long first tokens took.
//
// # Virtual time
//
// [Run] is a discrete-event simulation. A worker computes prompts one after the other at a constant rate, keeps whole
// blocks in an LRU cache, and decodes for a constant time per token beside it, which slows nothing down. Its
// blocks are in the index when the prompt is computed. Choices are made by what the frontends use: package
// frontend/choose where the loads are in memory, the store and its scripts where they are in Redis. With equal seeds both
// choose the same.
//
// # Real time
//
// [RunReal] sends the same requests over HTTP to real frontends, which know the fleet through a real index.
package replay
