package integration

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
)

// publisher is a libzmq publisher in a process of its own.
type publisher struct {
	t        *testing.T
	endpoint string
	in       io.WriteCloser
	out      *bufio.Scanner
}

const python = "/usr/bin/python3"

func startPublisher(t *testing.T) *publisher {
	t.Helper()
	if exec.Command(python, "-c", "import zmq").Run() != nil {
		needs(t, python+" with zmq")
	}
	cmd := exec.CommandContext(t.Context(), python, "testdata/publisher.py")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	p := &publisher{t: t, in: in, out: bufio.NewScanner(out)}
	p.endpoint = p.line()
	return p
}

func (p *publisher) line() string {
	p.t.Helper()
	if !p.out.Scan() {
		p.t.Fatalf("the publisher ended: %v", p.out.Err())
	}
	return p.out.Text()
}

// send sends one message.
func (p *publisher) send(frames ...[]byte) {
	p.t.Helper()
	texts := make([]string, len(frames))
	for i, f := range frames {
		texts[i] = hex.EncodeToString(f)
	}
	line, err := json.Marshal(texts)
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.in.Write(append(line, '\n')); err != nil {
		p.t.Fatal(err)
	}
}

// batch sends a live message with a payload given as hex digits.
func (p *publisher) batch(seq uint64, payload string) {
	p.t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(payload, " ", ""))
	if err != nil {
		p.t.Fatal(err)
	}
	p.send([]byte("kv"), binary.BigEndian.AppendUint64(nil, seq), b)
}

func TestMalformedEventsDoNotStopTheIndexer(t *testing.T) {
	redis := startRedis(t)
	pub := startPublisher(t)
	indexer, admin := startIndexer(t, redis.url(), "--worker=id=e0,model="+model+",events="+pub.endpoint+",block-size=4")
	if got := pub.line(); got != "subscribed" {
		t.Fatalf("the publisher says %q", got)
	}

	pub.send([]byte("only one frame"))
	pub.send([]byte("kv"), []byte("no sequence number"), []byte{0x90})
	pub.batch(0, "c1")                     // a byte that MessagePack does not use
	pub.batch(1, "93 cb 41")               // cut short
	pub.batch(2, "dd ff ff ff ff")         // claims 4 billion elements
	pub.batch(3, strings.Repeat("91", 64)) // nested without end
	pub.batch(4, "92 c0 91 a5 48656c6c6f") // an event that is no event
	pub.batch(5, "92 c0 91 91 a5 48656c6c6f")
	pub.batch(6, "92 c0 91 96 ab 426c6f636b53746f726564 91 a3 616263 c0 94 01 02 03 04 04 c0") // a hash that is text
	pub.batch(7, "92 c0 91 96 ab 426c6f636b53746f726564 91 07 c0 94 01 02 03 04 04 c0")        // at last

	want := kvcache.HashTokens(kvcache.HashSpec{BlockSize: 4}, []uint32{1, 2, 3, 4})[0]
	eventually(t, "the block of the one good event is in the index", func() bool {
		return strings.Contains(get(t, admin+"/dump"), want.String())
	})
	metrics := get(t, admin+"/metrics")
	for _, series := range []string{
		`warmroute_kv_event_errors_total{error="frame_count"} 1`,
		`warmroute_kv_event_errors_total{error="seq_length"} 1`,
		`warmroute_kv_event_errors_total{error="reserved_byte"} 1`,
		`warmroute_kv_event_errors_total{error="depth_limit"} 1`,
		`warmroute_kv_event_errors_total{error="unknown_tag"} 1`,
		`warmroute_kv_event_errors_total{error="field_type:block_hashes"} 1`,
	} {
		if !strings.Contains(metrics, series+"\n") {
			t.Errorf("metrics lack %s", series)
		}
	}
	indexer.terminate()
}

func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: status %d, %v", url, resp.StatusCode, err)
	}
	return string(body)
}
