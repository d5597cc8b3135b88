package indexer

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

// maxMetrics bounds what is read of a worker's metrics.
const maxMetrics = 8 << 20

// work is what a rank has done since its engine started, by the engine's own count.
type work struct{ tokens, requests float64 }

// fills says whether at least one block must have been filled: requests have at least a block's tokens on average.
func (w work) fills(blockSize int) bool {
	return blockSize > 0 && w.tokens >= float64(blockSize)*max(w.requests, 1)
}

// workCheck reads what the ranks of a worker have done, by rank; -1 is an engine that does not tell its ranks apart.
type workCheck func(ctx context.Context, base string) (map[int]work, error)

// newWorkCheck reads the Prometheus metrics of vLLM and SGLang. Only workers that have never published are asked, and only
// until they do.
func newWorkCheck(client *http.Client) workCheck {
	return func(ctx context.Context, base string) (map[int]work, error) {
		ctx, cancel := context.WithTimeout(ctx, healthTimeout)
		defer cancel()
		u, err := url.JoinPath(base, "metrics")
		if err != nil {
			return nil, err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
		if err != nil {
			return nil, err
		}
		res, err := client.Do(req)
		if err != nil {
			return nil, err
		}
		defer func() { _ = res.Body.Close() }()
		if res.StatusCode != http.StatusOK {
			return nil, fmt.Errorf("GET /metrics: status %s", res.Status)
		}
		return readWork(io.LimitReader(res.Body, maxMetrics))
	}
}

// counters are the samples of interest in the Prometheus text format. Some exporters write the colon as an underscore.
var (
	counters = regexp.MustCompile(
		`^(?:vllm|sglang)[:_](prompt_tokens_total|generation_tokens_total|request_success_total|num_requests_total)(?:\{(.*)\})? +([0-9.eE+]+)`)
	rankLabel = regexp.MustCompile(`(?:^|,)(?:engine|dp_rank)="([0-9]+)"`)
)

// readWork adds up the counters of tokens and requests.
func readWork(r io.Reader) (map[int]work, error) {
	out := map[int]work{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		sample := counters.FindStringSubmatch(lines.Text())
		if sample == nil {
			continue
		}
		value, err := strconv.ParseFloat(sample[3], 64)
		if err != nil {
			continue
		}
		rank := -1
		if label := rankLabel.FindStringSubmatch(sample[2]); label != nil {
			if rank, err = strconv.Atoi(label[1]); err != nil {
				continue
			}
		}
		w := out[rank]
		if strings.Contains(sample[1], "tokens") {
			w.tokens += value
		} else {
			w.requests += value
		}
		out[rank] = w
	}
	return out, lines.Err()
}

// neverHeard says whether the stream's publisher ought to speak and never has.
func (s *stream) neverHeard() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := &s.status
	heard := v.Endpoint == "" || !v.LastEvent.IsZero() || v.Watermark >= 0
	if heard {
		s.worked, v.Silent = 0, false
	}
	return !heard
}

// has notes what a rank that has never published has done. The second look in a row that finds filled blocks reports it: an event
// may be under way at the first.
func (s *stream) has(done map[int]work) {
	w, ok := done[s.id.Rank]
	if !ok && s.id.Rank == 0 {
		w = done[-1]
	}
	s.mu.Lock()
	if w.fills(s.status.BlockSize) {
		s.worked++
	} else {
		s.worked = 0
	}
	report := s.worked == 2 && !s.status.Silent
	s.status.Silent = s.worked >= 2
	s.mu.Unlock()
	if report {
		s.log.Error("the worker serves requests and has never published a KV event: are its KV events and its prefix cache on, and is this its endpoint?",
			"endpoint", s.reg.Endpoint, "tokens", w.tokens)
	}
}

// checkWork looks for those of a worker's streams that ought to have published.
func (ix *Indexer) checkWork(ctx context.Context, base string, streams []*stream) {
	var mute []*stream
	for _, s := range streams {
		if s.neverHeard() {
			mute = append(mute, s)
		}
	}
	if len(mute) == 0 {
		return
	}
	done, err := ix.work(ctx, base)
	if err != nil {
		ix.opts.Logger.Debug("what the worker has done is not known", "url", base, "error", err)
		return
	}
	for _, s := range mute {
		s.has(done)
	}
}
