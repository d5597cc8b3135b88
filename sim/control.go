package sim

import (
	"errors"
	"net"
	"net/http"
	"time"
)

// control adds the endpoints that only a simulated engine has. They work during a hang.
// Arguments are JSON; a missing body means all defaults.
//
//	POST /sim/crash         {"restart_after_ms": 0}  0: stays down (nothing listens any more)
//	POST /sim/hang, /sim/resume, /sim/restart
//	POST /sim/drop_events   {"n": 1, "rank": -1, "burnt": false}
//	POST /sim/clear         {"rank": -1}             409 while sequences are running
//	POST /sim/unhealthy     {"unhealthy": true}
//	POST /sim/sleep         {"asleep": true}
//	POST /sim/break_streams {"n": 1, "after_chunks": 1}
//	GET  /sim/state         what the ranks hold and where they listen
func (h *handler) control(mux *http.ServeMux) {
	mux.HandleFunc("POST /sim/crash", func(w http.ResponseWriter, r *http.Request) {
		var a struct {
			RestartAfterMS int64 `json:"restart_after_ms"`
		}
		if readArgs(w, r, &a) {
			h.afterAnswer(w, r, func() error { return h.e.crashThenRestart(time.Duration(a.RestartAfterMS) * time.Millisecond) })
		}
	})
	mux.HandleFunc("POST /sim/restart", func(w http.ResponseWriter, r *http.Request) {
		h.afterAnswer(w, r, h.e.Restart)
	})
	mux.HandleFunc("POST /sim/hang", h.engineDo(h.e.Hang))
	mux.HandleFunc("POST /sim/resume", h.engineDo(h.e.Resume))
	mux.HandleFunc("POST /sim/drop_events", func(w http.ResponseWriter, r *http.Request) {
		a := struct {
			N     int  `json:"n"`
			Rank  int  `json:"rank"`
			Burnt bool `json:"burnt"`
		}{1, -1, false}
		if readArgs(w, r, &a) {
			report(w, h.e.DropEvents(a.Rank, a.N, a.Burnt))
		}
	})
	mux.HandleFunc("POST /sim/clear", func(w http.ResponseWriter, r *http.Request) {
		a := struct {
			Rank int `json:"rank"`
		}{-1}
		if readArgs(w, r, &a) {
			report(w, h.e.ClearCache(a.Rank))
		}
	})
	mux.HandleFunc("POST /sim/unhealthy", func(w http.ResponseWriter, r *http.Request) {
		a := struct {
			Unhealthy bool `json:"unhealthy"`
		}{true}
		if readArgs(w, r, &a) {
			report(w, h.e.SetUnhealthy(a.Unhealthy))
		}
	})
	mux.HandleFunc("POST /sim/sleep", func(w http.ResponseWriter, r *http.Request) {
		a := struct {
			Asleep bool `json:"asleep"`
		}{true}
		if !readArgs(w, r, &a) {
			return
		}
		if a.Asleep {
			report(w, h.e.Sleep())
		} else {
			report(w, h.e.WakeUp())
		}
	})
	mux.HandleFunc("POST /sim/break_streams", func(w http.ResponseWriter, r *http.Request) {
		a := struct {
			N           int `json:"n"`
			AfterChunks int `json:"after_chunks"`
		}{1, 1}
		if readArgs(w, r, &a) {
			report(w, h.e.BreakStreams(a.N, a.AfterChunks))
		}
	})
	mux.HandleFunc("GET /sim/state", h.state)
}

func (h *handler) state(w http.ResponseWriter, _ *http.Request) {
	type rankState struct {
		Rank     int    `json:"rank"`
		Events   string `json:"events"`
		Replay   string `json:"replay,omitempty"`
		LastSeq  int64  `json:"last_seq"`
		Resident int    `json:"resident_blocks"`
		Load     int64  `json:"load"`
	}
	var ranks []rankState
	for _, r := range h.p.ranks {
		r.mu.Lock()
		resident := len(r.pool.cached)
		r.mu.Unlock()
		ranks = append(ranks, rankState{
			Rank: r.id, Events: h.e.EventEndpoint(r.id), Replay: h.e.ReplayEndpoint(r.id),
			LastSeq: r.pub.lastSeq(), Resident: resident, Load: r.load.Load(),
		})
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"model": h.o.Model, "block_size": h.o.BlockSize, "started_ms": h.p.started.UnixMilli(), "cancelled": h.e.Cancelled(), "ranks": ranks,
	})
}

// readArgs reads a control's arguments over their defaults; it answers where they are wrong.
func readArgs(w http.ResponseWriter, r *http.Request, args any) bool {
	if r.ContentLength == 0 {
		return true
	}
	if err := readJSON(r, args); err != nil {
		writeError(w, err)
		return false
	}
	return true
}

func report(w http.ResponseWriter, err error) {
	switch {
	case err == nil:
		writeJSON(w, http.StatusOK, map[string]any{})
	case errors.Is(err, errBusy):
		writeError(w, &apiError{status: http.StatusConflict, Message: err.Error(), Type: "ConflictError"})
	default:
		writeError(w, err)
	}
}

func (h *handler) engineDo(f func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { report(w, f()) }
}

// afterAnswer answers first and then does what ends this process and its connections.
func (h *handler) afterAnswer(w http.ResponseWriter, r *http.Request, f func() error) {
	w.Header().Set("Connection", "close")
	writeJSON(w, http.StatusAccepted, map[string]any{})
	if err := http.NewResponseController(w).Flush(); err != nil {
		return
	}
	if c, ok := r.Context().Value(connKey{}).(net.Conn); ok { // this one is not to be reset
		h.p.mu.Lock()
		delete(h.p.conns, c)
		h.p.mu.Unlock()
	}
	go func() {
		if err := f(); err != nil {
			h.o.Logger.Error("control failed", "error", err)
		}
	}()
}
