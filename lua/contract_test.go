package lua

import (
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// allowed is what scripts may call: commands that Redis 6.2 and miniredis both have.
var allowed = map[string]bool{
	"HMGET": true, "HGET": true, "HSET": true, "HDEL": true, "HLEN": true, "HGETALL": true, "HVALS": true, "HINCRBY": true,
	"ZADD": true, "ZREM": true, "ZSCORE": true, "ZMSCORE": true, "ZRANGE": true, "ZRANGEBYSCORE": true, "ZREMRANGEBYRANK": true, "ZCARD": true, "ZCOUNT": true,
	"GET": true, "SET": true, "DEL": true, "UNLINK": true, "EXISTS": true, "RENAME": true, "TIME": true, "PEXPIRE": true, "TYPE": true,
}

var (
	documented = regexp.MustCompile(`(?m)^-- (KEYS|ARGV)\[(\d+)(\.\.)?\]`)
	used       = regexp.MustCompile(`\b(KEYS|ARGV)\[(\d+)\]`)
	calls      = regexp.MustCompile(`\b(?:redis\.)?call\(([^,)]*)(?:,\s*([^,)\s]*))?`)
)

// TestHeadersAreTheContract compares each script's header with its code, and the code with the rules.
func TestHeadersAreTheContract(t *testing.T) {
	names, err := fs.Glob(files, "*.lua")
	if err != nil || len(names) < 6 {
		t.Fatalf("scripts: %v %v", names, err)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			text := source(name)
			for _, must := range []string{"-- KEYS[1]", "-- ARGV[1]", "-- Returns ", "-- Effects: "} {
				if !strings.Contains(text, must) {
					t.Errorf("the header lacks %q", must)
				}
			}
			var code strings.Builder
			for line := range strings.Lines(text) {
				if before, _, _ := strings.Cut(line, "--"); strings.TrimSpace(before) != "" {
					code.WriteString(before + "\n")
				}
			}
			body := code.String()

			top := map[string]int{}
			open := map[string]bool{} // documented as "from here on"
			for _, m := range documented.FindAllStringSubmatch(text, -1) {
				n, _ := strconv.Atoi(m[2])
				if n != top[m[1]]+1 {
					t.Errorf("%s[%d] is documented after %s[%d]", m[1], n, m[1], top[m[1]])
				}
				top[m[1]] = n
				open[m[1]] = open[m[1]] || m[3] != ""
			}
			for _, m := range used.FindAllStringSubmatch(body, -1) {
				if n, _ := strconv.Atoi(m[2]); n > top[m[1]] && !open[m[1]] {
					t.Errorf("%s[%d] is used and not documented", m[1], n)
				}
			}
			if strings.Contains(body, "tostring") {
				t.Error("tostring prints large numbers differently on Redis and miniredis")
			}
			for _, m := range calls.FindAllStringSubmatch(body, -1) {
				command := strings.Trim(m[1], `'`)
				if !allowed[command] {
					t.Errorf("%s is not on the list of commands", m[1])
				}
				if strings.ContainsAny(m[2], `'"`) {
					t.Errorf("%s on a key that the script makes up: %s", command, m[2])
				}
			}
			if strings.Contains(body, "unpack(") && !strings.Contains(body, "1000") {
				t.Error("unpack without a limit of 1000 values")
			}
		})
	}
}
