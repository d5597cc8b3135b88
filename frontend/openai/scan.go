package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// maxDepth bounds the nesting of a body. Engines refuse less.
const maxDepth = 256

var (
	errSyntax = errors.New("the body is not valid JSON")
	errDepth  = fmt.Errorf("the body nests deeper than %d levels", maxDepth)
)

// Object walks the members of the JSON object that b consists of and calls f with each
// decoded key and the raw value. The whole of b is checked; nothing is decoded or copied but
// the keys. A key that occurs twice is reported twice, so that the last one wins as it does
// in the engines. An error of f ends the walk.
func Object(b []byte, f func(key string, value []byte) error) error {
	return objectOf(b, nil, f)
}

// objectOf is [Object] for one who can read some values better. read is asked for each where it begins, and answers where
// it ends; 0 is a value that it does not read.
func objectOf(b []byte, read func(key string, at int) (end int), f func(key string, value []byte) error) error {
	i := space(b, 0)
	if i == len(b) {
		return errors.New("the body is empty")
	}
	s := scanner{b: b, read: read}
	var err error
	if b[i] != '{' {
		if _, err = s.value(i, 0); err != nil {
			return err
		}
		return errors.New("the body is not a JSON object")
	}
	if i, err = s.object(i, 0, f); err != nil {
		return err
	}
	if space(b, i) != len(b) {
		return errSyntax
	}
	return nil
}

// Array walks the elements of the JSON array that raw, a value handed out by [Object],
// consists of.
func Array(raw []byte, f func(element []byte) error) error {
	if len(raw) == 0 || raw[0] != '[' {
		return errSyntax
	}
	s := scanner{b: raw}
	_, err := s.array(0, 0, f)
	return err
}

// firstElement is the first element of a checked array; false where it has none.
func firstElement(raw []byte) ([]byte, bool) {
	start := space(raw, 1)
	if raw[start] == ']' {
		return nil, false
	}
	end, err := scanner{b: raw}.value(start, 1)
	if err != nil {
		return nil, false
	}
	return raw[start:end], true
}

// scanner checks JSON by RFC 8259. Each method takes the index at which something starts and
// returns the index behind it.
type scanner struct {
	b    []byte
	read func(key string, at int) (end int) // of the members of the outer object; nil reads none
}

func (s scanner) object(i, depth int, f func(string, []byte) error) (int, error) {
	b := s.b
	i = space(b, i+1)
	if i < len(b) && b[i] == '}' {
		return i + 1, nil
	}
	for {
		keyEnd, err := s.text(i)
		if err != nil {
			return 0, err
		}
		colon := space(b, keyEnd)
		if colon >= len(b) || b[colon] != ':' {
			return 0, errSyntax
		}
		start, end := space(b, colon+1), 0
		var key string
		if f != nil {
			if key = decodeKey(b[i:keyEnd]); s.read != nil {
				end = s.read(key, start)
			}
		}
		if end == 0 {
			if end, err = s.value(start, depth+1); err != nil {
				return 0, err
			}
		}
		if f != nil {
			if err := f(key, b[start:end]); err != nil {
				return 0, err
			}
		}
		i = space(b, end)
		if i >= len(b) {
			return 0, errSyntax
		}
		switch b[i] {
		case ',':
			i = space(b, i+1)
		case '}':
			return i + 1, nil
		default:
			return 0, errSyntax
		}
	}
}

func (s scanner) array(i, depth int, f func([]byte) error) (int, error) {
	b := s.b
	i = space(b, i+1)
	if i < len(b) && b[i] == ']' {
		return i + 1, nil
	}
	for {
		if f == nil {
			i = skipIDs(b, i)
		}
		end, err := s.value(i, depth+1)
		if err != nil {
			return 0, err
		}
		if f != nil {
			if err := f(b[i:end]); err != nil {
				return 0, err
			}
		}
		i = space(b, end)
		if i >= len(b) {
			return 0, errSyntax
		}
		switch b[i] {
		case ',':
			i = space(b, i+1)
		case ']':
			return i + 1, nil
		default:
			return 0, errSyntax
		}
	}
}

func (s scanner) value(i, depth int) (int, error) {
	if i >= len(s.b) {
		return 0, errSyntax
	}
	if depth > maxDepth {
		return 0, errDepth
	}
	switch c := s.b[i]; {
	case c == '"':
		return s.text(i)
	case c == '{':
		return s.object(i, depth, nil)
	case c == '[':
		return s.array(i, depth, nil)
	case c == '-' || c >= '0' && c <= '9':
		return s.number(i)
	}
	for _, word := range [...]string{"true", "false", "null"} {
		if bytes.HasPrefix(s.b[i:], []byte(word)) {
			return i + len(word), nil
		}
	}
	return 0, errSyntax
}

func (s scanner) text(i int) (int, error) {
	b := s.b
	if i >= len(b) || b[i] != '"' {
		return 0, errSyntax
	}
	i++
	for {
		for i < len(b) && plain[b[i]] {
			i++
		}
		if i >= len(b) {
			return 0, errSyntax
		}
		switch b[i] {
		case '"':
			return i + 1, nil
		case '\\':
		default:
			return 0, errSyntax
		}
		i++
		if i >= len(b) {
			return 0, errSyntax
		}
		switch b[i] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		case 'u':
			for range 4 {
				i++
				if i >= len(b) || !isHex(b[i]) {
					return 0, errSyntax
				}
			}
		default:
			return 0, errSyntax
		}
		i++
	}
}

// plain are the bytes that may stand in a string as they are.
var plain = func() (t [256]bool) {
	for c := 0x20; c < 256; c++ {
		t[c] = c != '"' && c != '\\'
	}
	return t
}()

func (s scanner) number(i int) (int, error) {
	b := s.b
	if b[i] == '-' {
		i++
	}
	start := i
	if i < len(b) && b[i] == '0' {
		i++
	} else if i = digits(b, i); i == start {
		return 0, errSyntax
	}
	if i < len(b) && b[i] == '.' {
		start = i + 1
		if i = digits(b, start); i == start {
			return 0, errSyntax
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		start = i
		if i = digits(b, start); i == start {
			return 0, errSyntax
		}
	}
	return i, nil
}

func digits(b []byte, i int) int {
	for i < len(b) && b[i] >= '0' && b[i] <= '9' {
		i++
	}
	return i
}

// skipIDs goes past elements that are plain positive integers with a comma right behind them:
// the bulk of a prompt of token ids.
func skipIDs(b []byte, i int) int {
	for i < len(b) && b[i] >= '1' && b[i] <= '9' {
		j := digits(b, i+1)
		if j >= len(b) || b[j] != ',' {
			return i
		}
		i = space(b, j+1)
	}
	return i
}

func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

// decodeKey takes a checked string literal.
func decodeKey(raw []byte) string {
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1])
	}
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}
