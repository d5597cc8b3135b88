package replay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// BlockTokens is how many tokens a block of the trace has.
const BlockTokens = 512

// Request is one line of a trace.
type Request struct {
	At     time.Duration // since the first
	Input  int           // tokens of the prompt
	Output int           // tokens of the answer
	// Blocks name the prompt's blocks of 512 tokens. Equal ids mean equal prompts up to and including there. The last one
	// may be partial.
	Blocks []uint64
}

// whole are the blocks that an engine can keep.
func (r *Request) whole() []uint64 { return r.Blocks[:r.Input/BlockTokens] }

// maxInput bounds a prompt of a trace.
const maxInput = 10_000_000

// ReadTrace reads a trace in the form that the Mooncake project publishes: a JSON object a line with timestamp (ms),
// input_length, output_length (tokens) and hash_ids.
func ReadTrace(r io.Reader) ([]Request, error) {
	var out []Request
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		q, err := parseRequest(lines.Bytes())
		if err == nil && len(out) > 0 && q.At < out[len(out)-1].At {
			err = errors.New("the timestamp is before the last one")
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		out = append(out, q)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", len(out)+1, err)
	}
	if len(out) == 0 {
		return nil, errors.New("the trace is empty")
	}
	for i := len(out) - 1; i >= 0; i-- {
		out[i].At -= out[0].At
	}
	return out, nil
}

func parseRequest(line []byte) (Request, error) {
	var v struct {
		Timestamp *float64 `json:"timestamp"`
		Input     int      `json:"input_length"`
		Output    int      `json:"output_length"`
		Hashes    []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &v); err != nil {
		return Request{}, err
	}
	switch {
	case v.Timestamp == nil || *v.Timestamp < 0 || *v.Timestamp > 1e12:
		return Request{}, errors.New("timestamp: want milliseconds from 0 to 1e12")
	case v.Input < 1 || v.Input > maxInput || v.Output < 0 || v.Output > maxInput:
		return Request{}, errors.New("input_length and output_length: want tokens, at most 1e7")
	case len(v.Hashes) != (v.Input+BlockTokens-1)/BlockTokens:
		return Request{}, fmt.Errorf("%d hash_ids for %d tokens: want one for each %d of them", len(v.Hashes), v.Input, BlockTokens)
	}
	return Request{
		At: time.Duration(*v.Timestamp * float64(time.Millisecond)), Input: v.Input, Output: v.Output, Blocks: v.Hashes,
	}, nil
}

// sessions numbers the conversations of a trace: a request goes on with the one that had the deepest of its blocks. The very first
// block, which is often common to all, says nothing.
func sessions(trace []Request) []int {
	of, next := map[uint64]int{}, 0
	out := make([]int, len(trace))
	for i := range trace {
		blocks, known := trace[i].whole(), false
		for k := len(blocks) - 1; k > 0 && !known; k-- {
			out[i], known = of[blocks[k]]
		}
		if !known {
			out[i] = next
			next++
		}
		for _, b := range blocks {
			of[b] = out[i]
		}
	}
	return out
}
