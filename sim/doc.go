// Package sim is a simulated LLM engine that looks like vLLM from the outside: the OpenAI
// HTTP surface with streaming, a prefix cache of fixed-size blocks, vLLM's metrics, and KV
// events over a real ZeroMQ PUB socket with the replay ROUTER, per data-parallel rank. The
// demo, the tests and the benchmarks run on it, in their own process or as one of its own.
//
// # What is real and what is not
//
// The block cache is real: reference counts, LRU eviction, hash chains, hits that never
// include the last token of a prompt. So are queueing (one prefill at a time per rank,
// decoding side by side), the events and their order. Text is not: tokens come from a toy
// tokenizer and answers are a pure function of the prompt, equal on every engine. Time is
// whatever [Options] says one token costs; no computation happens.
//
// # Conversations
//
// Rendering a conversation, appending the answer and the next question, and rendering it
// again gives a prompt that begins with exactly the tokens of the first prompt and its
// answer, so the next turn hits everything that the turn before has computed.
//
// # Faults
//
// Methods of [Engine], and POST /sim/… over HTTP, crash, hang and restart the engine, drop
// event batches, break streams and more. The package knows nothing of Redis: it is the
// same whether Redis is there or not.
package sim
