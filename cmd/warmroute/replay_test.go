package main

import (
	"reflect"
	"testing"
)

// A replay is worth something for a frontend of the same settings: what both have has one default.
func TestReplayHasTheFrontendsSlack(t *testing.T) {
	replayed, _ := reflect.TypeFor[replayCmd]().FieldByName("SessionSlack")
	served, _ := reflect.TypeFor[frontendOptions]().FieldByName("SessionSlack")
	if a, b := replayed.Tag.Get("default"), served.Tag.Get("default"); a == "" || a != b {
		t.Errorf("replay has a session slack of %q tokens, the frontend %q", a, b)
	}
}
