package main

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
)

// decodeCmd explains a captured event payload.
type decodeCmd struct {
	JSON    bool   `help:"Print the decoded batch as JSON, in the form of the vector files." env:"-"`
	Vectors string `placeholder:"FILE" type:"existingfile" help:"Check a file of payloads with their expected meaning instead of reading standard input; exit 1 and print a diff where one differs." env:"-"`
}

// Help is the long form of the command's help.
func (decodeCmd) Help() string {
	return `Reads one payload of a KV event message (its last frame) as hex digits from standard input
and says what it means to the indexer: the answer to "why is my index empty". White space
and a leading 0x do not matter.

Example: what a captured payload holds

    warmroute decode < payload.hex
    echo 92c09191b0416c6c426c6f636b73436c6561726564 | warmroute decode

Example: capture the next message of an engine, with pyzmq

    python3 -c 'import zmq; s = zmq.Context().socket(zmq.SUB); s.connect("tcp://127.0.0.1:5557"); s.subscribe("")
    print(s.recv_multipart()[-1].hex())' | warmroute decode

Example: the same as JSON, for jq

    od -An -v -tx1 payload.bin | warmroute decode --json

Example: does this build understand what the engines sent?

    warmroute decode --vectors kv-event-vectors.json

Exit codes: 0 decoded; 1 the payload or an event in it is refused, or a vector differs; 2 wrong flags.`
}

// Run decodes standard input or checks the vectors.
func (c decodeCmd) Run(std *stdio) error {
	if c.Vectors != "" {
		return c.checkVectors(std.Out)
	}
	if isTerminal(std.In) {
		_, _ = fmt.Fprintln(std.Err, "Reading hex digits from the terminal; Ctrl-D ends them.")
	}
	payload, err := readHex(std.In)
	if err != nil {
		return err
	}
	batch, err := wire.Decode(payload)
	if err != nil {
		return fmt.Errorf("%d bytes: %w", len(payload), err)
	}
	if c.JSON {
		_, err = fmt.Fprintf(std.Out, "%s\n", batch.JSON())
	} else {
		err = describe(std.Out, batch)
	}
	if err == nil && len(batch.Skipped) > 0 {
		err = fmt.Errorf("%d of %d events are refused", len(batch.Skipped), len(batch.Skipped)+len(batch.Events))
	}
	return err
}

func (c decodeCmd) checkVectors(out io.Writer) error {
	f, err := os.Open(c.Vectors)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	n, diffs, err := wire.CheckVectors(f)
	if err != nil {
		return fmt.Errorf("%s: %w", c.Vectors, err)
	}
	for _, d := range diffs {
		if _, err := fmt.Fprintln(out, d); err != nil {
			return err
		}
	}
	if len(diffs) > 0 {
		return fmt.Errorf("%d differences in %d vectors", len(diffs), n)
	}
	_, err = fmt.Fprintf(out, "%d vectors decode as expected\n", n)
	return err
}

// readHex reads hex digits, forgiving white space and a leading 0x.
func readHex(r io.Reader) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, 4*wire.MaxPayload))
	if err != nil {
		return nil, fmt.Errorf("standard input: %w", err)
	}
	text = bytes.Map(func(r rune) rune {
		if unicode.IsSpace(r) {
			return -1
		}
		return r
	}, text)
	text = bytes.TrimPrefix(bytes.TrimPrefix(text, []byte("0x")), []byte("0X"))
	if len(text) == 0 {
		return nil, errors.New("standard input is empty: want a payload as hex digits")
	}
	payload := make([]byte, hex.DecodedLen(len(text)))
	if _, err := hex.Decode(payload, text); err != nil {
		return nil, fmt.Errorf("standard input: %w: want hex digits only", err)
	}
	return payload, nil
}

