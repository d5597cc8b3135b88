package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/warmroute/warmroute/sim"
)

// simOptions describe one simulated engine. All but the addresses have the meaning of the
// field of the same name in sim.Options.
type simOptions struct {
	HTTPListen   address `name:"http-listen" default:"127.0.0.1:8000" placeholder:"ADDR" help:"HTTP address of the OpenAI surface (default ${default}). Port 0: any free port." group:"Addresses"`
	EventsListen string  `default:"tcp://127.0.0.1:5557" placeholder:"ENDPOINT" help:"Where rank 0 publishes KV events; rank r uses the port plus r (default ${default})." group:"Addresses"`
	ReplayListen string  `default:"tcp://127.0.0.1:5657" placeholder:"ENDPOINT" help:"Where rank 0 answers replay requests; rank r uses the port plus r (default ${default})." group:"Addresses"`
	NoReplay     bool    `help:"Offer no replay, as vLLM does unless it is told otherwise." group:"Addresses"`

	Model         string   `default:"sim-model" placeholder:"NAME" help:"Name of the served model (default ${default})." group:"Engine"`
	Lora          []string `placeholder:"NAME" help:"Names of adapters served beside the model." group:"Engine"`
	BlockSize     int      `default:"16" placeholder:"TOKENS" help:"Tokens per cache block (default ${default})." group:"Engine"`
	Blocks        int      `default:"4096" placeholder:"N" help:"Cache capacity of one rank, in blocks (default ${default})." group:"Engine"`
	MaxModelLen   int      `placeholder:"TOKENS" help:"Most tokens of a prompt and its answer together (default: what the cache holds, at most 131072)." group:"Engine"`
	MaxConcurrent int      `default:"256" placeholder:"N" help:"Requests that one rank runs at once; others wait (default ${default})." group:"Engine"`
	Ranks         int      `default:"1" placeholder:"N" help:"Data-parallel ranks (default ${default})." group:"Engine"`

	PrefillPerToken time.Duration `default:"50us" zero:"" placeholder:"TIME" help:"Time to compute one prompt token that the cache does not hold (default ${default})." group:"Speed"`
	DecodePerToken  time.Duration `default:"5ms" zero:"" placeholder:"TIME" help:"Time per token of the answer (default ${default})." group:"Speed"`

	Encoding     string `default:"map" enum:"map,array" placeholder:"FORM" help:"Form of the events: map (vLLM since 0.24) or array (before) (default ${default})." group:"Events"`
	ArrayArity   int    `default:"10" placeholder:"N" help:"Length of a stored event in array form: 6, 7, 8, 9, 10 or 12 (default ${default})." group:"Events"`
	ReplayLayout int    `default:"2" placeholder:"1|2" help:"Frame layout of replays: 1 (vLLM up to 0.25) or 2 (default ${default})." group:"Events"`
	BufferSteps  int    `default:"10000" placeholder:"N" help:"Event batches that a rank keeps for replay (default ${default})." group:"Events"`
	Topic        string `placeholder:"TEXT" help:"Topic of the event messages (default: empty)." group:"Events"`
	Duplicates   bool   `help:"Keep a physical copy per request of a block that two compute at once, as vLLM does." group:"Events"`
	Seed         uint64 `placeholder:"N" help:"Seed of the engine's own block hashes (default: random)." group:"Events"`
}

func (o simOptions) engine() sim.Options {
	return sim.Options{
		Listen: string(o.HTTPListen), EventsListen: o.EventsListen, ReplayListen: o.ReplayListen, NoReplay: o.NoReplay,
		Model: o.Model, LoRAs: o.Lora, BlockSize: o.BlockSize, Blocks: o.Blocks, MaxModelLen: o.MaxModelLen,
		MaxConcurrent: o.MaxConcurrent, Ranks: o.Ranks,
		PrefillPerToken: o.PrefillPerToken, DecodePerToken: o.DecodePerToken,
		Encoding: sim.Encoding(o.Encoding), ArrayArity: o.ArrayArity, ReplayLayout: o.ReplayLayout,
		BufferSteps: o.BufferSteps, Topic: o.Topic, Duplicates: o.Duplicates, Seed: o.Seed,
	}
}

// simCmd runs one simulated engine.
type simCmd struct {
	simOptions
}

// Help is the long form of the command's help.
func (simCmd) Help() string {
	return `A simulated engine that looks like vLLM from the outside: OpenAI completions and chat with
streaming, a block cache with LRU, KV events over ZMQ with replay, vLLM's metrics. Text is
made up, time is what --prefill-per-token and --decode-per-token say.

Example: one engine on the default ports

    warmroute sim

Example: a slow one with a small cache and two ranks, in the event format of vLLM 0.20

    warmroute sim --blocks 512 --prefill-per-token 1ms --ranks 2 --encoding array --replay-layout 1

Example: crash it for three seconds

    curl -X POST http://127.0.0.1:8000/sim/crash -d '{"restart_after_ms": 3000}'

More faults, each a POST: /sim/hang and /sim/resume, /sim/restart, /sim/drop_events, /sim/clear,
/sim/unhealthy, /sim/sleep, /sim/break_streams.

` + serviceExits
}

// Run serves until ctx ends.
func (c simCmd) Run(ctx context.Context, logger *slog.Logger) error {
	o := c.engine()
	o.Logger = logger
	e, err := sim.New(o)
	if err != nil {
		return setupError(err, "--http-listen", "--events-listen", "--replay-listen")
	}
	return runServices(ctx, logger, service{"sim", e.Addr(), e.Run})
}
