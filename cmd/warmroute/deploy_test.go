package main

import (
	"cmp"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/goccy/go-yaml"
)

// parsed parses a command of a deployment with its configuration file, whose path there is not the one here.
func parsed(t *testing.T, args []string, environ map[string]string, config string) *kong.Context {
	t.Helper()
	for k, v := range environ {
		t.Setenv(k, v)
	}
	here := make([]string, len(args))
	for i, a := range args {
		here[i] = a
		if strings.HasPrefix(a, "--config=") {
			here[i] = "--config=" + config
		}
	}
	cmd, _, err := parse(here, &stdio{Out: io.Discard, Err: io.Discard}, nil)
	if err != nil {
		t.Fatalf("warmroute %s: %v", strings.Join(args, " "), err)
	}
	return cmd
}

// The commands, variables and configuration of the Kubernetes manifests exist.
func TestKubernetesManifestsRunCommandsThatExist(t *testing.T) {
	const base = "../../deploy/kubernetes/base/"
	ports := map[string]string{"frontend": ":8080", "indexer": ":9201"}
	for _, name := range []string{"frontend", "indexer"} {
		t.Run(name, func(t *testing.T) {
			f, err := os.Open(base + name + ".yaml")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }()
			var deployment struct {
				Kind string
				Spec struct {
					Template struct {
						Spec struct {
							Containers []struct {
								Image string
								Args  []string
								Env   []struct{ Name, Value string }
								Ports []struct {
									ContainerPort string `yaml:"containerPort"`
								}
							}
						}
					}
				}
			}
			if err := yaml.NewDecoder(f).Decode(&deployment); err != nil || deployment.Kind != "Deployment" {
				t.Fatalf("%s, %v", deployment.Kind, err)
			}
			c := deployment.Spec.Template.Spec.Containers[0]
			known := map[string]bool{}
			settings(parser(t).Model, func(flag *kong.Flag) { known[flag.Envs[0]] = true })
			environ := map[string]string{}
			for _, e := range c.Env {
				if strings.HasPrefix(e.Name, envPrefix) && !known[e.Name] {
					t.Errorf("no command reads %s", e.Name)
				}
				environ[e.Name] = cmp.Or(e.Value, "redis://redis:6379") // good for a token as well
			}
			cmd := parsed(t, c.Args, environ, base+"warmroute.yaml")
			switch c := cmd.Selected().Target.Interface().(type) {
			case frontendCmd:
				if string(c.Frontend.Listen) != ports[name] || c.Redis.Redis == "" || c.Access.TokenFile == "" || c.Access.QueryTokenFile == "" || len(c.Frontend.WorkerDNS) != 1 {
					t.Errorf("incomplete: %+v", c)
				}
			case indexerCmd:
				if string(c.Indexer.AdminListen) != ports[name] || c.Redis.Redis == "" || c.Access.AdminTokenFile == "" || c.Access.QueryTokenFile == "" {
					t.Errorf("incomplete: %+v", c)
				}
			default:
				t.Errorf("%s runs %s", name, cmd.Command())
			}
			if got := ":" + c.Ports[0].ContainerPort; c.Image != "warmroute" || got != ports[name] {
				t.Errorf("image %s, port %s", c.Image, got)
			}
		})
	}
}

func TestSystemdUnitsRunCommandsThatExist(t *testing.T) {
	units, err := filepath.Glob("../../deploy/systemd/*.service")
	if err != nil || len(units) != 2 {
		t.Fatalf("units %v, %v", units, err)
	}
	config := filepath.Join(t.TempDir(), "warmroute.yaml")
	if err := os.WriteFile(config, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/warmroute (.*)$`).FindSubmatch(text)
		if m == nil {
			t.Fatalf("%s starts something else", unit)
		}
		cmd := parsed(t, strings.Fields(string(m[1])), nil, config)
		if want := "warmroute-" + cmd.Command() + ".service"; filepath.Base(unit) != want {
			t.Errorf("%s runs %s", unit, cmd.Command())
		}
		if f, ok := cmd.Selected().Target.Interface().(frontendCmd); ok && f.Frontend.DrainDelay+f.Frontend.DrainLimit >= stopTimeout(t, text) {
			t.Errorf("%s is killed before it is drained", unit)
		}
	}
	tokens, err := os.ReadFile("../../deploy/systemd/tokens.conf")
	if err != nil {
		t.Fatal(err)
	}
	environ := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^Environment=(\w+)=%d/([\w-]+)$`).FindAllStringSubmatch(string(tokens), -1) {
		environ[m[1]] = "/" + m[2]
		if !strings.Contains(string(tokens), "\nLoadCredential="+m[2]+":/etc/warmroute/credentials/"+m[2]+"\n") {
			t.Errorf("no credential %s", m[2])
		}
	}
	for _, command := range []string{"frontend", "indexer"} {
		var o accessOptions
		switch c := parsed(t, []string{command}, environ, config).Selected().Target.Interface().(type) {
		case frontendCmd:
			o = c.Access
		case indexerCmd:
			o = c.Access
		}
		if o.TokenFile != "/token" || o.QueryTokenFile != "/query-token" || o.AdminTokenFile != "/admin-token" {
			t.Errorf("%s with tokens.conf: %+v", command, o)
		}
	}
	if _, _, err := parse([]string{"frontend", "--drain-limits=1s"}, &stdio{Out: io.Discard, Err: io.Discard}, nil); err == nil || errors.Is(err, errHelp) {
		t.Error("the check itself lets everything pass")
	}
}

func stopTimeout(t *testing.T, unit []byte) time.Duration {
	t.Helper()
	m := regexp.MustCompile(`(?m)^TimeoutStopSec=(.*)$`).FindSubmatch(unit)
	if m == nil {
		t.Fatal("no TimeoutStopSec")
	}
	d, err := time.ParseDuration(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	return d
}
