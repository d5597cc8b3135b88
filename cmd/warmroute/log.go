package main

import (
	"context"
	"io"
	"log"
	"log/slog"
	"regexp"
)

// logOptions are the settings of the log, which goes to standard error.
type logOptions struct {
	Level  slog.Level `default:"info" placeholder:"LEVEL" help:"Least severe level that is logged: debug, info, warn or error (default ${default})."`
	Format string     `default:"text" enum:"text,json" placeholder:"FORMAT" help:"How a line looks: text or json (default ${default})."`
}

// quiet is the logger of a command whose parts would otherwise drown its own output: errors only,
// unless more was asked for.
func (o logOptions) quiet(logger *slog.Logger) *slog.Logger {
	if o.Level < slog.LevelInfo {
		return logger
	}
	return slog.New(atLeast{logger.Handler(), slog.LevelError})
}

// atLeast drops records below a level.
type atLeast struct {
	slog.Handler
	level slog.Level
}

// Enabled reports whether a record of the level is kept.
func (h atLeast) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= h.level && h.Handler.Enabled(ctx, l)
}

// WithAttrs keeps the limit.
func (h atLeast) WithAttrs(attrs []slog.Attr) slog.Handler {
	return atLeast{h.Handler.WithAttrs(attrs), h.level}
}

// WithGroup keeps the limit.
func (h atLeast) WithGroup(name string) slog.Handler {
	return atLeast{h.Handler.WithGroup(name), h.level}
}

func (o logOptions) logger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: o.Level}
	if o.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// libraries is where libraries write who know of no other log than the standard one, such as net/http.
type libraries struct{ logger *slog.Logger }

// quoted is what net/http repeats of what a worker sent, such as a part of an answer too much, which is nobody's business here.
var quoted = regexp.MustCompile(`"(?:[^"\\]|\\.)*"?`)

// Write makes a line of the log of a library's.
func (l libraries) Write(p []byte) (int, error) {
	l.logger.Debug("a library says", "text", string(quoted.ReplaceAll(p, []byte(`"…"`))))
	return len(p), nil
}

func (l libraries) listen() {
	log.SetFlags(0)
	log.SetOutput(l)
}
