// Package configfile reads the YAML configuration file. Its keys are the names of the command
// line's flags, so that a setting has one name everywhere:
//
//	redis: redis://10.0.0.5:6379
//	lookup-budget: 20ms
//	worker:
//	  - id: w0
//	    url: http://10.0.1.1:8000
//
// A key that no flag has, a key given twice and a value of the wrong shape are errors that name
// the file, the line and, for a misspelt key, the one that was probably meant: a setting that
// silently does nothing is worse than a process that does not start.
package configfile

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// Schema is what a file may contain: the name of each key and its shape.
type Schema map[string]Shape

// Shape is what the value of one key looks like.
type Shape struct {
	// List allows several values; one alone need not be written as a list.
	List bool
	// Fields are the keys of an element that is written as a mapping; nil means that elements
	// are plain values. Such an element becomes the text "key=value,key=value".
	Fields []string
}

// Setting is the value of one key as the command line would give it.
type Setting struct {
	Line   int
	Values []string // exactly one unless the key is a list
}

// Read reads and checks a file. The error names the file.
func Read(path string, schema Schema) (map[string]Setting, error) {
	src, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return Parse(path, src, schema)
}

// Parse checks the content of a file; name is what its errors call it.
func Parse(name string, src []byte, schema Schema) (map[string]Setting, error) {
	f, err := parser.ParseBytes(src, 0)
	if err != nil {
		return nil, syntaxError(name, err)
	}
	settings := map[string]Setting{}
	if len(f.Docs) > 1 {
		return nil, fmt.Errorf("%s: more than one YAML document", name)
	}
	if len(f.Docs) == 0 || f.Docs[0].Body == nil {
		return settings, nil
	}
	top, ok := f.Docs[0].Body.(*ast.MappingNode)
	if !ok {
		return nil, at(name, f.Docs[0].Body, errors.New("want a mapping of settings to values"))
	}
	for _, pair := range top.Values {
		key, value := pair.Key.GetToken().Value, pair.Value
		shape, ok := schema[key]
		if !ok {
			return nil, at(name, pair.Key, unknownKey(key, keys(schema)))
		}
		s := Setting{Line: line(pair.Key)}
		if s.Values, err = shape.values(value); err != nil {
			return nil, at(name, value, fmt.Errorf("%s: %w", key, err))
		}
		settings[key] = s
	}
	return settings, nil
}

// nodeError is an error about one node inside a value: its own line is better than the value's.
type nodeError struct {
	node ast.Node
	err  error
}

func (e *nodeError) Error() string { return e.err.Error() }
func (e *nodeError) Unwrap() error { return e.err }

func (s Shape) values(n ast.Node) ([]string, error) {
	list, ok := n.(*ast.SequenceNode)
	if !ok {
		v, err := s.value(n)
		return []string{v}, err
	}
	if !s.List {
		return nil, errors.New("want one value, not a list")
	}
	values := make([]string, 0, len(list.Values))
	for _, element := range list.Values {
		v, err := s.value(element)
		if err != nil {
			return nil, &nodeError{element, err}
		}
		values = append(values, v)
	}
	return values, nil
}

func (s Shape) value(n ast.Node) (string, error) {
	m, ok := n.(*ast.MappingNode)
	if !ok {
		return scalar(n)
	}
	if s.Fields == nil {
		return "", errors.New("want a plain value, not a mapping")
	}
	var b strings.Builder
	for i, pair := range m.Values {
		key := pair.Key.GetToken().Value
		if !slices.Contains(s.Fields, key) {
			return "", &nodeError{pair.Key, unknownKey(key, s.Fields)}
		}
		v, err := scalar(pair.Value)
		if err == nil && strings.ContainsAny(v, ", \t\n") {
			err = errors.New("a value here has no commas or white space")
		}
		if err != nil {
			return "", &nodeError{pair.Value, fmt.Errorf("%s: %w", key, err)}
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(key + "=" + v)
	}
	return b.String(), nil
}

func scalar(n ast.Node) (string, error) {
	switch v := n.(type) {
	case *ast.StringNode:
		return v.Value, nil
	case *ast.LiteralNode:
		return v.Value.Value, nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, nil
	case *ast.NullNode:
		return "", errors.New("has no value; remove the key to use the default")
	case *ast.AnchorNode, *ast.AliasNode, *ast.TagNode:
		return "", errors.New("anchors, aliases and tags are not supported")
	}
	return "", errors.New("want a plain value")
}

func line(n ast.Node) int { return n.GetToken().Position.Line }

func at(name string, n ast.Node, err error) error {
	var inner *nodeError
	for e := err; errors.As(e, &inner); e = inner.err {
		n = inner.node
	}
	return fmt.Errorf("%s:%d: %w", name, line(n), err)
}

// syntaxError keeps the parser's message and line, without the excerpt that it draws below it.
func syntaxError(name string, err error) error {
	var y yaml.Error
	if errors.As(err, &y) && y.GetToken() != nil {
		return fmt.Errorf("%s:%d: %s", name, y.GetToken().Position.Line, y.GetMessage())
	}
	return fmt.Errorf("%s: %w", name, err)
}

func unknownKey(key string, known []string) error {
	if near, ok := Nearest(key, known); ok {
		return fmt.Errorf("unknown key %q (did you mean %q?)", key, near)
	}
	return fmt.Errorf("unknown key %q", key)
}

func keys(s Schema) []string {
	names := make([]string, 0, len(s))
	for k := range s {
		names = append(names, k)
	}
	slices.Sort(names)
	return names
}
