package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/alecthomas/kong"
)

// completionCmd prints a shell's completion script.
type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// Help is the long form of the command's help.
func (completionCmd) Help() string {
	return `Prints a script that completes commands and flags. It goes to /etc/bash_completion.d/warmroute, to the file _warmroute in
a directory of zsh's $fpath, or to ~/.config/fish/completions/warmroute.fish; or, for this shell alone, to eval.

Example:

    warmroute completion bash

Exit codes: 0 printed; 2 another shell.`
}

// completed is one command with what can follow it.
type completed struct {
	path  string // "bench lookup"; "" for none
	help  string
	words []string // subcommands and flags
}

// Run prints the script.
func (c completionCmd) Run(std *stdio, k *kong.Kong) error {
	var all []completed
	var visit func(n *kong.Node, path string)
	visit = func(n *kong.Node, path string) {
		one := completed{path: path, help: n.Help}
		for _, child := range n.Children {
			if !child.Hidden {
				one.words = append(one.words, child.Name)
			}
		}
		for up := n; up != nil; up = up.Parent {
			for _, f := range up.Flags {
				if !f.Hidden {
					one.words = append(one.words, "--"+f.Name)
				}
			}
		}
		all = append(all, one)
		for _, child := range n.Children {
			if !child.Hidden {
				visit(child, strings.TrimSpace(path+" "+child.Name))
			}
		}
	}
	visit(k.Model.Node, "")
	var b strings.Builder
	switch c.Shell {
	case "bash":
		bashCompletion(&b, all)
	case "zsh":
		b.WriteString("#compdef warmroute\nautoload -U +X bashcompinit && bashcompinit\n")
		bashCompletion(&b, all)
	default:
		fishCompletion(&b, all)
	}
	_, err := io.WriteString(std.Out, b.String())
	return err
}

func bashCompletion(b *strings.Builder, all []completed) {
	b.WriteString(`_warmroute() {
  local word path="" candidate words
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    candidate="${path:+$path }$word"
    case "$candidate" in
`)
	var paths []string
	for _, c := range all {
		if c.path != "" {
			paths = append(paths, fmt.Sprintf("%q", c.path))
		}
	}
	fmt.Fprintf(b, "      %s) path=$candidate ;;\n", strings.Join(paths, "|"))
	b.WriteString("    esac\n  done\n  case \"$path\" in\n")
	for _, c := range all {
		fmt.Fprintf(b, "    %q) words=%q ;;\n", c.path, strings.Join(c.words, " "))
	}
	b.WriteString(`  esac
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _warmroute warmroute
`)
}

func fishCompletion(b *strings.Builder, all []completed) {
	quote := func(s string) string { return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'" }
	b.WriteString("complete -c warmroute -e\n")
	for _, c := range all {
		condition := "__fish_use_subcommand"
		if c.path != "" {
			condition = "__fish_seen_subcommand_from " + c.path[strings.LastIndexByte(c.path, ' ')+1:]
		}
		for _, word := range c.words {
			if flag, ok := strings.CutPrefix(word, "--"); ok {
				fmt.Fprintf(b, "complete -c warmroute -n %s -l %s\n", quote(condition), flag)
				continue
			}
			help := ""
			for _, child := range all {
				if child.path == strings.TrimSpace(c.path+" "+word) {
					help = child.help
				}
			}
			fmt.Fprintf(b, "complete -c warmroute -n %s -f -a %s -d %s\n", quote(condition), word, quote(help))
		}
	}
}
