package indexer

import (
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/warmroute/warmroute/indexer/wire"
	"github.com/warmroute/warmroute/kvcache"
)

// extras is what besides its tokens decides a block.
type extras struct {
	salt string
	mm   [][]uint64 // multimodal hashes per block; nil where there are none
}

// extrasOf reads extra_keys (vLLM) and mm_keys (TensorRT-LLM). Engines do not tag the elements of extra_keys, so what they
// are follows from their form: the adapter's name, [identifier, offset] or a long hex digest for a multimodal
// input, and any other string in the block at token 0 for the salt. What cannot be told apart is folded into the block's
// hash, which errs to the harmless side: such a block matches no prompt.
func extrasOf(e *wire.Event, lora string) extras {
	var x extras
	if !e.ExtraKeys.AllNil() {
		for i, v := range e.ExtraKeys.Values() {
			if items, ok := v.([]any); ok && i < len(e.Hashes) {
				x.block(i, len(e.Hashes), items, lora, e.Parent == nil && i == 0)
			}
		}
	}
	if !e.MMKeys.AllNil() {
		for i, v := range e.MMKeys.Values() {
			items, ok := v.([]any)
			if !ok || i >= len(e.Hashes) {
				continue
			}
			for _, item := range items {
				x.add(i, len(e.Hashes), mmKey(item))
			}
		}
	}
	if e.CacheSalt != "" {
		x.salt = e.CacheSalt
	}
	return x
}

func (x *extras) add(i, n int, mm uint64) {
	if x.mm == nil {
		x.mm = make([][]uint64, n)
	}
	x.mm[i] = append(x.mm[i], mm)
}

// block reads the extra keys of one block.
func (x *extras) block(i, n int, items []any, lora string, first bool) {
	for _, item := range items {
		switch v := item.(type) {
		case nil:
		case string:
			switch {
			case v == lora && lora != "":
			case first && !isDigest(v):
				x.salt = v
			default:
				x.add(i, n, kvcache.MultimodalHash(v))
			}
		case []byte: // digest of prompt embeddings
			x.add(i, n, kvcache.MultimodalHash(hex.EncodeToString(v)))
		case []any:
			if id, ok := pair(v); ok {
				x.add(i, n, kvcache.MultimodalHash(id))
			} else {
				x.add(i, n, kvcache.MultimodalHash(fmt.Sprint(v...)))
			}
		default:
			x.add(i, n, kvcache.MultimodalHash(fmt.Sprint(v)))
		}
	}
}

// pair reads [identifier, offset].
func pair(v []any) (id string, ok bool) {
	if len(v) != 2 {
		return "", false
	}
	id, ok = v[0].(string)
	_, isInt := v[1].(int64)
	return id, ok && isInt
}

// mmKey reads one of TensorRT-LLM's multimodal keys.
func mmKey(item any) uint64 {
	if m, ok := item.(wire.Map); ok {
		for _, kv := range m {
			if hash, ok := kv.Value.(string); ok && kv.Key == "hash" {
				return kvcache.MultimodalHash(hash)
			}
		}
	}
	return kvcache.MultimodalHash(fmt.Sprint(item))
}

// isDigest says whether s is at least 32 hex digits.
func isDigest(s string) bool {
	return len(s) >= 32 && strings.Trim(s, "0123456789abcdefABCDEF") == ""
}
