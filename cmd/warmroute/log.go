package main

import (
	"io"
	"log/slog"
)

// logOptions are the settings of the log, which goes to standard error.
type logOptions struct {
	Level  slog.Level `default:"info" placeholder:"LEVEL" help:"Least severe level that is logged: debug, info, warn or error."`
	Format string     `default:"text" enum:"text,json" help:"How a line looks: text or json."`
}

func (o logOptions) logger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: o.Level}
	if o.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
