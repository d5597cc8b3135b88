// Package demo shows the point of warmroute on one machine: simulated engines, an indexer and two
// frontends in this process, and a multi-turn chat workload that is played under kv routing, under
// round robin, and again under kv routing while Redis is taken away and given back.
//
// # Guarantees
//
// Every request counts: one that is not answered completely with status 200 is counted as failed,
// whatever the reason. The hit ratio is what the engines report, not what the index believes. Each
// part begins with engines whose caches are empty.
//
// # When Redis is away
//
// That is the last part. Redis itself is left alone: every connection of this process to it is cut
// and new ones are refused, so that the demo can run against a Redis that others use.
package demo
