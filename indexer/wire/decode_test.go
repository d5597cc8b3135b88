package wire

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
)

// encoded is any value as MessagePack.
func encoded(t testing.TB, v any) []byte {
	t.Helper()
	b, err := appendValue(nil, v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func mustDecode(t testing.TB, payload []byte) Batch {
	t.Helper()
	b, err := Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// list is an array, batchOf one with a time and these events.
func list(v ...any) []any { return v }

func batchOf(events ...any) []any { return list(1.5, events, 0) }

// storedMap is a good BlockStored with one key changed or added, removedMap a BlockRemoved.
func storedMap(key string, value any) Map {
	return withKey(Map{{"type", tagStored}, {"block_hashes", list(7)}, {"parent_block_hash", nil},
		{"token_ids", list(1, 2)}, {"block_size", 2}}, key, value)
}

func removedMap(key string, value any) Map {
	return withKey(Map{{"type", tagRemoved}, {"block_hashes", list(7)}}, key, value)
}

func withKey(m Map, key string, value any) Map {
	for i := range m {
		if m[i].Key == key {
			m[i].Value = value
			return m
		}
	}
	return append(m, MapEntry{key, value})
}

func without(m Map, key string) Map {
	return slices.DeleteFunc(m, func(e MapEntry) bool { return e.Key == key })
}

func nested(depth int) any {
	var v any
	for range depth {
		v = list(v)
	}
	return v
}

// TestEveryCode makes each code of the closed list happen, and so also proves that the list
// has none that cannot.
func TestEveryCode(t *testing.T) {
	const huge = "\xff\xfe"
	type input struct {
		code    string
		payload any // []byte as it is, anything else encoded
	}
	event := func(v any) any { return batchOf(v) }
	inputs := []input{
		{"payload_too_large", make([]byte, MaxPayload+1)},
		{"truncated", []byte{}},
		{"length_exceeds_input", []byte{0xdd, 0xff, 0xff, 0xff, 0xff}},
		{"depth_limit", batchOf(storedMap("future", nested(MaxDepth-2)))},
		{"reserved_byte", []byte{0x92, 0xc0, 0xc1}},
		{"trailing_bytes", []byte{0x92, 0xc0, 0x90, 0xc0}},
		{"batch_shape", 1},
		{"batch_length", list(1.5)},
		{"ts_type", list("x", list())},
		{"events_type", list(1.5, nil)},
		{"dp_rank", list(1.5, list(), 65536)},

		{"event_shape", event("BlockRemoved")},
		{"tag_type", event(list(1))},
		{"tag_type", event(Map{{"type", nil}})},
		{"tag_missing", event(list())},
		{"tag_missing", event(Map{{"block_hashes", list(7)}})},
		{"tag_missing", event(list(""))},
		{"unknown_tag", event(list("blockremoved"))},

		{"missing_field:block_hashes", event(list(tagRemoved))},
		{"missing_field:block_hashes", event(without(removedMap("x", 1), "block_hashes"))},
		{"missing_field:token_ids", event(list(tagStored, list(7), nil))},
		{"missing_field:block_size", event(list(tagStored, list(7), nil, list(1)))},
		{"hash_length:block_hashes", event(removedMap("block_hashes", list([]byte{})))},
		{"hash_length:block_hashes", event(removedMap("block_hashes", list(make([]byte, 4097))))},
		{"hash_length:parent_block_hash", event(storedMap("parent_block_hash", []byte{}))},
		{"hash_length:skipped_parent_block_hash", event(storedMap("skipped_parent_block_hash", []byte{}))},
		{"token_range:token_ids", event(storedMap("token_ids", list(1, -1)))},
		{"token_range:token_ids", event(storedMap("token_ids", list(1<<32)))},
		{"token_range:token_ids", event(storedMap("token_ids", list(list(1, 1<<32))))},
		{"token_range:skipped_token_ids", event(storedMap("skipped_token_ids", list(1<<32)))},
		{"field_type:token_ids", event(storedMap("token_ids", list(1, nil)))},
		{"field_type:token_ids", event(storedMap("token_ids", list(list(1, "a"))))},
		{"field_type:token_ids", event(storedMap("token_ids", list(list(1))))},
		{"field_type:block_size", event(storedMap("block_size", math.MaxInt32+1))},
		{"field_type:cache_salt", event(list(tagStored, list(7), nil, list(1), 1, nil, nil, Map{{"cache_salt", 1}}))},
		{"field_type:lora_name", event(list(tagStored, list(7), nil, list(1), 1, nil, nil, false))},
		{"field_type:group_idx", event(storedMap("group_idx", 1<<32))},
	}
	for _, f := range []field{fieldHashes, fieldTokens, fieldBlockSize, fieldParent, fieldMedium, fieldLoRAName,
		fieldCacheSalt, fieldSessionID, fieldSpecKind, fieldLocality, fieldOwnership, fieldExtraKeys, fieldMMKeys,
		fieldGroupIdx, fieldWindow, fieldSpanParent, fieldSpanTokens, fieldSpanExtraKeys} {
		name := fieldNames[f]
		for _, bad := range []any{true, 1.5, Map{}, Ext{1, []byte{0}}} {
			inputs = append(inputs, input{"field_type:" + name, event(storedMap(name, bad))})
		}
		switch f {
		case fieldHashes, fieldMedium, fieldLocality, fieldOwnership, fieldGroupIdx:
			inputs = append(inputs, input{"field_type:" + name, event(removedMap(name, false))})
		case fieldTokens, fieldSpanTokens:
			inputs = append(inputs, input{"invalid_utf8:" + name, event(storedMap(name, list(huge)))})
		}
		switch f {
		case fieldMedium, fieldLoRAName, fieldCacheSalt, fieldSessionID, fieldSpecKind, fieldLocality, fieldOwnership:
			inputs = append(inputs, input{"invalid_utf8:" + name, event(storedMap(name, huge))},
				input{"field_type:" + name, event(storedMap(name, []byte("GPU")))},
				input{"field_type:" + name, event(storedMap(name, 1))})
		}
	}
	frames := []string{"frame_count", "delimiter", "seq_length", "end_payload"} // TestFramesRefused
	seen := map[string]bool{}
	for _, in := range inputs {
		seen[in.code] = true
		payload, ok := in.payload.([]byte)
		if !ok {
			payload = encoded(t, in.payload)
		}
		batch, err := Decode(payload)
		var e *Error
		switch {
		case errors.As(err, &e):
			if e.Code.String() != in.code || !strings.HasSuffix(err.Error(), ": "+in.code) {
				t.Errorf("%s: got %v", in.code, err)
			}
		case len(batch.Events) != 0 || len(batch.Skipped) != 1 || batch.Skipped[0].Code.String() != in.code:
			t.Errorf("%s: got %s", in.code, batch.JSON())
		}
	}
	for _, c := range Codes() {
		if !seen[c] && !slices.Contains(frames, c) {
			t.Errorf("nothing makes %q happen", c)
		}
		delete(seen, c)
	}
	if len(seen) != 0 {
		t.Errorf("codes that are not in the list: %v", seen)
	}
	if Code(255).String() != "" || Code(0).String() != "" {
		t.Error("a code that does not exist has a name")
	}
}

// A broken event costs itself, and says whether a removal was lost.
func TestSkippedEvents(t *testing.T) {
	b := mustDecode(t, encoded(t, batchOf(
		storedMap("medium", 1),
		removedMap("medium", 1),
		list(tagRemoved),
		list("BlockInactive"),
		nil,
		list(tagCleared, 1, 2, "what"),
	)))
	want := []Skipped{
		{0, fieldMedium.code(fieldType), Stored},
		{1, fieldMedium.code(fieldType), Removed},
		{2, fieldHashes.code(missingField), Removed},
		{3, UnknownTag, Unknown},
		{4, EventShape, Unknown},
	}
	if !slices.Equal(b.Skipped, want) {
		t.Errorf("skipped %v, want %v", b.Skipped, want)
	}
	if len(b.Events) != 1 || b.Events[0].Kind != Cleared || b.Events[0].Index != 5 {
		t.Errorf("events %+v, want the clear at 5", b.Events)
	}
	var removals []int32
	for _, s := range b.Skipped {
		if s.Removal() {
			removals = append(removals, s.Index)
		}
	}
	if !slices.Equal(removals, []int32{1, 2}) {
		t.Errorf("lost removals at %v, want 1 and 2", removals)
	}
}

// Broken structure anywhere refuses the payload, also where a field before it is wrong.
func TestStructureComesFirst(t *testing.T) {
	for _, c := range []struct {
		payload []byte
		want    Code
	}{
		{append(encoded(t, list("ts", list())), 0xc0), TrailingBytes},
		{append(encoded(t, batchOf(list(1)))[:11], 0xc1), ReservedByte},
		{append(encoded(t, 1), 0xc0), TrailingBytes},
	} {
		_, err := Decode(c.payload)
		if e := new(Error); !errors.As(err, &e) || e.Code != c.want {
			t.Errorf("%x: got %v, want %v", c.payload, err, c.want)
		}
	}
}

func TestHashForms(t *testing.T) {
	digest := bytes.Repeat([]byte{0xab}, 24)
	copy(digest[16:], []byte{1, 2, 3, 4, 5, 6, 7, 8})
	for _, c := range []struct {
		in   any
		want kvcache.EngineHash
	}{
		{0, 0}, {100, 100}, {200, 200}, {1 << 31, 1 << 31}, {-1, math.MaxUint64}, {-33, math.MaxUint64 - 32},
		{-200, math.MaxUint64 - 199}, {-70000, math.MaxUint64 - 69999}, {math.MinInt64, 1 << 63},
		{uint64(1<<53 + 1), 1<<53 + 1}, {uint64(1 << 63), 1 << 63}, {uint64(math.MaxUint64), math.MaxUint64},
		{[]byte{9}, 9}, {[]byte{1, 2}, 0x102}, {digest[16:], 0x0102030405060708}, {digest, 0x0102030405060708},
		{make([]byte, 4096), 0},
	} {
		b := mustDecode(t, encoded(t, batchOf(storedMap("block_hashes", list(c.in)), storedMap("parent_block_hash", c.in))))
		if len(b.Events) != 2 || b.Events[0].Hashes[0] != c.want || *b.Events[1].Parent != c.want {
			t.Errorf("%v: got %s, want %s", c.in, b.JSON(), c.want)
		}
	}
}

func TestBatchForms(t *testing.T) {
	for _, c := range []struct {
		name string
		in   any
		want string
	}{
		{"no rank", list(1.5, list()), `{"ts":1.5,"dp_rank":null,"events":[],"skipped":[]}`},
		{"elements of the future", list(1.5, list(), 3, "x", Map{}), `{"ts":1.5,"dp_rank":3,"events":[],"skipped":[]}`},
		{"largest rank", list(-7, list(), 65535), `{"ts":-7,"dp_rank":65535,"events":[],"skipped":[]}`},
		{"map, SGLang's rank", Map{{"attn_dp_rank", 2}, {"ts", nil}, {"events", list()}, {1, 2}}, `{"ts":null,"dp_rank":2,"events":[],"skipped":[]}`},
		{"map, ranks nil and not", Map{{"dp_rank", 4}, {"events", list()}, {"data_parallel_rank", nil}}, `{"ts":null,"dp_rank":4,"events":[],"skipped":[]}`},
		{"map, keys repeated", Map{{"events", nil}, {"ts", "x"}, {"events", list()}, {"ts", 1}}, `{"ts":1,"dp_rank":null,"events":[],"skipped":[]}`},
		{"-Inf", list(math.Inf(-1), list(), nil), `{"ts":null,"dp_rank":null,"events":[],"skipped":[]}`},
	} {
		if got := mustDecode(t, encoded(t, c.in)).JSON(); string(got) != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.name, got, c.want)
		}
	}
	// A float of 32 bits, which msgspec does not write.
	if got := mustDecode(t, []byte{0x92, 0xca, 0x3f, 0xc0, 0, 0, 0x90}); got.TS != 1.5 || !got.TSValid {
		t.Errorf("float32: got %v", got.TS)
	}
}

func TestEventForms(t *testing.T) {
	stored := func(rest ...any) []any {
		return append(list(tagStored, list(7), nil, list(1, 2), 2, nil, "GPU"), rest...)
	}
	const head = `{"type":"stored","hashes":["0000000000000007"],"tier":"gpu","parent":null,`
	const single = head + `"tokens":[1,2],"token_kind":"single","block_size":2,"dense":true`
	for _, c := range []struct {
		name string
		in   any
		want string
	}{
		{"salt at 7", stored(Map{{"session_id", "s"}, {"cache_salt", "t"}, {"lora_name", "no"}}, 1, 2, 3, 4), single + `,"medium":"GPU","cache_salt":"t","session_id":"s"}`},
		{"list at 7", stored(list(), 1, 2, 3, 4), single + `,"medium":"GPU"}`},
		{"lora_id no integer", storedMap("lora_id", "x"), single + `}`},
		{"lora_id negative", storedMap("lora_id", -2), single + `,"lora_id":-2}`},
		{"lora_id above int64", storedMap("lora_id", uint64(math.MaxUint64)), single + `}`},
		{"no parent", without(storedMap("x", 1), "parent_block_hash"), single + `}`},
		{"empty strings", Map{{"type", tagRemoved}, {"block_hashes", list()}, {"medium", ""}, {"locality", ""}}, `{"type":"removed","hashes":[],"tier":"unknown","medium":"","locality":""}`},
		{"keys that are no strings", withKey(Map{{[]byte("type"), 1}, {nil, list()}, {"type", tagCleared}}, "medium", 1), `{"type":"cleared"}`},
		{"repeated key, first one wrong", append(Map{{"block_hashes", "x"}}, removedMap("medium", nil)...), `{"type":"removed","hashes":["0000000000000007"],"tier":"gpu"}`},
		{"not for removals", removedMap("token_ids", "x"), `{"type":"removed","hashes":["0000000000000007"],"tier":"gpu"}`},
		{"skipped span", withKey(withKey(storedMap("skipped_parent_block_hash", 5), "skipped_token_ids", list(9, 8)), "skipped_extra_keys", list(nil)), single + `,"skipped_parent_block_hash":"0000000000000005","skipped_token_ids":[9,8],"skipped_extra_keys":[null]}`},
		{"sparse", storedMap("token_ids", list(1, 2, 3, 4)), head + `"tokens":[1,2,3,4],"token_kind":"single","block_size":2,"dense":false}`},
		{"text", storedMap("token_ids", list("a", "b")), head + `"tokens":["a","b"],"token_kind":"text","block_size":2,"dense":true}`},
		{"mixed", storedMap("token_ids", list(list(1, 2), 3)), head + `"tokens":[[1,2],3],"token_kind":"mixed","block_size":2,"dense":true}`},
		{"mixed, late", storedMap("token_ids", list(1, "x")), head + `"tokens":[1,"x"],"token_kind":"mixed","block_size":2,"dense":true}`},
		{"opaque values", storedMap("mm_keys", list(nil, true, false, -1, uint64(math.MaxUint64), 0.5, math.NaN(), 1e30, "é<\"", "\xff", []byte{1}, Map{{1, list()}}, Ext{-1, []byte{2}}, Ext{5, nil})), single +
			`,"mm_keys":[null,true,false,-1,18446744073709551615,0.5,{"$float":"NaN"},1e+30,"é\u003c\"",{"$str":"ff"},{"$bin":"01"},{"$map":[[1,[]]]},{"$ext":-1,"data":"02"},{"$ext":5,"data":""}]}`},
	} {
		b := mustDecode(t, encoded(t, batchOf(c.in)))
		want := `{"ts":1.5,"dp_rank":0,"events":[` + c.want + `],"skipped":[]}`
		if got := string(b.JSON()); got != want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.name, got, want)
		}
	}
}

