package guard

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func networks(t *testing.T, allow ...string) *Networks {
	t.Helper()
	n, err := NewNetworks(NetworkOptions{Allow: allow})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestNetworks(t *testing.T) {
	for _, test := range []struct {
		allow, host, address string // the address that the host stands for
		want                 string // a part of the refusal, "" for none
	}{
		{"", "", "10.0.0.1", ""},
		{"", "", "127.0.0.1", ""},
		{"", "", "2001:db8::1", ""},
		{"", "", "169.254.169.254", "link-local"},
		{"", "metadata.google.internal", "169.254.169.254", "link-local"},
		{"", "", "::ffff:169.254.169.254", "link-local"},
		{"", "", "64:ff9b::a9fe:a9fe", "link-local"},
		{"", "", "fe80::1%eth0", "link-local"},
		{"", "", "0.0.0.0", "unspecified"},
		{"", "", "::", "unspecified"},
		{"", "", "224.0.0.1", "multicast"},
		{"", "", "100.100.100.200", "metadata"},
		{"", "", "fd00:ec2::254", "metadata"},
		{"", "", "fd00:ec2::23", "metadata"},
		{"", "", "fd00:c1::a9fe:a9fe", "metadata"},
		{"", "", "fd00:1::1", ""},
		{"", "", "64:ff9b:1::a9fe:a9fe", "link-local"},
		{"", "", "::169.254.169.254", "link-local"},
		{"", "", "::1", ""},
		{"fd00::/8", "", "fd00:ec2::254", "metadata"},
		{"fd00:ec2::254", "", "fd00:ec2::254", ""},
		{"169.254.7.0/24", "", "169.254.7.9", ""},
		{"169.254.7.0/24", "", "169.254.169.254", "link-local"},
		{"169.254.169.254", "", "169.254.169.254", ""},
		{"0.0.0.0/0", "", "169.254.169.254", "link-local"}, // nobody who writes everything means this
		{"0.0.0.0/0", "", "8.8.8.8", ""},
		{"10.0.0.0/8", "", "10.255.0.1", ""},
		{"10.0.0.0/8", "", "::ffff:10.1.2.3", ""},
		{"10.0.0.0/8", "", "11.0.0.1", "none of the networks"},
		{"10.0.0.0/8", "", "127.0.0.1", "none of the networks"},
		{"10.0.0.0/8", "evil.example.com", "127.0.0.1", "evil.example.com (127.0.0.1)"},
		{"10.0.0.0/8 fd00::/8", "", "fd00::1", ""},
		{".engines.example.com", "w0.engines.example.com", "203.0.113.5", ""},
		{".engines.example.com", "W0.Engines.Example.COM.", "203.0.113.5", ""},
		{".engines.example.com", "engines.example.com", "203.0.113.5", "none of the networks"},
		{".engines.example.com", "xengines.example.com", "203.0.113.5", "none of the networks"},
		{".engines.example.com", "w0.engines.example.com.evil.com", "203.0.113.5", "none of the networks"},
		{".engines.example.com", "w0.engines.example.com", "169.254.169.254", "link-local"},
		{"engine", "engine", "203.0.113.5", ""},
		{"engine 10.0.0.0/8", "other", "10.0.0.1", ""},
	} {
		n := networks(t, strings.Fields(test.allow)...)
		if test.host == "" {
			test.host = test.address
		}
		n.lookup = func(context.Context, string, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr(test.address)}, nil
		}
		err := n.Check(t.Context(), "tcp", test.host)
		dialled := n.Control(test.host)("tcp", netip.AddrPortFrom(netip.MustParseAddr(test.address), 80).String(), nil)
		for what, err := range map[string]error{"register": err, "dial": dialled} {
			var refused *AddressError
			if test.want == "" && err != nil || test.want != "" && (!errors.As(err, &refused) || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("%s of %s at %s, allowed %q: %v, want %q", what, test.host, test.address, test.allow, err, test.want)
			}
		}
	}
}

