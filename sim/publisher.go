package sim

import (
	"context"
	"encoding/binary"
	"log/slog"
	"math"
	"sync"
	"time"
)

// batch is one published message, kept for replay.
type batch struct {
	seq     uint64
	payload []byte
}

// publisher numbers the event batches of one rank, keeps the newest for replay and sends
// them to the subscribers. Sequence numbers start at 0 in each process lifetime.
type publisher struct {
	topic  []byte
	layout int // of replays: 1 or 2
	steps  int // batches kept
	writer eventWriter
	out    *zmtpServer
	log    *slog.Logger

	mu    sync.Mutex
	next  uint64 // the sequence number of the next batch
	kept  []batch
	held  []event // go out with the next batch
	drop  int     // batches still to be dropped
	burnt bool    // dropped batches are not kept for replay either
}

// publish sends one batch. It never waits for a subscriber.
func (p *publisher) publish(events []event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.held) > 0 {
		events, p.held = append(p.held, events...), nil
	}
	if len(events) == 0 {
		return
	}
	b := batch{seq: p.next}
	p.next++ // taken before encoding, as in vLLM: a batch that cannot be encoded burns its number
	var err error
	if b.payload, err = p.writer.encode(time.Now(), events); err != nil {
		p.log.Error("event batch not encoded", "seq", b.seq, "error", err)
		return
	}
	dropped := p.drop > 0
	if dropped {
		p.drop--
	}
	if !dropped || !p.burnt {
		p.kept = append(p.kept, b)
		if len(p.kept) > p.steps {
			p.kept = p.kept[1:]
		}
	}
	if !dropped {
		p.out.publish(p.topic, binary.BigEndian.AppendUint64(nil, b.seq), b.payload)
	}
}

// hold keeps an event back until the next batch: vLLM publishes from scheduler steps only.
func (p *publisher) hold(e event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = append(p.held, e)
}

func (p *publisher) dropNext(n int, burnt bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop, p.burnt = n, burnt
}

// lastSeq is the newest sequence number used, -1 before the first.
func (p *publisher) lastSeq() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int64(p.next) - 1
}

// since lists the kept batches from a sequence number on.
func (p *publisher) since(seq uint64) []batch {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []batch
	for _, b := range p.kept {
		if b.seq >= seq {
			out = append(out, b)
		}
	}
	return out
}

// replay answers one request of a DEALER: the kept batches, then the end marker.
func (p *publisher) replay(ctx context.Context, request [][]byte, send func(frames ...[]byte) error) error {
	if len(request) != 2 || len(request[0]) != 0 {
		p.log.WarnContext(ctx, "replay request ignored: want an empty frame and a sequence number", "frames", len(request))
		return nil
	}
	start := uint64(0)
	for _, b := range request[1] { // of any length, as Python reads it
		if start > math.MaxUint64>>8 {
			start = math.MaxUint64
			break
		}
		start = start<<8 | uint64(b)
	}
	for _, b := range p.since(start) {
		if err := send(p.frames(p.topic, b.seq, b.payload)...); err != nil {
			return err
		}
	}
	return send(p.frames(nil, math.MaxUint64, nil)...)
}

func (p *publisher) frames(topic []byte, seq uint64, payload []byte) [][]byte {
	number := binary.BigEndian.AppendUint64(nil, seq)
	if p.layout == 1 {
		return [][]byte{nil, number, payload}
	}
	return [][]byte{nil, topic, number, payload}
}
