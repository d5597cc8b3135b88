package overhead

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// fleet is workers that answer at once.
type fleet struct {
	urls  []string
	model string
	stop  func()
}

func startWorkers(n int) (*fleet, error) {
	f := &fleet{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"object":"model"}]}`, f.model)
	})
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"object":"text_completion","choices":[{"index":0,"text":"x"}]}`)
	})
	var servers []*http.Server
	f.stop = func() {
		for _, s := range servers {
			_ = s.Close()
		}
	}
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			f.stop()
			return nil, err
		}
		s := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
		go func() { _ = s.Serve(l) }()
		servers = append(servers, s)
		f.urls = append(f.urls, "http://"+l.Addr().String())
	}
	return f, nil
}

// call sends one request and reads the answer.
func (c *caller) call(ctx context.Context, url, body string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return false
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := c.client.Do(req)
	if err != nil {
		return false
	}
	defer func() { _ = res.Body.Close() }()
	_, err = io.Copy(io.Discard, res.Body)
	return err == nil && res.StatusCode == http.StatusOK
}

// awaitReady waits for a 200.
func awaitReady(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		if res, err := http.DefaultClient.Do(req); err == nil {
			_ = res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// startNginx starts a plain reverse proxy in one process.
func startNginx(ctx context.Context, program string, upstreams []string) (url string, pid int, stop func(), err error) {
	dir, err := os.MkdirTemp("", "warmroute-nginx-")
	if err != nil {
		return "", 0, nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", 0, nil, errors.Join(err, os.RemoveAll(dir))
	}
	addr := l.Addr().String()
	_ = l.Close()
	var servers strings.Builder
	for _, u := range upstreams {
		servers.WriteString("server " + strings.TrimPrefix(u, "http://") + ";\n")
	}
	config := fmt.Sprintf(`daemon off; master_process off; pid %[1]s/pid; error_log %[1]s/log crit;
events { worker_connections 1024; }
http {
	access_log off; client_max_body_size 32m; client_body_buffer_size 1m;
	client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
	upstream workers { %[2]s keepalive 64; }
	server {
		listen %[3]s;
		location / { proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }
	}
}
`, dir, servers.String(), addr)
	file := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return "", 0, nil, errors.Join(err, os.RemoveAll(dir))
	}
	cmd := exec.CommandContext(ctx, program, "-c", file, "-p", dir, "-e", filepath.Join(dir, "log"))
	if err := cmd.Start(); err != nil {
		return "", 0, nil, errors.Join(err, os.RemoveAll(dir))
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = os.RemoveAll(dir)
	}
	url = "http://" + addr
	if err := awaitReady(ctx, url+"/health"); err != nil {
		stop()
		return "", 0, nil, err
	}
	return url, cmd.Process.Pid, stop, nil
}

// cpuOf is the CPU time that a process has used, where the system tells (Linux).
func cpuOf(pid int) (time.Duration, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) {
		if _, err := os.Stat("/proc/self/stat"); err != nil {
			return 0, nil
		}
	}
	if err != nil {
		return 0, err
	}
	// The name in parentheses may hold anything; user and system time are the 12th and 13th fields behind it.
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat: %q", pid, b)
	}
	user, err := strconv.Atoi(string(fields[11]))
	system, err2 := strconv.Atoi(string(fields[12]))
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every architecture that Go runs on
	return time.Duration(user+system) * tick, errors.Join(err, err2)
}
