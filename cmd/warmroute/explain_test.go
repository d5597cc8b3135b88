package main

import (
	"slices"
	"strings"
	"testing"
)

func TestBlockBar(t *testing.T) {
	for _, c := range []struct {
		digits string
		n      int
		want   string
	}{
		{"", 3, "..."},
		{"000", 3, "..."},
		{"1248", 6, "DHdp.."},
		{"103", 3, "D_D"},
		{strings.Repeat("1", 80), 80, strings.Repeat("D", 40)},
		{strings.Repeat("1", 40) + "0" + strings.Repeat("4", 39), 80, strings.Repeat("D", 20) + "_" + strings.Repeat("d", 19)},
		{strings.Repeat("1", 79), 80, strings.Repeat("D", 39) + "."},
	} {
		if got := blockBar(c.digits, c.n); got != c.want {
			t.Errorf("blockBar(%q, %d) = %q, want %q", c.digits, c.n, got, c.want)
		}
	}
}

func TestReadTokens(t *testing.T) {
	for text, want := range map[string][]uint32{
		"[1, 2,3]\n": {1, 2, 3}, "1 2\n3\t4": {1, 2, 3, 4}, "4294967295": {4294967295},
		"": nil, "[]": nil, "1 -2": nil, "4294967296": nil, "[[1]]": nil, "1.5": nil,
	} {
		got, err := readTokens("-", strings.NewReader(text))
		if !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%q: %v, %v, want %v", text, got, err, want)
		}
	}
	if _, err := readTokens("/no/such/file", nil); err == nil || !strings.Contains(err.Error(), "--tokens") {
		t.Errorf("no such file: %v", err)
	}
}
