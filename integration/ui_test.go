package integration

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/warmroute/warmroute/kvcache"
)

var uiScreenshot = flag.Bool("ui-screenshot", false, "write docs/ui.png anew")

// The page in a real browser: what it shows of a fleet, of an outage of Redis and of its end, and who can use it.
func TestWebPage(t *testing.T) {
	b := startBrowser(t)
	redis := startRedis(t)
	e0, e1, e2 := startEngine(t, "e0", "--decode-per-token=2ms"), startEngine(t, "e1", "--decode-per-token=2ms"), startEngine(t, "e2")
	pushed := fmt.Sprintf("--worker=id=e2,url=%s,model=%s,block-size=16", e2.base, model) // its events come over HTTP
	_, indexer := startIndexer(t, redis.url(), append(workers(e0, e1), pushed)...)
	front, url := startFrontend(t, redis.url(), workers(e0, e1)...)

	talk := keepTalking(t, url)
	page := b.open("page", url+"/ui", map[string]any{"viewport": map[string]int{"width": 1280, "height": 900}, "colorScheme": "light"})

	// States: the banner, the workers with their streams, the plots, the decisions.
	page.see("#state", "exact")
	for _, w := range []string{"e0/0", "e1/0", "e2/0"} {
		page.see("tr[data-worker='"+w+"'] td", "healthy")
	}
	page.see("tr[data-worker='e0/0'] td[data-label='Blocks by tier']", "device")
	page.see("tr[data-worker='e0/0'] td[data-label='Generation']", "1")
	page.see("#choices summary", "overlap")
	page.see("figcaption output", "%")
	page.see("figure:has(#plot-states) output", "exact")
	page.see("figure:has(#plot-index) output", "p99")
	page.click("#choices summary")
	page.see("#choices details[open] tr.winner", "e")
	for _, s := range page.texts("#choices") {
		if strings.Contains(s, "quick brown") {
			t.Errorf("a decision shows a part of a prompt: %s", s)
		}
	}

	// The explorer: device, host and disk, and a hole, at the worker whose events the test makes up itself.
	messages := []message{longPrompt("plums"), {"user", "are they ripe?"}}
	talk.say(messages...)
	pushTiers(t, url, indexer, messages)
	request, err := json.Marshal(map[string]any{"model": model, "messages": messages})
	if err != nil {
		t.Fatal(err)
	}
	page.fill("#prompt", string(request))
	page.click("#explore button")
	page.see("#verdict", "would be chosen")
	page.see("#explored p", "Read as a chat request")
	row := "#explored tr[data-worker='e2/0']"
	page.see(row+" small", "host")
	for _, class := range []string{"device", "host", "disk", "hole"} {
		if page.count(row+" rect.f-"+class) == 0 {
			t.Errorf("the bar of e2 shows no %s: %s", class, page.text(row+" small"))
		}
	}
	if said := page.text(row + " small"); !strings.Contains(said, "1 hole: 5") {
		t.Errorf("the bar of e2 says %q, want one hole at block 5", said)
	}
	if cost := page.text(row + " td[data-label='Cost']"); strings.Trim(cost, "0123456789.") != "" {
		t.Errorf("cost %q is no number", cost)
	}
	if *uiScreenshot { // with something to see in the plots
		eventually(t, "half a minute of samples", func() bool {
			var s struct{ Samples []any }
			getJSON(t, url+"/ui/state", &s)
			return len(s.Samples) >= 30
		})
		page.click("#pause")
		page.click("#choices summary")
	}
	picture := filepath.Join(t.TempDir(), "ui.png")
	dark := filepath.Join(t.TempDir(), "ui-dark.png")
	page.do("screenshot", picture, map[string]any{"fullPage": true, "animations": "disabled"})
	reduceColours(t, picture)
	if i, err := os.Stat(picture); err != nil || i.Size() > 300_000 {
		t.Errorf("the screenshot: %v, %v; want one below 300 kB", i.Size(), err)
	}
	if *uiScreenshot {
		copyFile(t, picture, "../docs/ui.png")
		page.click("#pause")
	}

	// What does not fit is said, and breaks nothing.
	page.fill("#prompt", "1 2 x")
	page.choose("#kind", "tokens")
	page.click("#explore button")
	page.see("#explored .error", "Token ids are whole numbers")
	page.fill("#model", "nobody's")
	page.fill("#prompt", "1 2 3")
	page.click("#explore button")
	page.see("#explored .error", "does not exist")
	page.choose("#kind", "auto")
	page.fill("#model", model)
	if errors := page.errors(); slices.ContainsFunc(errors, func(s string) bool { return !strings.Contains(s, "404") }) || len(errors) != 1 {
		t.Errorf("the console: %q, want the one refusal of an unknown model", errors)
	}

	t.Run("keyboard", func(t *testing.T) { keyboard(t, b, url, string(request)) })
	t.Run("phone", func(t *testing.T) {
		phone := b.open("phone", url+"/ui", map[string]any{"viewport": map[string]int{"width": 375, "height": 700}, "hasTouch": true, "isMobile": true})
		phone.see("#state", "exact")
		phone.see("tr[data-worker='e0/0'] td", "healthy")
		phone.see("#choices summary", "overlap")
		phone.fill("#prompt", string(request))
		phone.click("#explore button")
		phone.see("#verdict", "would be chosen")
		if n := phone.do("overflow"); n != 0.0 {
			t.Errorf("the page is %v pixels wider than a phone", n)
		}
		phone.quiet()
	})
	t.Run("dark", func(t *testing.T) {
		night := b.open("night", url+"/ui", map[string]any{"viewport": map[string]int{"width": 1280, "height": 900}, "colorScheme": "dark"})
		night.see("#state", "exact")
		if light, dark := page.do("style", "body", "background-color"), night.do("style", "body", "background-color"); light == dark {
			t.Errorf("the background is %v by day and by night", dark)
		}
		night.do("screenshot", dark, map[string]any{"animations": "disabled"})
		night.quiet()
	})

	// An outage: the page says so, goes on to show the workers, and the explorer names the fallback's choice.
	redis.stop()
	page.see("#state", "degraded")
	page.see("#detail", "since")
	page.see("#meaning", "(connection)")
	page.see("#links li", "connection")
	page.see("#asof", "as of")
	page.see("#choices summary", "degraded")
	page.see("tr[data-worker='e0/0'] td", "healthy")
	page.see("tr[data-worker='e0/0'] td[data-label='Blocks by tier']", "device") // as they were
	page.see("figure:has(#plot-states) output", "degraded")
	page.fill("#prompt", string(request))
	page.click("#explore button")
	page.see("#verdict", "the fallback conversation-hash would choose")
	page.see("#explored td.wide", "unknown")

	// And its end.
	redis.start()
	page.see("#state", "exact")
	page.gone("#links li")
	page.see("figure:has(#plot-states) output", "exact")
	eventually(t, "blocks are read again", func() bool { return page.text("#asof") == "" })
	page.quiet()

	// A frontend that goes away is missed, and found again.
	if n := page.count("#lost[hidden]"); n != 1 {
		t.Errorf("%d hidden alerts of a lost frontend, want 1", n)
	}
	talk.stop()
	front.terminate() // the open feed holds up no drain
	page.see("#lost", "No news from the frontend")
	startFrontend(t, redis.url(), append(workers(e0, e1), "--listen="+strings.TrimPrefix(url, "http://"))...)
	page.gone("#lost")
	page.see("#state", "exact")
}

