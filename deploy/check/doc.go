// Package check tests the files of deploy and of docker-compose.yml against the libraries that will read them: kustomize, the
// Kubernetes API types and compose-go. It is a module of its own, so that none of these becomes a dependency of warmroute.
//
// Use -count=1: files outside of the module are no part of what go test remembers.
//
//	cd deploy/check && go test -count=1 ./...
package check
