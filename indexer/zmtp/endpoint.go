package zmtp

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// ParseEndpoint splits a ZeroMQ endpoint into what [net.Dial] takes: tcp://host:port and
// ipc://path (ipc://@name for Linux's abstract sockets). A wildcard host is what a publisher binds
// and cannot be dialled; it is refused.
func ParseEndpoint(endpoint string) (network, address string, err error) {
	scheme, rest, ok := strings.Cut(endpoint, "://")
	if !ok {
		return "", "", fmt.Errorf("endpoint %q: want tcp://host:port or ipc://path", endpoint)
	}
	switch scheme {
	case "tcp":
		host, port, err := net.SplitHostPort(rest)
		if err != nil {
			return "", "", fmt.Errorf("endpoint %q: %w", endpoint, err)
		}
		if host == "" || host == "*" || host == "0.0.0.0" || host == "::" {
			return "", "", fmt.Errorf("endpoint %q: a wildcard host can be bound, not dialled; name the engine's host (engines that dial out are not supported)", endpoint)
		}
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return "", "", fmt.Errorf("endpoint %q: port must be 1 to 65535", endpoint)
		}
		return "tcp", rest, nil
	case "ipc":
		if rest == "" || rest == "*" {
			return "", "", fmt.Errorf("endpoint %q: path is missing", endpoint)
		}
		return "unix", rest, nil
	}
	return "", "", fmt.Errorf("endpoint %q: transport must be tcp or ipc", endpoint)
}

// WithRank is the endpoint of a data-parallel rank: engines publish rank r on the base port + r.
func WithRank(endpoint string, rank int) (string, error) {
	if rank == 0 {
		return endpoint, nil
	}
	network, address, err := ParseEndpoint(endpoint)
	if err != nil {
		return "", err
	}
	if network != "tcp" {
		return "", fmt.Errorf("endpoint %q: only tcp endpoints have one port per rank", endpoint)
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", err
	}
	base, err := strconv.Atoi(port)
	if err != nil {
		return "", err
	}
	if rank < 0 || base+rank > 65535 {
		return "", errors.New("endpoint " + endpoint + ": no port for rank " + strconv.Itoa(rank))
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(base+rank)), nil
}
