package sim

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
)

func TestCompletionForms(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4})
	url := e.URL() + "/v1/completions"
	text := "one two three"
	ids := Tokenize(text)
	asText := post(t, url, object{"model": "sim-model", "prompt": text, "max_tokens": 5})
	asIDs := post(t, url, object{"prompt": ids, "max_tokens": 5, "return_token_ids": true})
	if asText.Choices[0].Text != asIDs.Choices[0].Text || asText.Choices[0].FinishReason != "length" {
		t.Errorf("text %+v and ids %+v disagree", asText.Choices, asIDs.Choices)
	}
	if c := asIDs.Choices[0]; !slices.Equal(c.PromptTokenIDs, ids) || textOf(c.TokenIDs) != c.Text || len(c.TokenIDs) != 5 {
		t.Errorf("token ids %+v", c)
	}
	many := post(t, url, object{"prompt": []string{text, "other"}, "n": 2, "max_tokens": 3})
	if len(many.Choices) != 4 || many.Choices[3].Index != 3 || many.Choices[0].Text == many.Choices[1].Text {
		t.Errorf("two prompts, two choices: %+v", many.Choices)
	}
	if want := (usage{len(ids) + 2, len(ids) + 2 + 12, 12, many.Usage.Details}); *many.Usage != want {
		t.Errorf("usage %+v, want %+v", *many.Usage, want)
	}
	lists := post(t, url, object{"prompt": [][]uint32{ids, {300}}})
	if len(lists.Choices) != 2 || !strings.HasPrefix(lists.Choices[0].Text, asText.Choices[0].Text) || lists.Usage.CompletionTokens != 2*completionTokens {
		t.Errorf("lists of ids: %+v", lists)
	}
	if !strings.HasPrefix(lists.ID, "cmpl-") || lists.Object != "text_completion" || lists.Model != "sim-model" {
		t.Errorf("answer %+v", lists)
	}
}

func TestCachedTokens(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 16})
	prompt := numbers(1000, 640)
	if cached := complete(t, e, prompt, 1); cached != 0 {
		t.Errorf("cold: %d cached", cached)
	}
	if cached := complete(t, e, prompt, 1); cached != 624 { // floor(639/16)·16
		t.Errorf("repeated: %d cached, want 624", cached)
	}
	salted := object{"prompt": prompt, "max_tokens": 1, "cache_salt": "a"}
	for i, want := range []int{0, 624} {
		if got := post(t, e.URL()+"/v1/completions", salted).Usage.Details.CachedTokens; got != want {
			t.Errorf("salted, time %d: %d cached, want %d", i, got, want)
		}
	}
}

func TestConversationHitsItsOwnAnswers(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4})
	var messages []object
	computed := 0 // tokens that the turn before has left in the cache
	for turn := range 4 {
		messages = append(messages, object{"role": "user", "content": fmt.Sprint("question number ", turn)})
		r := post(t, e.URL()+"/v1/chat/completions", object{"messages": messages})
		if got, want := r.Usage.Details.CachedTokens, computed/4*4; got != want {
			t.Errorf("turn %d: %d cached, want %d", turn, got, want)
		}
		computed = r.Usage.PromptTokens + r.Usage.CompletionTokens - 1
		if m := r.Choices[0].Message; m.Role != "assistant" || m.Content == "" || r.Choices[0].FinishReason != "stop" || r.Object != "chat.completion" {
			t.Errorf("answer %+v", r)
		}
		messages = append(messages, object{"role": "assistant", "content": r.Choices[0].Message.Content})
	}
}

func TestAdapters(t *testing.T) {
	e := startEngine(t, Options{Model: "base", LoRAs: []string{"ad1", "ad2"}, BlockSize: 4})
	for _, model := range []string{"base", "ad1", "ad2"} {
		for i, want := range []int{0, 8} {
			r := post(t, e.URL()+"/v1/completions", object{"model": model, "prompt": numbers(0, 10), "max_tokens": 1})
			if r.Usage.Details.CachedTokens != want || r.Model != model {
				t.Errorf("%s, time %d: %d cached of %s, want %d", model, i, r.Usage.Details.CachedTokens, r.Model, want)
			}
		}
	}
	_, batches := replay(t, e, 0, 0)
	if ev := batches[2].events[0]; ev.loraName != "ad2" || *ev.loraID != 2 || !slices.Equal(ev.extra[1], []string{"ad2"}) {
		t.Errorf("event %+v", ev)
	}
	_, models, _ := call(t, "GET", e.URL()+"/v1/models", nil)
	var list struct {
		Data []struct {
			ID     string
			Parent *string
		}
	}
	if err := json.Unmarshal([]byte(models), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Data) != 3 || list.Data[0].Parent != nil || list.Data[2].ID != "ad2" || *list.Data[2].Parent != "base" {
		t.Errorf("models %s", models)
	}
}

