package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/warmroute/warmroute/guard"
)

// tokenList is a setting that holds tokens. They are in no message.
type tokenList []string

// Decode adds the tokens of one flag, variable or key of the file.
func (l *tokenList) Decode(ctx *kong.DecodeContext) error {
	switch v := ctx.Scan.Pop().Value.(type) {
	case string:
		*l = append(*l, strings.Fields(v)...)
	case []any:
		for _, s := range v {
			*l = append(*l, fmt.Sprint(s))
		}
	}
	return nil
}

// String says how many there are.
func (l tokenList) String() string { return fmt.Sprintf("(%d tokens)", len(l)) }

// tokenOptions are what a server asks for, and a command shows.
type tokenOptions struct {
	Token          tokenList `sep:"none" placeholder:"SECRET" help:"Bearer token of clients, for OpenAI's routes, and for queries where --query-token is not set (default: none). Repeat it, or separate by white space, for several. Better given as a variable." group:"Access" env:"WARMROUTE_TOKEN"`
	TokenFile      string    `placeholder:"FILE" help:"File with such tokens, one per line; servers read it again when it changes." group:"Access" env:"WARMROUTE_TOKEN_FILE"`
	QueryToken     tokenList `sep:"none" placeholder:"SECRET" help:"Bearer token for what reads the index: queries, selection, workers, dumps and the page /ui (default: none)." group:"Access" env:"WARMROUTE_QUERY_TOKEN"`
	QueryTokenFile string    `placeholder:"FILE" help:"File with such tokens." group:"Access" env:"WARMROUTE_QUERY_TOKEN_FILE"`
}

// accessOptions are the tokens of a server.
type accessOptions struct {
	tokenOptions
	AdminToken     tokenList `sep:"none" placeholder:"SECRET" help:"Bearer token for what changes the index: /register, /unregister, /events; it reads the index too. Needed for --admin-listen beyond this machine." group:"Access"`
	AdminTokenFile string    `placeholder:"FILE" help:"File with such tokens." group:"Access"`
}

// tokens makes and reads them, and what workers are shown, and follows their files until ctx ends.
func (o accessOptions) tokens(ctx context.Context, logger *slog.Logger, worker guard.Secrets) (*guard.Tokens, error) {
	t, err := guard.NewTokens(guard.TokenOptions{
		Client: guard.Secrets{Values: o.Token, File: o.TokenFile},
		Query:  guard.Secrets{Values: o.QueryToken, File: o.QueryTokenFile},
		Admin:  guard.Secrets{Values: o.AdminToken, File: o.AdminTokenFile},
		Worker: worker,
		Logger: logger,
	})
	if err == nil {
		err = t.Load()
	}
	if err != nil {
		return nil, usagef("%w", err)
	}
	go t.Run(ctx)
	return t, nil
}

// at is a server that a command asks, with the token that it shows: one for queries, or else one of clients.
func (o tokenOptions) at(flag, url string) server {
	s := server{flag: flag, url: url}
	for _, of := range []struct {
		values     tokenList
		file, flag string
	}{{o.QueryToken, o.QueryTokenFile, "--query-token-file"}, {o.Token, o.TokenFile, "--token-file"}} {
		list := of.values
		if len(list) == 0 && of.file != "" {
			var err error
			if list, err = guard.ReadTokens(of.file); err != nil {
				s.err = usagef("%s: %w", of.flag, err)
				return s
			}
		}
		if len(list) > 0 {
			s.token = list[0]
			return s
		}
	}
	return s
}

// workerToken is what engines are shown.
func (o frontendOptions) workerToken() guard.Secrets {
	s := guard.Secrets{File: o.WorkerTokenFile}
	if o.WorkerToken != "" {
		s.Values = []string{o.WorkerToken}
	}
	return s
}
