package wire

import (
	"encoding/binary"
	"math"
)

// EndSeq is the sequence number of the END mark of a replay. No batch has it.
const EndSeq uint64 = math.MaxUint64

// Message is one message of the live stream.
type Message struct {
	Topic   string // chosen by the operator; may be empty
	Seq     uint64 // from 0, one more per batch, per publisher process
	Payload []byte // one batch, for [Decode]
}

// ParseLive reads a message as a SUB socket receives it: topic, sequence number, payload.
// Its errors are [*Error] with the codes FrameCount, SeqLength and EndPayload.
func ParseLive(frames [][]byte) (Message, error) {
	if len(frames) != 3 {
		return Message{}, &Error{FrameCount}
	}
	if len(frames[1]) != 8 {
		return Message{}, &Error{SeqLength}
	}
	seq := binary.BigEndian.Uint64(frames[1])
	if seq == EndSeq {
		return Message{}, &Error{EndPayload}
	}
	return Message{Topic: string(frames[0]), Seq: seq, Payload: frames[2]}, nil
}

// ReplyKind tells a replayed batch from the end of a replay.
type ReplyKind uint8

// The kinds of replies.
const (
	ReplyBatch ReplyKind = iota // one batch that the publisher still has
	ReplyEnd                    // there are no more
)

// Reply is one message of a replay.
type Reply struct {
	Kind     ReplyKind
	Topic    string // "" where HasTopic is false, and possibly otherwise
	HasTopic bool   // the newer layout, which repeats the topic
	Seq      uint64 // of a batch
	Payload  []byte // of a batch, for [Decode]
}

// ParseReplay reads a message as a DEALER socket receives it in answer to [ReplayRequest], in
// either layout: an empty delimiter, then (since vLLM 0.26) the topic, then sequence number
// and payload. Its errors are [*Error] with the codes FrameCount, Delimiter, SeqLength and
// EndPayload.
func ParseReplay(frames [][]byte) (Reply, error) {
	if len(frames) != 3 && len(frames) != 4 {
		return Reply{}, &Error{FrameCount}
	}
	if len(frames[0]) != 0 {
		return Reply{}, &Error{Delimiter}
	}
	n := len(frames)
	r := Reply{HasTopic: n == 4, Payload: frames[n-1]}
	if r.HasTopic {
		r.Topic = string(frames[1])
	}
	if len(frames[n-2]) != 8 {
		return Reply{}, &Error{SeqLength}
	}
	r.Seq = binary.BigEndian.Uint64(frames[n-2])
	if (r.Seq == EndSeq) != (len(r.Payload) == 0) {
		return Reply{}, &Error{EndPayload}
	}
	if r.Seq == EndSeq {
		r.Kind, r.Payload = ReplyEnd, nil
	}
	return r, nil
}

// ReplayRequest is the message that a DEALER sends to a publisher's replay socket to get
// every batch that it still has from sequence number start on.
func ReplayRequest(start uint64) [][]byte {
	return [][]byte{{}, binary.BigEndian.AppendUint64(nil, start)}
}
