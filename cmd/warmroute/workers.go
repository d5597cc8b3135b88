package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/warmroute/warmroute/cmd/warmroute/internal/configfile"
	"github.com/warmroute/warmroute/guard"
	"github.com/warmroute/warmroute/indexer"
	"github.com/warmroute/warmroute/kvcache"
)

// workerOptions name the engines that are known from the start; others may register.
type workerOptions struct {
	Worker  workerList `placeholder:"KEY=VALUE,…" sep:"none" help:"One engine; repeat for more. Keys: id, url, model, tenant, events, replay, block-size, ranks, type, topic, lora, salt, mode. In the file: a list of mappings. In the variable: separated by white space."`
	Network []string   `name:"worker-network" placeholder:"NETWORK" help:"Where workers may be that register, or are found: networks (10.0.0.0/8), addresses, hosts, .domain, ipc:///path; repeatable (default: anywhere but link-local and the like)."`
}

// networks are where workers may be that are not configured.
func (o workerOptions) networks(reg prometheus.Registerer) (*guard.Networks, error) {
	n, err := guard.NewNetworks(guard.NetworkOptions{Allow: o.Network, Registerer: reg})
	if err != nil {
		return nil, usagef("--worker-network: %w", err)
	}
	return n, nil
}

// workerSpec is one engine. The frontend needs the id and the url, the indexer the id, the
// model, the events endpoint and the block size.
type workerSpec struct {
	ID        string // stable name, the same for indexer and frontend; required
	URL       string // base of its HTTP API, without /v1
	Model     string // the base model that it serves
	Tenant    string // whose pools it belongs to; "" means default
	Events    string // ZMQ endpoint of rank 0's events, tcp://host:port
	Replay    string // ZMQ endpoint of rank 0's replay; "" where it offers none
	BlockSize int    // tokens per cache block
	Ranks     int    // data-parallel ranks; rank r's ports are rank 0's plus r. 0 means 1
	Type      string // vLLM, SGLang or TRTLLM; "" means vLLM
	Topic     string // prefix of the topics to subscribe to; "" means all
	LoRA      string // adapter that all of its blocks belong to
	Salt      string // cache salt that all of its blocks belong to
	Mode      string // count or set: whether a block stored twice takes two removals; "" means count
}

// workerFields sets each key of the text form.
var workerFields = []struct {
	key string
	set func(*workerSpec, string) error
}{
	{"id", func(w *workerSpec, v string) error {
		w.ID = v
		return kvcache.WorkerRank{Worker: v}.Validate()
	}},
	{"url", setText(func(w *workerSpec) *string { return &w.URL })},
	{"model", setText(func(w *workerSpec) *string { return &w.Model })},
	{"tenant", setText(func(w *workerSpec) *string { return &w.Tenant })},
	{"events", setText(func(w *workerSpec) *string { return &w.Events })},
	{"replay", setText(func(w *workerSpec) *string { return &w.Replay })},
	{"block-size", setCount(func(w *workerSpec) *int { return &w.BlockSize })},
	{"ranks", setCount(func(w *workerSpec) *int { return &w.Ranks })},
	{"type", func(w *workerSpec, v string) error {
		types := []string{"vLLM", "SGLang", "TRTLLM"}
		i := slices.IndexFunc(types, func(t string) bool { return strings.EqualFold(t, v) })
		if i < 0 {
			return fmt.Errorf("%q: want %s", v, strings.Join(types, ", "))
		}
		w.Type = types[i]
		return nil
	}},
	{"topic", setText(func(w *workerSpec) *string { return &w.Topic })},
	{"lora", setText(func(w *workerSpec) *string { return &w.LoRA })},
	{"salt", setText(func(w *workerSpec) *string { return &w.Salt })},
	{"mode", func(w *workerSpec, v string) error {
		if v != indexer.ModeCount && v != indexer.ModeSet {
			return fmt.Errorf("%q: want %s or %s", v, indexer.ModeCount, indexer.ModeSet)
		}
		w.Mode = v
		return nil
	}},
}

func setText(field func(*workerSpec) *string) func(*workerSpec, string) error {
	return func(w *workerSpec, v string) error {
		*field(w) = v
		return nil
	}
}

func setCount(field func(*workerSpec) *int) func(*workerSpec, string) error {
	return func(w *workerSpec, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 {
			return fmt.Errorf("%q: want a whole number from 1", v)
		}
		*field(w) = n
		return nil
	}
}

// parseWorker reads "id=w0,url=http://10.0.1.1:8000,…".
func parseWorker(s string) (workerSpec, error) {
	var w workerSpec
	var seen, known []string
	for _, f := range workerFields {
		known = append(known, f.key)
	}
	for part := range strings.SplitSeq(s, ",") {
		key, value, ok := strings.Cut(part, "=")
		i := slices.Index(known, key)
		switch {
		case !ok:
			return w, fmt.Errorf("worker %q: %q: want key=value", s, part)
		case i < 0:
			if near, ok := configfile.Nearest(key, known); ok {
				return w, fmt.Errorf("worker %q: unknown key %q (did you mean %q?)", s, key, near)
			}
			return w, fmt.Errorf("worker %q: unknown key %q: want one of %s", s, key, strings.Join(known, ", "))
		case slices.Contains(seen, key):
			return w, fmt.Errorf("worker %q: %s is given twice", s, key)
		case value == "":
			return w, fmt.Errorf("worker %q: %s has no value", s, key)
		}
		seen = append(seen, key)
		if err := workerFields[i].set(&w, value); err != nil {
			return w, fmt.Errorf("worker %q: %s: %w", s, key, err)
		}
	}
	if w.ID == "" {
		return w, fmt.Errorf("worker %q: id is missing", s)
	}
	return w, nil
}

// workerList is the flag --worker.
type workerList []workerSpec

// forIndexer refuses what only a frontend can do without.
func (l workerList) forIndexer() error {
	for _, w := range l {
		if w.Model == "" {
			return usagef("--worker: worker %q: model is missing: an indexer needs the name of the model that the engine serves", w.ID)
		}
	}
	return nil
}

// Fields are the keys of one worker in the configuration file.
func (workerList) Fields() []string {
	keys := make([]string, len(workerFields))
	for i, f := range workerFields {
		keys[i] = f.key
	}
	return keys
}

// Decode adds the workers of one flag, variable or key of the file.
func (l *workerList) Decode(ctx *kong.DecodeContext) error {
	var specs []string
	switch v := ctx.Scan.Pop().Value.(type) {
	case string:
		specs = strings.Fields(v)
	case []any:
		for _, s := range v {
			specs = append(specs, fmt.Sprint(s))
		}
	}
	if len(specs) == 0 {
		return errors.New("want id=…,url=…")
	}
	for _, s := range specs {
		w, err := parseWorker(s)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(*l, func(o workerSpec) bool { return o.ID == w.ID }) {
			return fmt.Errorf("worker %q is given twice", w.ID)
		}
		*l = append(*l, w)
	}
	return nil
}
