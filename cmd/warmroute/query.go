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
	Asked  askedFrontend `embed:""`
	About  promptOptions `embed:""`
	Hashes int           `placeholder:"TOKENS" help:"Also print the hashes of the prompt's blocks of so many tokens, as the index has them." env:"-"`
	JSON   bool          `help:"Print one JSON object." env:"-"`
}

// Help is the long form of the command's help.
func (queryCmd) Help() string {
	return `Which worker holds how much of a prompt? The frontend asks the index; nothing is generated, and nothing is routed.
` + promptHelp + `

Example: a completion's prompt

    warmroute query --model llama --prompt @prompt.txt

Example: a chat, as the engine renders it

    warmroute query --model llama --messages @chat.json

Example: token ids, and the names of their blocks in Redis

    warmroute query --model llama --tokens @ids.json --hashes 16 --json

Exit codes: 0 some worker holds a block of it; 1 none does, or nobody knows; 2 wrong flags.`
}

// overlap is one worker rank of the answer, in tokens.
type overlap struct {
	Worker string `json:"worker_id"`
	Rank   int    `json:"dp_rank"`
	Tokens int    `json:"tokens"`
}

// Run asks and prints, the warmest worker first.
func (c queryCmd) Run(ctx context.Context, std *stdio) error {
	frontend := c.Asked.server()
	question, ids, err := c.About.question(ctx, frontend, std)
	if err != nil {
		return err
	}
	var answer struct {
		Scores map[string]map[int]int `json:"scores"` // tokens by worker and rank
		State  kvcache.IndexState     `json:"index_state"`
	}
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
		return cmp.Or(b.Tokens-a.Tokens, cmp.Compare(a.Worker, b.Worker), a.Rank-b.Rank)
	})
	hashes := []kvcache.BlockHash{}
	if c.Hashes > 0 {
		hashes = append(hashes, kvcache.HashTokens(kvcache.HashSpec{BlockSize: c.Hashes, Salt: c.About.Salt}, ids)...)
	}
	if c.JSON {
		err = json.NewEncoder(std.Out).Encode(map[string]any{
			"prompt_tokens": len(ids), "index_state": answer.State, "overlaps": list, "block_hashes": hashes,
		})
	} else {
		err = printOverlaps(std.Out, len(ids), list, hashes, answer.State)
	}
	switch {
	case err != nil:
		return err
	case answer.State == kvcache.Degraded:
		return saysNothing(answer.State, "", frontend)
	case len(list) == 0 || list[0].Tokens == 0:
		return fmt.Errorf("no worker holds a block of these %s (docs/troubleshooting.md: overlap is always zero)", count(len(ids), "token"))
	}
	return nil
}

const barWidth = 40

func printOverlaps(w io.Writer, tokens int, list []overlap, hashes []kvcache.BlockHash, state kvcache.IndexState) error {
	tint := tintFor(w)
	var b strings.Builder
	fmt.Fprintf(&b, "%s, index %s\n", count(tokens, "token"), state)
	width := 0
	name := func(o overlap) string { return fmt.Sprintf("%s/%d", o.Worker, o.Rank) }
	for _, o := range list {
		width = max(width, len(name(o)))
	}
	for _, o := range list {
		full := min(o.Tokens*barWidth/max(tokens, 1), barWidth)
		fmt.Fprintf(&b, "%-*s  %s%s  %s, %d %%\n", width, name(o),
			tint.good(strings.Repeat("#", full)), tint.dim(strings.Repeat(".", barWidth-full)), count(o.Tokens, "token"), o.Tokens*100/max(tokens, 1))
	}
	for i, h := range hashes {
		fmt.Fprintf(&b, "block %d  %s\n", i, h)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
