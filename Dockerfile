# The image of every part: the command line says which one runs.
#   docker build -t warmroute .
#   docker run --rm warmroute demo
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o /warmroute ./cmd/warmroute

FROM gcr.io/distroless/static-debian12:nonroot
COPY --from=build /warmroute /usr/local/bin/warmroute
# 8080 OpenAI API, queries and metrics of a frontend; 9201 admin and metrics of an indexer.
EXPOSE 8080 9201
USER nonroot:nonroot
ENTRYPOINT ["/usr/local/bin/warmroute"]
CMD ["--help"]
