package indexer

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
	"github.com/goccy/go-yaml"

	"github.com/warmroute/warmroute/indexer/api"
)

// Every route is described, and every description is of a route.
func TestOpenAPIDescribesTheRoutes(t *testing.T) {
	ix, err := New(Options{Store: newStore(t), Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ix.Close() }()
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
	for _, r := range ix.handler().(*gin.Engine).Routes() {
		served[r.Method+" "+parameter.ReplaceAllString(r.Path, "{$1}")] = true
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
