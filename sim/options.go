package sim

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"
)

// Encoding is the shape that events have on the wire.
type Encoding string

const (
	EncodingMap   Encoding = "map"   // maps tagged by "type": vLLM since 0.24
	EncodingArray Encoding = "array" // positional arrays: vLLM before 0.24
)

// arrayVersions lists the arities that a stored event has had, with a release that sent it.
var arrayVersions = map[int]string{6: "0.9.1", 7: "0.10.2", 8: "0.14.0", 9: "0.17.0", 10: "0.20.0", 12: "0.22.0"}

// Options configures an [Engine]. The zero value is a small engine that answers at once.
type Options struct {
	// Model is the served model's name. Default "sim-model".
	Model string
	// LoRAs are the names of the adapters that are served beside the model. Default none.
	LoRAs []string
	// BlockSize is the tokens of one cache block. Default 16.
	BlockSize int
	// Blocks is the cache capacity of one rank in blocks. Default 4096.
	Blocks int
	// MaxModelLen is the most tokens that a prompt and its answer may have together. It must
	// fit into the cache. Default: the smaller of 131072 and the cache's capacity in tokens.
	MaxModelLen int
	// PrefillPerToken is how long one token takes that the cache does not hold. Default 0.
	PrefillPerToken time.Duration
	// PrefillChunk is how many tokens one prefill step computes at most. Default 2048.
	PrefillChunk int
	// DecodePerToken is how long one token of the answer takes after the first. Default 0.
	DecodePerToken time.Duration
	// MaxConcurrent is how many sequences one rank runs at once; others wait. Default 256.
	MaxConcurrent int
	// Ranks is the number of data-parallel ranks behind the one HTTP address. Default 1.
	Ranks int

	// Listen is the HTTP address, host:port. Default "127.0.0.1:0".
	Listen string
	// EventsListen is where rank 0 publishes; rank r uses the port plus r, or any free port
	// where the port is 0. The host may be "*". Default "tcp://127.0.0.1:0".
	EventsListen string
	// ReplayListen is the same for replays. Default "tcp://127.0.0.1:0".
	ReplayListen string
	// NoReplay leaves the replay sockets out, as vLLM does unless it is told otherwise.
	NoReplay bool
	// Topic is the first frame of each event message. Default "".
	Topic string
	// Encoding of events. Default [EncodingMap].
	Encoding Encoding
	// ArrayArity is the length of a stored event under [EncodingArray]: 6, 7, 8, 9, 10 or
	// 12, as vLLM's releases had it. Default 10 (vLLM 0.20).
	ArrayArity int
	// ReplayLayout is the frame layout of replays: 1 without the topic frame (vLLM up to
	// 0.25), 2 with it. Default 2.
	ReplayLayout int
	// BufferSteps is how many event batches a rank keeps for replay. Default 10000.
	BufferSteps int
	// HighWaterMark is how many messages may wait for one subscriber before it loses some.
	// Default 100000.
	HighWaterMark int
	// Duplicates keeps a physical copy per sequence where two compute the same block, each
	// with a stored and later a removed event, as vLLM does. Default: one shared copy.
	Duplicates bool
	// Fingerprint is the system_fingerprint of answers, by which a client can tell which engine gave it. Default none, as
	// vLLM.
	Fingerprint string
	// Seed of the engine's own block hashes; they also differ from restart to restart.
	// Default 0: random, as in vLLM without PYTHONHASHSEED.
	Seed uint64

	// Logger takes the engine's log. Default: discard.
	Logger *slog.Logger
}

func (o Options) withDefaults() (Options, error) {
	if o.Model == "" {
		o.Model = "sim-model"
	}
	for _, d := range []struct {
		v    *int
		def  int
		name string
	}{
		{&o.BlockSize, 16, "BlockSize"}, {&o.Blocks, 4096, "Blocks"}, {&o.PrefillChunk, 2048, "PrefillChunk"},
		{&o.MaxConcurrent, 256, "MaxConcurrent"}, {&o.Ranks, 1, "Ranks"}, {&o.BufferSteps, 10000, "BufferSteps"},
		{&o.HighWaterMark, 100000, "HighWaterMark"}, {&o.ArrayArity, 10, "ArrayArity"}, {&o.ReplayLayout, 2, "ReplayLayout"},
	} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < 0 {
			return o, fmt.Errorf("sim: %s is %d: want at least 1", d.name, *d.v)
		}
	}
	if o.PrefillPerToken < 0 || o.DecodePerToken < 0 {
		return o, errors.New("sim: a time per token is negative")
	}
	capacity := o.Blocks * o.BlockSize
	if o.MaxModelLen == 0 {
		o.MaxModelLen = min(131072, capacity)
	}
	if o.MaxModelLen < 2 || o.MaxModelLen > capacity {
		return o, fmt.Errorf("sim: MaxModelLen is %d: want 2 to %d, the tokens that %d blocks of %d hold", o.MaxModelLen, capacity, o.Blocks, o.BlockSize)
	}
	seen := map[string]bool{o.Model: true}
	for _, l := range o.LoRAs {
		if l == "" || seen[l] {
			return o, fmt.Errorf("sim: adapter name %q is empty or taken", l)
		}
		seen[l] = true
	}
	if o.Encoding == "" {
		o.Encoding = EncodingMap
	}
	if o.Encoding != EncodingMap && o.Encoding != EncodingArray {
		return o, fmt.Errorf("sim: encoding %q: want map or array", o.Encoding)
	}
	if arrayVersions[o.ArrayArity] == "" {
		return o, fmt.Errorf("sim: ArrayArity is %d: want 6, 7, 8, 9, 10 or 12", o.ArrayArity)
	}
	if o.ReplayLayout > 2 {
		return o, fmt.Errorf("sim: ReplayLayout is %d: want 1 or 2", o.ReplayLayout)
	}
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	if o.EventsListen == "" {
		o.EventsListen = "tcp://127.0.0.1:0"
	}
	if o.ReplayListen == "" {
		o.ReplayListen = "tcp://127.0.0.1:0"
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// version is the vLLM release that sends events of this form.
func (o *Options) version() string {
	if o.Encoding == EncodingArray {
		return arrayVersions[o.ArrayArity]
	}
	return "0.26.0"
}

// rankAddresses turns a ZeroMQ endpoint into one listen address per rank.
func rankAddresses(endpoint string, ranks int) ([]string, error) {
	hostport, ok := strings.CutPrefix(endpoint, "tcp://")
	host, portText, err := net.SplitHostPort(hostport)
	if !ok || err != nil {
		return nil, fmt.Errorf("sim: endpoint %q: want tcp://host:port", endpoint)
	}
	port, err := strconv.Atoi(portText)
	if err != nil || port < 0 || port+ranks-1 > 65535 {
		return nil, fmt.Errorf("sim: endpoint %q: the ports of %d ranks do not fit below 65536", endpoint, ranks)
	}
	if host == "*" {
		host = ""
	}
	addrs := make([]string, ranks)
	for r := range addrs {
		if port == 0 {
			addrs[r] = net.JoinHostPort(host, "0")
		} else {
			addrs[r] = net.JoinHostPort(host, strconv.Itoa(port+r))
		}
	}
	return addrs, nil
}

// dialable is the address under which this machine reaches a listener.
func dialable(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}
