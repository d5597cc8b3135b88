package zmtp

import (
	"strings"
	"syscall"
	"time"
)

// tcpUserTimeout is TCP_USER_TIMEOUT, which package syscall does not name.
const tcpUserTimeout = 18

// unackedLimit is how long sent bytes may stay without acknowledgement: keep-alive does not probe while any
// are, and retransmission alone would hold on to a dead peer for a quarter of an hour.
const unackedLimit = 25 * time.Second

// limitUnacked is a net.Dialer's Control. A kernel that refuses the option leaves the connection usable.
func limitUnacked(network, _ string, rc syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return nil
	}
	return rc.Control(func(fd uintptr) {
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(unackedLimit.Milliseconds()))
	})
}
