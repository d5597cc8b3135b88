// Package contracts tests files that are read by others than us with the libraries that will read them: deployments with
// kustomize, the Kubernetes API types and compose-go, the API descriptions with an OpenAPI validator. It is a module of its
// own, so that none of these becomes a dependency of warmroute.
//
// Use -count=1: files outside of the module are no part of what go test remembers.
//
//	cd integration/contracts && go test -count=1 ./...
package contracts
