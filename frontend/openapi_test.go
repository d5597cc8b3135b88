package frontend

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
	"github.com/goccy/go-yaml"

	"github.com/warmroute/warmroute/frontend/api"
)

// Every route but the page's is described, and every description is of a route.
func TestOpenAPIDescribesTheRoutes(t *testing.T) {
	f, err := New(Options{Workers: []Worker{{ID: "w", URL: refusing(t)}}})
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Paths map[string]map[string]any
	}
	if err := yaml.Unmarshal(api.OpenAPI, &doc); err != nil {
		t.Fatal(err)
	}
	described := map[string]bool{}
	for path, operations := range doc.Paths {
		for method := range operations {
			described[strings.ToUpper(method)+" "+path] = true
		}
	}
	parameter := regexp.MustCompile(`:(\w+)`)
	served := map[string]bool{}
	for _, r := range f.routes().(*gin.Engine).Routes() {
		if r.Path != "/" && !strings.HasPrefix(r.Path, "/ui") {
			served[r.Method+" "+parameter.ReplaceAllString(r.Path, "{$1}")] = true
		}
	}
	for _, route := range slices.Sorted(maps.Keys(served)) {
		if !described[route] {
			t.Errorf("openapi.yaml lacks %s", route)
		}
	}
	for _, route := range slices.Sorted(maps.Keys(described)) {
		if !served[route] {
			t.Errorf("openapi.yaml describes %s, which there is not", route)
		}
	}
}

// What a description says of tokens is what the routes ask for.
func TestOpenAPIDescribesTheTokens(t *testing.T) {
	var doc struct {
		Security []map[string][]string
		Paths    map[string]map[string]struct {
			Security  *[]map[string][]string
			Responses map[string]any
		}
		Components struct {
			SecuritySchemes map[string]any `yaml:"securitySchemes"`
		}
	}
	if err := yaml.Unmarshal(api.OpenAPI, &doc); err != nil {
		t.Fatal(err)
	}
	takes := map[string][]string{"open": {}, "client": {"client"}, "both": {"admin", "client", "query"}, "query": {"admin", "query"}} // with none as well, where a process has no tokens
	parameter := regexp.MustCompile(`:(\w+)`)
	for kind, routes := range access {
		for _, route := range routes {
			method, path, _ := strings.Cut(route, " ")
			op, ok := doc.Paths[parameter.ReplaceAllString(path, "{$1}")][strings.ToLower(method)]
			if !ok {
				continue // of the page
			}
			security := doc.Security
			if op.Security != nil {
				security = *op.Security
			}
			got := []string{}
			for _, s := range security {
				for scheme := range s {
					if doc.Components.SecuritySchemes[scheme] == nil {
						t.Errorf("%s: there is no scheme %s", route, scheme)
					}
					got = append(got, scheme)
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, takes[kind]) || len(security) != len(got)+min(len(got), 1) {
				t.Errorf("%s: described with %v, takes %v or nothing", route, security, takes[kind])
			}
			for _, code := range []string{"401", "403"} {
				if _, described := op.Responses[code]; described != (kind != "open") {
					t.Errorf("%s: %s is described: %v", route, code, described)
				}
			}
		}
	}
}
