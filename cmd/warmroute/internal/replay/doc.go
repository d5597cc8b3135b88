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
// [RunReal] sends the same requests over HTTP to real frontends in this process, some times as fast. Simulated engines publish real
// events, a real indexer follows them into a redis-server that is started for it, and the loads are leases there. Prompts are
// computed faster by the speed; answers are shorter by it, so that their tokens come at their usual pace.
package replay
