//go:build unix

package frontend

import "syscall"

// openFiles is how many files the process may have open; 0 where the system does not tell.
func openFiles() uint64 {
	var l syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l) != nil {
		return 0
	}
	return uint64(l.Cur)
}
