package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/indexer/zmtp"
)

// eventsCmd prints what an engine publishes.
type eventsCmd struct {
	Endpoint  string `arg:"" placeholder:"tcp://HOST:PORT" help:"Engine's KV events, or with --past its replay."`
	Past      bool   `help:"Ask for the messages that the engine still has, at its replay endpoint, and end." env:"-"`
	From      uint64 `placeholder:"SEQ" help:"With --past: from this message." env:"-"`
	Follow    bool   `short:"f" help:"Go on until interrupted, also when the engine restarts; else the next message is all." env:"-"`
	FromTopic string `name:"topic" placeholder:"PREFIX" help:"Only topics that begin like this." env:"-"`
	JSON      bool   `help:"Print one JSON object per message." env:"-"`
}

// Help is the long form of the command's help.
func (eventsCmd) Help() string {
	return `What does an engine say about its cache? This connects to it directly, as an indexer does, and shows each
message with its number, and whether an event would be indexed. An engine publishes when it serves requests; an idle one
is silent.

Example: the next message

    warmroute events tcp://10.0.1.1:5557

Example: all of them, until Ctrl-C

    warmroute events --follow tcp://10.0.1.1:5557

Example: what the engine can still replay

    warmroute events --past tcp://10.0.1.1:5657

Exit codes: 0 messages came; 1 none did, or one could not be read; 2 wrong flags.`
}

// eventsSilent is what to look at where no message comes.
const eventsSilent = "an idle engine is silent: ask it something meanwhile; are events enabled, and is this the port of the rank?"

// eventsPatience is how long the first message, and each of a replay, may take.
const eventsPatience = 10 * time.Second

// Run prints until the end that the flags say.
func (c eventsCmd) Run(ctx context.Context, std *stdio, logger *slog.Logger) error {
	if _, _, err := zmtp.ParseEndpoint(c.Endpoint); err != nil {
		return usagef("%w", err)
	}
	if c.Past && c.Follow {
		return usagef("--past ends by itself: leave out --follow")
	}
	for {
		n, err := c.read(ctx, std.Out)
		switch {
		case ctx.Err() != nil && c.Follow:
			return nil // that is how it ends
		case ctx.Err() != nil && err != nil:
			return fmt.Errorf("interrupted after %d messages (%s)", n, eventsSilent)
		case err == nil || !c.Follow || errors.Is(err, errPrinting):
			return err
		}
		logger.Warn("the engine is away, dialling again", "endpoint", c.Endpoint, "messages", n, "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// eventsLine is the form of --json.
type eventsLine struct {
	Seq   uint64          `json:"seq"`
	Topic string          `json:"topic"`
	Batch json.RawMessage `json:"batch,omitempty"`
	Error string          `json:"error,omitempty"` // why the payload cannot be read
}

// errPrinting is an output that takes no more, such as a closed pipe.
var errPrinting = errors.New("cannot print")

// read prints what comes over one connection, and returns how many messages came.
func (c eventsCmd) read(ctx context.Context, out io.Writer) (n int, err error) {
	kind, o := zmtp.SocketSUB, zmtp.Options{Topic: c.FromTopic}
	if c.Past {
		kind, o = zmtp.SocketDEALER, zmtp.Options{}
	}
	dialling, cancel := context.WithTimeout(ctx, eventsPatience)
	conn, err := zmtp.Dial(dialling, c.Endpoint, kind, o)
	cancel()
	if err != nil {
		hint := "does the engine publish KV events there? vLLM and SGLang: --kv-events-config"
		switch {
		case !errors.Is(err, zmtp.ErrProtocol):
		case c.Past:
			hint = "is this its replay endpoint? At the one of its events, leave out --past"
		case strings.Contains(err.Error(), "ROUTER"):
			hint = "this is its replay endpoint: --past asks there"
		}
		return 0, fmt.Errorf("%w (%s)", err, hint)
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if c.Past {
		if err := conn.Send(wire.ReplayRequest(c.From)...); err != nil {
			return 0, err
		}
	}
	for {
		if !c.Follow {
			if err := conn.SetReadDeadline(time.Now().Add(eventsPatience)); err != nil {
				return n, err
			}
		}
		frames, err := conn.Recv()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return n, fmt.Errorf("connected, but no message in %v (%s)", eventsPatience, eventsSilent)
		case err != nil:
			return n, err
		}
		m, end, err := c.parse(frames)
		if end && n == 0 {
			return n, fmt.Errorf("the engine has no message to replay from %d on (%s)", c.From, eventsSilent)
		}
		if err != nil || end {
			return n, err
		}
		n++
		if err := c.print(out, m); err != nil {
			return n, err
		}
		if !c.Past && !c.Follow {
			return n, nil
		}
	}
}

func (c eventsCmd) parse(frames [][]byte) (m wire.Message, end bool, err error) {
	if !c.Past {
		m, err = wire.ParseLive(frames)
		return m, false, err
	}
	r, err := wire.ParseReplay(frames)
	return wire.Message{Topic: r.Topic, Seq: r.Seq, Payload: r.Payload}, r.Kind == wire.ReplyEnd, err
}

func (c eventsCmd) print(out io.Writer, m wire.Message) error {
	batch, bad := wire.Decode(m.Payload)
	var err error
	switch {
	case c.JSON:
		line := eventsLine{Seq: m.Seq, Topic: m.Topic}
		if bad != nil {
			line.Error = bad.Error()
		} else {
			line.Batch = json.RawMessage(batch.JSON())
		}
		err = json.NewEncoder(out).Encode(line)
	case bad != nil:
		_, err = fmt.Fprintf(out, "message %d: %s\n", m.Seq, tintFor(out).bad(bad.Error()))
	default:
		if _, err = fmt.Fprintf(out, "message %d: ", m.Seq); err == nil {
			err = describe(out, batch)
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errPrinting, err)
	}
	if bad != nil && !c.Follow {
		return fmt.Errorf("message %d: %w", m.Seq, bad)
	}
	return nil
}