// keyboard does without a mouse what the page is for.
func keyboard(t *testing.T, b *browser, url, request string) {
	page := b.open("keys", url+"/ui", nil)
	page.see("#choices summary", "overlap")
	page.press("Tab")
	if got := page.do("focused"); got != "a" {
		t.Errorf("the first stop is %v, want the link to the explorer", got)
	}
	seen := map[any]bool{}
	for range 60 {
		page.press("Tab")
		focused := page.do("focused")
		if seen[focused] = true; focused == "prompt" {
			break
		}
		switch focused {
		case "plot-hit":
			page.press("ArrowLeft")
			page.press("ArrowLeft")
			if label, _ := page.do("attribute", "#plot-hit", "aria-label").(string); !strings.Contains(label, "s ago") {
				t.Errorf("the plot says %q after two steps back", label)
			}
		case "pause":
			page.press("Enter")
			if pressed := page.do("attribute", "#pause", "aria-pressed"); pressed != "true" {
				t.Errorf("the list is not paused: %v", pressed)
			}
		case "summary":
			if page.count("#choices details[open]") == 0 {
				page.press("Enter")
				page.see("#choices details[open] tr.winner", "e")
				page.do("focus", "#model") // past the rest of the list
			}
		}
	}
	for _, stop := range []string{"plot-hit", "plot-spread", "pause", "summary", "prompt"} {
		if !seen[stop] {
			t.Errorf("the keyboard does not reach %s, only %v", stop, seen)
		}
	}
	page.do("type", request)
	page.press("Control+Enter")
	page.see("#verdict", "would be chosen")
	page.quiet()
}

