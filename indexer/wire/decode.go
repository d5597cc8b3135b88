package wire

import (
	"math"
	"slices"

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
	left   int // events still to come, this one included: more like this one are likely
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
		d.left = n - i
		batch.Events = append(batch.Events, Event{Index: int32(i)})
		e := &batch.Events[len(batch.Events)-1]
		next, code := d.event(e, pos)
		if code != 0 {
			if k := len(batch.Skipped); k == 0 {
				batch.Skipped = make([]Skipped, 0, min(n-i, 8)) // a few are broken
			} else if k == cap(batch.Skipped) {
				batch.Skipped = slices.Grow(batch.Skipped, n-i) // or all: no repeated growing
			}
			batch.Skipped = append(batch.Skipped, Skipped{Index: e.Index, Code: code, Kind: e.Kind})
			batch.Events = batch.Events[:len(batch.Events)-1]
		}
		pos = next
	}
}

// spans are the positions of an event's fields; 0 where a field is absent.
type spans [numFields]int32

// event decodes the event at pos and gives the position after it. Where it fails, e.Kind still
// says what the tag said.
func (d *decoder) event(e *Event, pos int) (next int, code Code) {
	var at spans
	if n, first, ok := arrayLen(d.b, pos); ok {
		if n == 0 {
			return first, TagMissing
		}
		next = skip(d.b, first)
		code = d.tag(e, first)
		next = d.arrayFields(e.Kind, &at, n-1, next)
	} else if n, first, ok := mapLen(d.b, pos); ok {
		var tag int
		tag, next = d.mapFields(&at, n, first)
		if tag == 0 {
			return next, TagMissing
		}
		code = d.tag(e, tag)
	} else {
		return skip(d.b, pos), EventShape
	}
	switch {
	case code != 0:
	case e.Kind == Stored:
		code = d.stored(e, &at)
	case e.Kind == Removed:
		code = d.removed(e, &at)
	}
	return next, code
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

// arrayFields finds the fields among the n elements from pos on, and the position after them.
func (d *decoder) arrayFields(k Kind, at *spans, n, pos int) (next int) {
	var order []field
	switch k {
	case Stored:
		order = storedFields[:]
	case Removed:
		order = removedFields[:]
	}
	for i := range n {
		if i < len(order) {
			f := order[i]
			if f == fieldLoRAName && d.notLoRAName(at, pos) {
				order = nil // nothing is known of what follows
			} else {
				at[f] = int32(pos)
			}
		}
		pos = skip(d.b, pos)
	}
	return pos
}

// notLoRAName reports that the element at the position of the adapter's name is another
// producer's: SGLang 0.5.18 to 0.5.20 put a map of salt and session there, a fork a list.
func (d *decoder) notLoRAName(at *spans, pos int) bool {
	if n, first, ok := mapLen(d.b, pos); ok {
		var extra spans
		d.mapFields(&extra, n, first)
		at[fieldCacheSalt], at[fieldSessionID] = extra[fieldCacheSalt], extra[fieldSessionID]
		return true
	}
	_, _, ok := arrayLen(d.b, pos)
	return ok
}

// mapFields finds the known fields of a map, the last one where a key is repeated, and gives
// the position of its tag, 0 where it has none, and the position after the map.
func (d *decoder) mapFields(at *spans, n, pos int) (tag, next int) {
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
	return tag, pos
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
