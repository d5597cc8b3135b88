package sim

import (
	"encoding/binary"

	"github.com/warmroute/warmroute/kvcache"
	"github.com/zeebo/xxh3"
)

// adapter is a LoRA adapter as a request names it; the zero value is the base model.
type adapter struct {
	name string
	id   int // from 1, in the order of Options.LoRAs
}

// sequence is one prompt and the answer that is being made for it.
type sequence struct {
	tokens    []uint32 // the prompt, then the answer so far
	promptLen int
	outLen    int // how long the answer will be
	finish    string
	answer    answer
	lora      adapter
	salt      string

	size    int                  // tokens per block
	seed    uint64               // of engine hashes
	engine  []kvcache.EngineHash // of the full blocks so far
	content *kvcache.Hasher

	blocks     []*block // holding the tokens from the first on
	computed   int      // tokens whose KV is in blocks
	registered int      // leading blocks that the cache knows, or has been told of
	hit        int      // tokens that the cache held at admission
	reserved   int      // blocks set aside for the rest of this sequence
}

func newSequence(o *Options, seed uint64, prompt []uint32, choice int, lora adapter, salt string) *sequence {
	s := &sequence{
		tokens: prompt, promptLen: len(prompt), answer: newAnswer(prompt, choice),
		lora: lora, salt: salt, size: o.BlockSize, seed: seed,
		content: kvcache.NewHasher(kvcache.HashSpec{BlockSize: o.BlockSize, LoRA: lora.name, Salt: salt}),
	}
	// Choices of one request share the prompt's array: the answer must not be appended in place.
	s.tokens = s.tokens[:len(prompt):len(prompt)]
	s.content.Append(prompt)
	s.hashFull()
	return s
}

// append adds a token of the answer.
func (s *sequence) append(token uint32) {
	s.tokens = append(s.tokens, token)
	s.content.Append([]uint32{token})
	s.hashFull()
}

// hashFull extends the chain of engine hashes to all full blocks.
func (s *sequence) hashFull() {
	for i := len(s.engine); i < len(s.tokens)/s.size; i++ {
		b := make([]byte, 0, 8+4*s.size+len(s.lora.name)+len(s.salt))
		if i > 0 {
			b = binary.LittleEndian.AppendUint64(b, uint64(s.engine[i-1]))
		}
		for _, t := range s.tokens[i*s.size : (i+1)*s.size] {
			b = binary.LittleEndian.AppendUint32(b, t)
		}
		b = append(b, s.lora.name...)
		if i == 0 {
			b = append(b, 0)
			b = append(b, s.salt...)
		}
		s.engine = append(s.engine, kvcache.EngineHash(xxh3.HashSeed(b, s.seed)))
	}
}

// extraKeys is what beside the tokens went into the hash of block i, as vLLM reports it:
// the adapter's name in every block, the salt in the first.
func (s *sequence) extraKeys(i int) []string {
	var keys []string
	if s.lora.name != "" {
		keys = append(keys, s.lora.name)
	}
	if i == 0 && s.salt != "" {
		keys = append(keys, s.salt)
	}
	return keys
}

// end is how many tokens will have been computed when the answer is complete. The last
// token of an answer is never fed back, so its KV is never computed.
func (s *sequence) end() int { return s.promptLen + s.outLen - 1 }