// Pairs and lists may come with heads that are longer than needed.
func TestLongHeads(t *testing.T) {
	tokens := fromHex(t, "dd00000003 dc0002 01ce00000002 dd00000002 02cd0003 92 d2000000 03 cf0000000000000004")
	p := fromHex(t, "df00000003 a27473 c0 a6") // {"ts":nil, "events":[…], "x":nil}
	p = append(p, "events"...)
	p = append(p, fromHex(t, "dd00000001 dc0005 db0000000b")...)
	p = append(p, tagStored...)
	p = append(append(append(p, fromHex(t, "91 01 c0")...), tokens...), 3)
	p = append(p, fromHex(t, "d90178 c0")...)
	b := mustDecode(t, p)
	if len(b.Events) != 1 || !slices.Equal(b.Events[0].Bigrams, [][2]uint32{{1, 2}, {2, 3}, {3, 4}}) {
		t.Fatalf("got %s", b.JSON())
	}
	if got := b.Events[0].BlockTokens(nil, 0); !slices.Equal(got, []uint32{1, 2, 3}) {
		t.Errorf("tokens of block 0: %v", got)
	}
}

// Extensions of fixed sizes, which this package does not write.
func TestFixedExtensions(t *testing.T) {
	for _, c := range []struct {
		list string
		want string
	}{
		{"91 d4ff01", `[{"$ext":-1,"data":"01"}]`},
		{"92 d5020102 d60301020304", `[{"$ext":2,"data":"0102"},{"$ext":3,"data":"01020304"}]`},
		{"91 d7040102030405060708", `[{"$ext":4,"data":"0102030405060708"}]`},
		{"91 d805000102030405060708090a0b0c0d0e0f", `[{"$ext":5,"data":"000102030405060708090a0b0c0d0e0f"}]`},
	} {
		if got := string(appendJSONValue(nil, Opaque(fromHex(t, c.list)).Values())); got != c.want || validate(fromHex(t, c.list)) != 0 {
			t.Errorf("%s: got %s, want %s", c.list, got, c.want)
		}
		if short := fromHex(t, c.list); validate(short[:2]) == 0 || validate(short[:3]) == 0 {
			t.Errorf("%s: a part of it is valid", c.list)
		}
	}
}

