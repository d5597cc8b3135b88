package ui

import (
	"cmp"
	"encoding/json"
	"slices"
	"time"
)

// State is what a frontend knows of itself, its workers and the links to the index. Times are its own clock's.
type State struct {
	Frontend string  `json:"frontend"` // the address that it listens on
	Instance string  `json:"instance"` // names this run of the frontend
	Draining bool    `json:"draining"`
	Policy   string  `json:"policy"`
	Fallback string  `json:"fallback"`
	Budget   float64 `json:"lookup_budget_seconds"`
	InFlight int     `json:"in_flight"` // requests being proxied
	Index    Index   `json:"index"`
	// Workers are those of the fleet, and after them those that only the index knows.
	Workers []Worker `json:"workers"`
}

// Index is how it stands with the index as a whole.
type Index struct {
	State string `json:"state"` // exact, partial, degraded, or bypassed where there is none
	// Since is when the state began, as far as the links tell; null where unknown.
	Since  *time.Time `json:"since"`
	Reason string     `json:"reason,omitempty"` // of index_fallbacks_total; absent while exact
	Links  []Link     `json:"links"`
	// Updated is the newest change or renewal of any stream, as of the last reading of the workers.
	Updated *time.Time `json:"last_updated,omitempty"`
	// Read is when sizes, streams and loads were last read in full, null if never; ReadError says why a later reading failed.
	Read      *time.Time `json:"read"`
	ReadError string     `json:"read_error,omitempty"`
}

// Link is the way to one part of the index.
type Link struct {
	Name   string     `json:"name"` // as in /ready
	Up     bool       `json:"up"`
	Since  *time.Time `json:"since,omitempty"`
	Detail string     `json:"detail,omitempty"`
}

// Worker is one engine instance.
type Worker struct {
	ID     string    `json:"id"`
	Tenant string    `json:"tenant_id"`
	URL    string    `json:"url,omitempty"`
	Engine string    `json:"engine,omitempty"`
	Source string    `json:"source,omitempty"` // config, index, snapshot, dns
	State  string    `json:"state"`            // of warmroute_workers; unknown: only the index knows it
	Cause  string    `json:"cause,omitempty"`
	Since  time.Time `json:"since,omitzero"`
	Models []string  `json:"models"`
	Ranks  []Rank    `json:"ranks"`
}

// Rank is one data-parallel rank.
type Rank struct {
	Rank int  `json:"dp_rank"`
	Load Load `json:"load"` // this frontend's
	// Shared is the load of all frontends, as last read; null where unknown.
	Shared *Load `json:"shared_load"`
	// Hits is the share of the blocks of prompts sent there that it held, over about a minute; null without any. PerSecond are
	// requests sent there, over the same time.
	Hits      *float64 `json:"hit_ratio"`
	PerSecond float64  `json:"requests_per_second"`
	Streams   []Stream `json:"streams"` // one per pool that it has blocks in
}

// Load is what is under way.
type Load struct {
	Requests      int `json:"requests"`
	PrefillTokens int `json:"prefill_tokens"`
	DecodeBlocks  int `json:"decode_blocks"`
}

// Stream is a rank's part of a pool: its KV events and what they add up to.
type Stream struct {
	Model      string    `json:"model"`
	Generation int64     `json:"generation"`
	Epoch      int64     `json:"epoch"`     // the generation that the engine's present process began with; 0: unknown
	Watermark  int64     `json:"watermark"` // newest message applied; -1: none yet
	Updated    time.Time `json:"updated"`   // last change or renewal, by the indexer's clock
	Blocks     Blocks    `json:"blocks"`
	// Restarts and Breaks are ends of generations that readings of Redis have shown: by a new process of the engine, or within one,
	// because its cache was cleared or messages were lost. What happens while nobody watches counts once at most.
	Restarts int `json:"restarts"`
	Breaks   int `json:"breaks"`
}

// Blocks are counts by tier. A block on several tiers counts on each.
type Blocks struct {
	Device    int `json:"device"`
	Host      int `json:"host"`
	Disk      int `json:"disk"`
	Predicted int `json:"predicted"`
}

// Pool is what Redis says of a pool.
type Pool struct {
	Tenant, Model string
	Ranks         []PoolRank
}

// PoolRank is a rank of a pool. Followed: it has a stream.
type PoolRank struct {
	Worker   string
	Rank     int
	URL      string
	Engine   string
	Followed bool
	Stream   Stream
	Shared   *Load
}

type rankKey struct {
	tenant, worker string
	rank           int
}

func (r *PoolRank) key() rankKey { return rankKey{"", r.Worker, r.Rank} }

// message is one event of a feed: the state, and what is new of plots and decisions.
type message struct {
	Time     time.Time `json:"time"`
	Interval float64   `json:"interval_seconds"`
	State
	Samples   []Sample   `json:"samples"`
	Decisions []Decision `json:"decisions"` // ascending
}

func (m *message) encode() []byte {
	b, err := json.Marshal(m)
	if err != nil { // a NaN, which no source should have
		b, _ = json.Marshal(map[string]string{"error": err.Error()})
	}
	return b
}

// message joins the frontend's own state with what was last read of Redis.
func (p *Page) message(now time.Time, s *State) *message {
	m := &message{Time: now, Interval: p.o.Interval.Seconds(), State: *s, Samples: []Sample{}, Decisions: []Decision{}}
	if m.Index.Links == nil {
		m.Index.Links = []Link{}
	}
	ranks := map[rankKey]*Rank{}
	for i := range m.Workers {
		w := &m.Workers[i]
		for j := range w.Ranks {
			r := &w.Ranks[j]
			k := rankKey{w.Tenant, w.ID, r.Rank}
			r.Hits, r.PerSecond = p.recorder.rates(k, p.o.Interval)
			r.Streams = []Stream{}
			ranks[k] = r
		}
	}
	read := p.inspected.Load()
	if read == nil {
		return m
	}
	if !read.at.IsZero() {
		m.Index.Read = &read.at
	}
	m.Index.ReadError = read.err
	strangers := map[rankKey]*Worker{} // by worker
	for _, pool := range read.pools {
		for _, pr := range pool.Ranks {
			r := ranks[rankKey{pool.Tenant, pr.Worker, pr.Rank}]
			if r == nil {
				if !pr.Followed {
					continue // the rest of a load
				}
				k := rankKey{tenant: pool.Tenant, worker: pr.Worker}
				w := strangers[k]
				if w == nil {
					w = &Worker{
						ID: pr.Worker, Tenant: pool.Tenant, URL: pr.URL, Engine: pr.Engine, State: "unknown",
						Cause: "only the index knows it: no worker of this frontend has this id and rank", Models: []string{},
					}
					strangers[k] = w
				}
				w.Ranks = append(w.Ranks, Rank{Rank: pr.Rank, Streams: []Stream{}})
				r = &w.Ranks[len(w.Ranks)-1]
			}
			if pr.Shared != nil {
				r.Shared = pr.Shared
			}
			if pr.Followed {
				r.Streams = append(r.Streams, pr.Stream)
			}
		}
	}
	first := len(m.Workers)
	for _, w := range strangers {
		slices.SortFunc(w.Ranks, func(a, b Rank) int { return a.Rank - b.Rank })
		m.Workers = append(m.Workers, *w)
	}
	slices.SortFunc(m.Workers[first:], func(a, b Worker) int { return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.ID, b.ID)) })
	return m
}
