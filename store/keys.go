package store

import (
	"strconv"
	"strings"

	"github.com/warmroute/warmroute/kvcache"
)

// The key layout, version 1. All keys of a shard share one hash tag, so that every script runs
// on one cluster slot.
const (
	keyPrefix = "wr:1:"
	keyPools  = keyPrefix + "pools"
)

func poolTag(p kvcache.PoolID) string      { return keyPrefix + "{" + escape(p.String()) + "}" }
func configKey(p kvcache.PoolID) string    { return poolTag(p) + ":config" }
func placementKey(p kvcache.PoolID) string { return poolTag(p) + ":workers" }
func checkedKey(p kvcache.PoolID) string   { return poolTag(p) + ":checked" }
func loadKey(p kvcache.PoolID) string      { return poolTag(p) + ":load" }
func leasesKey(p kvcache.PoolID) string    { return poolTag(p) + ":leases" }
func deadlinesKey(p kvcache.PoolID) string { return poolTag(p) + ":deadlines" }

// shardKeys makes the keys of one shard.
type shardKeys string

func newShardKeys(p kvcache.PoolID, shard int) shardKeys {
	return shardKeys(keyPrefix + "{" + escape(p.String()) + "#" + strconv.Itoa(shard) + "}")
}

func (k shardKeys) holders() string { return string(k) + ":holders" }
func (k shardKeys) slots() string   { return string(k) + ":slots" }
func (k shardKeys) idle() string    { return string(k) + ":idle" }
func (k shardKeys) version() string { return string(k) + ":version" }
func (k shardKeys) top() string     { return string(k) + ":top" }

func (k shardKeys) stream(w kvcache.WorkerRank) string {
	return string(k) + ":stream:" + w.String()
}

func (k shardKeys) blocks(w kvcache.WorkerRank, t kvcache.Tier) string {
	return string(k) + ":blocks:" + w.String() + ":" + t.String()
}

func (k shardKeys) copies(w kvcache.WorkerRank, t kvcache.Tier) string {
	return string(k) + ":copies:" + w.String() + ":" + t.String()
}

func (k shardKeys) retired(slot int, t kvcache.Tier) string {
	return string(k) + ":retired:" + strconv.Itoa(slot) + ":" + t.String()
}

// escape keeps braces, which end a hash tag, and the shard separator out of a pool's name.
var escaper = strings.NewReplacer("%", "%25", "{", "%7B", "}", "%7D", "#", "%23")

func escape(s string) string { return escaper.Replace(s) }
