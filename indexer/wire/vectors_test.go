package wire

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

type eventVector struct {
	Name    string          `json:"name"`
	Payload string          `json:"payload_hex"`
	Expect  json.RawMessage `json:"expect"`
}

func readVectors[T any](t testing.TB, file string) []T {
	t.Helper()
	data, err := os.ReadFile("testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var v []T
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	if len(v) == 0 {
		t.Fatalf("%s is empty", file)
	}
	return v
}

func fromHex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEventVectors(t *testing.T) {
	f, err := os.Open("testdata/kv-event-vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n, diffs, err := CheckVectors(f)
	if err != nil {
		t.Fatal(err)
	}
	if n != 105 {
		t.Errorf("%d vectors, want 105", n)
	}
	for _, d := range diffs {
		t.Error(d)
	}
}

// CheckVectors lets truncated and length_exceeds_input pass for each other; the decoder
// tells them apart as the vectors do.
func TestEventVectorCodes(t *testing.T) {
	refused := 0
	for _, v := range readVectors[eventVector](t, "kv-event-vectors.json") {
		var want string
		if json.Unmarshal(v.Expect, &want) != nil {
			continue
		}
		refused++
		_, err := Decode(fromHex(t, v.Payload))
		var e *Error
		if !errors.As(err, &e) || "error: "+e.Code.String() != want {
			t.Errorf("%s: got %v, want %s", v.Name, err, want)
		}
	}
	if refused == 0 {
		t.Error("no vector is refused")
	}
}

func TestCheckVectorsReportsDifferences(t *testing.T) {
	const removed = "93cb41da556e401000009192ac426c6f636b52656d6f7665649201cfffffffffffffffff00"
	for _, c := range []struct {
		name, payload, expect string
		want                  []string
	}{
		{"equal", removed, `{"ts":1767225600.25,"dp_rank":0,"events":[{"type":"removed","hashes":["0000000000000001","ffffffffffffffff"],"tier":"gpu"}],"skipped":[]}`, nil},
		{"ts in another spelling", removed, `{"ts":1.76722560025e9,"dp_rank":0,"events":[{"type":"removed","hashes":["0000000000000001","ffffffffffffffff"],"tier":"gpu"}],"skipped":[]}`, nil},
		{"values", removed, `{"ts":1,"dp_rank":1,"events":[{"type":"stored","hashes":["0000000000000001"],"medium":"GPU"}],"skipped":null}`, []string{
			"v: dp_rank: got 0, want 1",
			"v: events[0].hashes: got 2 elements, want 1",
			"v: events[0].medium: missing, want \"GPU\"",
			"v: events[0].type: got \"removed\", want \"stored\"",
			"v: events[0].tier: got \"gpu\", want it absent",
			"v: skipped: got [], want null",
			"v: ts: got 1767225600.25, want 1",
		}},
		{"refused", "c0", `{"ts":1}`, []string{`v: batch: got "error: batch_shape", want {"ts":1}`}},
		{"another code", "c0", `"error: depth_limit"`, []string{`v: batch: got "error: batch_shape", want "error: depth_limit"`}},
		{"same class of code", "92c0", `"error: length_exceeds_input"`, nil},
		{"same class of code, the other way", "92", `"error: truncated"`, nil},
		{"not refused", removed, `"error: truncated"`, []string{`v: batch: got {"dp_rank":0,"events":[{"hashes":["0000000000000001","ffffffffffffffff"],"tier":"gpu","type":"removed"}],"skipped":[],"t…, want "error: truncated"`}},
	} {
		in := `[{"name":"v","payload_hex":"` + c.payload + `","expect":` + c.expect + `}]`
		n, got, err := CheckVectors(strings.NewReader(in))
		if err != nil || n != 1 || !slices.Equal(got, c.want) {
			t.Errorf("%s: got %d %q, %v\nwant %q", c.name, n, got, err, c.want)
		}
	}
}

func TestCheckVectorsExactIntegers(t *testing.T) {
	// A stored event whose extra keys are [[2^64-1]].
	const payload = "93c09199ab426c6f636b53746f72656490c09004c0c0c09191cfffffffffffffffffc0"
	in := func(n string) string {
		return `[{"name":"v","payload_hex":"` + payload + `","expect":{"ts":null,"dp_rank":null,` +
			`"events":[{"type":"stored","hashes":[],"tier":"gpu","parent":null,"tokens":[],"token_kind":"none",` +
			`"block_size":4,"dense":false,"extra_keys":[[` + n + `]]}],"skipped":[]}}]`
	}
	if _, diffs, err := CheckVectors(strings.NewReader(in("18446744073709551615"))); err != nil || len(diffs) != 0 {
		t.Errorf("equal: got %q, %v", diffs, err)
	}
	if _, diffs, err := CheckVectors(strings.NewReader(in("18446744073709551614"))); err != nil || len(diffs) != 1 {
		t.Errorf("last digit off: got %q, %v, want one difference", diffs, err)
	}
}

func TestCheckVectorsBadFiles(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{``, "read vectors: EOF"},
		{`{"name":"x"}`, "read vectors: json: cannot unmarshal object"},
		{`[] []`, "something follows the list"},
		{`[{"name":"x","frames":[]}]`, `vector 0 ("x"): want payload_hex and expect`},
		{`[{"name":"x","payload_hex":"9","expect":{}}]`, `vector 0 ("x"): payload_hex: encoding/hex: odd length`},
	} {
		_, _, err := CheckVectors(strings.NewReader(c.in))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: got %v, want %q", c.in, err, c.want)
		}
	}
}

