package wire

import (
	"encoding/json"
	"errors"
	"slices"
	"testing"
)

// FuzzDecode asserts of any payload: no panic; memory within a multiple of its length; an
// error is one of the list; and what decodes is the same after being encoded and decoded again.
func FuzzDecode(f *testing.F) {
	for _, v := range readVectors[eventVector](f, "kv-event-vectors.json") {
		f.Add(fromHex(f, v.Payload))
	}
	everything := storedMap("token_ids", list(1, list(2, 3), "four"))
	for _, key := range []string{"medium", "lora_name", "cache_salt", "session_id", "kv_cache_spec_kind", "locality", "ownership"} {
		everything = withKey(everything, key, key)
	}
	for _, key := range []string{"extra_keys", "mm_keys", "skipped_token_ids", "skipped_extra_keys"} {
		everything = withKey(everything, key, list())
	}
	for _, key := range []string{"lora_id", "group_idx", "kv_cache_spec_sliding_window", "skipped_parent_block_hash"} {
		everything = withKey(everything, key, 9)
	}
	f.Add(encoded(f, batchOf(everything, removedMap("locality", ""), list(tagCleared))))
	f.Add(encoded(f, batchOf(storedMap("extra_keys", list(nil, true, -1, uint64(1<<63), 0.5, "s", []byte{1}, Map{{1, nil}}, Ext{1, []byte{2}})))))
	codes := Codes()
	f.Fuzz(func(t *testing.T, payload []byte) {
		var b Batch
		var err error
		if got := allocated(func() { b, err = Decode(payload) }); got > memoryBound(len(payload)) {
			t.Errorf("%d bytes decode to %d", len(payload), got)
		}
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || !slices.Contains(codes, e.Code.String()) {
				t.Fatalf("an error that is not in the list: %v", err)
			}
			if b.Events != nil || b.Skipped != nil || b.Rank != nil {
				t.Fatalf("an error with a batch: %+v", b)
			}
			return
		}
		for _, s := range b.Skipped {
			if !slices.Contains(codes, s.Code.String()) {
				t.Fatalf("skipped for %d, which is not in the list", s.Code)
			}
		}
		for i := range b.Events {
			checkEvent(t, &b.Events[i])
		}
		if !json.Valid(b.JSON()) {
			t.Fatalf("no JSON: %s", b.JSON())
		}
		if err := checkRoundTrip(b); err != nil {
			t.Fatal(err)
		}
	})
}

// checkEvent asserts what the documentation of Event promises.
func checkEvent(t *testing.T, e *Event) {
	if e.Kind == Unknown || e.HashBytes != nil && len(e.HashBytes) != len(e.Hashes) {
		t.Fatalf("event %d: kind %v, %d hashes, %d binary", e.Index, e.Kind, len(e.Hashes), len(e.HashBytes))
	}
	if dense := e.BlockSize > 0 && e.NumTokens() > 0 && e.NumTokens() == e.BlockSize*len(e.Hashes); dense != e.Dense {
		t.Fatalf("event %d: dense is %v", e.Index, e.Dense)
	}
	for i := range e.Hashes {
		n := len(e.BlockTokens(nil, i))
		if want := e.Dense && (e.TokenKind == SingleTokens || e.TokenKind == BigramTokens); want && n != e.BlockSize || !want && n != 0 {
			t.Fatalf("event %d: block %d has %d tokens of %d", e.Index, i, n, e.BlockSize)
		}
	}
	for _, o := range []Opaque{e.TokenList, e.ExtraKeys, e.MMKeys} {
		back, err := ListOf(o.Values()...)
		if err != nil {
			t.Fatalf("event %d: %v", e.Index, err)
		}
		if code := validate(back); code != 0 || back.Len() != o.Len() {
			t.Fatalf("event %d: %x reads back as %x: %v", e.Index, o, back, code)
		}
	}
}
