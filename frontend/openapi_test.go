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
