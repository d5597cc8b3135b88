# What one does with this repository; `make` alone lists it.
GO          ?= go
STATICCHECK ?= honnef.co/go/tools/cmd/staticcheck@v0.8.2
PACKAGES    ?= ./...
TESTFLAGS   ?=
FUZZTIME    ?= 30s
VERSION     ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)

.DEFAULT_GOAL := help
.PHONY: help build install demo test race lint bench fuzz deps docs tidy image compose clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

build: ## Build bin/warmroute
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/warmroute ./cmd/warmroute

install: ## Install warmroute where go install puts it
	CGO_ENABLED=0 $(GO) install -trimpath ./cmd/warmroute

demo: ## Run the demo: no Redis, no GPU, under a minute
	$(GO) run ./cmd/warmroute demo

deps: ## Install what the tests use beyond Go (as root, with apt-get), or name what is missing
	@.ci/deps

test: deps ## Run all tests, about two minutes; REQUIRE_REDIS=1 fails what would be skipped
	$(GO) test $(TESTFLAGS) $(PACKAGES)
	cd integration/contracts && $(GO) test -count=1 $(filter-out -race,$(TESTFLAGS)) ./...

race: ## Run all tests with the race detector
	$(MAKE) test TESTFLAGS="-race $(TESTFLAGS)"

lint: ## gofmt, go vet, staticcheck, go mod tidy
	@unformatted=$$(gofmt -l .) && test -z "$$unformatted" || { echo "not gofmt-ed:"; echo "$$unformatted"; exit 1; }
	$(GO) vet $(PACKAGES)
	$(GO) run $(STATICCHECK) $(PACKAGES)
	$(GO) mod tidy -diff
	cd integration/contracts && $(GO) vet ./... && $(GO) mod tidy -diff

bench: deps ## Run every benchmark once; BENCHTIME=2s for figures
	$(GO) test -run '^$$' -bench . -benchmem -benchtime $(or $(BENCHTIME),1x) $(PACKAGES)

fuzz: ## Run every fuzz target for FUZZTIME each (default 30s)
	@set -e; for package in $$($(GO) list $(PACKAGES)); do \
		for target in $$($(GO) test -list '^Fuzz' $$package | grep '^Fuzz' || true); do \
			echo "$$package $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$package; \
		done; \
	done

docs: ## Write the documents that are made from the code; tests say when they are out of date
	$(GO) test ./docs/monitoring ./cmd/warmroute ./integration -run UpToDate -update

tidy: ## gofmt -w and go mod tidy
	gofmt -w .
	$(GO) mod tidy

image: ## Build the container image warmroute, tagged with the version and latest
	docker build -t warmroute:$(VERSION) -t warmroute:latest .

compose: ## Run Redis, two indexers, two frontends and two simulated engines in containers
	docker compose up --build

clean: ## Remove what was built
	rm -rf bin dist
