// Package capacity says what an index of a fleet needs of Redis: memory, the share of one core, shards, connections.
// The constants are measured; docs/performance.md has the measurements and docs/capacity.md the formulas.
package capacity

import (
	"errors"
	"math"
)

// What was measured, rounded to the careful side.
const (
	BytesPerBlock  = 240  // of Redis memory per block and worker rank that holds it, when nothing is shared
	MemorySpare    = 1.5  // maxmemory over the index's bytes: a third stays free
	LookupFixed    = 5e-6 // s of Redis CPU per lookup and shard: parsing, the version
	LookupPerBlock = 2e-7 // s of Redis CPU per block of the prompt
	StorePerBlock  = 2.1e-6
	RemovePerBlock = 1.9e-6
	// DuplicatePerBlock is what a batch costs that another indexer has applied: it is sent and parsed.
	DuplicatePerBlock = 3e-7
	// CoreShare is how busy a Redis may be on average: bursts and slow commands of others need the rest.
	CoreShare = 0.5
)

// Fleet is what is to be served.
type Fleet struct {
	Workers      int     `json:"workers"`
	Ranks        int     `json:"ranks"`               // data-parallel ranks per worker
	Blocks       int     `json:"blocks_per_rank"`     // cache of a rank, all tiers together
	BlockSize    int     `json:"block_size"`          // tokens
	Requests     float64 `json:"requests_per_second"` // of the whole fleet
	PromptTokens int     `json:"prompt_tokens"`       // mean
	OutputTokens int     `json:"output_tokens"`       // mean
	HitRatio     float64 `json:"hit_ratio"`           // share of the prompts' blocks that are cached
	Frontends    int     `json:"frontends"`
	Indexers     int     `json:"indexers"`
	Pool         int     `json:"redis_pool"`        // --redis-pool
	NodeMemory   int64   `json:"redis_node_memory"` // bytes that one Redis node may use
}

// Sizing is what that needs.
type Sizing struct {
	IndexBlocks   int64   `json:"index_blocks"`
	IndexBytes    int64   `json:"index_bytes"`
	Shards        int     `json:"shards"`               // on as many Redis nodes; 1 needs no cluster
	MaxMemory     int64   `json:"maxmemory_per_node"`   // bytes
	LookupBlocks  int     `json:"blocks_per_lookup"`    //
	Lookups       float64 `json:"lookups_per_second"`   //
	LookupCore    float64 `json:"lookup_core_per_node"` // 1 = one core; every shard is asked, so shards do not divide it
	WrittenBlocks float64 `json:"written_blocks_per_second"`
	WriteCore     float64 `json:"write_core_per_node"`
	Core          float64 `json:"core_per_node"`
	MostLookups   float64 `json:"most_lookups_per_second"` // at CoreShare, with the writes that come with them
	LookupBytes   float64 `json:"lookup_bytes_per_second"` // to and from one node
	Connections   int     `json:"connections_per_node"`
	MaxClients    int     `json:"maxclients"`
	// Warnings say what does not fit, and what to do.
	Warnings []string `json:"warnings"`
}

// Plan computes what the fleet needs. It refuses numbers that mean nothing.
func Plan(f Fleet) (Sizing, error) {
	if f.Workers < 1 || f.Ranks < 1 || f.Blocks < 1 || f.BlockSize < 1 || f.Frontends < 1 || f.Indexers < 1 || f.Pool < 1 || f.NodeMemory < 1 {
		return Sizing{}, errors.New("workers, ranks, blocks, block size, frontends, indexers, pool and memory are 1 or more")
	}
	if f.Requests < 0 || f.PromptTokens < 0 || f.OutputTokens < 0 || f.HitRatio < 0 || f.HitRatio > 1 || math.IsInf(f.Requests, 0) || math.IsNaN(f.Requests) {
		return Sizing{}, errors.New("requests and tokens cannot be negative, and a hit ratio is from 0 to 1")
	}
	holders := int64(f.Workers) * int64(f.Ranks)
	s := Sizing{IndexBlocks: holders * int64(f.Blocks), Lookups: f.Requests, LookupBlocks: f.PromptTokens / f.BlockSize, Warnings: []string{}}
	s.IndexBytes = s.IndexBlocks * BytesPerBlock
	whole := int64(float64(s.IndexBytes) * MemorySpare)

	lookup := LookupFixed + LookupPerBlock*float64(s.LookupBlocks) // s, on every shard
	s.LookupCore = f.Requests * lookup
	// A block that is computed is stored, and some time later removed to make room.
	fresh := (float64(f.PromptTokens)*(1-f.HitRatio) + float64(f.OutputTokens)) / float64(f.BlockSize)
	write := fresh * (StorePerBlock + RemovePerBlock + 2*DuplicatePerBlock*float64(f.Indexers-1)) // s per request, over all shards
	s.WrittenBlocks = 2 * fresh * f.Requests

	s.Shards = int(max(1, (whole+f.NodeMemory-1)/f.NodeMemory))
	if room := CoreShare - s.LookupCore; room > 0 {
		s.Shards = max(s.Shards, int(math.Ceil(f.Requests*write/room)))
	}
	s.Shards = min(s.Shards, int(min(holders, 1024)))
	s.MaxMemory = (whole + int64(s.Shards) - 1) / int64(s.Shards)
	s.WriteCore = f.Requests * write / float64(s.Shards)
	s.Core = s.LookupCore + s.WriteCore
	s.MostLookups = CoreShare / (lookup + write/float64(s.Shards))
	// 23 bytes per block are sent, and half a byte per rank of the shard and what frames it come back.
	s.LookupBytes = f.Requests * float64(s.LookupBlocks) * (23 + 8 + float64(holders)/float64(s.Shards)/2)
	s.Connections = (f.Frontends + f.Indexers) * 2 * f.Pool
	s.MaxClients = max(10_000, 2*s.Connections)

	if s.MaxMemory > f.NodeMemory {
		s.Warnings = append(s.Warnings, "one worker rank's blocks are more than a Redis node may hold: larger nodes, or larger blocks")
	}
	if s.LookupCore > CoreShare {
		s.Warnings = append(s.Warnings, "lookups alone need more than half a core of every Redis node, which shards do not divide: "+
			"larger blocks, or divide the fleet among several Redis")
	}
	if s.LookupBytes > 1e9 {
		s.Warnings = append(s.Warnings, "lookups need more than 1 GB/s of network per Redis node")
	}
	return s, nil
}

// BlocksIn is how many blocks of a model's KV cache fit into memory.
func BlocksIn(memory, bytesPerToken int64, blockSize int) int {
	if memory < 0 || bytesPerToken < 1 || blockSize < 1 {
		return 0
	}
	return int(memory / bytesPerToken / int64(blockSize))
}
