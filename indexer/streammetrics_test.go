package indexer

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/warmroute/warmroute/indexer/zmtp/zmtptest"
)

func TestStreamsAreCountedByState(t *testing.T) {
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	away := e.Endpoint[:strings.LastIndexByte(e.Endpoint, ':')] + ":1" // nobody listens there
	r := prometheus.NewRegistry()
	ix := newIndexer(t, Options{Store: newStore(t), Registerer: r, Workers: []Worker{
		worker("w", e), {ID: "away", Model: "m", Endpoint: away, BlockSize: 4}, {ID: "http", Model: "unsized"},
	}})
	start(t, ix)
	e.Subscribed()
	want := func(text string) {
		t.Helper()
		eventually(t, func() string {
			if err := testutil.GatherAndCompare(r, strings.NewReader(text), "warmroute_kv_streams", "warmroute_kv_buffered_messages"); err != nil {
				return err.Error()
			}
			return ""
		})
	}
	want(`
		# HELP warmroute_kv_buffered_messages Messages of all streams that wait to be applied to the index.
		# TYPE warmroute_kv_buffered_messages gauge
		warmroute_kv_buffered_messages 0
		# HELP warmroute_kv_streams Event streams that this indexer follows, by state (live, disconnected, unregistered).
		# TYPE warmroute_kv_streams gauge
		warmroute_kv_streams{state="disconnected"} 1
		warmroute_kv_streams{state="live"} 1
		warmroute_kv_streams{state="unregistered"} 1
	`)
}

func TestLastEventIsThatOfTheStreamOrItsBeginning(t *testing.T) {
	st := newStore(t)
	e := zmtptest.Start(t, zmtptest.Config{XPUB: true})
	r := prometheus.NewRegistry()
	begun := time.Now()
	ix := newIndexer(t, Options{Store: st, Registerer: r, Workers: []Worker{worker("w", e), {ID: "mute", Model: "m", Ranks: 2}}})
	start(t, ix)
	e.Subscribed()
	before := lastEvents(t, r)
	for _, id := range []string{"default:m w 0", "default:m mute 0", "default:m mute 1"} {
		if v, ok := before[id]; !ok || v.Before(begun.Truncate(time.Millisecond)) || v.After(time.Now()) {
			t.Errorf("%s: last event %v (%v), want the time since when it is followed", id, v, ok)
		}
	}
	e.Publish("kv", 0, payload(stored(nil, 1)))
	wantHeld(t, st, testPool, gpu("w/0", 1)...)
	after := lastEvents(t, r)
	if want := workerStatus(t, ix, "w", 0).LastEvent; after["default:m w 0"].UnixMilli() != want.UnixMilli() {
		t.Errorf("last event %v, want %v", after["default:m w 0"], want)
	}
	if after["default:m mute 1"] != before["default:m mute 1"] {
		t.Errorf("a stream without events moved from %v to %v", before["default:m mute 1"], after["default:m mute 1"])
	}

	if code, body := request(t, ix, "POST", "/unregister", `{"instance_id": "mute", "model_name": "m"}`); code != 200 {
		t.Fatalf("unregister: %d %v", code, body)
	}
	if left := lastEvents(t, r); len(left) != 1 {
		t.Errorf("after a worker has left: %v", left)
	}
}

// lastEvents reads the gauge by "pool worker rank".
func lastEvents(t *testing.T, g prometheus.Gatherer) map[string]time.Time {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]time.Time{}
	for _, f := range families {
		if f.GetName() != "warmroute_kv_stream_last_event_timestamp_seconds" {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			out[labels["pool"]+" "+labels["worker"]+" "+labels["rank"]] = time.UnixMilli(int64(m.GetGauge().GetValue()*1000 + 0.5))
		}
	}
	return out
}
