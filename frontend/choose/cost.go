package choose

import (
	"errors"
	"math"

	"github.com/warmroute/warmroute/kvcache"
)

// Load is what one worker rank has under way.
type Load struct {
	Requests      int // not finished
	PrefillTokens int // of prompts, not computed yet and not cached
	DecodeBlocks  int // that the requests occupy
}

// Weights are the parameters of the cost.
type Weights struct {
	PrefillScale float64 // of the work before a first token, against decoding
	Miss         float64 // of a block of this prompt that has to be computed, against one that waits in the queue
	Decode       float64 // of a block occupied by a request under way
	Request      float64 // of a request under way, in blocks
	// Temperature makes the choice a lottery: the probability of a candidate falls with its cost by
	// exp(−cost/Temperature), where the costs are scaled to 0 for the cheapest and 1 for the dearest. 0 takes
	// the cheapest.
	Temperature float64
}

// Default are the weights that replays of traces gave; see docs/adr.
var Default = Weights{PrefillScale: 4, Miss: 8, Decode: 1}

// LeastRequests are weights under which only the requests under way count.
var LeastRequests = Weights{Request: 1}

// MaxWeight bounds every weight, so that costs stay finite.
const MaxWeight = 1e9

// Validate refuses weights that are no numbers, negative, or too large.
func (w Weights) Validate() error {
	for _, x := range [...]float64{w.PrefillScale, w.Miss, w.Decode, w.Request, w.Temperature} {
		if !(x >= 0 && x <= MaxWeight) { // NaN too
			return errors.New("weights are numbers from 0 to 1e9")
		}
	}
	return nil
}

// Request is what has to be placed.
type Request struct {
	BlockSize int // tokens; at least 1
	Tokens    int // of the prompt
}

// Cost is what the request costs at a worker rank with that load, where credit of the prompt's blocks need
// no prefill. The conversions keep compilers from fusing operations: Redis rounds after each.
func (w Weights) Cost(r Request, l Load, credit float64) float64 {
	size := float64(r.BlockSize)
	miss := math.Max(0, float64(r.Tokens)/size-credit)
	prefill := float64(l.PrefillTokens)/size + float64(w.Miss*miss)
	return float64(float64(w.PrefillScale*prefill)+float64(w.Decode*float64(l.DecodeBlocks))) + float64(w.Request*float64(l.Requests))
}

// Slack is the cost of so many prompt tokens in a worker rank's queue, by which the one of a session may be dearer.
func (w Weights) Slack(tokens, blockSize int) float64 {
	return w.PrefillScale * float64(tokens) / float64(blockSize)
}

// Prefill is how many tokens of the request have to be computed at a worker rank, given the credit.
func (r Request) Prefill(credit float64) int {
	return int(math.Ceil(math.Max(0, float64(r.Tokens)-float64(credit*float64(r.BlockSize)))))
}

// Tiers are what a block is worth that is not on the device, where it is worth 1.
type Tiers struct {
	Host, Disk float64
	Predicted  float64 // routed there, and no event yet
}

// DefaultTiers are those that Dynamo uses too.
var DefaultTiers = Tiers{Host: 0.75, Disk: 0.25, Predicted: 1}

// Credit is how many blocks of a prompt count as computed at a worker rank.
func (t Tiers) Credit(o kvcache.Overlap) float64 {
	return float64(o.Device) + float64(t.Host*float64(o.Host-o.Device)) +
		float64(t.Disk*float64(o.Disk-o.Host)) + float64(t.Predicted*float64(o.Any-o.Disk))
}

// Override changes weights for one request; nil leaves one as it is. The names in JSON are those of Dynamo's
// router_config_override.
type Override struct {
	OverlapScoreCredit *float64 `json:"overlap_score_credit,omitempty"` // Miss
	OverlapScoreWeight *float64 `json:"overlap_score_weight,omitempty"` // PrefillScale, in older versions
	PrefillLoadScale   *float64 `json:"prefill_load_scale,omitempty"`   // PrefillScale
	RouterTemperature  *float64 `json:"router_temperature,omitempty"`   // Temperature
	RequestWeight      *float64 `json:"decode_active_request_weight,omitempty"`
	HostWeight         *float64 `json:"host_cache_hit_weight,omitempty"`
	DiskWeight         *float64 `json:"disk_cache_hit_weight,omitempty"`
}

// Apply changes the weights, or says what is wrong with the override.
func (o *Override) Apply(w Weights, t Tiers) (Weights, Tiers, error) {
	if o == nil {
		return w, t, nil
	}
	set := func(to *float64, from *float64) {
		if from != nil {
			*to = *from
		}
	}
	set(&w.Miss, o.OverlapScoreCredit)
	set(&w.PrefillScale, o.OverlapScoreWeight)
	set(&w.PrefillScale, o.PrefillLoadScale)
	set(&w.Temperature, o.RouterTemperature)
	set(&w.Request, o.RequestWeight)
	set(&t.Host, o.HostWeight)
	set(&t.Disk, o.DiskWeight)
	if err := errors.Join(w.Validate(), t.Validate()); err != nil {
		return Weights{}, Tiers{}, err
	}
	return w, t, nil
}

// Validate refuses weights of tiers outside 0 to 1: a block elsewhere is never worth more than one on the device.
func (t Tiers) Validate() error {
	for _, x := range [...]float64{t.Host, t.Disk, t.Predicted} {
		if !(x >= 0 && x <= 1) {
			return errors.New("weights of tiers are numbers from 0 to 1")
		}
	}
	return nil
}
