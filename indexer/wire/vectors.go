package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// CheckVectors decodes every payload of a file of test vectors and compares it with what
// the file expects. The file is a JSON list of
//
//	{"name": …, "payload_hex": …, "expect": <the form of Batch.JSON> or "error: <code>"}
//
// n is how many vectors there are, and each diff one difference, as "<name>: <path>: got …,
// want …". The codes truncated and length_exceeds_input count as one. err says why the file
// itself cannot be read.
func CheckVectors(r io.Reader) (n int, diffs []string, err error) {
	var vectors []struct {
		Name    string          `json:"name"`
		Payload *string         `json:"payload_hex"`
		Expect  json.RawMessage `json:"expect"`
	}
	dec := json.NewDecoder(r)
	if err := dec.Decode(&vectors); err != nil {
		return 0, nil, fmt.Errorf("read vectors: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return 0, nil, errors.New("read vectors: something follows the list")
	}
	for i, v := range vectors {
		if v.Payload == nil || v.Expect == nil {
			return 0, nil, fmt.Errorf("vector %d (%q): want payload_hex and expect", i, v.Name)
		}
		payload, err := hex.DecodeString(*v.Payload)
		if err != nil {
			return 0, nil, fmt.Errorf("vector %d (%q): payload_hex: %w", i, v.Name, err)
		}
		want, err := parseJSON(v.Expect)
		if err != nil {
			return 0, nil, fmt.Errorf("vector %d (%q): expect: %w", i, v.Name, err)
		}
		got, err := rendered(payload)
		if err != nil {
			return 0, nil, fmt.Errorf("vector %d (%q): %w", i, v.Name, err)
		}
		for _, d := range diffJSON("", got, want) {
			diffs = append(diffs, v.Name+": "+d)
		}
	}
	return len(vectors), diffs, nil
}

// rendered is what a payload decodes to, as JSON values.
func rendered(payload []byte) (any, error) {
	batch, err := Decode(payload)
	if refused := (*Error)(nil); errors.As(err, &refused) {
		return "error: " + refused.Code.String(), nil
	}
	return parseJSON(batch.JSON())
}

func parseJSON(b []byte) (v any, err error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber() // 64-bit integers do not survive float64
	err = dec.Decode(&v)
	return v, err
}

func diffJSON(path string, got, want any) []string {
	switch w := want.(type) {
	case map[string]any:
		g, ok := got.(map[string]any)
		if !ok {
			break
		}
		var diffs []string
		for _, k := range slices.Sorted(maps.Keys(w)) {
			if v, ok := g[k]; ok {
				diffs = append(diffs, diffJSON(join(path, k), v, w[k])...)
			} else {
				diffs = append(diffs, fmt.Sprintf("%s: missing, want %s", join(path, k), brief(w[k])))
			}
		}
		for _, k := range slices.Sorted(maps.Keys(g)) {
			if _, ok := w[k]; !ok {
				diffs = append(diffs, fmt.Sprintf("%s: got %s, want it absent", join(path, k), brief(g[k])))
			}
		}
		return diffs
	case []any:
		g, ok := got.([]any)
		if !ok {
			break
		}
		var diffs []string
		for i := range min(len(g), len(w)) {
			diffs = append(diffs, diffJSON(path+"["+strconv.Itoa(i)+"]", g[i], w[i])...)
		}
		if len(g) != len(w) {
			diffs = append(diffs, fmt.Sprintf("%s: got %d elements, want %d", path, len(g), len(w)))
		}
		return diffs
	case json.Number:
		if g, ok := got.(json.Number); ok && sameNumber(g, w) {
			return nil
		}
	default:
		if got == want || structural(got) && structural(want) {
			return nil
		}
	}
	if path == "" {
		path = "batch"
	}
	return []string{fmt.Sprintf("%s: got %s, want %s", path, brief(got), brief(want))}
}

// structural reports one of the two ways to say that a payload ends too early.
func structural(v any) bool {
	return v == "error: "+Truncated.String() || v == "error: "+LengthExceedsInput.String()
}

// sameNumber compares integers exactly and anything else as floats.
func sameNumber(a, b json.Number) bool {
	if a == b {
		return true
	}
	if !strings.ContainsAny(string(a+b), ".eE") {
		return false
	}
	fa, errA := a.Float64()
	fb, errB := b.Float64()
	return errA == nil && errB == nil && fa == fb
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// brief is a value as JSON, cut where it is long.
func brief(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	const most = 120
	if len(text) > most {
		return strings.ToValidUTF8(string(text[:most]), "") + "…"
	}
	return string(text)
}
