package main

import (
	"io"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/goccy/go-yaml"
)

// variable is "${NAME:-default}" in a compose file.
var variable = regexp.MustCompile(`\$\{\w+:-([^}]*)\}`)

func TestComposeFileRunsCommandsThatExist(t *testing.T) {
	src, err := os.ReadFile("../../docker-compose.yml")
	if err != nil {
		t.Fatal(err)
	}
	var compose struct {
		Services map[string]struct {
			Image       string
			Command     []string
			Environment map[string]string
			Healthcheck struct{ Test []string }
		}
	}
	if err := yaml.Unmarshal(variable.ReplaceAll(src, []byte("$1")), &compose); err != nil {
		t.Fatal(err)
	}
	commands := map[string]int{}
	for name, service := range compose.Services {
		if service.Image != "warmroute" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			for k, v := range service.Environment {
				t.Setenv(k, v)
			}
			cmd, _, err := parse(service.Command, &stdio{Out: io.Discard, Err: io.Discard}, nil)
			if err != nil {
				t.Fatalf("%v: %v", service.Command, err)
			}
			commands[service.Command[0]]++
			switch c := cmd.Selected().Target.Interface().(type) {
			case indexerCmd:
				if c.Redis.Redis == "" || len(c.Workers.Worker) != 2 || len(c.Access.AdminToken) == 0 {
					t.Errorf("incomplete: %+v", c)
				}
			case frontendCmd:
				if c.Redis.Redis == "" || len(c.Workers.Worker) != 2 {
					t.Errorf("incomplete: %+v", c)
				}
			}
		})
	}
	if commands["indexer"] != 2 || commands["frontend"] != 2 || commands["sim"] != 2 {
		t.Errorf("commands %v, want two of each", commands)
	}
	redis := compose.Services["redis"]
	if i := slices.Index(redis.Command, "--maxmemory-policy"); i < 0 || redis.Command[i+1] != "noeviction" || len(redis.Healthcheck.Test) == 0 {
		t.Errorf("redis: command %v, health check %v", redis.Command, redis.Healthcheck.Test)
	}
}
