package zmtp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"strings"
)

const (
	greetingSize = 64
	maxCommand   = 64 << 10 // READY is some 40 bytes; metadata may make it longer
)

func greeting() []byte {
	g := make([]byte, greetingSize)
	g[0], g[9] = 0xff, 0x7f
	g[10] = 3 // version 3.0
	copy(g[12:32], "NULL")
	return g
}

// greet exchanges greetings and READY commands.
func (c *Conn) greet(typ SocketType) error {
	hello := appendFrame(greeting(), flagCommand, readyCommand(typ))
	if _, err := c.nc.Write(hello); err != nil {
		return err
	}
	var g [greetingSize]byte
	// The signature is looked at alone, because a peer of another protocol may not send 64 bytes.
	if _, err := io.ReadFull(c.r, g[:10]); err != nil {
		return fmt.Errorf("greeting: %w", eof(err, true))
	}
	if g[0] != 0xff || g[9]&1 != 1 {
		return fmt.Errorf("%w: not a ZMTP greeting: %x", ErrProtocol, g[:10])
	}
	if _, err := io.ReadFull(c.r, g[10:]); err != nil {
		return fmt.Errorf("greeting: %w", eof(err, true))
	}
	if g[10] < 3 {
		return fmt.Errorf("%w: peer speaks ZMTP %d, want 3", ErrProtocol, g[10])
	}
	if mechanism := string(bytes.TrimRight(g[12:32], "\x00")); mechanism != "NULL" {
		return fmt.Errorf("%w: peer wants the security mechanism %q, only NULL is supported", ErrProtocol, mechanism)
	}
	flags, body, err := c.readFrame(maxCommand, maxCommand)
	if err != nil {
		return fmt.Errorf("READY: %w", eof(err, true))
	}
	if flags&flagCommand == 0 {
		return fmt.Errorf("%w: a message where READY was expected", ErrProtocol)
	}
	c.peer, err = parseReady(body)
	if err != nil {
		return err
	}
	if !slices.Contains(typ.peers(), c.peer) {
		return fmt.Errorf("%w: peer is a %.32q socket, want %s", ErrProtocol, c.peer, strings.Join(typ.peers(), " or "))
	}
	return nil
}

func readyCommand(typ SocketType) []byte {
	b := []byte("\x05READY")
	b = appendProperty(b, "Socket-Type", string(typ))
	return appendProperty(b, "Identity", "")
}

func appendProperty(b []byte, name, value string) []byte {
	b = append(b, byte(len(name)))
	b = append(b, name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

// parseReady returns the peer's socket type.
func parseReady(b []byte) (string, error) {
	if reason, ok := bytes.CutPrefix(b, []byte("\x05ERROR")); ok {
		return "", fmt.Errorf("%w: peer refuses: %.200q", ErrProtocol, reason)
	}
	b, ok := bytes.CutPrefix(b, []byte("\x05READY"))
	if !ok {
		return "", fmt.Errorf("%w: command other than READY", ErrProtocol)
	}
	var typ string
	for len(b) > 0 {
		n := int(b[0])
		if len(b) < 1+n+4 {
			return "", fmt.Errorf("%w: READY is cut short", ErrProtocol)
		}
		name := string(b[1 : 1+n])
		size := binary.BigEndian.Uint32(b[1+n:])
		b = b[1+n+4:]
		if uint64(size) > uint64(len(b)) {
			return "", fmt.Errorf("%w: READY is cut short", ErrProtocol)
		}
		if strings.EqualFold(name, "Socket-Type") {
			typ = string(b[:size])
		}
		b = b[size:]
	}
	return typ, nil
}
