package replay

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// answer is what is looked at of a streamed completion.
type answer struct {
	first  time.Time // when its first token came
	cached int       // tokens of the prompt that were in the engine's cache
}

// readAnswer reads server-sent events up to [DONE]. A stream without a token, usage or [DONE] is a broken one.
func readAnswer(r io.Reader) (a answer, err error) {
	usage := false
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data:")
		if !ok {
			continue
		}
		if data = strings.TrimSpace(data); data == "[DONE]" {
			if a.first.IsZero() || !usage {
				return a, errors.New("the stream ended without a token or without usage")
			}
			return a, nil
		}
		var chunk struct {
			Error   json.RawMessage
			Choices []struct{ Text string }
			Usage   *struct {
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return a, fmt.Errorf("chunk of the stream: %w", err)
		}
		if chunk.Error != nil {
			return a, fmt.Errorf("error in the stream: %s", chunk.Error)
		}
		if len(chunk.Choices) > 0 && chunk.Choices[0].Text != "" && a.first.IsZero() {
			a.first = time.Now()
		}
		if chunk.Usage != nil {
			usage, a.cached = true, chunk.Usage.Details.Cached
		}
	}
	return a, errors.Join(lines.Err(), errors.New("the stream ended without [DONE]"))
}
