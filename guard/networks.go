package guard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// NetworkOptions configures Networks.
type NetworkOptions struct {
	// Allow are the places that workers may be in: networks (10.0.0.0/8), addresses, hosts (engine.example.com), all hosts below a name
	// (.engines.example.com), and sockets below a path (ipc:///run/engines/). Empty: everywhere.
	//
	// Link-local, multicast and unspecified addresses, and those where clouds keep a machine's credentials, are refused all the same
	// unless a network within them is named, such as 169.254.7.0/24.
	Allow []string
	// Registerer gets the metrics. Default: they are kept but not registered.
	Registerer prometheus.Registerer
}

// Networks are the places that may be dialled because somebody registered them. A nil *Networks are those of no options.
type Networks struct {
	bounded  bool // there is a list
	prefixes []netip.Prefix
	hosts    []string // in lower case; one that begins with a dot means all below it
	sockets  []string // prefixes of paths
	refused  *prometheus.CounterVec
	lookup   func(ctx context.Context, network, host string) ([]netip.Addr, error)
}

var anywhere = &Networks{lookup: net.DefaultResolver.LookupNetIP}

// special are the networks that only a network within them allows.
var special = []struct {
	netip.Prefix
	what string
}{
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local"},
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
	{netip.MustParsePrefix("0.0.0.0/8"), "unspecified"},
	{netip.MustParsePrefix("::/128"), "unspecified"},
	{netip.MustParsePrefix("255.255.255.255/32"), "broadcast"},
	{netip.MustParsePrefix("100.100.100.200/32"), "a cloud's metadata"},     // Alibaba
	{netip.MustParsePrefix("168.63.129.16/32"), "a cloud's metadata"},       // Azure
	{netip.MustParsePrefix("192.0.0.192/32"), "a cloud's metadata"},         // Oracle
	{netip.MustParsePrefix("fd00:ec2::/32"), "a cloud's metadata"},          // AWS: metadata, credentials of pods
	{netip.MustParsePrefix("fd20:ce::254/128"), "a cloud's metadata"},       // Google
	{netip.MustParsePrefix("fd00:c1::a9fe:a9fe/128"), "a cloud's metadata"}, // Oracle
	{netip.MustParsePrefix("fd00:100::100:200/128"), "a cloud's metadata"},  // Alibaba
	{netip.MustParsePrefix("fd00:42::42/128"), "a cloud's metadata"},        // Scaleway
	{netip.MustParsePrefix("fd00:a9fe:a9fe::1/128"), "a cloud's metadata"},  // Akamai
}

// carriers hold an IPv4 address in their last four bytes: NAT64's, and what came before mapped addresses.
var carriers = []netip.Prefix{netip.MustParsePrefix("64:ff9b::/96"), netip.MustParsePrefix("64:ff9b:1::/48"), netip.MustParsePrefix("::/96")}

// NewNetworks reads the list.
func NewNetworks(o NetworkOptions) (*Networks, error) {
	n := &Networks{bounded: len(o.Allow) > 0, lookup: anywhere.lookup, refused: newRefused(o.Registerer)}
	for _, s := range o.Allow {
		if err := n.add(s); err != nil {
			return nil, err
		}
	}
	return n, nil
}

func (n *Networks) add(s string) error {
	if path, ok := strings.CutPrefix(s, "ipc://"); ok {
		if !strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "@") {
			return fmt.Errorf("network %q: want ipc:// and an absolute path", s)
		}
		n.sockets = append(n.sockets, path)
		return nil
	}
	if p, err := netip.ParsePrefix(s); err == nil {
		if p != p.Masked() {
			return fmt.Errorf("network %q has bits set beyond its length: %s?", s, p.Masked())
		}
		n.prefixes = append(n.prefixes, p)
		return nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		a = a.Unmap().WithZone("")
		n.prefixes = append(n.prefixes, netip.PrefixFrom(a, a.BitLen()))
		return nil
	}
	if !isHost(s) {
		return fmt.Errorf("network %q: want a network (10.0.0.0/8), an address, a host, .domain for all hosts below it, or ipc:///path", s)
	}
	n.hosts = append(n.hosts, strings.ToLower(strings.TrimSuffix(s, ".")))
	return nil
}

// isHost is about characters; a name that looks like a network or an address and is none is refused.
func isHost(s string) bool {
	letters := false
	for i := range len(s) {
		switch c := s[i] | 0x20; {
		case c >= 'a' && c <= 'z':
			letters = true
		case s[i] >= '0' && s[i] <= '9', s[i] == '-', s[i] == '_', s[i] == '.':
		default:
			return false
		}
	}
	return letters && !strings.Contains(s, "..")
}

// AddressError says that an address may not be dialled.
type AddressError struct {
	// Host is how the address was named.
	Host string
	// Address is what it stands for; "" where the name alone is refused.
	Address string
	// Special is the kind of an address that is refused unless it is named, such as link-local; "" where it is in no network of the list.
	Special string
}