// chunks reads a stream: the JSON of each event, without the end marker, and whether it came.
func chunks(t *testing.T, r io.Reader) (all []reply, done bool, err error) {
	t.Helper()
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case lines.Text() == "":
		case !ok:
			t.Fatalf("line %q", lines.Text())
		case data == "[DONE]":
			done = true
		default:
			var c reply
			if err := json.Unmarshal([]byte(data), &c); err != nil {
				t.Fatalf("%q: %v", data, err)
			}
			all = append(all, c)
		}
	}
	return all, done, lines.Err()
}

func TestStreaming(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4})
	for _, chat := range []bool{false, true} {
		url, body := e.URL()+"/v1/completions", object{"prompt": "tell me", "max_tokens": 6, "n": 2}
		if chat {
			url, body = e.URL()+"/v1/chat/completions", object{"messages": []object{{"role": "user", "content": "tell me"}}, "max_tokens": 6, "n": 2}
		}
		whole := post(t, url, body)
		body["stream"], body["stream_options"] = true, object{"include_usage": true}
		res := send(t, "POST", url, body)
		all, done, err := chunks(t, res.Body)
		res.Body.Close()
		if err != nil || !done || !strings.HasPrefix(res.Header.Get("Content-Type"), "text/event-stream") {
			t.Fatalf("chat %v: stream ended %v, %v", chat, done, err)
		}
		texts, finished := [2]string{}, [2]string{}
		for _, c := range all[:len(all)-1] {
			if len(c.Choices) != 1 || c.Usage != nil {
				t.Fatalf("chunk %+v", c)
			}
			o := c.Choices[0]
			texts[o.Index] += o.Text + o.Delta.Content
			finished[o.Index] += o.FinishReason
		}
		last := all[len(all)-1]
		if len(last.Choices) != 0 || last.Usage == nil || last.Usage.CompletionTokens != 12 {
			t.Errorf("chat %v: last chunk %+v", chat, last)
		}
		for i, c := range whole.Choices {
			if texts[i] != c.Text+c.Message.Content || finished[i] != "length" {
				t.Errorf("chat %v, choice %d: streamed %q (%s), whole %q", chat, i, texts[i], finished[i], c.Text+c.Message.Content)
			}
		}
		if chat && all[0].Choices[0].Delta.Role != "assistant" {
			t.Errorf("first chunk %+v", all[0])
		}
	}
}

func TestTokenizeEndpoints(t *testing.T) {
	e := startEngine(t, Options{MaxModelLen: 1000})
	var got struct {
		Count       int
		MaxModelLen int `json:"max_model_len"`
		Tokens      []uint32
		TokenStrs   []string `json:"token_strs"`
	}
	ask := func(body any) {
		t.Helper()
		got.TokenStrs = nil
		status, answer, _ := call(t, "POST", e.URL()+"/tokenize", body)
		if err := json.Unmarshal([]byte(answer), &got); status != 200 || err != nil {
			t.Fatalf("%d %s", status, answer)
		}
	}
	ask(object{"prompt": "hello there", "return_token_strs": true})
	if !slices.Equal(got.Tokens, Tokenize("hello there")) || got.Count != len(got.Tokens) || got.MaxModelLen != 1000 || strings.Join(got.TokenStrs, "") != "hello there" {
		t.Errorf("completion form: %+v", got)
	}
	_, text, _ := call(t, "POST", e.URL()+"/detokenize", object{"tokens": got.Tokens})
	if text != `{"prompt":"hello there"}` {
		t.Errorf("detokenize: %s", text)
	}
	// The chat form gives exactly what a chat request computes.
	chat := object{"messages": []object{{"role": "system", "content": []object{{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}}}, {"role": "user", "content": "hi"}},
		"tools": []object{{"type": "function"}}}
	ask(chat)
	chat["return_token_ids"] = true
	_, answer, _ := call(t, "POST", e.URL()+"/v1/chat/completions", chat)
	var res struct {
		PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	}
	if err := json.Unmarshal([]byte(answer), &res); err != nil || !slices.Equal(res.PromptTokenIDs, got.Tokens) || got.TokenStrs != nil {
		t.Errorf("the chat form gives %v, the request computes %v", got.Tokens, res.PromptTokenIDs)
	}
	whole := slices.Clone(got.Tokens)
	delete(chat, "return_token_ids")
	chat["add_generation_prompt"] = false
	ask(chat)
	if n := len(Tokenize("<|im_start|>assistant\n")); !slices.Equal(got.Tokens, whole[:len(whole)-n]) {
		t.Errorf("without the generation prompt: %v", got.Tokens)
	}
}

