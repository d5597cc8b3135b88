package sim

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/warmroute/warmroute/kvcache"
)

// patience bounds every wait in these tests; nothing depends on how much of it is used.
const patience = 20 * time.Second

func startEngine(t *testing.T, o Options) *Engine {
	t.Helper()
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- e.Run(t.Context()) }()
	t.Cleanup(func() {
		e.Close()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return e
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// client has no keep-alive, so that a test's requests are independent of each other.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}

type object = map[string]any

// call sends a request with a JSON body (none where it is nil) and reads the whole answer.
func call(t *testing.T, method, url string, body any, headers ...string) (status int, answer string, header http.Header) {
	t.Helper()
	res := send(t, method, url, body, headers...)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	return res.StatusCode, string(b), res.Header
}

func send(t *testing.T, method, url string, body any, headers ...string) *http.Response {
	t.Helper()
	res, err := client.Do(request(t, method, url, body, headers...))
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func request(t *testing.T, method, url string, body any, headers ...string) *http.Request {
	t.Helper()
	var b []byte
	switch v := body.(type) {
	case nil:
	case string:
		b = []byte(v)
	default:
		var err error
		if b, err = json.Marshal(v); err != nil {
			t.Fatal(err)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), method, url, bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return req
}

// reply is what the tests read of an answer.
type reply struct {
	ID      string
	Model   string
	Object  string
	Choices []struct {
		Index          int
		Text           string
		Message, Delta struct{ Role, Content string }
		FinishReason   string   `json:"finish_reason"`
		TokenIDs       []uint32 `json:"token_ids"`
		PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	}
	Usage *usage
}

func post(t *testing.T, url string, body any, headers ...string) reply {
	t.Helper()
	status, answer, _ := call(t, "POST", url, body, headers...)
	if status != 200 {
		t.Fatalf("POST %s: %d %s", url, status, answer)
	}
	var r reply
	if err := json.Unmarshal([]byte(answer), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// complete runs one completion of a token prompt and returns how much of it was cached.
func complete(t *testing.T, e *Engine, prompt []uint32, outLen int, headers ...string) (cached int) {
	t.Helper()
	return post(t, e.URL()+"/v1/completions", object{"prompt": prompt, "max_tokens": outLen}, headers...).Usage.Details.CachedTokens
}

// peer is a ZeroMQ client reduced to what a test needs; it shares no code with the server.
type peer struct {
	net.Conn
	in *bufio.Reader
	t  *testing.T
}

func dial(t *testing.T, endpoint string) *peer {
	t.Helper()
	var d net.Dialer
	c, err := d.DialContext(t.Context(), "tcp", strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return &peer{Conn: c, in: bufio.NewReader(c), t: t}
}

func (p *peer) raw(b string) {
	p.t.Helper()
	if _, err := io.WriteString(p, b); err != nil {
		p.t.Fatal(err)
	}
}

func greeting() string {
	return "\xff" + strings.Repeat("\x00", 8) + "\x7f\x03\x00NULL" + strings.Repeat("\x00", 48)
}

// connect shakes hands as the given socket type.
func connect(t *testing.T, endpoint, kind string) *peer {
	t.Helper()
	p := dial(t, endpoint)
	ready := "\x05READY\x0bSocket-Type\x00\x00\x00" + string(rune(len(kind))) + kind
	p.raw(greeting() + "\x04" + string(rune(len(ready))) + ready)
	if _, err := io.ReadFull(p.in, make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	if _, flags := p.frame(); flags != 4 {
		t.Fatalf("flags %d, want the READY command", flags)
	}
	return p
}

// subscribe connects a SUB and waits until the subscription counts: the server answers a
// PING after it, in order.
func subscribe(t *testing.T, e *Engine, rank int, topic string) *peer {
	t.Helper()
	p := connect(t, e.EventEndpoint(rank), "SUB")
	p.raw("\x00" + string(rune(len(topic)+1)) + "\x01" + topic)
	p.raw("\x04\x07\x04PING\x00\x00")
	if body, flags := p.frame(); flags != 4 || string(body) != "\x04PONG" {
		t.Fatalf("got %q (flags %d), want a PONG", body, flags)
	}
	return p
}

func (p *peer) frame() (body []byte, flags byte) {
	p.t.Helper()
	body, flags, err := p.tryFrame()
	if err != nil {
		p.t.Fatal(err)
	}
	return body, flags
}

func (p *peer) tryFrame() (body []byte, flags byte, err error) {
	flags, err = p.in.ReadByte()
	if err != nil {
		return nil, 0, err
	}
	size := make([]byte, 1+7*(flags>>1&1))
	if _, err = io.ReadFull(p.in, size); err != nil {
		return nil, 0, err
	}
	n := uint64(size[0])
	if len(size) == 8 {
		n = binary.BigEndian.Uint64(size)
	}
	body = make([]byte, n)
	_, err = io.ReadFull(p.in, body)
	return body, flags, err
}

func (p *peer) message() (frames [][]byte) {
	p.t.Helper()
	for {
		body, flags := p.frame()
		frames = append(frames, body)
		if flags&1 == 0 {
			return frames
		}
	}
}

// live reads one event message.
func (p *peer) live() (seq uint64, b decoded) {
	p.t.Helper()
	m := p.message()
	if len(m) != 3 || len(m[1]) != 8 {
		p.t.Fatalf("live message of %d frames: %q", len(m), m)
	}
	return binary.BigEndian.Uint64(m[1]), decode(p.t, m[2])
}

// replay asks a rank for its batches from start on.
func replay(t *testing.T, e *Engine, rank int, start uint64) (seqs []uint64, batches []decoded) {
	t.Helper()
	p := connect(t, e.ReplayEndpoint(rank), "DEALER")
	p.raw("\x01\x00\x00\x08" + string(binary.BigEndian.AppendUint64(nil, start)))
	for {
		m := p.message()
		seq := binary.BigEndian.Uint64(m[len(m)-2])
		if seq == 1<<64-1 {
			if len(m[len(m)-1]) != 0 {
				t.Fatal("an end marker with a payload")
			}
			return seqs, batches
		}
		seqs, batches = append(seqs, seq), append(batches, decode(t, m[len(m)-1]))
	}
}

// decoded is one batch as a consumer reads it, by a decoder that is not ours.
type decoded struct {
	ts     float64
	events []decodedEvent
	rank   int
}

type decodedEvent struct {
	tag                        string
	hashes                     []uint64
	parent                     *uint64
	tokens                     []uint32
	blockSize                  int
	loraID                     *int
	medium, loraName, specKind string
	extra                      [][]string
	groupIdx                   *int
	fields                     int // of the array, or keys of the map
}

func decode(t *testing.T, payload []byte) decoded {
	t.Helper()
	dec := msgpack.NewDecoder(bytes.NewReader(payload))
	dec.UseLooseInterfaceDecoding(true)
	v, err := dec.DecodeInterface()
	batch, ok := v.([]any)
	if err != nil || !ok || len(batch) != 3 {
		t.Fatalf("payload %.200x: %v, %v; want an array of 3", payload, v, err)
	}
	if _, err := dec.DecodeInterface(); !errors.Is(err, io.EOF) {
		t.Fatalf("payload %.200x: something follows the batch", payload)
	}
	d := decoded{ts: batch[0].(float64), rank: int(unsigned(batch[2]))}
	for _, e := range batch[1].([]any) {
		d.events = append(d.events, decodeEvent(t, e))
	}
	return d
}

var storedNames = []string{"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}

func decodeEvent(t *testing.T, v any) (e decodedEvent) {
	t.Helper()
	m, ok := v.(map[string]any)
	if list, isList := v.([]any); isList {
		names := storedNames
		if list[0] == "BlockRemoved" {
			names = []string{"type", "block_hashes", "medium", "group_idx"}
		}
		m, ok = object{}, true
		for i, x := range list {
			m[names[i]] = x
		}
	}
	if !ok {
		t.Fatalf("event %v is neither a map nor an array", v)
	}
	e.fields = len(m)
	for name, x := range m {
		switch name {
		case "type":
			e.tag = x.(string)
		case "block_hashes":
			for _, h := range x.([]any) {
				e.hashes = append(e.hashes, unsigned(h))
			}
		case "parent_block_hash":
			if x != nil {
				h := unsigned(x)
				e.parent = &h
			}
		case "token_ids":
			for _, id := range x.([]any) {
				e.tokens = append(e.tokens, uint32(unsigned(id)))
			}
		case "block_size":
			e.blockSize = int(unsigned(x))
		case "lora_id":
			e.loraID = optional(x)
		case "group_idx":
			e.groupIdx = optional(x)
		case "medium":
			e.medium, _ = x.(string)
		case "lora_name":
			e.loraName, _ = x.(string)
		case "kv_cache_spec_kind":
			e.specKind, _ = x.(string)
		case "extra_keys":
			for _, keys := range x.([]any) {
				var block []string
				if keys != nil {
					for _, k := range keys.([]any) {
						block = append(block, k.(string))
					}
				}
				e.extra = append(e.extra, block)
			}
		case "kv_cache_spec_sliding_window":
			if x != nil {
				t.Errorf("window %v, want null", x)
			}
		default:
			t.Errorf("unknown field %q", name)
		}
	}
	return e
}

func unsigned(v any) uint64 {
	switch n := v.(type) {
	case int64:
		return uint64(n)
	case uint64:
		return n
	}
	panic(fmt.Sprintf("%T is not an integer", v))
}

func optional(v any) *int {
	if v == nil {
		return nil
	}
	n := int(unsigned(v))
	return &n
}

// follower is an index of one rank built from nothing but its events.
type follower struct {
	content map[uint64]kvcache.BlockHash // by engine hash
	salt    map[uint64]string            // by engine hash: only the first block's event names it
	copies  map[uint64]int
}

func newFollower() *follower {
	return &follower{content: map[uint64]kvcache.BlockHash{}, salt: map[uint64]string{}, copies: map[uint64]int{}}
}

func (f *follower) apply(t *testing.T, b decoded) {
	t.Helper()
	for _, e := range b.events {
		switch e.tag {
		case "AllBlocksCleared":
			*f = *newFollower()
		case "BlockRemoved":
			for _, h := range e.hashes {
				if f.copies[h]--; f.copies[h] < 0 {
					t.Fatalf("%016x removed, but it was not stored", h)
				} else if f.copies[h] == 0 {
					delete(f.copies, h)
				}
			}
		case "BlockStored":
			spec := kvcache.HashSpec{BlockSize: e.blockSize, LoRA: e.loraName}
			if e.parent == nil && len(e.extra) > 0 && len(e.extra[0]) > 0 && e.extra[0][len(e.extra[0])-1] != e.loraName {
				spec.Salt = e.extra[0][len(e.extra[0])-1]
			}
			hasher := kvcache.NewHasher(spec)
			if e.parent != nil {
				parent, ok := f.content[*e.parent]
				if !ok {
					t.Fatalf("parent %016x was never stored", *e.parent)
				}
				spec.Salt = f.salt[*e.parent]
				hasher = kvcache.NewHasherAfter(spec, parent)
			}
			hasher.Append(e.tokens)
			for i, h := range e.hashes {
				f.content[h], f.salt[h] = hasher.Hashes()[i], spec.Salt
				f.copies[h]++
			}
		default:
			t.Fatalf("unknown event %q", e.tag)
		}
	}
}

// want compares with the engine's own view.
func (f *follower) want(t *testing.T, resident []ResidentBlock) {
	t.Helper()
	got := []ResidentBlock{}
	for h, n := range f.copies {
		got = append(got, ResidentBlock{Content: f.content[h], Engine: kvcache.EngineHash(h), Copies: n})
	}
	slices.SortFunc(got, func(a, b ResidentBlock) int { return strings.Compare(a.Content.String(), b.Content.String()) })
	if !slices.Equal(got, resident) {
		t.Fatalf("the events replay to %d blocks, the engine holds %d:\n%v\n%v", len(got), len(resident), got, resident)
	}
}

// readLines checks a program's output line by line.
func readLines(t *testing.T, r io.Reader) func(want string) {
	lines := bufio.NewScanner(r)
	return func(want string) {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("the program ended (%v), want %q", lines.Err(), want)
		}
		if got := lines.Text(); got != want {
			t.Fatalf("the program says %q, want %q", got, want)
		}
	}
}

// subscribers is how many peers of a rank's PUB have subscribed to something.
func (e *Engine) subscribers(rank int) (n int) {
	r, err := e.rank(rank)
	if err != nil {
		return 0
	}
	s := r.pub.out
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.mu.Lock()
		if len(c.topics) > 0 {
			n++
		}
		c.mu.Unlock()
	}
	return n
}
