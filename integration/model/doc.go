// Package model holds one test: engines, indexers and Redis do at random what they do in production, including all the ways in
// which they fail, and the index is compared with a model of what the engines hold.
//
// Everything real: publishers on libzmq, indexers with their own connections, a redis-server that loses data. While it runs, no
// lookup may go back to blocks of an engine process that is over; whenever the world has come to rest, the index equals the
// model, every lookup equals the one that the model gives, and the store's own check finds nothing.
//
//	go test ./integration/model -model.seeds 200 -model.steps 10000 -timeout 5h
package model