func TestBadRequests(t *testing.T) {
	e := startEngine(t, Options{MaxModelLen: 100, Ranks: 2})
	for _, c := range []struct {
		path, body string
		status     int
		say        string
	}{
		{"/v1/completions", `{"model":"other","prompt":"x"}`, 404, "The model `other` does not exist."},
		{"/v1/completions", `{"model":"sim-model"}`, 400, "required"},
		{"/v1/completions", `{"prompt":""}`, 400, "cannot be empty"},
		{"/v1/completions", `{"prompt":[]}`, 400, "empty"},
		{"/v1/completions", `{"prompt":[`, 400, "JSON"},
		{"/v1/completions", `{"prompt":{}}`, 400, "want a string"},
		{"/v1/completions", `{"prompt":["x",1]}`, 400, "prompt"},
		{"/v1/completions", `{"prompt":[[1],[]]}`, 400, "cannot be empty"},
		{"/v1/completions", `{"prompt":[-1]}`, 400, "prompt"},
		{"/v1/completions", `{"prompt":[1.5]}`, 400, "prompt"},
		{"/v1/completions", `{"prompt":[99999999]}`, 400, "out of vocabulary"},
		{"/v1/completions", `{"prompt":[` + strings.Repeat("1,", 99) + `1]}`, 400, "maximum context length is 100 tokens"},
		{"/v1/completions", `{"prompt":"x","max_tokens":100}`, 400, "maximum context length"},
		{"/v1/completions", `{"prompt":"x","max_tokens":0}`, 400, "at least 1"},
		{"/v1/completions", `{"prompt":"x","n":0}`, 400, "n must be"},
		{"/v1/completions", `{"prompt":"x","n":100000}`, 400, "n must be"},
		{"/v1/completions", `{"prompt":"x","cache_salt":""}`, 400, "cache_salt"},
		{"/v1/completions", `{"prompt":"x","stream_options":{}}`, 400, "Stream options"},
		{"/v1/completions", `[]`, 400, "JSON"},
		{"/v1/completions", ``, 400, "JSON"},
		{"/v1/chat/completions", `{"messages":[]}`, 400, "messages"},
		{"/v1/chat/completions", `{"messages":[{"content":"x"}]}`, 400, "role"},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}`, 400, "text only"},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":true,"continue_final_message":true}`, 400, "Cannot set both"},
		{"/v1/responses", `{"input":[]}`, 400, "input"},
		{"/v1/embeddings", `{"input":"x","encoding_format":"base64"}`, 400, "encoding_format"},
		{"/tokenize", `{}`, 400, "prompt or messages"},
		{"/detokenize", `{"tokens":[4294967295]}`, 400, "out of vocabulary"},
		{"/detokenize", `{}`, 400, "tokens"},
	} {
		status, answer, _ := call(t, "POST", e.URL()+c.path, c.body)
		var body struct {
			Error *struct {
				Message, Type string
				Code          int
			}
		}
		if err := json.Unmarshal([]byte(answer), &body); err != nil || body.Error == nil {
			t.Errorf("%s %.80s: %d %s is not an error body", c.path, c.body, status, answer)
			continue
		}
		if status != c.status || body.Error.Code != status || body.Error.Type == "" || !strings.Contains(body.Error.Message, c.say) {
			t.Errorf("%s %.80s: %d %q, want %d %q", c.path, c.body, status, body.Error.Message, c.status, c.say)
		}
	}
	for _, rank := range []string{"2", "-1", "x"} {
		if status, _, _ := call(t, "POST", e.URL()+"/v1/completions", object{"prompt": "x"}, "X-data-parallel-rank", rank); status != 400 {
			t.Errorf("rank %s: status %d", rank, status)
		}
	}
	if last := e.LastSeq(0); last != -1 {
		t.Errorf("refused requests have published batch %d", last)
	}
}

