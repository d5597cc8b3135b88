package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/kvcache"
)

// explainCmd asks a frontend where a prompt would go, and why.
type explainCmd struct {
	Asked askedFrontend `embed:""`
	About promptOptions `embed:""`
	JSON  bool          `help:"Print one JSON object." env:"-"`
}

// Help is the long form of the command's help.
func (explainCmd) Help() string {
	w := choose.Default
	return fmt.Sprintf(`Where would a frontend send this prompt, and why there? One line per candidate: which blocks of the prompt it holds, what else it
has to do, and the cost that the choice compares. Nothing is generated, routed or counted. The same as the prefix explorer of the
frontend's page /ui.
`+promptHelp+`

Example: a completion's prompt

    warmroute explain --model llama --prompt "Hello, world"

Example: a chat, as the engine renders it

    warmroute explain --model llama --messages '[{"role":"user","content":"Hello"}]'

Example: token ids

    warmroute explain --model llama --tokens 1,2,3,4 --json

COST is %g for each block of prompts that waits there, %g for each block of this prompt that has to be computed, and %g for each block that
requests under way occupy, unless the policy or its weights are others; the lowest wins. OVERLAP counts blocks from the first on, without a hole; DEVICE does so on the device alone, HOST there or on the host, DISK on any
of the three, so that each is at least the one before. REQUESTS, PREFILL (tokens) and DECODE (blocks) are under way there.

In a bar: D device, H host, d disk, p predicted, _ a hole, . not held; one letter may stand for several blocks.

Exit codes: 0 the answer comes from the index; 1 nobody answers, or the index is away and the fallback's choice is shown; 2 wrong flags.`,
		w.PrefillScale, w.PrefillScale*w.Miss, w.Decode)
}

// explained is the answer of POST /ui/explore.
type explained struct {
	Policy     string             `json:"policy"`
	Reason     string             `json:"reason"`
	State      kvcache.IndexState `json:"index_state"`
	Cause      string             `json:"cause"`
	Shared     bool               `json:"shared_loads"`
	BlockSize  int                `json:"block_size"`
	Tokens     int                `json:"prompt_tokens"`
	Blocks     int                `json:"prompt_blocks"`
	Shown      int                `json:"shown_blocks"`
	Problem    string             `json:"holders_problem"`
	Candidates []struct {
		Worker   string                                 `json:"worker_id"`
		Rank     int                                    `json:"dp_rank"`
		Overlap  *struct{ Device, Host, Disk, Any int } `json:"overlap"`
		Requests int                                    `json:"requests"`
		Prefill  int                                    `json:"prefill_tokens"`
		Decode   int                                    `json:"decode_blocks"`
		Cost     *float64                               `json:"cost"`
	} `json:"candidates"`
	Holders []struct {
		Worker string `json:"worker_id"`
		Rank   int    `json:"dp_rank"`
		Tiers  string `json:"tiers"`
	} `json:"holders"`
}

// Run asks and prints.
func (c explainCmd) Run(ctx context.Context, std *stdio) error {
	frontend := c.Asked.server()
	question, _, err := c.About.question(ctx, frontend, std)
	if err != nil {
		return err
	}
	var raw json.RawMessage
	if err := frontend.ask(ctx, "/ui/explore", question, &raw); err != nil {
		return err
	}
	var answer explained
	if err := json.Unmarshal(raw, &answer); err != nil || len(answer.Candidates) == 0 {
		return frontend.notOurs("/ui/explore", err)
	}
	if c.JSON {
		_, err = fmt.Fprintf(std.Out, "%s\n", raw)
	} else {
		err = answer.print(std.Out)
	}
	if err == nil && answer.Cause != "" {
		err = saysNothing(answer.State, answer.Cause, frontend)
	}
	return err
}

