package configfile

import "strings"

// Nearest is the candidate that name was probably meant to be: the one with the fewest edits
// (insert, delete, replace a character), where these are at most two or a third of it and
// something of both is left; candidates in front win ties. Case and the choice of - or _ do not
// count.
func Nearest(name string, candidates []string) (string, bool) {
	plain := func(s string) string { return strings.ReplaceAll(strings.ToLower(s), "_", "-") }
	best, found := "", false
	limit := max(2, len(name)/3) + 1
	for _, c := range candidates {
		if d := edits(plain(name), plain(c)); d < min(limit, len(name), len(c)) {
			best, found, limit = c, true, d
		}
	}
	return best, found
}

func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
