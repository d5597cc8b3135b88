package wire

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
)

// What the vectors hold in a form that this package writes is written back byte for byte:
// those payloads are msgspec's own.
func TestEncodeEqualsProducers(t *testing.T) {
	forms := map[string]Form{
		"vllm091/": FormArray6, "vllm0102/": FormArray7, "vllm-pos8/": FormArray8,
		"vllm-pos10/": FormArray10, "vllm-pos12/": FormArray12, "vllm-map/": FormMap,
	}
	// Signed hashes come back unsigned, and these are no producer's order or batch.
	other := map[string]bool{
		"vllm091/stored-removed-cleared-signed": true, "vllm-map/stored-keys-reversed": true,
		"vllm-map/batch-as-map": true, "vllm-map/batch-as-map-no-dp": true,
	}
	done := map[string]int{}
	for _, v := range readVectors[eventVector](t, "kv-event-vectors.json") {
		prefix := v.Name[:strings.IndexByte(v.Name, '/')+1]
		form, ok := forms[prefix]
		if !ok || other[v.Name] {
			continue
		}
		done[prefix]++
		b := mustDecode(t, fromHex(t, v.Payload))
		if got := hex.EncodeToString(Encode(nil, b, form)); got != v.Payload {
			t.Errorf("%s:\ngot  %s\nwant %s", v.Name, got, v.Payload)
		}
	}
	if len(done) != len(forms) {
		t.Errorf("vectors by form: %v, want some of each of %v", done, forms)
	}
}

func TestEncodeFromScratch(t *testing.T) {
	parent, rank := engineHash(0x1122334455667788), 2
	b := Batch{TS: 1.5, TSValid: true, Rank: &rank, Events: []Event{
		{Kind: Stored, Hashes: hashes(1, math.MaxUint64), Parent: &parent, Tokens: []uint32{1, 200, 70000, math.MaxUint32},
			BlockSize: 2, Medium: "GPU", LoRAName: "a", GroupIdx: Some(uint32(0)), LoRAID: Some(int64(-40000))},
		{Kind: Removed, Hashes: hashes(1), Medium: "CPU"},
		{Kind: Cleared},
	}}
	for _, form := range []Form{FormMap, FormArray6, FormArray7, FormArray8, FormArray9, FormArray10, FormArray12} {
		got := mustDecode(t, Encode([]byte{}, b, form))
		want := `{"ts":1.5,"dp_rank":2,"events":[{"type":"stored","hashes":["0000000000000001","ffffffffffffffff"],"tier":"gpu",` +
			`"parent":"1122334455667788","tokens":[1,200,70000,4294967295],"token_kind":"single","block_size":2,"dense":true`
		if form == FormMap || form >= 7 {
			want += `,"medium":"GPU"`
		}
		if form == FormMap || form >= 8 {
			want += `,"lora_name":"a"`
		}
		want += `,"lora_id":-40000`
		if form == FormMap || form >= 10 {
			want += `,"group_idx":0`
		}
		want += `},{"type":"removed","hashes":["0000000000000001"],"tier":`
		if form == FormArray6 {
			want += `"gpu"}` // medium did not exist
		} else {
			want += `"cpu","medium":"CPU"}`
		}
		want += `,{"type":"cleared"}],"skipped":[]}`
		if string(got.JSON()) != want {
			t.Errorf("form %d:\ngot  %s\nwant %s", form, got.JSON(), want)
		}
	}
	if dst := Encode([]byte("x"), Batch{}, FormMap); !bytes.Equal(dst, []byte{'x', 0x93, 0xc0, 0x90, 0xc0}) {
		t.Errorf("an empty batch: %x", dst)
	}
}