func (e *AddressError) Error() string {
	at := e.Host
	if e.Address != "" && e.Address != e.Host {
		at += " (" + e.Address + ")"
	}
	if e.Special != "" {
		return fmt.Sprintf("%s is %s, where no worker is expected (--worker-network allows it)", at, e.Special)
	}
	return at + " is in none of the networks of workers (--worker-network)"
}

// Check says whether a place may be dialled, as far as that is known before: a host of network tcp, or a path of network unix. A host that does
// not resolve here and now may pass; the dial will tell.
func (n *Networks) Check(ctx context.Context, network, host string) error {
	if n == nil {
		n = anywhere
	}
	return n.count("register", n.check(ctx, network, host))
}

// lookupLimit bounds what Check waits for a resolver.
const lookupLimit = time.Second

func (n *Networks) check(ctx context.Context, network, host string) error {
	if network == "unix" {
		return n.socket(host)
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return n.address(host, a)
	}
	// Some resolvers take 2130706433, or 127.1, for an address.
	if !isHost(host) {
		return fmt.Errorf("%q is neither an address nor the name of a host", host)
	}
	if n.bounded && len(n.prefixes) == 0 && !n.named(host) {
		return &AddressError{Host: host}
	}
	ctx, cancel := context.WithTimeout(ctx, lookupLimit)
	defer cancel()
	addresses, err := n.lookup(ctx, "ip", host)
	if err != nil {
		return nil
	}
	var first error
	for _, a := range addresses {
		err := n.address(host, a)
		if err == nil {
			return nil
		}
		if first == nil {
			first = err
		}
	}
	return first
}

// Control is a [net.Dialer]'s: called with each address that a dial to host, as it was named, is about to connect to.
func (n *Networks) Control(host string) func(network, address string, c syscall.RawConn) error {
	if n == nil {
		n = anywhere
	}
	return func(network, address string, _ syscall.RawConn) error {
		return n.count("dial", n.dialled(host, network, address))
	}
}

func (n *Networks) dialled(host, network, address string) error {
	if network == "unix" {
		return n.socket(address)
	}
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("address %q: %w", address, err)
	}
	return n.address(host, at.Addr())
}

// Dial is the DialContext of a transport; own are the places, host:port, that the configuration itself names, which may be anywhere.
func (n *Networks) Dial(d net.Dialer, own ...string) func(ctx context.Context, network, address string) (net.Conn, error) {
	free := map[string]bool{}
	for _, place := range own {
		free[place] = true
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		d := d
		if !free[address] {
			host, _, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			d.Control = n.Control(host)
		}
		return d.DialContext(ctx, network, address)
	}
}

// address judges an address that stands for a host.
func (n *Networks) address(host string, a netip.Addr) error {
	a = a.Unmap().WithZone("")
	inside := a
	for _, p := range carriers {
		if p.Contains(a) && !a.IsLoopback() && !a.IsUnspecified() {
			b := a.As16()
			inside = netip.AddrFrom4([4]byte(b[12:]))
		}
	}
	for _, s := range special {
		if !s.Contains(inside) {
			continue
		}
		for _, p := range n.prefixes {
			if p.Contains(inside) && p.Bits() >= s.Bits() {
				return nil
			}
		}
		return &AddressError{host, a.String(), s.what}
	}
	if !n.bounded || n.named(host) {
		return nil
	}
	for _, p := range n.prefixes {
		if p.Contains(a) {
			return nil
		}
	}
	return &AddressError{Host: host, Address: a.String()}
}

// named tells whether the list has a host by its name.
func (n *Networks) named(host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	for _, h := range n.hosts {
		if host == h || h[0] == '.' && strings.HasSuffix(host, h) {
			return true
		}
	}
	return false
}

// socket judges the path of a Unix socket.
func (n *Networks) socket(path string) error {
	if !n.bounded {
		return nil
	}
	if !strings.HasPrefix(path, "@") {
		path = filepath.Clean(path)
	}
	for _, s := range n.sockets {
		if strings.HasPrefix(path, s) {
			return nil
		}
	}
	return &AddressError{Host: "ipc://" + path}
}

func (n *Networks) count(at string, err error) error {
	if err != nil && n.refused != nil {
		n.refused.WithLabelValues(at).Inc()
	}
	return err
}

// WorkerURL reads a worker's base URL, http or https with a host. A name or a password in it would be sent by nobody, and seen by everybody who
// may see workers; no error repeats it.
func WorkerURL(raw string) (*url.URL, error) {
	u, err := url.Parse(raw)
	switch {
	case err == nil && u.User != nil:
		return nil, errors.New("url: a user or password in it is sent by nobody: what engines ask for is --worker-token")
	case err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https":
		if strings.Contains(raw, "@") {
			raw = "with an @"
		}
		return nil, fmt.Errorf("url %q: want http://host:port or https://host:port", raw)
	}
	return u, nil
}

// Place is where a transport dials for a URL, host:port; false where that is none.
func Place(raw string) (place string, ok bool) {
	u, err := url.Parse(raw)
	if err != nil || u.Hostname() == "" {
		return "", false
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(u.Hostname(), port), true
}
