package fleet

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/warmroute/warmroute/kvcache"
)

// saved is the file: what the catalog last listed.
type saved struct {
	Version int           `json:"version"`
	Workers []savedWorker `json:"workers"`
	Pools   []savedPool   `json:"pools"`
}

type savedWorker struct {
	ID     string   `json:"id"`
	URL    string   `json:"url"`
	Engine string   `json:"engine,omitempty"`
	Tenant string   `json:"tenant,omitempty"`
	Ranks  []int    `json:"ranks"`
	Pools  []string `json:"pools"`
}

type savedPool struct {
	Pool      string `json:"pool"`
	BlockSize int    `json:"block_size"`
}

const (
	savedVersion  = 1
	savedMaxBytes = 16 << 20
)

// load takes over the file. Whatever is wrong with it is logged, and the fleet starts without.
func (f *Fleet) load(ctx context.Context) {
	if f.o.File == "" {
		return
	}
	content, err := readFile(f.o.File)
	if errors.Is(err, fs.ErrNotExist) {
		f.o.Logger.InfoContext(ctx, "no snapshot of the workers yet", "file", f.o.File)
		return
	}
	var listed map[Key]*listing
	var pools map[kvcache.PoolID]int
	if err == nil {
		listed, pools, err = decodeSaved(content)
	}
	if err != nil {
		f.o.Logger.WarnContext(ctx, "the snapshot of the workers cannot be used", "file", f.o.File, "error", err)
		return
	}
	f.saved = string(content)
	f.mu.Lock()
	for k, l := range listed {
		if f.listed[k] == nil {
			f.listed[k] = l
		}
	}
	for p, size := range pools {
		if f.pools[p] == 0 {
			f.pools[p] = size
		}
	}
	added, gone := f.reconcile()
	f.mu.Unlock()
	f.o.Logger.InfoContext(ctx, "workers of the snapshot", "file", f.o.File, "workers", len(listed))
	f.announce(added, gone)
}

func readFile(name string) ([]byte, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	content, err := io.ReadAll(io.LimitReader(file, savedMaxBytes+1))
	if err == nil && len(content) > savedMaxBytes {
		err = fmt.Errorf("more than %d bytes", savedMaxBytes)
	}
	return content, err
}

func decodeSaved(content []byte) (map[Key]*listing, map[kvcache.PoolID]int, error) {
	var s saved
	if err := json.Unmarshal(content, &s); err != nil {
		return nil, nil, err
	}
	if s.Version != savedVersion {
		return nil, nil, fmt.Errorf("version %d: want %d", s.Version, savedVersion)
	}
	listed, pools := map[Key]*listing{}, map[kvcache.PoolID]int{}
	for _, w := range s.Workers {
		worker, err := newState(Worker{ID: w.ID, URL: w.URL, Engine: w.Engine, Tenant: w.Tenant}, SourceSaved)
		if err != nil {
			return nil, nil, err
		}
		l := &listing{worker: worker, ranks: w.Ranks}
		for _, rank := range w.Ranks {
			if err := (kvcache.WorkerRank{Worker: w.ID, Rank: rank}).Validate(); err != nil {
				return nil, nil, err
			}
		}
		slices.Sort(l.ranks)
		l.ranks = slices.Compact(l.ranks)
		for _, name := range w.Pools {
			p, err := kvcache.ParsePoolID(name)
			if err != nil {
				return nil, nil, err
			}
			l.pools = append(l.pools, p)
		}
		listed[worker.Key()] = l
	}
	for _, p := range s.Pools {
		id, err := kvcache.ParsePoolID(p.Pool)
		if err != nil {
			return nil, nil, err
		}
		if p.BlockSize < 1 {
			return nil, nil, fmt.Errorf("pool %s: block size %d", p.Pool, p.BlockSize)
		}
		pools[id] = p.BlockSize
	}
	return listed, pools, nil
}

// save writes the file where its content has changed: to another file first, so that a crash leaves the old
// or the new one.
func (f *Fleet) save(ctx context.Context) {
	if f.o.File == "" {
		return
	}
	content, err := f.encodeSaved()
	if err == nil && string(content) == f.saved {
		return
	}
	if err == nil {
		err = replaceFile(f.o.File, content)
	}
	cause := ""
	if err != nil {
		cause = err.Error()
	} else {
		f.saved = string(content)
	}
	if changed, _ := f.saving.turn(cause); changed {
		if err != nil {
			f.o.Logger.WarnContext(ctx, "the snapshot of the workers cannot be written", "file", f.o.File, "error", err)
		} else {
			f.o.Logger.InfoContext(ctx, "the snapshot of the workers is written again", "file", f.o.File)
		}
	}
}

func (f *Fleet) encodeSaved() ([]byte, error) {
	s := saved{Version: savedVersion, Workers: []savedWorker{}, Pools: []savedPool{}}
	f.mu.Lock()
	for k, l := range f.listed {
		if l.worker == nil {
			continue
		}
		w := savedWorker{ID: k.ID, URL: l.worker.URL, Engine: l.worker.Engine, Tenant: l.worker.Tenant, Ranks: l.ranks, Pools: []string{}}
		for _, p := range l.pools {
			w.Pools = append(w.Pools, p.String())
		}
		slices.Sort(w.Pools)
		s.Workers = append(s.Workers, w)
	}
	for p, size := range f.pools {
		s.Pools = append(s.Pools, savedPool{p.String(), size})
	}
	f.mu.Unlock()
	slices.SortFunc(s.Workers, func(a, b savedWorker) int { return KeyOf(a.Tenant, a.ID).compare(KeyOf(b.Tenant, b.ID)) })
	slices.SortFunc(s.Pools, func(a, b savedPool) int { return cmp.Compare(a.Pool, b.Pool) })
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	err := e.Encode(s)
	return b.Bytes(), err
}

func replaceFile(name string, content []byte) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = tmp.Close() // the first error counts
			_ = os.Remove(tmp.Name())
		}
	}()
	if _, err = tmp.Write(content); err != nil {
		return err
	}
	if err = tmp.Sync(); err != nil {
		return err
	}
	if err = tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), name)
}
