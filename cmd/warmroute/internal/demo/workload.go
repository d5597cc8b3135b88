package demo

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// message is one entry of a chat.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// conversation is what one user says to an assistant, turn by turn. Many conversations share
// the system prompt that they open with, as the users of one application do.
type conversation struct {
	id     string
	system string
	turns  []string // what the user says in each turn
}

// shape is the size of a workload.
type shape struct {
	chats       int // conversations
	systems     int // system prompts, shared by the conversations in turn
	systemWords int
	turns       int // per conversation
	turnWords   int // per user message
}

// conversations makes a workload that is the same for the same seed.
func (s shape) conversations(seed uint64) []conversation {
	rng := rand.New(rand.NewPCG(seed, 0))
	systems := make([]string, s.systems)
	for i := range systems {
		systems[i] = fmt.Sprintf("You are assistant %d. %s", i, words(rng, s.systemWords))
	}
	out := make([]conversation, s.chats)
	for i := range out {
		c := conversation{id: fmt.Sprintf("demo-%d-%d", seed, i), system: systems[i%len(systems)]}
		for range s.turns {
			c.turns = append(c.turns, words(rng, s.turnWords))
		}
		out[i] = c
	}
	// Neighbours in time should not be neighbours in system prompt, or round robin over an even
	// number of engines would look like affinity.
	rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func (s shape) requests() int { return s.chats * s.turns }

var vocabulary = strings.Fields(`cache block prefix prompt token worker index route score event replay
	shard warm cold batch stream queue model layer head page slot tier gate light river stone paper
	field cloud north south morning evening garden window bridge letter number answer question`)

func words(rng *rand.Rand, n int) string {
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(vocabulary[rng.IntN(len(vocabulary))])
	}
	return b.String()
}
