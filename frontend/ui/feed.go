package ui

import (
	"context"
	"embed"
	"io/fs"
	"net/http"
	"path"
	"strconv"
	"time"
)

//go:embed assets
var files embed.FS

// policy lets the page load and do nothing but what this frontend serves.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

var contentTypes = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}

// ServeFile answers with a file of the page, "" for the page itself. They hold no data, so that they need no token.
func ServeFile(w http.ResponseWriter, name string) bool {
	if name == "" {
		name = "index.html"
	}
	text, err := fs.ReadFile(files, "assets/"+name)
	if err != nil {
		return false
	}
	h := w.Header()
	h.Set("Content-Type", contentTypes[path.Ext(name)])
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cache-Control", "no-cache")
	h.Set("Content-Length", strconv.Itoa(len(text)))
	_, _ = w.Write(text) // a client that left
	return true
}

// feed is one watcher.
type feed struct{ messages chan []byte }

// Snapshot is the first message of a feed: the state, all points of the plots and all decisions that are kept. Redis is asked first
// where nobody has watched of late.
func (p *Page) Snapshot(ctx context.Context) []byte {
	if read := p.inspected.Load(); (read == nil || time.Since(read.tried) > freshFor) && p.inspecting.CompareAndSwap(false, true) {
		p.inspect(ctx)
		p.inspecting.Store(false)
	}
	state := p.o.Source.State()
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.snapshot(&state)
}

// freshFor is how old a reading of Redis may be that a single answer is made of.
const freshFor = 5 * time.Second

// snapshot is called with p.mu held.
func (p *Page) snapshot(state *State) []byte {
	m := p.message(time.Now(), state)
	m.Samples = append(m.Samples, p.samples...)
	m.Decisions, _ = p.recorder.since(0)
	return m.encode()
}

// ServeFeed is a stream of server-sent events, each a JSON object: at once a whole picture, then one with what is new every
// interval; a decision may come twice. The server bounds how long a watcher may take to accept one. It is false, with nothing written, where there are too many watchers or the frontend drains.
func (p *Page) ServeFeed(w http.ResponseWriter, r *http.Request) bool {
	first, f := p.watch()
	if f == nil {
		return false
	}
	defer p.leave(f)
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	conn := http.NewResponseController(w)
	for text := first; ; {
		for _, part := range [][]byte{[]byte("data: "), text, []byte("\n\n")} {
			if _, err := w.Write(part); err != nil {
				return true
			}
		}
		if err := conn.Flush(); err != nil {
			return true
		}
		var ok bool
		select {
		case <-r.Context().Done():
			return true
		case text, ok = <-f.messages:
			if !ok {
				return true
			}
		}
	}
}

// watch begins a feed; nil where that cannot be.
func (p *Page) watch() (first []byte, f *feed) {
	state := p.o.Source.State()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.feeds) >= p.o.MaxWatchers {
		return nil, nil
	}
	if len(p.feeds) == 0 { // nobody was told of those that came meanwhile
		_, p.sent = p.recorder.since(0)
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
	f = &feed{messages: make(chan []byte, 4)}
	p.feeds[f] = struct{}{}
	p.watchers.Add(1)
	return p.snapshot(&state), f
}

func (p *Page) leave(f *feed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.feeds[f]; ok {
		delete(p.feeds, f)
		p.watchers.Add(-1)
	}
}

// close ends all feeds and refuses new ones.
func (p *Page) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for f := range p.feeds {
		close(f.messages)
		delete(p.feeds, f)
		p.watchers.Add(-1)
	}
}
