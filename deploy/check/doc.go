// Package check tests the files of deploy and of docker-compose.yml against the libraries that will read them: kustomize, the
// Kubernetes API types and compose-go. It is a module of its own, so that none of these becomes a dependency of warmroute.
//
//	cd deploy/check && go test ./...
package check