func TestBodyTooLarge(t *testing.T) {
	e := startEngine(t, Options{})
	req := request(t, "POST", e.URL()+"/v1/completions", nil)
	req.Body = io.NopCloser(io.MultiReader(strings.NewReader(`{"prompt":"`), io.LimitReader(endless{}, maxBody)))
	req.ContentLength = -1
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("status %d", res.StatusCode)
	}
}

type endless struct{}

func (endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = 'x'
	}
	return len(b), nil
}

func TestRanks(t *testing.T) {
	e := startEngine(t, Options{BlockSize: 4, Ranks: 3})
	for range 2 {
		complete(t, e, numbers(0, 9), 1, "x-data-parallel-rank", "2")
	}
	if len(e.Resident(0))+len(e.Resident(1)) != 0 || len(e.Resident(2)) != 2 {
		t.Fatalf("the pinned rank holds %d blocks", len(e.Resident(2)))
	}
	if _, batches := replay(t, e, 2, 0); len(batches) != 1 || batches[0].rank != 2 {
		t.Errorf("batches %+v", batches)
	}
	// Without a pin the ranks take turns while they are equally loaded.
	for i := range 9 {
		complete(t, e, numbers(1000*(1+i), 4), 1)
	}
	for rank, want := range []int{3, 3, 5} {
		if got := len(e.Resident(rank)); got != want {
			t.Errorf("rank %d holds %d blocks, want %d", rank, got, want)
		}
	}
	if e.Resident(3) != nil || e.Resident(-1) != nil || e.EventEndpoint(3) != "" {
		t.Error("rank 3 is not there")
	}
}

func TestSmallEndpoints(t *testing.T) {
	e := startEngine(t, Options{Encoding: EncodingArray, BlockSize: 4})
	for path, want := range map[string]string{"/health": "", "/ping": "", "/version": `{"version":"0.20.0"}`, "/load": `{"server_load":0}`, "/is_sleeping": `{"is_sleeping":false}`} {
		status, answer, header := call(t, "GET", e.URL()+path, nil, "X-Request-Id", "abc")
		if status != 200 || answer != want || header.Get("X-Request-Id") != "abc" {
			t.Errorf("%s: %d %q, id %q", path, status, answer, header.Get("X-Request-Id"))
		}
	}
	status, answer, header := call(t, "POST", e.URL()+"/v1/embeddings", object{"input": []string{"a b", "c"}})
	var emb struct {
		Data []struct{ Embedding []float64 }
	}
	if err := json.Unmarshal([]byte(answer), &emb); status != 200 || err != nil || len(emb.Data) != 2 || len(emb.Data[1].Embedding) != 32 || header.Get("X-Request-Id") == "" {
		t.Errorf("embeddings: %d %s", status, answer)
	}
	for _, stream := range []bool{false, true} {
		_, answer, _ = call(t, "POST", e.URL()+"/v1/responses", object{"input": "hi", "instructions": "be brief", "stream": stream})
		if !strings.Contains(answer, `"status":"completed"`) || stream != strings.Contains(answer, "event: response.output_text.delta\n") {
			t.Errorf("responses: %s", answer)
		}
	}
	complete(t, e, numbers(0, 9), 3)
	complete(t, e, numbers(0, 9), 3)
	_, metrics, _ := call(t, "GET", e.URL()+"/metrics", nil)
	for _, want := range []string{
		`vllm:num_requests_running{engine="0",model_name="sim-model"} 0`,
		`vllm:num_requests_waiting{engine="0",model_name="sim-model"} 0`,
		`vllm:kv_cache_usage_perc{engine="0",model_name="sim-model"} 0`,
		`vllm:prefix_cache_hits_total{engine="0",model_name="sim-model"} 28`, // 20 of the second response, 8 of the second completion,
		`vllm:request_success_total{engine="0",finished_reason="length",model_name="sim-model"} 2`,
		`vllm:cache_config_info{block_size="4",enable_prefix_caching="True",engine="0",num_gpu_blocks="4096",prefix_caching_hash_algo="xxhash"} 1`,
		"process_start_time_seconds ",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	if status, _, _ := call(t, "GET", e.URL()+"/v1/completions", nil); status != 405 {
		t.Errorf("GET on a POST endpoint: %d", status)
	}
}