func TestWebPageAsksForTheToken(t *testing.T) {
	b := startBrowser(t)
	e0 := startEngine(t, "e0")
	_, url := startServe(t, append(workers(e0), "--token=s3cret", "--query-token=qu3ry")...)
	page := b.open("page", url, nil) // which leads to /ui
	page.see("#ask-title", "asks for a token")
	if state := page.text("#state"); state != "connecting …" {
		t.Errorf("without a token the page shows %q", state)
	}
	page.do("type", "wrong")
	page.press("Enter")
	page.see("#ask-why", "not the right one")
	page.do("type", "s3cret")
	page.press("Enter")
	page.see("#ask-why", "for something else")
	page.do("type", "qu3ry")
	page.press("Enter")
	page.see("#state", "exact")
	page.see("tr[data-worker='e0/0'] td", "healthy")
	page.fill("#prompt", strings.Repeat("a prompt of some length ", 20))
	page.press("Tab") // to the button
	page.press("Enter")
	page.see("#explored p", "Read as a prompt")
	for _, e := range page.errors() {
		if !strings.Contains(e, "401") && !strings.Contains(e, "403") {
			t.Errorf("the console: %s", e)
		}
	}
}

// pushTiers has the third worker hold the prompt in ways that a simulated engine does not: 6 blocks on the device, then 5 in host
// memory, the rest but the last on disk, and block 5 gone.
func pushTiers(t *testing.T, url, indexer string, messages []message) {
	t.Helper()
	var tokens struct{ Tokens []uint32 }
	postJSON(t, url+"/tokenize", map[string]any{"model": model, "messages": messages}, &tokens)
	full := len(tokens.Tokens) / 16
	if full < 16 {
		t.Fatalf("the prompt has %d blocks, too few for the picture", full)
	}
	block := func(i int) string {
		return fmt.Sprintf(`{"block_hash":%d,"tokens_hash":%d}`, 1000+i, uint64(kvcache.HashBlock(kvcache.HashSpec{BlockSize: 16}, tokens.Tokens[i*16:i*16+16], nil)))
	}
	stored := func(id int, tier string, from, to int) string {
		parent, list := "null", []string{}
		if from > 0 {
			parent = fmt.Sprint(1000 + from - 1)
		}
		for i := from; i < to; i++ {
			list = append(list, block(i))
		}
		return fmt.Sprintf(`{"storage_tier":%q,"event":{"event_id":%d,"data":{"stored":{"parent_hash":%s,"blocks":[%s]}}}}`, tier, id, parent, strings.Join(list, ","))
	}
	events := []string{
		stored(0, "device", 0, 6), stored(1, "host_pinned", 6, 11), stored(2, "disk", 11, full-1),
		`{"storage_tier":"device","event":{"event_id":3,"data":{"removed":{"block_hashes":[1005]}}}}`,
	}
	var answer any
	if resp := postJSON(t, indexer+"/events", json.RawMessage(`{"worker":"e2","events":[`+strings.Join(events, ",")+`]}`), &answer); resp.StatusCode != 202 {
		t.Fatalf("events: %d, %v", resp.StatusCode, answer)
	}
}

// talker sends requests until it is stopped.
type talker struct {
	t    *testing.T
	url  string
	quit chan struct{}
	done sync.WaitGroup
	once sync.Once
}

func keepTalking(t *testing.T, url string) *talker {
	k := &talker{t: t, url: url, quit: make(chan struct{})}
	for i := range 3 {
		k.done.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-k.quit:
					return
				default:
				}
				k.say(longPrompt(fmt.Sprintf("topic %d", (n+i)%5)), message{"user", strings.Repeat(fmt.Sprintf("and what of %d? ", n%40), 30)})
			}
		})
	}
	t.Cleanup(k.stop)
	return k
}

// say sends one request, which has to succeed, whatever Redis does.
func (k *talker) say(messages ...message) {
	if a := chat(k.t, k.url, messages...); a.worker == "" {
		k.t.Errorf("an answer of nobody: %+v", a)
	}
}

