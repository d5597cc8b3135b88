// Package api holds the description of an indexer's HTTP surface, which is served at /openapi.yaml. Tests compare it with the routes,
// in both directions, and run its examples.
package api

import _ "embed"

// OpenAPI is the description, in OpenAPI 3.1 as YAML.
//
//go:embed openapi.yaml
var OpenAPI []byte