func TestNetworksThatMeanNothing(t *testing.T) {
	for _, s := range []string{"", " ", "10.0.0.1/8", "10.0.0.0/33", "10.0.0", "a b", "http://x", "x:80", "a..b", "ipc://", "ipc://x", "*", "*.example.com", "::1/129"} {
		if _, err := NewNetworks(NetworkOptions{Allow: []string{s}}); err == nil {
			t.Errorf("%q passes", s)
		}
	}
}

// What a name stands for is known when it is dialled, whatever it stood for before.
func TestNamesAreJudgedByTheirAddresses(t *testing.T) {
	n := networks(t, "10.0.0.0/8")
	stands := []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	n.lookup = func(context.Context, string, string) ([]netip.Addr, error) { return stands, nil }
	if err := n.Check(t.Context(), "tcp", "rebinding.example.com"); err != nil {
		t.Error(err)
	}
	if err := n.Control("rebinding.example.com")("tcp4", "127.0.0.1:6379", nil); err == nil {
		t.Error("the second answer passes")
	}
	stands = append(stands, netip.MustParseAddr("127.0.0.1"))
	if err := n.Check(t.Context(), "tcp", "half.example.com"); err != nil {
		t.Errorf("one of two addresses is right: %v", err)
	}
	n.lookup = func(context.Context, string, string) ([]netip.Addr, error) { return nil, errors.New("no such host") }
	if err := n.Check(t.Context(), "tcp", "later.example.com"); err != nil {
		t.Errorf("a name that does not resolve yet: %v", err)
	}
	only := networks(t, ".example.com")
	only.lookup = func(context.Context, string, string) ([]netip.Addr, error) {
		t.Error("a name that cannot be right is looked up")
		return nil, nil
	}
	if err := only.Check(t.Context(), "tcp", "evil.org"); err == nil {
		t.Error("a name of another domain passes")
	}
}

// What only some resolvers take for a host is none, however it ends.
func TestHostsThatAreNone(t *testing.T) {
	n := networks(t, "10.0.0.0/8", ".example.com")
	n.lookup = func(_ context.Context, _, host string) ([]netip.Addr, error) {
		t.Errorf("%q is looked up", host)
		return nil, nil
	}
	for _, host := range []string{"", "0", "2130706433", "0177.0.0.1", "127.1", "127.0.0.1.", "127.0.0.1#.example.com", "10.0.0.1@127.0.0.1", "x\x00.example.com", "eth0;10.0.0.1", "１２７.0.0.1", "a..example.com", "10.0.0.1 "} {
		if err := n.Check(t.Context(), "tcp", host); err == nil || !strings.Contains(err.Error(), "neither an address nor the name of a host") {
			t.Errorf("%q: %v", host, err)
		}
	}
}

func TestWorkerURL(t *testing.T) {
	for raw, want := range map[string]string{
		"http://w:8000": "", "https://[fd00::1]/base": "", "http://w": "",
		"": "want http", "w:8000": "want http", "//w:8000": "want http", "ftp://w": "want http", "http://": "want http", "http://:6379": "want http",
		"http://w:port": "want http", "http:w": "want http", "unix:///run/x": "want http", "http://w:1\r\nX: y": "want http",
		"http://w:s3cret@w:8000": "--worker-token", "http://s3cret@w:8000": "--worker-token", "http://10.0.0.1:80@169.254.169.254": "--worker-token",
		"http://w:s3cret@w:port": "want http", "ftp://w:s3cret@w": "--worker-token",
	} {
		u, err := WorkerURL(raw)
		if want == "" && (err != nil || u.Hostname() == "") || want != "" && (err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "s3cret")) {
			t.Errorf("%q: %v, want %q", raw, err, want)
		}
	}
}

func TestSockets(t *testing.T) {
	for _, test := range []struct {
		allow, path string
		want        bool
	}{
		{"", "/run/x", true}, {"10.0.0.0/8", "/run/x", false}, {"ipc:///run/engines/", "/run/engines/a", true},
		{"ipc:///run/engines/", "/run/engines/../docker.sock", false}, {"ipc:///run/engines/", "/run/docker.sock", false}, {"ipc://@vllm", "@vllm-0", true},
	} {
		n := networks(t, strings.Fields(test.allow)...)
		if err := n.Check(t.Context(), "unix", test.path); (err == nil) != test.want {
			t.Errorf("%s, allowed %q: %v", test.path, test.allow, err)
		}
		if err := n.Control("")("unix", test.path, nil); (err == nil) != test.want {
			t.Errorf("dial of %s, allowed %q: %v", test.path, test.allow, err)
		}
	}
}

