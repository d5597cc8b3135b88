package main

import (
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestWorkersFromEverywhere(t *testing.T) {
	want := workerList{
		{ID: "w0", URL: "http://10.0.1.1:8000", Model: "llama", Events: "tcp://10.0.1.1:5557", BlockSize: 16, Ranks: 2, Type: "SGLang"},
		{ID: "w1", URL: "http://10.0.1.2:8000"},
	}
	w0 := "id=w0,url=http://10.0.1.1:8000,model=llama,events=tcp://10.0.1.1:5557,block-size=16,ranks=2,type=sglang"
	w1 := "id=w1,url=http://10.0.1.2:8000"
	path := filepath.Join(t.TempDir(), "wr.yaml")
	file := `
worker:
  - {id: w0, url: "http://10.0.1.1:8000", model: llama, events: "tcp://10.0.1.1:5557", block-size: 16, ranks: 2, type: sglang}
  - ` + w1 + "\n"
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args     []string
		variable string
	}{
		"flags":                  {args: []string{"--worker", w0, "--worker=" + w1}},
		"variable":               {variable: w0 + " \n" + w1},
		"file":                   {args: []string{"--config", path}},
		"flags beat the rest":    {args: []string{"--config", path, "--worker=" + w0, "--worker=" + w1}, variable: "id=w2"},
		"variable beats file":    {args: []string{"--config=" + path}, variable: w0 + " " + w1},
		"one flag for several":   {args: []string{"--worker", w0 + " " + w1}},
		"empty variable is none": {args: []string{"--config", path}, variable: ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("WARMROUTE_WORKER", c.variable)
			cmd, _, err := parse(append([]string{"frontend"}, c.args...), &stdio{Out: io.Discard, Err: io.Discard}, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := cmd.Selected().Target.Interface().(frontendCmd).Workers.Worker
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
}

func TestParseWorkerRefuses(t *testing.T) {
	for spec, want := range map[string]string{
		"url=http://h":            "id is missing",
		"id=w0,rl=http://h":       `unknown key "rl" (did you mean "url"?)`,
		"id=w0,mode=all":          "mode: \"all\": want count or set",
		"id=w0,ranks=0":           "ranks: \"0\": want a whole number from 1",
		"id=w0,block-size=x":      "block-size: \"x\": want a whole number from 1",
		"id=w0,id=w1":             "id is given twice",
		"id=w0,url":               `"url": want key=value`,
		"id=w0,url=":              "url has no value",
		"id=a/b":                  "id: worker id",
		"id=w0,type=llama.cpp":    "want vLLM, SGLang, TRTLLM",
		"id=w0,kubernetes=please": "want one of id, url",
	} {
		if _, err := parseWorker(spec); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want … %s", spec, err, want)
		}
	}
	_, _, err := parse([]string{"frontend", "--worker=id=w0 id=w0"}, &stdio{Out: io.Discard, Err: io.Discard}, nil)
	if err == nil || !strings.Contains(err.Error(), `worker "w0" is given twice`) {
		t.Errorf("twice: %v", err)
	}
}

func TestByteSize(t *testing.T) {
	for text, want := range map[string]byteSize{"1": 1, "512": 512, "64KiB": 64 << 10, "32 MiB": 32 << 20, "2GiB": 2 << 30} {
		var b byteSize
		if err := b.UnmarshalText([]byte(text)); err != nil || b != want {
			t.Errorf("%q: got %d, %v; want %d", text, b, err, want)
		}
	}
	for _, text := range []string{"", "0", "-1", "1.5MiB", "MiB", "8MB", "9999999999GiB"} {
		var b byteSize
		if err := b.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is taken as %d", text, b)
		}
	}
}
