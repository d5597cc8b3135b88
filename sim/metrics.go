package sim

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are vLLM's, by vLLM's names; a registry lives as long as one simulated process.
type metrics struct {
	ranks []rankMetrics
}

// rankMetrics are the series of one rank.
type rankMetrics struct {
	running, waiting, usage                  prometheus.Gauge
	queries, hits, prompt, generated         prometheus.Counter
	firstToken, interToken                   prometheus.Observer
	stopped, lengthReached, aborted, errored prometheus.Counter
	sleeping                                 prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer, o *Options, started time.Time) metrics {
	f := promauto.With(reg)
	labels := []string{"model_name", "engine"}
	gauge := func(name, help string) *prometheus.GaugeVec {
		return f.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	counter := func(name, help string, more ...string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, append(more, labels...))
	}
	seconds := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return f.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	}
	running := gauge("vllm:num_requests_running", "Number of requests in model execution batches.")
	waiting := gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.")
	usage := gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
	sleeping := gauge("vllm:engine_sleep_state", "1 while the engine sleeps.")
	queries := counter("vllm:prefix_cache_queries_total", "Prefix cache queries, in number of tokens.")
	hits := counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in number of cached tokens.")
	preemptions := counter("vllm:num_preemptions_total", "Number of preemptions; always 0 here.")
	prompt := counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.")
	generated := counter("vllm:generation_tokens_total", "Number of generation tokens processed.")
	success := counter("vllm:request_success_total", "Finished requests by reason.", "finished_reason")
	first := seconds("vllm:time_to_first_token_seconds", "Time to first token.", []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80})
	inter := seconds("vllm:inter_token_latency_seconds", "Time between tokens.", []float64{.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5})
	info := f.NewGaugeVec(prometheus.GaugeOpts{Name: "vllm:cache_config_info", Help: "Information of the LLM engine's cache configuration."},
		[]string{"block_size", "num_gpu_blocks", "enable_prefix_caching", "prefix_caching_hash_algo", "engine"})
	f.NewGauge(prometheus.GaugeOpts{Name: "process_start_time_seconds", Help: "Start time of the process since unix epoch in seconds."}).
		Set(float64(started.UnixMilli()) / 1000)

	var m metrics
	for id := range o.Ranks {
		engine := strconv.Itoa(id)
		l := []string{o.Model, engine}
		finished := func(reason string) prometheus.Counter { return success.WithLabelValues(reason, o.Model, engine) }
		preemptions.WithLabelValues(l...)
		info.WithLabelValues(strconv.Itoa(o.BlockSize), strconv.Itoa(o.Blocks), "True", "xxhash", engine).Set(1)
		m.ranks = append(m.ranks, rankMetrics{
			running: running.WithLabelValues(l...), waiting: waiting.WithLabelValues(l...), usage: usage.WithLabelValues(l...),
			queries: queries.WithLabelValues(l...), hits: hits.WithLabelValues(l...),
			prompt: prompt.WithLabelValues(l...), generated: generated.WithLabelValues(l...),
			firstToken: first.WithLabelValues(l...), interToken: inter.WithLabelValues(l...),
			stopped: finished("stop"), lengthReached: finished("length"), aborted: finished("abort"), errored: finished("error"),
			sleeping: sleeping.WithLabelValues(l...),
		})
	}
	return m
}
