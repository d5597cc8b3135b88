package kvcache

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// RouterEvent is one change of one worker's cache in Dynamo's JSON shape. Warmroute takes
// it at POST /events, where blocks carry the engine's hash and a local hash, and writes it
// in dumps, where blocks carry the content hash of their whole prefix.
type RouterEvent struct {
	WorkerID    WorkerName  `json:"worker_id"`
	StorageTier StorageTier `json:"storage_tier,omitempty"`
	Event       CacheEvent  `json:"event"`
}

// CacheEvent is the event proper.
type CacheEvent struct {
	EventID uint64    `json:"event_id"`
	DPRank  int       `json:"dp_rank"`
	Data    EventData `json:"data"`
}

// EventData holds exactly one of its three forms.
type EventData struct {
	Stored  *StoredData
	Removed *RemovedData
	Cleared bool
}

// StoredData lists consecutive blocks, each the child of the one before.
type StoredData struct {
	ParentHash *EngineHash   `json:"parent_hash,omitempty"`
	Blocks     []StoredBlock `json:"blocks"`
}

// StoredBlock is one block. Incoming: BlockHash is the engine's id and TokensHash the local
// hash. In dumps: BlockHash is the content hash of the prefix and EngineHash the engine's id
// (its low 53 bits, which is what the index keeps).
type StoredBlock struct {
	BlockHash  BlockHash   `json:"block_hash"`
	TokensHash *LocalHash  `json:"tokens_hash,omitempty"`
	EngineHash *EngineHash `json:"engine_hash,omitempty"`
}

// RemovedData names blocks by the engine's ids.
type RemovedData struct {
	BlockHashes []EngineHash `json:"block_hashes"`
}

// MarshalJSON writes {"stored":{…}}, {"removed":{…}} or "cleared", as serde does.
func (d EventData) MarshalJSON() ([]byte, error) {
	switch {
	case d.Stored != nil:
		return json.Marshal(map[string]*StoredData{"stored": d.Stored})
	case d.Removed != nil:
		return json.Marshal(map[string]*RemovedData{"removed": d.Removed})
	case d.Cleared:
		return []byte(`"cleared"`), nil
	}
	return nil, errors.New("event data: neither stored nor removed nor cleared")
}

// UnmarshalJSON reads what MarshalJSON writes, and {"cleared":…} as well.
func (d *EventData) UnmarshalJSON(b []byte) error {
	*d = EventData{}
	if bytes.Equal(bytes.TrimSpace(b), []byte(`"cleared"`)) {
		d.Cleared = true
		return nil
	}
	var forms struct {
		Stored  *StoredData      `json:"stored"`
		Removed *RemovedData     `json:"removed"`
		Cleared *json.RawMessage `json:"cleared"`
	}
	if err := json.Unmarshal(b, &forms); err != nil {
		return fmt.Errorf("event data: %w", err)
	}
	n := 0
	if forms.Stored != nil {
		d.Stored = forms.Stored
		n++
	}
	if forms.Removed != nil {
		d.Removed = forms.Removed
		n++
	}
	if forms.Cleared != nil {
		d.Cleared = true
		n++
	}
	if n != 1 {
		return errors.New(`event data: want exactly one of "stored", "removed", "cleared"`)
	}
	return nil
}

// WorkerName is a worker id that JSON may give as a string or, as Dynamo does, a number.
type WorkerName string

// UnmarshalJSON takes a string or an integer.
func (w *WorkerName) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err == nil {
		*w = WorkerName(s)
		return nil
	}
	if _, err := strconv.ParseUint(string(b), 10, 64); err != nil {
		return fmt.Errorf("worker id %s: want a string or a whole number", b)
	}
	*w = WorkerName(b)
	return nil
}

// StorageTier is Dynamo's name of a [Tier]; empty means the device.
type StorageTier string

// The storage tiers by Dynamo's names.
const (
	StorageDevice StorageTier = "device"
	StorageHost   StorageTier = "host_pinned"
	StorageDisk   StorageTier = "disk"
)

// Tier is the tier that the name stands for; false for a name that is not indexed.
func (s StorageTier) Tier() (Tier, bool) {
	switch s {
	case "", StorageDevice, "Device":
		return Device, true
	case StorageHost, "host", "HostPinned":
		return Host, true
	case StorageDisk, "Disk":
		return Disk, true
	}
	return 0, false
}

// StorageTierOf is Dynamo's name of a tier that holds stored blocks.
func StorageTierOf(t Tier) StorageTier {
	return [NumTiers]StorageTier{StorageDevice, StorageHost, StorageDisk, "predicted"}[t]
}

// MarshalJSON writes 16 hex digits: a JSON number above 2^53 does not survive many readers.
func (h BlockHash) MarshalJSON() ([]byte, error) { return []byte(`"` + h.String() + `"`), nil }

// MarshalJSON writes 16 hex digits.
func (h LocalHash) MarshalJSON() ([]byte, error) { return BlockHash(h).MarshalJSON() }

// MarshalJSON writes 16 hex digits.
func (h EngineHash) MarshalJSON() ([]byte, error) { return BlockHash(h).MarshalJSON() }

// UnmarshalJSON takes an unsigned or signed 64-bit number or 16 hex digits, never through a float.
func (h *BlockHash) UnmarshalJSON(b []byte) error {
	v, err := parseHashJSON(b)
	*h = BlockHash(v)
	return err
}

// UnmarshalJSON takes what [BlockHash.UnmarshalJSON] takes.
func (h *LocalHash) UnmarshalJSON(b []byte) error {
	v, err := parseHashJSON(b)
	*h = LocalHash(v)
	return err
}

// UnmarshalJSON takes what [BlockHash.UnmarshalJSON] takes.
func (h *EngineHash) UnmarshalJSON(b []byte) error {
	v, err := parseHashJSON(b)
	*h = EngineHash(v)
	return err
}

func parseHashJSON(b []byte) (uint64, error) {
	if len(b) == 18 && b[0] == '"' && b[17] == '"' {
		if v, err := strconv.ParseUint(string(b[1:17]), 16, 64); err == nil {
			return v, nil
		}
	}
	if v, err := strconv.ParseUint(string(b), 10, 64); err == nil {
		return v, nil
	}
	if v, err := strconv.ParseInt(string(b), 10, 64); err == nil {
		return uint64(v), nil
	}
	return 0, fmt.Errorf("hash %.40s: want a 64-bit integer or a string of 16 hex digits", b)
}
