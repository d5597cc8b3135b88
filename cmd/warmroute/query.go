package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/warmroute/warmroute/kvcache"
)

// queryCmd asks a frontend's index about one prompt.
type queryCmd struct {
	Frontend  string   `default:"http://127.0.0.1:8080" placeholder:"URL" help:"Frontend to ask (default ${default})." env:"-"`
	Token     string   `placeholder:"SECRET" help:"Bearer token that clients have to show (default: none). Better given as a variable." env:"WARMROUTE_TOKEN"`
	Model     string   `required:"" placeholder:"NAME" help:"Model, or adapter." env:"-"`
	Tenant    string   `name:"of-tenant" default:"default" placeholder:"NAME" help:"Tenant of the pool (default ${default})." env:"-"`
	Tokens    []uint32 `placeholder:"ID,…" help:"Token ids, instead of a text." env:"-"`
	Salt      string   `placeholder:"TEXT" help:"Cache salt of the request." env:"-"`
	BlockSize int      `name:"hashes" placeholder:"TOKENS" help:"Also print the hashes of the prompt's blocks of so many tokens, as the index has them." env:"-"`
	JSON      bool     `help:"Print one JSON object." env:"-"`
	Prompt    string   `arg:"" optional:"" help:"Prompt: a text, or messages as a JSON array; - or nothing reads standard input."`
}

// Help is the long form of the command's help.
func (queryCmd) Help() string {
	return `Which worker holds how much of a prompt? The frontend tokenizes it, as for a request, and asks the index;
nothing is generated, and nothing is routed.

Example: a completion's prompt

    warmroute query --model llama Hello,world

Example: a chat, as the engine renders it

    warmroute query --model llama '[{"role":"user","content":"Hello"}]'

Example: token ids, and the names of their blocks in Redis

    warmroute query --model llama --tokens 1,2,3,4 --hashes 4 --json

Exit codes: 0 some worker holds a block of it; 1 none does, or nobody knows; 2 wrong flags.`
}

// overlap is one worker rank of the answer, in tokens.
type overlap struct {
	Worker string `json:"worker"`
	Rank   string `json:"dp_rank"`
	Tokens int    `json:"tokens"`
}

// Run asks and prints, the warmest worker first.
func (c queryCmd) Run(ctx context.Context, std *stdio) error {
	frontend := server{"--frontend", c.Frontend, c.Token}
	if len(c.Tokens) == 0 {
		if err := c.tokenize(ctx, frontend, std); err != nil {
			return err
		}
	}
	var answer struct {
		Scores map[string]map[string]int `json:"scores"`
		State  kvcache.IndexState        `json:"index_state"`
	}
	question := map[string]any{"model": c.Model, "tenant_id": c.Tenant, "token_ids": c.Tokens, "cache_salt": c.Salt}
	if err := frontend.ask(ctx, "/query", question, &answer); err != nil {
		return err
	}
	list := []overlap{}
	for worker, ranks := range answer.Scores {
		for rank, n := range ranks {
			list = append(list, overlap{worker, rank, n})
		}
	}
	slices.SortFunc(list, func(a, b overlap) int {
		return cmp.Or(b.Tokens-a.Tokens, cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	var hashes []kvcache.BlockHash
	if c.BlockSize > 0 {
		hashes = kvcache.HashTokens(kvcache.HashSpec{BlockSize: c.BlockSize, Salt: c.Salt}, c.Tokens)
	}
	var err error
	if c.JSON {
		err = json.NewEncoder(std.Out).Encode(map[string]any{
			"prompt_tokens": len(c.Tokens), "index_state": answer.State, "overlaps": list, "block_hashes": append([]kvcache.BlockHash{}, hashes...),
		})
	} else {
		err = c.print(std.Out, list, hashes, answer.State)
	}
	switch {
	case err != nil:
		return err
	case answer.State == kvcache.Degraded:
		return fmt.Errorf("the index is away: %s/ready says why", c.Frontend)
	case len(list) == 0 || list[0].Tokens == 0:
		return fmt.Errorf("no worker holds a block of these %s (docs/troubleshooting.md: overlap is always zero)", count(len(c.Tokens), "token"))
	}
	return nil
}

// tokenize has the frontend find the token ids of the prompt.
func (c *queryCmd) tokenize(ctx context.Context, frontend server, std *stdio) error {
	text := c.Prompt
	if text == "" || text == "-" {
		if isTerminal(std.In) {
			_, _ = fmt.Fprintln(std.Err, "Reading the prompt from the terminal; Ctrl-D ends it.")
		}
		b, err := io.ReadAll(io.LimitReader(std.In, answerLimit))
		if err != nil {
			return fmt.Errorf("standard input: %w", err)
		}
		text = string(b)
	}
	if text == "" {
		return usagef("there is no prompt: give a text, or --tokens")
	}
	body := map[string]any{"model": c.Model, "prompt": text}
	var messages []map[string]any
	if json.Unmarshal([]byte(text), &messages) == nil {
		body = map[string]any{"model": c.Model, "messages": messages}
	}
	var answer struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := frontend.ask(ctx, "/tokenize", body, &answer); err != nil {
		return fmt.Errorf("tokenize: %w", err)
	}
	if len(answer.Tokens) == 0 {
		return fmt.Errorf("the engine answers no token ids for %d bytes", len(text))
	}
	c.Tokens = answer.Tokens
	return nil
}

const barWidth = 40

func (c queryCmd) print(w io.Writer, list []overlap, hashes []kvcache.BlockHash, state kvcache.IndexState) error {
	tint := tintFor(w)
	var b strings.Builder
	fmt.Fprintf(&b, "%s, index %s\n", count(len(c.Tokens), "token"), state)
	width := 0
	for _, o := range list {
		width = max(width, len(o.Worker)+1+len(o.Rank))
	}
	for _, o := range list {
		full := o.Tokens * barWidth / max(len(c.Tokens), 1)
		fmt.Fprintf(&b, "%-*s  %s%s  %d tokens, %d %%\n", width, o.Worker+"/"+o.Rank,
			tint.good(strings.Repeat("#", full)), tint.dim(strings.Repeat(".", barWidth-full)), o.Tokens, o.Tokens*100/max(len(c.Tokens), 1))
	}
	for i, h := range hashes {
		fmt.Fprintf(&b, "block %d  %s\n", i, h)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