// A real transport dials what is allowed, what the configuration names, and nothing else; nothing of it reaches the other end.
func TestDial(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	place := server.Listener.Addr().String()
	_, port, _ := net.SplitHostPort(place)
	get := func(n *Networks, host string, own ...string) error {
		t.Helper()
		c := http.Client{Transport: &http.Transport{DialContext: n.Dial(net.Dialer{}, own...), DisableKeepAlives: true}}
		res, err := c.Get("http://" + net.JoinHostPort(host, port))
		if err == nil {
			_ = res.Body.Close()
		}
		return err
	}
	reg := prometheus.NewRegistry()
	closed, err := NewNetworks(NetworkOptions{Allow: []string{"10.0.0.0/8"}, Registerer: reg})
	if err != nil {
		t.Fatal(err)
	}
	var refused *AddressError
	for _, host := range []string{"127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1"} {
		if err := get(closed, host); err == nil || host[:3] == "127" && host != "127.1" && !errors.As(err, &refused) {
			t.Errorf("%s: %v", host, err)
		}
	}
	if n := testutil.ToFloat64(closed.refused.WithLabelValues("dial")); n < 2 {
		t.Errorf("%v refusals are counted", n)
	}
	if err := get(closed, "127.0.0.1", place); err != nil {
		t.Errorf("the configuration's own place: %v", err)
	}
	if err := get(networks(t, "127.0.0.0/8", "::1"), "localhost"); err != nil {
		t.Errorf("allowed: %v", err)
	}
	if err := get(networks(t, "localhost"), "localhost"); err != nil {
		t.Errorf("allowed by name: %v", err)
	}
	if err := get(nil, "127.0.0.1"); err != nil {
		t.Errorf("no list: %v", err)
	}
	// A socket.
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	d := net.Dialer{Control: closed.Control("")}
	if _, err := d.DialContext(t.Context(), "unix", path); !errors.As(err, &refused) {
		t.Errorf("a socket: %v", err)
	}
}

// Two parts of one process share the metrics.
func TestOneRegistryForTwo(t *testing.T) {
	reg := prometheus.NewRegistry()
	for range 2 {
		n, err := NewNetworks(NetworkOptions{Registerer: reg})
		if err != nil {
			t.Fatal(err)
		}
		_ = n.Check(t.Context(), "tcp", "169.254.169.254")
		Guard(&http.Server{}, nil, ConnOptions{Surface: "x", Registerer: reg})
	}
	want := "# HELP warmroute_addresses_refused_total Addresses of workers that --worker-network does not allow, by where: register (the registration was refused) or dial (each attempt).\n" +
		"# TYPE warmroute_addresses_refused_total counter\nwarmroute_addresses_refused_total{at=\"register\"} 2\n"
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "warmroute_addresses_refused_total"); err != nil {
		t.Error(err)
	}
}

func FuzzNetworks(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", ".example.com", "ipc:///run/", "fe80::1%1"} {
		f.Add(s, "127.0.0.1")
	}
	f.Fuzz(func(t *testing.T, allow, host string) {
		n, err := NewNetworks(NetworkOptions{Allow: []string{allow}})
		if err != nil {
			return
		}
		n.lookup = func(context.Context, string, string) ([]netip.Addr, error) { return nil, errors.New("none") }
		a, err := netip.ParseAddr(host)
		if err != nil {
			return
		}
		// What passes is in the list, or the list has it by name, which is no address.
		if n.Check(t.Context(), "tcp", host) == nil && (len(n.prefixes) != 1 || !n.prefixes[0].Contains(a.Unmap().WithZone(""))) {
			t.Errorf("%s passes by %q", host, allow)
		}
	})
}
