package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/warmroute/warmroute/kvcache"
)

// explainCmd asks a frontend where a prompt would go, and why.
type explainCmd struct {
	Frontend string `default:"http://127.0.0.1:8080" placeholder:"URL" help:"Frontend to ask (default ${default})." env:"-"`
	Token    string `placeholder:"SECRET" help:"Bearer token that clients have to show (default: none). Better given as a variable." env:"WARMROUTE_TOKEN"`
	Model    string `required:"" placeholder:"NAME" help:"Model, or adapter." env:"-"`
	Tenant   string `name:"of-tenant" default:"default" placeholder:"NAME" help:"Tenant of the pool (default ${default})." env:"-"`
	Prompt   string `xor:"prompt" placeholder:"TEXT" help:"Prompt: a text, or messages as a JSON array; - or nothing reads standard input." env:"-"`
	Tokens   string `xor:"prompt" placeholder:"FILE" help:"File with token ids, as a JSON array or separated by white space or commas; - is standard input." env:"-"`
	Salt     string `placeholder:"TEXT" help:"Cache salt of the request." env:"-"`
	JSON     bool   `help:"Print one JSON object." env:"-"`
}

// Help is the long form of the command's help.
func (explainCmd) Help() string {
	return `Where would a frontend send this prompt, and why there? One line per candidate: which blocks of the prompt it holds, what else it
has to do, and the cost that the choice compares. Nothing is generated, routed or counted. The same as the prefix explorer of the
frontend's page /ui.

Example: a completion's prompt

    warmroute explain --model llama --prompt Hello,world

Example: a chat, as the engine renders it

    warmroute explain --model llama --prompt '[{"role":"user","content":"Hello"}]'

Example: token ids

    warmroute explain --model llama --tokens ids.json --json

In a bar: D device, H host, d disk, p predicted, _ a hole, . not held; one letter may stand for several blocks.

Exit codes: 0 the answer comes from the index; 1 nobody answers, or the index is away and the fallback's choice is shown; 2 wrong flags.`
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
	frontend := server{"--frontend", c.Frontend, c.Token}
	q := queryCmd{Model: c.Model, Prompt: c.Prompt}
	var err error
	if c.Tokens != "" {
		q.Tokens, err = readTokens(c.Tokens, std.In)
	} else {
		err = q.tokenize(ctx, frontend, std)
	}
	if err != nil {
		return err
	}
	question := map[string]any{"model": c.Model, "tenant_id": c.Tenant, "token_ids": q.Tokens, "cache_salt": c.Salt}
	var raw json.RawMessage
	if err := frontend.ask(ctx, "/ui/explore", question, &raw); err != nil {
		return err
	}
	var answer explained
	if err := json.Unmarshal(raw, &answer); err != nil || len(answer.Candidates) == 0 {
		return fmt.Errorf("%s does not answer as warmroute does (is --frontend right?)", c.Frontend)
	}
	if c.JSON {
		_, err = fmt.Fprintf(std.Out, "%s\n", raw)
	} else {
		err = answer.print(std.Out)
	}
	if err == nil && answer.Cause != "" {
		err = fmt.Errorf("the index says nothing (%s): %s/ready says more", answer.Cause, c.Frontend)
	}
	return err
}

// readTokens reads token ids of a file.
func readTokens(name string, in io.Reader) ([]uint32, error) {
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, usagef("--tokens: %w", err)
		}
		defer func() { _ = file.Close() }()
		in = file
	}
	text, err := io.ReadAll(io.LimitReader(in, answerLimit))
	if err != nil {
		return nil, fmt.Errorf("--tokens %s: %w", name, err)
	}
	words := strings.FieldsFunc(strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(string(text)), "["), "]"), func(r rune) bool {
		return r == ',' || r == ' ' || r == '\n' || r == '\t' || r == '\r'
	})
	if len(words) == 0 {
		return nil, usagef("--tokens %s: there are no token ids", name)
	}
	ids := make([]uint32, len(words))
	for i, w := range words {
		n, err := strconv.ParseUint(w, 10, 32)
		if err != nil {
			return nil, usagef("--tokens %s: %q is no token id", name, w)
		}
		ids[i] = uint32(n)
	}
	return ids, nil
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
