package sim

import (
	"bytes"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/warmroute/warmroute/kvcache"
)

type eventKind int

const (
	stored eventKind = iota
	removed
	cleared
)

// event is one change of a rank's cache.
type event struct {
	kind   eventKind
	hashes []kvcache.EngineHash
	parent *kvcache.EngineHash // nil where the first block is the first of a prompt
	tokens []uint32
	lora   adapter
	extra  [][]string // per block; nil where there is none
}

// eventWriter encodes batches as msgspec does in vLLM: shortest integers, positional
// batches, events as tagged maps or, in older versions, as arrays of that version's length.
type eventWriter struct {
	encoding  Encoding
	arity     int // of a stored array
	blockSize int
	rank      int
}

// field is one value of an event, in the order of declaration.
type field struct {
	name  string
	write func(*msgpack.Encoder) error
}

func (w eventWriter) encode(at time.Time, events []event) ([]byte, error) {
	var buf bytes.Buffer
	enc := msgpack.NewEncoder(&buf)
	err := firstError(
		enc.EncodeArrayLen(3),
		enc.EncodeFloat64(float64(at.UnixMicro())/1e6),
		enc.EncodeArrayLen(len(events)),
	)
	for i := range events {
		if err == nil {
			err = w.event(enc, &events[i])
		}
	}
	err = firstError(err, enc.EncodeInt(int64(w.rank)))
	return buf.Bytes(), err
}

func (w eventWriter) event(enc *msgpack.Encoder, e *event) error {
	tag, fields := w.fields(e)
	if w.encoding == EncodingArray {
		err := firstError(enc.EncodeArrayLen(1+len(fields)), enc.EncodeString(tag))
		for _, f := range fields {
			err = firstError(err, f.write(enc))
		}
		return err
	}
	err := firstError(enc.EncodeMapLen(1+len(fields)), enc.EncodeString("type"), enc.EncodeString(tag))
	for _, f := range fields {
		err = firstError(err, enc.EncodeString(f.name), f.write(enc))
	}
	return err
}

func (w eventWriter) fields(e *event) (tag string, fields []field) {
	switch e.kind {
	case cleared:
		return "AllBlocksCleared", nil
	case removed:
		fields = []field{{"block_hashes", hashes(e.hashes)}, {"medium", text("GPU")}, {"group_idx", number(0)}}
		if w.encoding == EncodingArray {
			fields = fields[:removedArity(w.arity)-1]
		}
		return "BlockRemoved", fields
	}
	fields = []field{
		{"block_hashes", hashes(e.hashes)}, {"parent_block_hash", null}, {"token_ids", tokens(e.tokens)},
		{"block_size", number(w.blockSize)}, {"lora_id", null}, {"medium", text("GPU")}, {"lora_name", null},
		{"extra_keys", extraKeys(e.extra)}, {"group_idx", number(0)}, {"kv_cache_spec_kind", text("full_attention")},
		{"kv_cache_spec_sliding_window", null},
	}
	if e.parent != nil {
		fields[1].write = hash(*e.parent)
	}
	if e.lora.name != "" {
		fields[4].write = number(e.lora.id)
		fields[6].write = text(e.lora.name)
	}
	if w.encoding == EncodingArray {
		return "BlockStored", fields[:w.arity-1]
	}
	return "BlockStored", fields[:10] // a map leaves a null window out
}

// removedArity is the length of a removed array in the version whose stored array has the given length.
func removedArity(storedArity int) int {
	switch {
	case storedArity < 7:
		return 2
	case storedArity < 10:
		return 3
	}
	return 4
}

func null(enc *msgpack.Encoder) error { return enc.EncodeNil() }

func text(s string) func(*msgpack.Encoder) error {
	return func(enc *msgpack.Encoder) error { return enc.EncodeString(s) }
}

func number(n int) func(*msgpack.Encoder) error {
	return func(enc *msgpack.Encoder) error { return enc.EncodeInt(int64(n)) }
}

func hash(h kvcache.EngineHash) func(*msgpack.Encoder) error {
	return func(enc *msgpack.Encoder) error { return enc.EncodeUint(uint64(h)) }
}

func hashes(hs []kvcache.EngineHash) func(*msgpack.Encoder) error {
	return func(enc *msgpack.Encoder) error {
		err := enc.EncodeArrayLen(len(hs))
		for _, h := range hs {
			err = firstError(err, enc.EncodeUint(uint64(h)))
		}
		return err
	}
}

func tokens(ts []uint32) func(*msgpack.Encoder) error {
	return func(enc *msgpack.Encoder) error {
		err := enc.EncodeArrayLen(len(ts))
		for _, t := range ts {
			err = firstError(err, enc.EncodeUint(uint64(t)))
		}
		return err
	}
}

func extraKeys(blocks [][]string) func(*msgpack.Encoder) error {
	return func(enc *msgpack.Encoder) error {
		err := enc.EncodeArrayLen(len(blocks))
		for _, keys := range blocks {
			if keys == nil {
				err = firstError(err, enc.EncodeNil())
				continue
			}
			err = firstError(err, enc.EncodeArrayLen(len(keys)))
			for _, k := range keys {
				err = firstError(err, enc.EncodeString(k))
			}
		}
		return err
	}
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
