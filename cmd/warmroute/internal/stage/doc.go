// Package stage sets up what the demo and the outage benchmark play on: simulated engines, indexers and frontends in
// this process, with a way to Redis that can be watched and cut, and clients that play conversations against them.
//
// # Guarantees
//
// Every request has an [Outcome]: one that is not answered completely with status 200 has an error, whatever the
// reason. Hits are what the engines report, not what the index believes.
//
// # When Redis is away
//
// [New] fails, unless it is told to start all the same. Later everything here goes on: that is what it is for.
package stage
