package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// askedFrontend is the frontend that a command asks.
type askedFrontend struct {
	Frontend string `default:"http://127.0.0.1:8080" placeholder:"URL" help:"Frontend to ask (default ${default})." env:"-"`
	tokenOptions
}

func (a askedFrontend) server() server { return a.at("--frontend", a.Frontend) }

// promptOptions are a prompt and whose it is, for the commands that ask about one.
type promptOptions struct {
	Model    string `required:"" placeholder:"NAME" help:"Model, or adapter." env:"-"`
	Tenant   string `default:"default" placeholder:"NAME" help:"Tenant of the pool (default ${default})." env:"-"`
	Prompt   string `xor:"prompt" placeholder:"TEXT|@FILE|-" help:"Prompt of a completion: the text, a file with it, or standard input." env:"-"`
	Messages string `xor:"prompt" placeholder:"JSON|@FILE|-" help:"Messages of a chat, as a JSON array." env:"-"`
	Tokens   string `xor:"prompt" placeholder:"ID,…|@FILE|-" help:"Token ids, separated by commas or white space, or as a JSON array." env:"-"`
	Salt     string `placeholder:"TEXT" help:"Cache salt of the request." env:"-"`
}

// promptHelp is what the help of each of these commands says of the prompt.
const promptHelp = `The prompt is one of --prompt, --messages and --tokens. Each takes the value itself, @ and the name of a file, or - for standard
input; one line end at the end of a file is not part of a prompt. The frontend has the engine tokenize a text, as for a request.
Only full blocks count: a prompt shorter than a block overlaps with nothing.`

// question is the body of a query about the prompt. A text is tokenized by the frontend.
func (p promptOptions) question(ctx context.Context, frontend server, std *stdio) (map[string]any, []uint32, error) {
	if _, err := frontend.base(); err != nil {
		return nil, nil, err // before anything is read
	}
	ids, err := p.ids(ctx, frontend, std)
	if err != nil {
		return nil, nil, err
	}
	return map[string]any{"model": p.Model, "tenant_id": p.Tenant, "token_ids": ids, "cache_salt": p.Salt}, ids, nil
}

func (p promptOptions) ids(ctx context.Context, frontend server, std *stdio) ([]uint32, error) {
	body := map[string]any{"model": p.Model}
	switch {
	case p.Tokens != "":
		text, err := given("--tokens", p.Tokens, std)
		if err != nil {
			return nil, err
		}
		return parseTokens(text)
	case p.Messages != "":
		text, err := given("--messages", p.Messages, std)
		if err != nil {
			return nil, err
		}
		var messages []map[string]any
		if err := json.Unmarshal([]byte(text), &messages); err != nil || len(messages) == 0 {
			return nil, usagef(`--messages: want a JSON array such as [{"role":"user","content":"Hello"}]; a text goes to --prompt`)
		}
		body["messages"] = messages
	case p.Prompt != "":
		text, err := given("--prompt", p.Prompt, std)
		if err != nil {
			return nil, err
		}
		if text == "" {
			return nil, usagef("--prompt %s: it is empty", p.Prompt)
		}
		body["prompt"] = text
	default:
		return nil, usagef("there is no prompt: give --prompt, --messages or --tokens; with - it is read from standard input")
	}
	var answer struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := frontend.ask(ctx, "/tokenize", body, &answer); err != nil {
		return nil, fmt.Errorf("tokenize: %w", err)
	}
	if len(answer.Tokens) == 0 {
		return nil, fmt.Errorf("the engine finds no tokens in the prompt: give its token ids by --tokens")
	}
	return answer.Tokens, nil
}

// given is the value of a flag, what is in the file that it names by @, or standard input for -.
func given(flag, value string, std *stdio) (string, error) {
	in, name := std.In, "standard input"
	switch file, isFile := strings.CutPrefix(value, "@"); {
	case isFile:
		f, err := os.Open(file)
		if err != nil {
			return "", usagef("%s: %w", flag, err)
		}
		defer func() { _ = f.Close() }()
		in, name = f, file
	case value != "-":
		return value, nil
	case isTerminal(std.In):
		_, _ = fmt.Fprintf(std.Err, "Reading %s from the terminal; Ctrl-D ends it.\n", flag)
	}
	b, err := readAll(in)
	if err != nil {
		return "", fmt.Errorf("%s: %s: %w", flag, name, err)
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r"), nil
}

// parseTokens reads token ids, separated by commas or white space, in brackets or not.
func parseTokens(text string) ([]uint32, error) {
	text = strings.TrimSpace(text)
	if inner, ok := strings.CutPrefix(text, "["); ok {
		if text, ok = strings.CutSuffix(inner, "]"); !ok {
			return nil, usagef("--tokens: the bracket is not closed")
		}
	}
	words := strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(", \t\r\n", r) })
	if len(words) == 0 {
		return nil, usagef("--tokens: there are no token ids")
	}
	ids := make([]uint32, len(words))
	for i, w := range words {
		n, err := strconv.ParseUint(w, 10, 32)
		if err != nil {
			return nil, usagef("--tokens: %q is no token id (a file is named by @, standard input is -)", w)
		}
		ids[i] = uint32(n)
	}
	return ids, nil
}
