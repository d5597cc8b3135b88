package wire

import (
	"bytes"
	"errors"
	"runtime"
	"testing"
)

func TestDepthLimit(t *testing.T) {
	// The unknown key's value is at depth 3 of the batch.
	for depth, ok := range map[int]bool{MaxDepth - 3: true, MaxDepth - 2: false} {
		_, err := Decode(encoded(t, batchOf(storedMap("future", nested(depth)))))
		if (err == nil) != ok {
			t.Errorf("innermost value at depth %d: got %v", depth+3, err)
		}
	}
}

// Every prefix of a good payload ends too early, and every one is said to.
func TestEveryTruncation(t *testing.T) {
	whole := encoded(t, batchOf(storedMap("extra_keys", list(nil, list("a", []byte{1}, 1.5, Ext{3, make([]byte, 300)}))),
		removedMap("block_hashes", list(-1, 1<<40, make([]byte, 32))), list(tagCleared)))
	mustDecode(t, whole)
	for n := range whole {
		_, err := Decode(whole[:n])
		if e := new(Error); !errors.As(err, &e) || e.Code != Truncated && e.Code != LengthExceedsInput {
			t.Errorf("the first %d bytes: %v", n, err)
		}
	}
}

// allocated is how many bytes f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// memoryBound is the most that decoding n bytes may allocate.
func memoryBound(n int) uint64 { return uint64(n)*48 + 64<<10 }

// The worst that each kind of content can do to memory, a quarter of a megabyte of each.
func TestMemoryIsBounded(t *testing.T) {
	const size = 256 << 10
	filled := func(piece []byte) []byte { // a batch of pieces
		n := size / len(piece)
		p := appendArrayLen([]byte{0x93, 0xc0}, n)
		return append(append(p, bytes.Repeat(piece, n)...), 0xc0)
	}
	inList := func(tag, key string, piece []byte) []byte {
		n := size / len(piece)
		m := encoded(t, Map{{"type", tag}, {"block_size", 1}, {"block_hashes", list()}, {"token_ids", list()}})
		m[0]++ // one key more, which comes last and wins
		m = appendArrayLen(appendStr(m, key), n)
		return append(append(append([]byte{0x93, 0xc0, 0x91}, m...), bytes.Repeat(piece, n)...), 0xc0)
	}
	for name, p := range map[string][]byte{
		"nil events":       filled([]byte{0xc0}),
		"smallest events":  filled(encoded(t, list(tagRemoved, list()))),
		"clears":           filled(encoded(t, list(tagCleared))),
		"small hashes":     inList(tagRemoved, "block_hashes", []byte{1}),
		"binary hashes":    inList(tagRemoved, "block_hashes", []byte{0xc4, 1, 1}),
		"hashes, one bad":  append(bytes.TrimSuffix(inList(tagRemoved, "block_hashes", []byte{1}), []byte{1, 0xc0}), 0xc3, 0xc0),
		"small tokens":     inList(tagStored, "token_ids", []byte{1}),
		"pairs":            inList(tagStored, "token_ids", []byte{0x92, 1, 1}),
		"empty texts":      inList(tagStored, "token_ids", []byte{0xa0}),
		"opaque lists":     inList(tagStored, "extra_keys", []byte{0x90}),
		"short strings":    filled(encoded(t, Map{{"type", tagRemoved}, {"block_hashes", list()}, {"medium", "x"}, {"ownership", "y"}})),
		"repeated keys":    filled(append([]byte{0x8f}, bytes.Repeat(encoded(t, "block_hashes"), 30)...)),
		"claims, 4 G":      {0x93, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff, 0xc0},
		"claims, the rest": append([]byte{0x93, 0xc0, 0xdd, 0, 4, 0, 0}, bytes.Repeat([]byte{0xc1}, size)...),
		"small arena":      filled(encoded(t, list(tagStored, list(1), 1, list(make([]any, 513)...), 1))),
	} {
		var batch Batch
		got := allocated(func() { batch, _ = Decode(p) })
		if got > memoryBound(len(p)) {
			t.Errorf("%s: %d bytes decode to %d, %.1f each", name, len(p), got, float64(got)/float64(len(p)))
		}
		t.Logf("%-17s %5.1f bytes per byte, %d events, %d skipped", name, float64(got)/float64(len(p)), len(batch.Events), len(batch.Skipped))
	}
}
