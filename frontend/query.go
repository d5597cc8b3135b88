package frontend

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/gin-gonic/gin"

	"github.com/warmroute/warmroute/frontend/choose"
	"github.com/warmroute/warmroute/frontend/fleet"
	"github.com/warmroute/warmroute/frontend/openai"
	"github.com/warmroute/warmroute/kvcache"
	"github.com/warmroute/warmroute/store"
)

// question is the body of the index routes, of which each reads its part.
type question struct {
	Model     string `json:"model"`
	ModelName string `json:"model_name"`
	TenantID  string `json:"tenant_id"`
	LoRA      string `json:"lora_name"`
	Salt      string `json:"cache_salt"`
	BlockSize int    `json:"block_size"`
	Instance  string `json:"instance_id"`

	SeqHashes   []kvcache.BlockHash `json:"seq_hashes"`
	BlockHash   []kvcache.BlockHash `json:"block_hash"`
	BlockHashes []kvcache.LocalHash `json:"block_hashes"` // local, as Dynamo's clients send them

	Pinned   *pinnedWorker        `json:"pinned_worker"`
	Allowed  []kvcache.WorkerName `json:"allowed_worker_ids"`
	Override *choose.Override     `json:"router_config_override"`
	Output   int                  `json:"expected_output_tokens"`
	ID       string               `json:"selection_id"`
	Tokens   int                  `json:"isl_tokens"` // of the prompt, where hashes are given

	session string // session_id, or else x-session-id
	tokens  []uint32
	pool    kvcache.PoolID
	target  fleet.Target // without nodes where the fleet does not serve the model
}

// pinnedWorker is a worker id, or an object that names a rank as well.
type pinnedWorker struct {
	WorkerID kvcache.WorkerName `json:"worker_id"`
	Rank     *int               `json:"dp_rank"`
}

func (p *pinnedWorker) UnmarshalJSON(b []byte) error {
	type plain pinnedWorker
	var err error
	if b[0] == '{' {
		err = json.Unmarshal(b, (*plain)(p))
	} else {
		err = p.WorkerID.UnmarshalJSON(b)
	}
	switch {
	case err != nil:
		return err
	case p.WorkerID == "" && p.Rank == nil:
		return errors.New("names neither a worker nor a rank")
	case p.Rank != nil && (*p.Rank < 0 || *p.Rank > kvcache.MaxRank):
		return errors.New("a rank is a whole number from 0 to " + strconv.Itoa(kvcache.MaxRank))
	}
	return nil
}

// question reads the body of an index route and finds the pool.
func (f *Frontend) question(c *gin.Context) (*question, error) {
	body, err := f.readBody(c)
	if err != nil {
		return nil, err
	}
	defer body.drop()
	// Token ids are many; encoding/json would take most of the request's time for them. The
	// other members go to it one by one, and their keys are exact.
	q := &question{session: c.GetHeader(headerSession)}
	var ids []byte
	err = openai.Object(body.bytes, func(key string, raw []byte) error {
		if key == "token_ids" {
			ids = raw
			return nil
		}
		return q.set(key, raw)
	})
	if err != nil {
		return nil, asBadRequest(err)
	}
	if q.Model == "" {
		q.Model = q.ModelName
	}
	if q.Model == "" {
		return nil, refuse(http.StatusBadRequest, "invalid_request", `"model" is missing`)
	}
	q.pool = kvcache.PoolID{Tenant: q.TenantID, Model: q.Model}
	if q.pool.Tenant == "" {
		q.pool.Tenant = kvcache.DefaultTenant
	}
	if q.BlockSize < 0 {
		return nil, refuse(http.StatusBadRequest, "invalid_request", `"block_size" is negative`)
	}
	if err := errors.Join(q.pool.Validate(), checkTenant(q.pool.Tenant)); err != nil {
		return nil, refuse(http.StatusBadRequest, "invalid_request", err.Error())
	}
	limit := f.o.MaxPromptTokens
	if t, ok := f.fleet.Snapshot().Target(q.pool.Tenant, q.Model); ok {
		q.target, q.pool = t, t.Pool
		if q.LoRA == "" {
			q.LoRA = t.LoRA
		}
	}
	if ids != nil && string(ids) != "null" {
		if q.tokens, err = openai.Tokens(ids, "token_ids", limit); err != nil {
			return nil, err
		}
	}
	return q, nil
}

// set decodes one member.
func (q *question) set(key string, raw []byte) error {
	var to any
	switch key {
	case "model":
		to = &q.Model
	case "model_name":
		to = &q.ModelName
	case "tenant_id":
		to = &q.TenantID
	case "lora_name":
		to = &q.LoRA
	case "cache_salt":
		to = &q.Salt
	case "block_size":
		to = &q.BlockSize
	case "instance_id":
		var name kvcache.WorkerName
		err := json.Unmarshal(raw, &name)
		q.Instance = string(name)
		return asMemberError(key, err)
	case "seq_hashes", "sequence_hashes":
		to = &q.SeqHashes
	case "block_hash":
		to = &q.BlockHash
	case "block_hashes":
		to = &q.BlockHashes
	case "pinned_worker":
		q.Pinned = nil // of two the last one counts, not what both make together
		to = &q.Pinned
	case "allowed_worker_ids":
		to = &q.Allowed
	case "router_config_override":
		q.Override = nil
		to = &q.Override
	case "expected_output_tokens":
		to = &q.Output
	case "selection_id":
		to = &q.ID
	case "isl_tokens":
		to = &q.Tokens
	case "session_id":
		to = &q.session
	default:
		return nil
	}
	return asMemberError(key, json.Unmarshal(raw, to))
}