func (k *talker) stop() {
	k.once.Do(func() { close(k.quit) })
	k.done.Wait()
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// reduceColours writes a PNG file anew with the 256 colours that it has most of: a third of the size.
func reduceColours(t *testing.T, path string) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	full, err := png.Decode(file)
	if err != nil {
		t.Fatal(err)
	}
	counts := map[color.Color]int{}
	for y := range full.Bounds().Dy() {
		for x := range full.Bounds().Dx() {
			counts[full.At(x, y)]++
		}
	}
	colours := slices.SortedFunc(maps.Keys(counts), func(a, b color.Color) int { return counts[b] - counts[a] })
	reduced := image.NewPaletted(full.Bounds(), colours[:min(256, len(colours))])
	draw.Draw(reduced, full.Bounds(), full, image.Point{}, draw.Src)
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, reduced); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// browser is a Chromium that a program in node drives; see testdata/ui/browser.mjs.
type browser struct {
	t     *testing.T
	mu    sync.Mutex
	in    io.Writer
	lines *bufio.Scanner
}

// tab is one page of a browser.
type tab struct {
	b    *browser
	name string
}

// startBrowser installs the driver and starts Chromium, or skips the test where they are not to be had.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			needs(t, program)
		}
	}
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		needs(t, "chromium (Debian: apt-get install chromium)")
	}
	dir := t.TempDir()
	for _, name := range []string{"package.json", "browser.mjs"} {
		copyFile(t, filepath.Join("testdata/ui", name), filepath.Join(dir, name))
	}
	install := exec.CommandContext(t.Context(), "npm", "install", "--prefix", dir, "--no-audit", "--no-fund", "--ignore-scripts",
		"--fetch-retries=1", "--fetch-timeout=20000")
	if out, err := install.CombinedOutput(); err != nil {
		needs(t, fmt.Sprintf("playwright-core of npm (%v: %s)", err, out))
	}
	cmd := exec.Command("node", filepath.Join(dir, "browser.mjs"), chromium)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var complaints strings.Builder
	cmd.Stderr = &complaints
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close() // which ends it
		if err := cmd.Wait(); err != nil {
			t.Errorf("the browser: %v\n%s", err, complaints.String())
		}
	})
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 8<<20)
	return &browser{t: t, in: in, lines: lines}
}

func (b *browser) open(name, url string, options map[string]any) *tab {
	b.t.Helper()
	p := &tab{b, name}
	p.do("open", url, options)
	return p
}

// do runs a command of browser.mjs.
func (p *tab) do(command string, args ...any) any {
	p.b.t.Helper()
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	line, err := json.Marshal(append([]any{p.name, command}, args...))
	if err != nil {
		p.b.t.Fatal(err)
	}
	if _, err := p.b.in.Write(append(line, '\n')); err != nil {
		p.b.t.Fatalf("the browser is gone: %v", err)
	}
	if !p.b.lines.Scan() {
		p.b.t.Fatalf("the browser is gone: %v", p.b.lines.Err())
	}
	var answer struct {
		OK    any
		Error string
	}
	if err := json.Unmarshal(p.b.lines.Bytes(), &answer); err != nil {
		p.b.t.Fatal(err)
	}
	if answer.Error != "" {
		p.b.t.Fatalf("%s %s %v: %s", p.name, command, args, answer.Error)
	}
	return answer.OK
}

func (p *tab) see(selector, text string)     { p.b.t.Helper(); p.do("see", selector, text) }
func (p *tab) gone(selector string)          { p.b.t.Helper(); p.do("gone", selector) }
func (p *tab) fill(selector, text string)    { p.b.t.Helper(); p.do("fill", selector, text) }
func (p *tab) choose(selector, value string) { p.b.t.Helper(); p.do("choose", selector, value) }
func (p *tab) click(selector string)         { p.b.t.Helper(); p.do("click", selector) }
func (p *tab) press(key string)              { p.b.t.Helper(); p.do("press", key) }
func (p *tab) count(selector string) int {
	p.b.t.Helper()
	return int(p.do("count", selector).(float64))
}
func (p *tab) text(selector string) string { p.b.t.Helper(); return p.do("text", selector).(string) }
func (p *tab) texts(selector string) []string {
	p.b.t.Helper()
	return asStrings(p.do("texts", selector))
}
func (p *tab) errors() []string { p.b.t.Helper(); return asStrings(p.do("errors")) }

func asStrings(v any) []string {
	var out []string
	for _, s := range v.([]any) {
		out = append(out, s.(string))
	}
	return out
}

// quiet expects that the console has nothing to complain of.
func (p *tab) quiet() {
	p.b.t.Helper()
	if errors := p.errors(); len(errors) > 0 {
		p.b.t.Errorf("the console of %s: %q", p.name, errors)
	}
}
