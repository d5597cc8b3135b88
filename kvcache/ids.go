package kvcache

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// DefaultTenant is the tenant of a pool where none is named.
const DefaultTenant = "default"

// PoolID names what is indexed and routed as one unit: one served model of one
// tenant. LoRA adapters share the pool of their base model.
type PoolID struct {
	Tenant string // "" means [DefaultTenant]
	Model  string
}

// String is the pool's name in keys, logs and metrics: "<tenant>:<model>".
func (p PoolID) String() string {
	if p.Tenant == "" {
		return DefaultTenant + ":" + p.Model
	}
	return p.Tenant + ":" + p.Model
}

// ParsePoolID is the inverse of [PoolID.String].
func ParsePoolID(s string) (PoolID, error) {
	tenant, model, ok := strings.Cut(s, ":")
	p := PoolID{Tenant: tenant, Model: model}
	if !ok {
		return PoolID{}, fmt.Errorf("pool %q: want <tenant>:<model>", s)
	}
	return p, p.Validate()
}

// Validate refuses names that cannot be a Redis key or a label.
func (p PoolID) Validate() error {
	if p.Model == "" {
		return errors.New("pool: the model name is empty")
	}
	if len(p.Model) > 256 || hasControl(p.Model) {
		return errors.New("pool: a model name is at most 256 printable bytes")
	}
	if strings.ContainsRune(p.Tenant, ':') || len(p.Tenant) > 128 || hasControl(p.Tenant) {
		return errors.New("pool: a tenant name is at most 128 printable bytes without a colon")
	}
	return nil
}

// WorkerRank names what holds blocks and gets chosen: a data-parallel rank of a worker.
type WorkerRank struct {
	Worker string
	Rank   int
}

// MaxRank is the highest data-parallel rank that is accepted.
const MaxRank = 65535

// String is "<worker>/<rank>".
func (w WorkerRank) String() string { return w.Worker + "/" + strconv.Itoa(w.Rank) }

// ParseWorkerRank is the inverse of [WorkerRank.String].
func ParseWorkerRank(s string) (WorkerRank, error) {
	i := strings.LastIndexByte(s, '/')
	if i < 0 {
		return WorkerRank{}, fmt.Errorf("worker rank %q: want <worker>/<rank>", s)
	}
	rank, err := strconv.Atoi(s[i+1:])
	if err != nil {
		return WorkerRank{}, fmt.Errorf("worker rank %q: want <worker>/<rank>", s)
	}
	w := WorkerRank{Worker: s[:i], Rank: rank}
	return w, w.Validate()
}

// Validate refuses names that cannot be part of a Redis key: a worker id is 1 to 128
// letters, digits, dots, underscores, colons, @ or hyphens.
func (w WorkerRank) Validate() error {
	if w.Worker == "" || len(w.Worker) > 128 {
		return fmt.Errorf("worker id %q: want 1 to 128 characters", w.Worker)
	}
	for i := range len(w.Worker) {
		c := w.Worker[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		case c == '.', c == '_', c == ':', c == '@', c == '-':
		default:
			return fmt.Errorf("worker id %q: only letters, digits and . _ : @ - are allowed", w.Worker)
		}
	}
	if w.Rank < 0 || w.Rank > MaxRank {
		return fmt.Errorf("rank %d of worker %q: want 0 to %d", w.Rank, w.Worker, MaxRank)
	}
	return nil
}

func hasControl(s string) bool {
	for _, r := range s {
		if r < 0x20 || r == 0x7f || r == '\uFFFD' {
			return true
		}
	}
	return false
}

// Tier is where a block lives. Its value is the bit that it takes in a holders nibble.
type Tier uint8

const (
	Device    Tier = iota // GPU memory
	Host                  // host memory
	Disk                  // disk or storage
	Predicted             // we routed it there, no event yet

	NumTiers = 4
)

var tierNames = [NumTiers]string{"device", "host", "disk", "predicted"}

// String is the tier's name in Redis keys: device, host, disk or predicted.
func (t Tier) String() string {
	if int(t) < len(tierNames) {
		return tierNames[t]
	}
	return "tier" + strconv.Itoa(int(t))
}

// ParseTier is the inverse of [Tier.String].
func ParseTier(s string) (Tier, error) {
	for i, n := range tierNames {
		if s == n {
			return Tier(i), nil
		}
	}
	return 0, fmt.Errorf("tier %q: want device, host, disk or predicted", s)
}