func asMemberError(key string, err error) error {
	if err == nil {
		return nil
	}
	why := err.Error()
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		why = "a JSON " + wrong.Value + " cannot stand here"
		if wrong.Field != "" {
			why = strconv.Quote(wrong.Field) + ": " + why
		}
	}
	return refuse(http.StatusBadRequest, "invalid_request", strconv.Quote(key)+": "+why)
}

// asBadRequest is for errors of the JSON itself.
func asBadRequest(err error) error {
	var api *apiError
	if errors.As(err, &api) {
		return err
	}
	return refuse(http.StatusBadRequest, "invalid_request", err.Error())
}

// blocks are the hashes that the question gives; false where it gives none.
func (q *question) blocks() ([]kvcache.BlockHash, bool) {
	switch {
	case q.SeqHashes != nil:
		return q.SeqHashes, true
	case q.BlockHash != nil:
		return q.BlockHash, true
	case q.BlockHashes != nil:
		return kvcache.ChainLocals(q.BlockHashes), true
	}
	return nil, false
}

// know asks the index about tokens or hashes. A model that neither the fleet nor the index knows
// is an error; an index that is away is not.
func (f *Frontend) know(c *gin.Context, q *question, o store.LookupOptions) (knowledge, error) {
	k := knowledge{blockSize: f.o.BlockSize, state: kvcache.Bypassed}
	defer func() {
		c.Set(keyIndexState, string(k.state))
		f.learnt(c.Request.Context(), q, &k)
	}()
	hashes, given := q.blocks()
	if q.tokens == nil && !given {
		return k, refuse(http.StatusBadRequest, "invalid_request", "neither token ids nor block hashes are given")
	}
	if limit := f.o.MaxPromptTokens; len(hashes) > limit {
		return k, openai.TooLong(len(hashes), limit)
	}
	if f.o.Index == nil {
		k.tokens, k.blocks = len(q.tokens), len(hashes)
		f.fellBack(&k, reasonDisabled)
		return k, q.served(&k)
	}
	err := f.consult(c.Request.Context(), &k, inquiry{
		pool: q.pool, tokens: q.tokens, spec: kvcache.HashSpec{LoRA: q.LoRA, Salt: q.Salt}, hashes: hashes,
		options: o, blockSize: q.BlockSize,
	})
	if err != nil || k.found {
		return k, err
	}
	return k, q.served(&k)
}

// served refuses a model that nobody knows, unless the index might.
func (q *question) served(k *knowledge) error {
	if k.state == kvcache.Degraded || q.target.Pool.Model != "" {
		return nil
	}
	return unknownModel(q.Model)
}

// query answers POST /query.
func (f *Frontend) query(c *gin.Context) {
	q, err := f.question(c)
	if err == nil && q.tokens == nil {
		err = refuse(http.StatusBadRequest, "invalid_request", `"token_ids" is missing`)
	}
	f.report(c, q, err)
}

// queryByHash answers POST /query_by_hash.
func (f *Frontend) queryByHash(c *gin.Context) {
	q, err := f.question(c)
	if err == nil {
		q.tokens = nil
	}
	f.report(c, q, err)
}

func (f *Frontend) report(c *gin.Context, q *question, err error) {
	if err != nil {
		fail(c, err)
		return
	}
	k, err := f.know(c, q, store.LookupOptions{TreeSizes: true, Frequencies: true})
	if err != nil {
		fail(c, err)
		return
	}
	c.JSON(http.StatusOK, answerOf(q, &k))
}

// match is how much of a prompt one worker holds, in tokens, each tier including the faster ones.
type match struct {
	Longest int            `json:"longest_matched"`
	GPU     int            `json:"GPU"`
	DP      map[string]int `json:"DP"`
	CPU     int            `json:"CPU"`
	Disk    int            `json:"DISK"`
}

// answerOf is the answer of the query routes: Mooncake's under the tenant's name, Dynamo's beside it.
func answerOf(q *question, k *knowledge) map[string]any {
	workers := map[string]*match{}
	scores, sizes := map[string]map[string]int{}, map[string]map[string]int{}
	frequencies := k.scores.Frequencies
	if frequencies == nil {
		frequencies = []int{}
	}
	for w, o := range k.scores.Scores {
		if q.Instance != "" && q.Instance != w.Worker {
			continue
		}
		m := workers[w.Worker]
		if m == nil {
			m = &match{DP: map[string]int{}}
			workers[w.Worker] = m
			scores[w.Worker], sizes[w.Worker] = map[string]int{}, map[string]int{}
		}
		rank := strconv.Itoa(w.Rank)
		m.Longest = max(m.Longest, o.Any*k.blockSize)
		m.GPU = max(m.GPU, o.Device*k.blockSize)
		m.CPU = max(m.CPU, o.Host*k.blockSize)
		m.Disk = max(m.Disk, o.Disk*k.blockSize)
		m.DP[rank] = o.Any * k.blockSize
		scores[w.Worker][rank] = o.Any * k.blockSize
		sizes[w.Worker][rank] = k.scores.TreeSizes[w]
	}
	return map[string]any{
		q.pool.Tenant: workers,
		"scores":      scores, "frequencies": frequencies, "tree_sizes": sizes, "index_state": k.state,
	}
}
