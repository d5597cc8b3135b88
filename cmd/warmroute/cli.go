package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"

	"github.com/alecthomas/kong"
)

// Exit codes of every command.
const (
	exitOK     = 0
	exitFailed = 1 // it failed, or what it looked at is not well (differences, problems)
	exitUsage  = 2 // wrong flags, variables or configuration file
)

const description = `Sends LLM requests to the worker whose KV cache already holds the prompt's prefix.

    warmroute demo                 see it work: no Redis, no GPU, under a minute
    warmroute <command> --help     what a command does, with examples

A flag whose help names a variable ($WARMROUTE_…) is a setting: it can also be given by that
variable, and by a key of the YAML file that --config names, all under the same name:
--lookup-budget, WARMROUTE_LOOKUP_BUDGET, lookup-budget. A flag wins over the variable, the
variable over the file, the file over the default. The other flags act once.

Exit codes: 0 done; 1 failed, or what it looked at is not well; 2 wrong flags or configuration.
SIGINT and SIGTERM drain and then end; a second signal ends at once.`

// cli is the whole command line: one field per command, the settings in one documented struct
// per concern (see the *Options structs), shared by the commands that need them.
type cli struct {
	Help   helpFlag   `short:"h" help:"Show this help and exit."`
	Config string     `short:"c" placeholder:"FILE" help:"YAML file whose keys are names of flags."`
	Log    logOptions `embed:"" prefix:"log-" group:"Logging"`

	Demo     demoCmd     `cmd:"" help:"Show the point of it: no Redis, no GPU, under a minute."`
	Serve    serveCmd    `cmd:"" help:"Run indexer and frontend in one process."`
	Indexer  indexerCmd  `cmd:"" help:"Follow the engines' KV events into Redis."`
	Frontend frontendCmd `cmd:"" help:"Route OpenAI requests to the worker with the warmest cache."`
	Sim      simCmd      `cmd:"" help:"Run a simulated engine."`
	Workers  workersCmd  `cmd:"" help:"List the workers: health, load, and who follows their events."`
	Query    queryCmd    `cmd:"" help:"Ask which worker holds how much of a prompt."`
	Explain  explainCmd  `cmd:"" help:"Say where a prompt would go, and why."`
	Top      topCmd      `cmd:"" help:"Watch a frontend at work."`
	Events   eventsCmd   `cmd:"" help:"Show the KV events that an engine publishes."`
	Plan     planCmd     `cmd:"" help:"Size Redis for a fleet."`
	Check    checkCmd    `cmd:"" help:"Prove that the index in Redis agrees with itself, or repair it."`
	Dump     dumpCmd     `cmd:"" help:"Write the stored blocks of a pool, one JSON line each."`
	Load     loadCmd     `cmd:"" help:"Make an index from a dump."`
	Decode   decodeCmd   `cmd:"" help:"Say what a captured event payload means."`
	Bench    benchCmd    `cmd:"" help:"Measure the index on a Redis server."`
	Replay   replayCmd   `cmd:"" help:"Replay a trace: what is each policy worth?"`
	Version  versionCmd  `cmd:"" help:"Print the version."`

	Completion completionCmd `cmd:"" help:"Print a script that completes commands and flags in a shell."`
}

// stdio is where a command reads and writes; logs go to Err.
type stdio struct {
	In       io.Reader
	Out, Err io.Writer
}

// run parses args and runs the command that they name. It returns the exit code.
func run(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	std := &stdio{In: in, Out: out, Err: errOut}
	cmd, logger, err := parse(args, std, os.Environ())
	command := "warmroute"
	if cmd != nil && cmd.Selected() != nil {
		command = cmd.Selected().FullPath()
	}
	if err == nil {
		libraries{logger}.listen()
		cmd.BindTo(ctx, (*context.Context)(nil))
		cmd.Bind(std, logger)
		err = cmd.Run()
	}
	var usage *usageError
	switch {
	case err == nil, errors.Is(err, errHelp):
		return exitOK
	case errors.As(err, &usage):
		_, _ = fmt.Fprintf(errOut, "warmroute: %v\nRun \"%s --help\" for what it takes.\n", err, command)
		return exitUsage
	default:
		_, _ = fmt.Fprintf(errOut, "warmroute: %v\n", err)
		return exitFailed
	}
}

// usageError is an error in flags, variables or the configuration file.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// usagef makes a usage error of a command that finds its flags contradictory.
func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// errHelp says that help was printed and nothing is left to do.
var errHelp = errors.New("help was asked for")

// helpFlag prints help like kong's own, but ends the parse by an error instead of os.Exit.
type helpFlag bool

// IgnoreDefault keeps a default command from hiding the flag.
func (helpFlag) IgnoreDefault() {}

// BeforeReset prints the help of the command that the flag stands behind.
func (helpFlag) BeforeReset(ctx *kong.Context) error {
	if err := ctx.PrintUsage(false); err != nil {
		return err
	}
	return errHelp
}

// parse reads flags, variables and file, in this order of precedence, and makes the logger. With
// an error, the context says as far as it is known which command was meant.
func parse(args []string, std *stdio, environ []string) (*kong.Context, *slog.Logger, error) {
	var c cli
	app, err := newParser(&c, std)
	if err != nil {
		return nil, nil, err
	}
	unsetEmptyVariables(app.Model)
	args = usualSpellings(args)
	cmd, err := app.Parse(args)
	if parse := (*kong.ParseError)(nil); errors.As(err, &parse) && !errors.Is(err, errHelp) {
		return parse.Context, nil, &usageError{parse.Unwrap()}
	}
	if err != nil {
		return nil, nil, err
	}
	for _, flag := range cmd.Flags() {
		if err := checkNumber(flag, flag.Target.Interface()); err != nil {
			return cmd, nil, &usageError{fmt.Errorf("%s: %w", flag.ShortSummary(), err)}
		}
	}
	logger := c.Log.logger(std.Err)
	cmd.Bind(&c.Log)
	warnUnknownVariables(logger, app.Model, environ)
	return cmd, logger, nil
}

// usualSpellings turns what people type without looking into what the commands are called.
func usualSpellings(args []string) []string {
	switch {
	case len(args) == 0:
		return []string{"--help"}
	case args[0] == "help":
		return append(slices.Clone(args[1:]), "--help")
	case args[0] == "--version":
		return []string{"version"}
	}
	return args
}

func newParser(c *cli, std *stdio) (*kong.Kong, error) {
	return kong.New(c,
		kong.Name("warmroute"),
		kong.Description(description),
		kong.Writers(std.Out, std.Err),
		kong.NoDefaultHelp(),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true, NoAppDescFormat: true}),
		kong.DefaultEnvars(envPrefix),
		kong.Vars(replayDefaults()),
		kong.Vars(tierDefaults()),
		kong.WithBeforeResolve(loadConfigFile),
	)
}
