package sim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Frames of ZMTP: flags, a length of one byte or eight, and a body.

const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4

	maxFrame  = 1 << 20 // of what peers send: subscriptions and replay requests
	maxFrames = 16      // in one message
)

func encodeMessage(frames [][]byte) []byte {
	n := 0
	for _, f := range frames {
		n += 9 + len(f)
	}
	b := make([]byte, 0, n)
	for i, f := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = flagMore
		}
		b = appendFrame(b, flags, f)
	}
	return b
}

func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		b = binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(len(body)))
	} else {
		b = append(b, flags, byte(len(body)))
	}
	return append(b, body...)
}

func (c *zmtpConn) writeFrame(flags byte, body []byte) error {
	return c.writeRaw(appendFrame(nil, flags, body))
}

func (c *zmtpConn) writeRaw(b []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	_, err := c.Write(b)
	return err
}

// readMessage reads one message, or a command as a nil frame followed by its body.
func (c *zmtpConn) readMessage() ([][]byte, error) {
	var frames [][]byte
	for {
		flags, body, err := c.readFrame()
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if len(frames) > 0 {
				return nil, errors.New("a command inside a message")
			}
			return [][]byte{nil, body}, nil
		}
		frames = append(frames, body)
		if flags&flagMore == 0 {
			return frames, nil
		}
		if len(frames) == maxFrames {
			return nil, errors.New("too many frames in a message")
		}
	}
}

func (c *zmtpConn) readFrame() (flags byte, body []byte, err error) {
	var head [9]byte
	if _, err := io.ReadFull(c.in, head[:2]); err != nil {
		return 0, nil, err
	}
	size := uint64(head[1])
	if head[0]&flagLong != 0 {
		if _, err := io.ReadFull(c.in, head[2:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	if size > maxFrame {
		return 0, nil, fmt.Errorf("a frame of %d bytes: at most %d are taken", size, maxFrame)
	}
	body = make([]byte, size)
	_, err = io.ReadFull(c.in, body)
	return head[0], body, err
}