func (x *explained) print(w io.Writer) error {
	tint := tintFor(w)
	tiers := map[string]string{}
	for _, h := range x.Holders {
		tiers[fmt.Sprintf("%s/%d", h.Worker, h.Rank)] = h.Tiers
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s of %d; index %s\n\n", count(x.Tokens, "token"), count(x.Blocks, "full block"), x.BlockSize, x.State)
	// The bars are coloured, so that they come last: a table cannot count what does not print.
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "WORKER\tCOST\tOVERLAP\tDEVICE\tHOST\tDISK\tREQUESTS\tPREFILL\tDECODE\tBLOCKS")
	for _, c := range x.Candidates {
		name, cost, overlap := fmt.Sprintf("%s/%d", c.Worker, c.Rank), "-", "?\t?\t?\t?"
		if c.Cost != nil {
			cost = fmt.Sprintf("%.1f", *c.Cost)
		}
		if o := c.Overlap; o != nil {
			overlap = fmt.Sprintf("%d\t%d\t%d\t%d", o.Any, o.Device, o.Host, o.Disk)
		}
		blocks := "?"
		if held, ok := tiers[name]; ok || x.State == kvcache.Exact {
			blocks = tint.good(blockBar(held, max(x.Shown, 1)))
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%d\t%s\n", name, cost, overlap, c.Requests, c.Prefill, c.Decode, blocks)
		delete(tiers, name)
	}
	for _, h := range x.Holders {
		if name := fmt.Sprintf("%s/%d", h.Worker, h.Rank); tiers[name] != "" {
			_, _ = fmt.Fprintf(t, "%s\tno candidate\t\t\t\t\t\t\t\t%s\n", name, blockBar(h.Tiers, max(x.Shown, 1)))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(&b, "\n%s\n", x.verdict())
	if x.Shown < x.Blocks && x.Shown > 0 {
		fmt.Fprintf(&b, "The bars are of the first %d blocks.\n", x.Shown)
	}
	if x.Problem != "" {
		fmt.Fprintf(&b, "Single blocks cannot be read in full: %s.\n", x.Problem)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// verdict says why the winner won.
func (x *explained) verdict() string {
	best := x.Candidates[0]
	s := fmt.Sprintf("%s/%d would be chosen", best.Worker, best.Rank)
	switch {
	case x.Cause != "":
		return fmt.Sprintf("%s by the fallback %s, reason %s: nobody knows who holds what (%s).", s, x.Policy, x.Reason, x.Cause)
	case x.Reason == "overlap" && best.Overlap != nil:
		s += fmt.Sprintf(": it holds %d of %s", best.Overlap.Any, count(x.Blocks, "block"))
	case x.Reason == "load":
		s += ": what it holds decides nothing, it has the least to do"
	default:
		s += fmt.Sprintf(": policy %s, reason %s", x.Policy, x.Reason)
	}
	if len(x.Candidates) > 1 && best.Cost != nil && x.Candidates[1].Cost != nil {
		s += fmt.Sprintf("; its cost is %.1f, the next one's %.1f", *best.Cost, *x.Candidates[1].Cost)
	}
	return s + "."
}

// blockBar draws who holds each of n blocks: digits has a hexadecimal digit of tiers per block, "" where none is held. A letter that
// stands for several blocks shows a hole first, then one that is not held, then the slowest tier.
func blockBar(digits string, n int) string {
	const letters = "DHdp"
	last := len(strings.TrimRight(digits, "0")) - 1
	of := func(i int) (letter byte, weight int) {
		if i > last {
			return '.', 9
		}
		bits, _ := strconv.ParseUint(digits[i:i+1], 16, 8)
		for t := range letters {
			if bits>>t&1 != 0 {
				return letters[t], t
			}
		}
		return '_', 10
	}
	width := min(n, barWidth)
	bar := make([]byte, width)
	for x := range bar {
		worst := -1
		for i := x * n / width; i < (x+1)*n/width; i++ {
			if letter, weight := of(i); weight > worst {
				bar[x], worst = letter, weight
			}
		}
	}
	return string(bar)
}