// Integers and lengths take their shortest form, at each border between two.
func TestShortestForms(t *testing.T) {
	for v, want := range map[any]string{
		0: "00", 127: "7f", 128: "cc80", 255: "ccff", 256: "cd0100", 65535: "cdffff", 65536: "ce00010000",
		math.MaxUint32: "ceffffffff", 1 << 32: "cf0000000100000000", uint64(math.MaxUint64): "cfffffffffffffffff",
		-1: "ff", -32: "e0", -33: "d0df", -128: "d080", -129: "d1ff7f", -32768: "d18000", -32769: "d2ffff7fff",
		math.MinInt32: "d280000000", math.MinInt32 - 1: "d3ffffffff7fffffff", math.MinInt64: "d38000000000000000",
		1.5: "cb3ff8000000000000", true: "c3", "": "a0",
	} {
		if got := hex.EncodeToString(encoded(t, v)); got != want {
			t.Errorf("%v: got %s, want %s", v, got, want)
		}
	}
	for _, c := range []struct {
		value func(n int) any
		heads map[int]string
	}{
		{func(n int) any { return strings.Repeat("x", n) }, map[int]string{31: "bf", 32: "d920", 255: "d9ff", 256: "da0100", 65536: "db00010000"}},
		{func(n int) any { return make([]byte, n) }, map[int]string{0: "c400", 255: "c4ff", 256: "c50100", 65536: "c600010000"}},
		{func(n int) any { return make([]any, n) }, map[int]string{15: "9f", 16: "dc0010", 65536: "dd00010000"}},
		{func(n int) any { return make(Map, n) }, map[int]string{15: "8f", 16: "de0010", 65536: "df00010000"}},
		{func(n int) any { return Ext{2, make([]byte, n)} }, map[int]string{1: "c70102", 256: "c8010002", 65536: "c90001000002"}},
	} {
		for n, head := range c.heads {
			in := c.value(n)
			b := encoded(t, in)
			if got := hex.EncodeToString(b[:len(head)/2]); got != head {
				t.Errorf("%T of %d: got %s, want %s", in, n, got, head)
			}
			if code := validate(b); code != 0 {
				t.Errorf("%T of %d: %v", in, n, code)
			}
			if back, next := valueAt(b, 0); next != len(b) || !reflect.DeepEqual(back, in) {
				t.Errorf("%T of %d does not read back", in, n)
			}
		}
	}
}

// project is what is left of a decoded event after it was written in a form.
func project(e Event, f Form) Event {
	if f == FormMap || e.Kind == Cleared {
		return e
	}
	drop := func(s *string, fld field) {
		*s = ""
		e.empty &^= 1 << fld
	}
	drop(&e.CacheSalt, fieldCacheSalt)
	drop(&e.SessionID, fieldSessionID)
	drop(&e.Locality, fieldLocality)
	drop(&e.Ownership, fieldOwnership)
	e.MMKeys, e.Span = nil, nil
	if f < 7 {
		drop(&e.Medium, fieldMedium)
		e.Tier = TierGPU
	}
	if f < 8 {
		drop(&e.LoRAName, fieldLoRAName)
	}
	if f < 9 {
		e.ExtraKeys = nil
	}
	if f < 10 {
		e.GroupIdx = Opt[uint32]{}
	}
	if f < 12 {
		drop(&e.SpecKind, fieldSpecKind)
		e.SlidingWindow = Opt[uint32]{}
	}
	return e
}

// checkRoundTrip is the property: what was decoded, written in any form, decodes to the same
// again as far as the form holds it, and is then written as the same bytes.
func checkRoundTrip(b Batch) error {
	for _, form := range []Form{FormMap, FormArray6, FormArray7, FormArray8, FormArray9, FormArray10, FormArray12} {
		written := Encode(nil, b, form)
		again, err := Decode(written)
		if err != nil {
			return fmt.Errorf("form %d: %w", form, err)
		}
		if again.TS != b.TS || again.TSValid != b.TSValid || !reflect.DeepEqual(again.Rank, b.Rank) {
			return fmt.Errorf("form %d: frame: got %v %v %v, want %v %v %v", form, again.TS, again.TSValid, again.Rank, b.TS, b.TSValid, b.Rank)
		}
		if len(again.Skipped) != 0 || len(again.Events) != len(b.Events) {
			return fmt.Errorf("form %d: %d events and %d skipped, want %d", form, len(again.Events), len(again.Skipped), len(b.Events))
		}
		for i, e := range b.Events {
			want := project(e, form)
			want.Index = int32(i) // those that were skipped are not written
			if !reflect.DeepEqual(again.Events[i], want) {
				return fmt.Errorf("form %d: event %d:\ngot  %+v\nwant %+v", form, i, again.Events[i], want)
			}
		}
		if twice := Encode(nil, again, form); !bytes.Equal(twice, written) {
			return fmt.Errorf("form %d: got %x the second time, %x the first", form, twice, written)
		}
	}
	return nil
}

func TestRoundTripVectors(t *testing.T) {
	n := 0
	for _, v := range readVectors[eventVector](t, "kv-event-vectors.json") {
		b, err := Decode(fromHex(t, v.Payload))
		if err != nil {
			continue
		}
		n++
		if err := checkRoundTrip(b); err != nil {
			t.Errorf("%s: %v", v.Name, err)
		}
	}
	if n == 0 {
		t.Error("no vector decodes")
	}
}
