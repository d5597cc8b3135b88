// Package choose ranks worker ranks for a request: what it would cost at each, and which one is taken.
// It is pure: no I/O, no clock, no randomness of its own.
//
// The same arithmetic runs in Redis, in select.lua, where all frontends share the loads and choosing and
// reserving are one step. This package is for the choice without Redis, for explaining a choice, and for
// replays. A test holds the two together.
//
// # The cost
//
// In blocks, lower is better:
//
//	PrefillScale × (queued prefill + Miss × max(0, prompt − credit)) + Decode × active decode blocks + Request × active requests
//
// The credit of a prompt's blocks that a worker rank holds is that of [Tiers.Credit].
package choose
