package contracts

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pb33f/libopenapi"
	validator "github.com/pb33f/libopenapi-validator"
	v3 "github.com/pb33f/libopenapi/datamodel/high/v3"
)

// description is a file and what serves it.
type description struct {
	file string
	base string
}

// Both descriptions are valid OpenAPI 3.1. Their examples are run against a running warmroute, each operation at least once, and
// requests and answers are as described.
func TestOpenAPI(t *testing.T) {
	frontend, indexer := startWarmroute(t)
	for _, d := range []description{{"../../indexer/api/openapi.yaml", indexer}, {"../../frontend/api/openapi.yaml", frontend}} {
		t.Run(strings.Split(d.file, "/")[2], func(t *testing.T) { d.check(t) })
	}
}

func (d description) check(t *testing.T) {
	text, err := os.ReadFile(d.file)
	if err != nil {
		t.Fatal(err)
	}
	// The server is the one that runs here.
	doc, err := libopenapi.NewDocument(bytes.Replace(text, []byte("servers: [{url: \""), []byte("servers: [{url: \""+d.base+"\"}, {url: \""), 1))
	if err != nil {
		t.Fatal(err)
	}
	check, errs := validator.NewValidator(doc)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	if ok, problems := check.ValidateDocument(); !ok {
		for _, p := range problems {
			t.Errorf("%s: %s %s", d.file, p.Message, p.Reason)
			for _, s := range p.SchemaValidationErrors {
				t.Errorf("  %s: %s", s.FieldPath, s.Reason)
			}
		}
		t.FailNow()
	}
	model, err := doc.BuildV3Model()
	if err != nil {
		t.Fatal(err)
	}
	if got := d.get(t, "/openapi.yaml"); got != string(text) {
		t.Errorf("what is served is not the file: %.200s", got)
	}
	for path, item := range model.Model.Paths.PathItems.FromOldest() {
		for method, op := range item.GetOperations().FromOldest() {
			target := path
			for _, p := range op.Parameters {
				if p.In == "path" {
					target = strings.ReplaceAll(target, "{"+p.Name+"}", p.Example.Value)
				}
			}
			t.Run(method+" "+path, func(t *testing.T) {
				examples := bodies(t, op)
				if op.RequestBody == nil {
					examples = map[string][]byte{"": nil}
				} else if len(examples) == 0 && path != "/v1/embeddings" { // which the simulated engine does not have
					t.Fatal("no example")
				}
				for name, body := range examples {
					d.try(t, check, op, name, method, target, body)
				}
			})
		}
	}
}

// bodies are the examples of an operation's body, as JSON.
func bodies(t *testing.T, op *v3.Operation) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	if op.RequestBody == nil {
		return all
	}
	media := op.RequestBody.Content.GetOrZero("application/json")
	if media.Examples == nil {
		return all
	}
	for name, e := range media.Examples.FromOldest() {
		var v any
		if err := e.Value.Decode(&v); err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = b
	}
	return all
}

// try sends an example, which has to succeed, and validates both ways.
func (d description) try(t *testing.T, check validator.Validator, op *v3.Operation, name, method, target string, body []byte) {
	t.Helper()
	request := func() *http.Request {
		r, err := http.NewRequestWithContext(t.Context(), strings.ToUpper(method), d.base+target, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if body != nil {
			r.Header.Set("Content-Type", "application/json")
		}
		return r
	}
	resp, err := http.DefaultClient.Do(request())
	if err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode/100 != 2 {
		t.Fatalf("example %q: status %d: %s", name, resp.StatusCode, answer)
	}
	kind, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	documented := op.Responses.Codes.GetOrZero(fmt.Sprint(resp.StatusCode))
	if documented == nil || kind != "" && documented.Content.GetOrZero(kind) == nil {
		t.Fatalf("example %q: status %d with %q is not described", name, resp.StatusCode, kind)
	}
	if kind != "application/json" {
		return // nothing to validate but the status and the type
	}
	resp.Body = io.NopCloser(bytes.NewReader(answer))
	if ok, problems := check.ValidateHttpRequestResponse(request(), resp); !ok {
		for _, p := range problems {
			t.Errorf("example %q: %s: %s", name, p.Message, p.Reason)
			for _, s := range p.SchemaValidationErrors {
				t.Errorf("  %s: %s", s.FieldPath, s.Reason)
			}
		}
		t.Logf("the answer was: %s", answer)
	}
}

func (d description) get(t *testing.T, path string) string {
	t.Helper()
	resp, err := http.Get(d.base + path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// startWarmroute builds and starts a simulated engine and `warmroute serve`, and returns the URLs of the latter's two surfaces.
func startWarmroute(t *testing.T) (frontend, indexer string) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "warmroute")
	build := exec.Command("go", "build", "-o", program, "./cmd/warmroute")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	start := func(ready func(map[string]any) bool, args ...string) {
		cmd := exec.Command(program, append(args, "--log-format=json")...)
		log, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		up := make(chan bool)
		go func() {
			lines := bufio.NewScanner(log)
			for done := false; lines.Scan(); {
				var entry map[string]any
				if json.Unmarshal(lines.Bytes(), &entry) == nil && !done && ready(entry) {
					done = true
					up <- true
				}
			}
		}()
		select {
		case <-up:
		case <-time.After(time.Minute):
			t.Fatalf("%s does not start", args[0])
		}
	}
	var engine map[string]any
	start(func(entry map[string]any) bool {
		engine = entry
		return entry["msg"] == "simulated engine is up"
	}, "sim", "--http-listen=127.0.0.1:0", "--events-listen=tcp://127.0.0.1:0", "--replay-listen=tcp://127.0.0.1:0")
	start(func(entry map[string]any) bool {
		if entry["msg"] == "listening" {
			switch url := fmt.Sprint("http://", entry["addr"]); entry["service"] {
			case "frontend":
				frontend = url
			case "indexer":
				indexer = url
			}
		}
		return entry["msg"] == "worker up" && frontend != "" && indexer != ""
	}, "serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0",
		fmt.Sprintf("--worker=id=w0,url=%s,model=sim-model,events=%s,replay=%s,block-size=16", engine["url"], engine["events"], engine["replay"]))
	return frontend, indexer
}