func TestBlockTokens(t *testing.T) {
	b := mustDecode(t, encoded(t, batchOf(
		withKey(storedMap("block_hashes", list(7, 8)), "token_ids", list(1, 2, 3, 4)),
		storedMap("token_ids", list(1, 2, 3)), // not dense
		storedMap("token_ids", list("a", "b")),
	)))
	for _, c := range []struct {
		event, block int
		want         []uint32
	}{
		{0, 0, []uint32{0, 1, 2}}, {0, 1, []uint32{0, 3, 4}}, {0, 2, []uint32{0}}, {0, -1, []uint32{0}},
		{1, 0, []uint32{0}}, {2, 0, []uint32{0}},
	} {
		if got := b.Events[c.event].BlockTokens([]uint32{0}, c.block); !slices.Equal(got, c.want) {
			t.Errorf("event %d block %d: got %v, want %v", c.event, c.block, got, c.want)
		}
	}
}

func TestTiers(t *testing.T) {
	type in struct {
		t  Tier
		ok bool
		c  kvcache.Tier
	}
	for medium, want := range map[string]in{
		"GPU": {TierGPU, true, kvcache.Device}, "gpu": {TierGPU, true, kvcache.Device},
		"CPU": {TierCPU, true, kvcache.Host}, "Cpu_Pinned": {TierCPU, true, kvcache.Host},
		"CPU_TIER1": {TierCPU, true, kvcache.Host}, "CPU_TIER2": {TierDisk, true, kvcache.Disk},
		"disk": {TierDisk, true, kvcache.Disk}, "STORAGE": {TierDisk, true, kvcache.Disk},
		"EXTERNAL": {TierExternal, false, 0}, "NVLINK_POOL": {TierUnknown, false, 0}, "": {TierUnknown, false, 0},
	} {
		got := TierOf(medium)
		if c, ok := got.Cache(); got != want.t || c != want.c || ok != want.ok {
			t.Errorf("%q: got %v, %v, %v, want %v", medium, got, c, ok, want)
		}
	}
}

