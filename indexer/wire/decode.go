package wire

import (
	"math"

	"github.com/warmroute/warmroute/kvcache"
)

// Decode reads one payload. Its errors are [*Error]; then the batch is empty, the payload's
// sequence number is spent, and since it may have held removals, what its publisher is
// known to hold is no longer certain. Events that are broken are in [Batch.Skipped] and
// lose nothing else.
func Decode(payload []byte) (Batch, error) {
	if code := validate(payload); code != 0 {
		return Batch{}, &Error{code}
	}
	d := decoder{b: payload}
	batch, events, code := d.frame()
	if code != 0 {
		return Batch{}, &Error{code}
	}
	d.events(&batch, events)
	return batch, nil
}

// decoder decodes one payload that has passed validate.
type decoder struct {
	b      []byte
	tokens arena[uint32]
	hashes arena[kvcache.EngineHash]
	last   string // the last string that was copied: adapters and salts come in runs
}

// frame reads all of a batch but its events, of which it gives the position.
func (d *decoder) frame() (batch Batch, events int, code Code) {
	var ts, rank int // positions; 0 where absent
	if n, pos, ok := arrayLen(d.b, 0); ok {
		if n < 2 {
			return Batch{}, 0, BatchLength
		}
		ts = pos
		events = skip(d.b, ts)
		if n > 2 {
			rank = skip(d.b, events)
		}
	} else if n, pos, ok := mapLen(d.b, 0); ok {
		ts, events, rank = d.frameMap(n, pos)
	} else {
		return Batch{}, 0, BatchShape
	}
	if ts != 0 && !isNil(d.b, ts) {
		if !d.timestamp(&batch, ts) {
			return Batch{}, 0, TSType
		}
	}
	if events == 0 {
		return Batch{}, 0, EventsType
	}
	if _, _, ok := arrayLen(d.b, events); !ok {
		return Batch{}, 0, EventsType
	}
	if rank != 0 && !isNil(d.b, rank) {
		v, ok := uintAt(d.b, rank, kvcache.MaxRank)
		if !ok {
			return Batch{}, 0, BadRank
		}
		r := int(v)
		batch.Rank = &r
	}
	return batch, events, 0
}

// frameMap finds the parts of a batch that is a map, as one development version wrote it.
func (d *decoder) frameMap(n, pos int) (ts, events, rank int) {
	var ranks [3]int // by the names below
	for range n {
		key, _ := strAt(d.b, pos)
		pos = skip(d.b, pos)
		switch string(key) {
		case "ts":
			ts = pos
		case "events":
			events = pos
		case "data_parallel_rank":
			ranks[0] = pos
		case "attn_dp_rank":
			ranks[1] = pos
		case "dp_rank":
			ranks[2] = pos
		}
		pos = skip(d.b, pos)
	}
	for _, r := range ranks {
		if r != 0 && !isNil(d.b, r) {
			return ts, events, r
		}
	}
	return ts, events, 0
}

func (d *decoder) timestamp(batch *Batch, pos int) bool {
	v, ok := floatAt(d.b, pos)
	if !ok {
		bits, negative, isInt := intAt(d.b, pos)
		if !isInt {
			return false
		}
		v = float64(bits)
		if negative {
			v = float64(int64(bits))
		}
	}
	if !math.IsNaN(v) && !math.IsInf(v, 0) {
		batch.TS, batch.TSValid = v, true
	}
	return true
}

// minEvent is the size of the smallest event that decodes: a removal of nothing. It bounds
// the memory that a count of events can claim.
const minEvent = 15

func (d *decoder) events(batch *Batch, pos int) {
	n, pos, _ := arrayLen(d.b, pos)
	if most := (len(d.b) - pos) / minEvent; most > 0 {
		batch.Events = make([]Event, 0, min(n, most))
	}
	for i := range n {
		batch.Events = append(batch.Events, Event{Index: int32(i)})
		e := &batch.Events[len(batch.Events)-1]
		if code := d.event(e, pos); code != 0 {
			batch.Skipped = append(batch.Skipped, Skipped{Index: e.Index, Code: code, Kind: e.Kind})
			batch.Events = batch.Events[:len(batch.Events)-1]
		}
		pos = skip(d.b, pos)
	}
}