// describe says what a batch means, one line per event.
func describe(w io.Writer, b wire.Batch) error {
	var s strings.Builder
	if b.TSValid {
		at := time.UnixMicro(int64(b.TS * 1e6)).UTC()
		fmt.Fprintf(&s, "batch of %s", at.Format(time.RFC3339Nano))
	} else {
		s.WriteString("batch without a time")
	}
	if b.Rank != nil {
		fmt.Fprintf(&s, ", rank %d", *b.Rank)
	}
	s.WriteString(": " + count(len(b.Events)+len(b.Skipped), "event"))
	if len(b.Skipped) > 0 {
		fmt.Fprintf(&s, ", %d of them refused", len(b.Skipped))
	}
	s.WriteByte('\n')
	events, skipped := b.Events, b.Skipped
	for len(events) > 0 || len(skipped) > 0 {
		if len(skipped) == 0 || len(events) > 0 && events[0].Index < skipped[0].Index {
			describeEvent(&s, &events[0])
			events = events[1:]
			continue
		}
		fmt.Fprintf(&s, "%d  REFUSED  %s: %s\n", skipped[0].Index, skipped[0].Kind, skipped[0].Code)
		skipped = skipped[1:]
	}
	_, err := io.WriteString(w, s.String())
	return err
}

func describeEvent(s *strings.Builder, e *wire.Event) {
	fmt.Fprintf(s, "%d  %-7s", e.Index, e.Kind)
	if e.Kind == wire.Cleared {
		s.WriteString("  the rank's whole cache\n")
		return
	}
	fmt.Fprintf(s, "  %s on %s", count(len(e.Hashes), "block"), e.Tier)
	if e.Medium != "" && !strings.EqualFold(e.Medium, e.Tier.String()) {
		fmt.Fprintf(s, " (%q)", e.Medium)
	}
	if e.Kind == wire.Stored {
		if e.Parent == nil {
			s.WriteString(", from the start of a prompt")
		} else {
			fmt.Fprintf(s, ", after %s", *e.Parent)
		}
		if n := e.NumTokens(); n > 0 {
			fmt.Fprintf(s, ", %s (%s) in blocks of %d", count(n, "token"), e.TokenKind, e.BlockSize)
		} else {
			s.WriteString(", without tokens: where known blocks now also are")
		}
	}
	for _, f := range []struct{ name, value string }{
		{"adapter", e.LoRAName}, {"salt", e.CacheSalt}, {"group kind", e.SpecKind}, {"locality", e.Locality}, {"ownership", e.Ownership},
	} {
		if f.value != "" {
			fmt.Fprintf(s, ", %s %q", f.name, f.value)
		}
	}
	if e.GroupIdx.Valid {
		fmt.Fprintf(s, ", group %d", e.GroupIdx.Value)
	}
	s.WriteByte('\n')
	const shown = 4
	for i, h := range e.Hashes {
		if i == shown && len(e.Hashes) > shown+1 {
			fmt.Fprintf(s, "     … %d more\n", len(e.Hashes)-shown)
			break
		}
		fmt.Fprintf(s, "     %s\n", h)
	}
	for _, reason := range notIndexed(e) {
		fmt.Fprintf(s, "     not indexed: %s\n", reason)
	}
}

// notIndexed says why an event does not reach the index as it stands.
func notIndexed(e *wire.Event) []string {
	var reasons []string
	if _, ok := e.Tier.Cache(); !ok {
		reasons = append(reasons, fmt.Sprintf("medium %q is no tier of the index", e.Medium))
	}
	if !e.Local() {
		reasons = append(reasons, fmt.Sprintf("locality %q is not this worker's", e.Locality))
	}
	if e.Kind == wire.Stored {
		if !e.PrefixIndexable() {
			reasons = append(reasons, "its group's attention does not depend on the whole prefix")
		}
		if e.NumTokens() > 0 && !e.Dense {
			reasons = append(reasons, "the tokens are not exactly one block per hash")
		}
		seen := map[kvcache.EngineHash]bool{}
		if e.Parent != nil {
			seen[*e.Parent] = true
		}
		for _, h := range e.Hashes {
			if seen[h] {
				reasons = append(reasons, fmt.Sprintf("block %s occurs twice in its own chain", h))
				break
			}
			seen[h] = true
		}
	}
	return reasons
}

// count is "1 block", "2 blocks".
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