func TestLocalAndIndexable(t *testing.T) {
	for _, c := range []struct {
		key              string
		value            any
		local, indexable bool
	}{
		{"x", nil, true, true},
		{"locality", "LOCAL", true, true}, {"locality", nil, true, true},
		{"locality", "REMOTE", false, true}, {"locality", "NEARBY", false, true}, {"locality", "", false, true},
		{"group_idx", 0, true, true}, {"group_idx", 1, true, false},
		{"kv_cache_spec_kind", "mla_attention", true, true}, {"kv_cache_spec_kind", "mamba", true, false},
	} {
		e := mustDecode(t, encoded(t, batchOf(storedMap(c.key, c.value)))).Events[0]
		if e.Local() != c.local || e.PrefixIndexable() != c.indexable {
			t.Errorf("%s %v: local %v, indexable %v, want %v, %v", c.key, c.value, e.Local(), e.PrefixIndexable(), c.local, c.indexable)
		}
	}
}

func TestOpaque(t *testing.T) {
	for _, c := range []struct {
		in     []any
		allNil bool
	}{
		{list(), true}, {list(nil, nil), true}, {list(nil, list(nil)), false}, {list("a"), false}, {make([]any, 70000), true},
	} {
		o, err := ListOf(c.in...)
		if err != nil {
			t.Fatal(err)
		}
		if o.AllNil() != c.allNil || o.Len() != len(c.in) || len(o.Values()) != len(c.in) {
			t.Errorf("%.40v: AllNil %v, Len %d, %d values", c.in, o.AllNil(), o.Len(), len(o.Values()))
		}
	}
	var none Opaque
	if !none.AllNil() || none.Len() != 0 || none.Values() != nil {
		t.Error("nil is not an empty list")
	}
	if _, err := ListOf(Map{{"a", list(struct{}{})}}); err == nil {
		t.Error("a struct was taken")
	}
}
