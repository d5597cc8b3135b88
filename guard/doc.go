// Package guard is what a process lets in, and where it lets itself be sent.
//
//   - [Tokens] are bearer tokens by role: whose request may pass; and what workers are shown.
//   - [Guard] bounds the connections of a server, and the time that one takes to accept what is written to it.
//   - [Networks] bounds the addresses that are dialled because somebody registered them.
//
// # Guarantees
//
// A token is compared by its digest, in constant time, with all that are known; it is in no error, no log and no text of an option.
// A file of tokens that cannot be read any more, or is empty, leaves its own as they were: nothing opens by a fault. An address is checked
// when it is dialled, after its name is resolved, so that a name cannot change its mind in between.
//
// Nothing here asks Redis.
package guard