// spans are the positions of an event's fields; 0 where a field is absent.
type spans [numFields]int32

// event decodes the event at pos. Where it fails, e.Kind still says what the tag said.
func (d *decoder) event(e *Event, pos int) Code {
	var at spans
	if n, first, ok := arrayLen(d.b, pos); ok {
		if n == 0 {
			return TagMissing
		}
		if code := d.tag(e, first); code != 0 {
			return code
		}
		d.arrayFields(e.Kind, &at, n-1, skip(d.b, first))
	} else if n, first, ok := mapLen(d.b, pos); ok {
		tag := d.mapFields(&at, n, first)
		if tag == 0 {
			return TagMissing
		}
		if code := d.tag(e, tag); code != 0 {
			return code
		}
	} else {
		return EventShape
	}
	switch e.Kind {
	case Stored:
		return d.stored(e, &at)
	case Removed:
		return d.removed(e, &at)
	}
	return 0
}

func (d *decoder) tag(e *Event, pos int) Code {
	tag, ok := strAt(d.b, pos)
	if !ok {
		return TagType
	}
	switch string(tag) {
	case tagStored:
		e.Kind = Stored
	case tagRemoved:
		e.Kind = Removed
	case tagCleared:
		e.Kind = Cleared
	case "":
		return TagMissing
	default:
		return UnknownTag
	}
	return 0
}

const (
	tagStored  = "BlockStored"
	tagRemoved = "BlockRemoved"
	tagCleared = "AllBlocksCleared"
)

// The fields by position, after the tag. Producers only ever appended.
var (
	storedFields = [...]field{fieldHashes, fieldParent, fieldTokens, fieldBlockSize, fieldLoRAID,
		fieldMedium, fieldLoRAName, fieldExtraKeys, fieldGroupIdx, fieldSpecKind, fieldWindow}
	removedFields = [...]field{fieldHashes, fieldMedium, fieldGroupIdx}
)

func (d *decoder) arrayFields(k Kind, at *spans, n, pos int) {
	var order []field
	switch k {
	case Stored:
		order = storedFields[:]
	case Removed:
		order = removedFields[:]
	}
	for _, f := range order[:min(n, len(order))] {
		if k == Stored && f == fieldLoRAName {
			// SGLang 0.5.18 to 0.5.20 put a map of salt and session here, a fork a list.
			if entries, first, ok := mapLen(d.b, pos); ok {
				var extra spans
				d.mapFields(&extra, entries, first)
				at[fieldCacheSalt], at[fieldSessionID] = extra[fieldCacheSalt], extra[fieldSessionID]
				return
			}
			if _, _, ok := arrayLen(d.b, pos); ok {
				return
			}
		}
		at[f] = int32(pos)
		pos = skip(d.b, pos)
	}
}

// mapFields finds the known fields of a map, the last one where a key is repeated, and gives
// the position of its tag, 0 where it has none.
func (d *decoder) mapFields(at *spans, n, pos int) (tag int) {
	for range n {
		key, ok := strAt(d.b, pos)
		pos = skip(d.b, pos)
		if ok {
			if string(key) == "type" {
				tag = pos
			} else if f := fieldByName(key); f < numFields {
				at[f] = int32(pos)
			}
		}
		pos = skip(d.b, pos)
	}
	return tag
}

// fieldByName is numFields for a key that is not known.
func fieldByName(key []byte) field {
	switch string(key) {
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldBlockSize
	case "lora_id":
		return fieldLoRAID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoRAName
	case "extra_keys":
		return fieldExtraKeys
	case "group_idx":
		return fieldGroupIdx
	case "kv_cache_spec_kind":
		return fieldSpecKind
	case "kv_cache_spec_sliding_window":
		return fieldWindow
	case "cache_salt":
		return fieldCacheSalt
	case "session_id":
		return fieldSessionID
	case "locality":
		return fieldLocality
	case "ownership":
		return fieldOwnership
	case "mm_keys":
		return fieldMMKeys
	case "skipped_parent_block_hash":
		return fieldSpanParent
	case "skipped_token_ids":
		return fieldSpanTokens
	case "skipped_extra_keys":
		return fieldSpanExtraKeys
	}
	return numFields
}
