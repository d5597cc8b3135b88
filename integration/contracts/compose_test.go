package contracts

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/cli"
)

// The compose file is read as docker compose reads it, with its schema, anchors and variables.
func TestComposeFile(t *testing.T) {
	o, err := cli.NewProjectOptions([]string{"../../docker-compose.yml"}, cli.WithName("warmroute"), cli.WithResolvedPaths(true),
		cli.WithEnv([]string{"WARMROUTE_ADMIN_TOKEN=from-the-environment"}))
	if err != nil {
		t.Fatal(err)
	}
	p, err := o.LoadProject(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := p.ServiceNames(), []string{"engine-0", "engine-1", "frontend-0", "frontend-1", "indexer-0", "indexer-1", "redis"}; !slices.Equal(got, want) {
		t.Fatalf("services %v, want %v", got, want)
	}
	for name, s := range p.Services {
		for _, port := range s.Ports {
			if port.HostIP != "127.0.0.1" {
				t.Errorf("%s is open to other machines at %s:%s", name, port.HostIP, port.Published)
			}
		}
		if name == "redis" {
			continue
		}
		if s.Build == nil || !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Equal(s.SecurityOpt, []string{"no-new-privileges:true"}) {
			t.Errorf("%s: read only %v, capabilities dropped %v, %v", name, s.ReadOnly, s.CapDrop, s.SecurityOpt)
		}
		if strings.HasPrefix(name, "engine") {
			continue
		}
		if token := s.Environment["WARMROUTE_ADMIN_TOKEN"]; token == nil || *token != "from-the-environment" {
			t.Errorf("%s: the token is not taken from the environment", name)
		}
		// frontends drain for --drain-limit, 30 s by default; compose kills after 10 s unless it is told otherwise.
		if strings.HasPrefix(name, "frontend") && (s.StopGracePeriod == nil || time.Duration(*s.StopGracePeriod) <= 30*time.Second) {
			t.Errorf("%s: stop_grace_period %v", name, s.StopGracePeriod)
		}
	}
}

// The image has nothing but the program, which is static and does not run as root.
func TestDockerfile(t *testing.T) {
	text, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	stages := regexp.MustCompile(`(?m)^FROM `).Split(string(text), -1)
	last := stages[len(stages)-1]
	for _, want := range []string{"gcr.io/distroless/static-debian12:nonroot\n", "\nUSER nonroot:nonroot\n", "\nENTRYPOINT [\"/usr/local/bin/warmroute\"]\n"} {
		if !strings.Contains(last, want) {
			t.Errorf("the last stage lacks %q:\n%s", want, last)
		}
	}
	if strings.Contains(last, "\nRUN ") || !strings.Contains(string(text), "CGO_ENABLED=0") {
		t.Error("the last stage has no shell to RUN anything, and no C library")
	}
}
