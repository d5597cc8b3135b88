//go:build !linux

package zmtp

import "syscall"

// limitUnacked does nothing where the system has no such limit; keep-alive works there all the same.
func limitUnacked(string, string, syscall.RawConn) error { return nil }
