package wire

// Code is the reason of a refusal, from a closed list; see [Codes].
type Code uint8

// The codes of whole payloads and of frames, and those of events that name no field.
const (
	_ Code = iota // no error

	// Structure: the payload is refused as a whole.
	PayloadTooLarge    // more than MaxPayload bytes
	Truncated          // ends inside a value
	LengthExceedsInput // a length claims more than there is
	DepthLimit         // nested deeper than MaxDepth
	ReservedByte       // the code byte c1
	TrailingBytes      // something follows the batch

	// Batch: the payload is refused as a whole.
	BatchShape  // neither an array nor a map
	BatchLength // an array of fewer than 2
	TSType      // ts is no number and not nil
	EventsType  // events is no array
	BadRank     // the rank is no whole number from 0 to 65535

	// Event: this event is skipped.
	EventShape // neither an array nor a map
	TagType    // the tag is no string
	TagMissing // there is no tag, or it is empty
	UnknownTag // none of the three tags

	// Frames: the message is dropped.
	FrameCount // not the number of frames of such a message
	Delimiter  // a replay's first frame is not empty
	SeqLength  // the sequence number is not 8 bytes long
	EndPayload // END's number with a payload, or a replayed batch without one

	firstFieldCode
)

// Classes of the codes that name a field: the code is firstFieldCode + class·numFields + field.
const (
	missingField = iota
	fieldType
	hashLength
	tokenRange
	invalidUTF8
	numClasses
)

// field numbers the fields of events that are known, in the order in which they are checked.
type field uint8

const (
	fieldHashes field = iota
	fieldTokens
	fieldBlockSize
	fieldParent
	fieldMedium
	fieldLoRAName
	fieldCacheSalt
	fieldSessionID
	fieldSpecKind
	fieldLocality
	fieldOwnership
	fieldExtraKeys
	fieldMMKeys
	fieldGroupIdx
	fieldWindow
	fieldSpanParent
	fieldSpanTokens
	fieldSpanExtraKeys
	fieldLoRAID
	numFields
)

var fieldNames = [numFields]string{
	"block_hashes", "token_ids", "block_size", "parent_block_hash", "medium", "lora_name",
	"cache_salt", "session_id", "kv_cache_spec_kind", "locality", "ownership", "extra_keys",
	"mm_keys", "group_idx", "kv_cache_spec_sliding_window", "skipped_parent_block_hash",
	"skipped_token_ids", "skipped_extra_keys", "lora_id",
}

func (f field) code(class int) Code {
	return firstFieldCode + Code(class)*Code(numFields) + Code(f)
}

const numCodes = int(firstFieldCode) + numClasses*int(numFields)

var codeNames = makeCodeNames()

// makeCodeNames names the codes that exist. The combinations of class and field that cannot
// occur stay empty.
func makeCodeNames() [numCodes]string {
	names := [numCodes]string{
		PayloadTooLarge: "payload_too_large", Truncated: "truncated",
		LengthExceedsInput: "length_exceeds_input", DepthLimit: "depth_limit",
		ReservedByte: "reserved_byte", TrailingBytes: "trailing_bytes",
		BatchShape: "batch_shape", BatchLength: "batch_length", TSType: "ts_type",
		EventsType: "events_type", BadRank: "dp_rank",
		EventShape: "event_shape", TagType: "tag_type", TagMissing: "tag_missing",
		UnknownTag: "unknown_tag",
		FrameCount: "frame_count", Delimiter: "delimiter", SeqLength: "seq_length",
		EndPayload: "end_payload",
	}
	for class, fields := range [numClasses]struct {
		prefix string
		fields []field
	}{
		missingField: {"missing_field:", []field{fieldHashes, fieldTokens, fieldBlockSize}},
		hashLength:   {"hash_length:", []field{fieldHashes, fieldParent, fieldSpanParent}},
		tokenRange:   {"token_range:", []field{fieldTokens, fieldSpanTokens}},
		invalidUTF8: {"invalid_utf8:", []field{fieldTokens, fieldMedium, fieldLoRAName, fieldCacheSalt,
			fieldSessionID, fieldSpecKind, fieldLocality, fieldOwnership, fieldSpanTokens}},
	} {
		for _, f := range fields.fields {
			names[f.code(class)] = fields.prefix + fieldNames[f]
		}
	}
	for f := range fieldLoRAID { // all but lora_id, which is dropped where it is no integer
		names[f.code(fieldType)] = "field_type:" + fieldNames[f]
	}
	return names
}

// String is the code's name, such as unknown_tag or field_type:block_hashes.
func (c Code) String() string {
	if int(c) < numCodes {
		return codeNames[c]
	}
	return ""
}

// Codes are the names of all codes that this package can report.
func Codes() []string {
	var all []string
	for _, name := range codeNames {
		if name != "" {
			all = append(all, name)
		}
	}
	return all
}

// Error is the refusal of a whole payload or message.
type Error struct {
	Code Code
}

// Error names the code.
func (e *Error) Error() string { return "kv event payload refused: " + e.Code.String() }
