package kvcache

// Overlap is how many contiguous blocks of a prompt, from its first, one worker rank
// holds. Each depth counts the blocks held on that tier or a faster one, so
// Device ≤ Host ≤ Disk ≤ Any.
type Overlap struct {
	Device int // on the device
	Host   int // on the device or the host
	Disk   int // on the device, the host or disk
	Any    int // on any of these, or predicted: the overlap score
}

// OverlapScores is the answer of the index for one prompt, in blocks.
type OverlapScores struct {
	// Scores holds the worker ranks with at least one block. Absent means 0.
	Scores map[WorkerRank]Overlap
	// Frequencies is how often the block at each depth of the longest overlap was looked up before, within the index's window and
	// exact to a quarter of it; empty unless the index tracks uses.
	Frequencies []int
	// TreeSizes is how many blocks each rank in Scores holds in all, predictions left out; a block on two tiers counts
	// twice, because it takes room twice. nil unless asked for.
	TreeSizes map[WorkerRank]int
}

// IndexState says how much of the index an answer rests on.
type IndexState string

const (
	Exact    IndexState = "exact"    // every shard answered
	Partial  IndexState = "partial"  // some shards were away; their workers count as cold
	Degraded IndexState = "degraded" // no shard answered: overlaps are unknown, not zero
	Bypassed IndexState = "bypassed" // the index was not asked
)
