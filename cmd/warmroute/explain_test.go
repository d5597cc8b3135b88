package main

import (
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