func TestReplayVectors(t *testing.T) {
	sockets := map[string]int{}
	for _, v := range readVectors[struct {
		Name   string   `json:"name"`
		Dir    string   `json:"dir"`
		Socket string   `json:"socket"`
		Frames []string `json:"frames"`
		Expect struct {
			Kind, Error string
			Topic       *string
			Seq         uint64
		} `json:"expect"`
	}](t, "kv-replay-vectors.json") {
		frames := make([][]byte, len(v.Frames))
		for i, f := range v.Frames {
			frames[i] = fromHex(t, f)
		}
		sockets[v.Dir+" "+v.Socket]++
		var err error
		var reply Reply
		switch v.Dir + " " + v.Socket {
		case "send DEALER":
			start := uint64(41)
			got := ReplayRequest(start)
			// The vector without a delimiter is what an engine does not answer.
			equal := slices.EqualFunc(got, frames, slices.Equal[[]byte])
			if want := v.Name == "request/dealer"; equal != want {
				t.Errorf("%s: ReplayRequest(%d) = %x, equal: %v, want %v", v.Name, start, got, equal, want)
			}
			continue
		case "send REQ": // the socket adds the delimiter
			if got := ReplayRequest(0); len(frames) != 1 || !slices.Equal(got[1], frames[0]) || len(got[0]) != 0 {
				t.Errorf("%s: ReplayRequest(0) = %x", v.Name, got)
			}
			continue
		case "recv SUB":
			var m Message
			m, err = ParseLive(frames)
			reply = Reply{Topic: m.Topic, HasTopic: true, Seq: m.Seq, Payload: m.Payload}
		case "recv DEALER":
			reply, err = ParseReplay(frames)
		}
		switch v.Expect.Kind {
		case "error":
			if e := new(Error); !errors.As(err, &e) || e.Code.String() != v.Expect.Error {
				t.Errorf("%s: got %v, want %s", v.Name, err, v.Expect.Error)
			}
		case "end":
			if err != nil || reply.Kind != ReplyEnd || reply.Payload != nil {
				t.Errorf("%s: got %+v, %v, want the END mark", v.Name, reply, err)
			}
		case "batch":
			topic := v.Expect.Topic
			if err != nil || reply.Kind != ReplyBatch || reply.Seq != v.Expect.Seq ||
				reply.HasTopic != (topic != nil) || topic != nil && reply.Topic != *topic {
				t.Errorf("%s: got %+v, %v, want %+v", v.Name, reply, err, v.Expect)
			}
			if _, err := Decode(reply.Payload); err != nil {
				t.Errorf("%s: payload: %v", v.Name, err)
			}
		default:
			t.Errorf("%s: kind %q", v.Name, v.Expect.Kind)
		}
	}
	if want := map[string]int{"send DEALER": 2, "send REQ": 1, "recv SUB": 4, "recv DEALER": 7}; !maps.Equal(sockets, want) {
		t.Errorf("vectors by socket: %v, want %v", sockets, want)
	}
}

func TestFramesRefused(t *testing.T) {
	seq := func(b byte) []byte { return []byte{b, b, b, b, b, b, b, b} }
	nine := append(seq(0), 1)
	for _, c := range []struct {
		name   string
		live   bool
		frames [][]byte
		want   Code
	}{
		{"live, none", true, nil, FrameCount},
		{"live, four", true, [][]byte{{}, {}, seq(1), {0x90}}, FrameCount},
		{"live, seq of 9 bytes", true, [][]byte{{}, nine, {0x90}}, SeqLength},
		{"live, seq reserved for END", true, [][]byte{{}, seq(0xff), {0x90}}, EndPayload},
		{"replay, none", false, nil, FrameCount},
		{"replay, five", false, [][]byte{{}, {}, {}, seq(1), {0x90}}, FrameCount},
		{"replay, topic first", false, [][]byte{{'k'}, {}, seq(1), {0x90}}, Delimiter},
		{"replay, seq of 9 bytes", false, [][]byte{{}, nine, {0x90}}, SeqLength},
		{"replay, seq empty", false, [][]byte{{}, seq(1), {}, {0x90}}, SeqLength},
		{"replay, batch without payload", false, [][]byte{{}, seq(1), {}}, EndPayload},
	} {
		var err error
		if c.live {
			_, err = ParseLive(c.frames)
		} else {
			_, err = ParseReplay(c.frames)
		}
		if e := new(Error); !errors.As(err, &e) || e.Code != c.want {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
	}
}
