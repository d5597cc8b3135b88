package stage

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"strings"
)

// Message is one entry of a chat.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Conversation is what one user says to an assistant, turn by turn. Many conversations share
// the system prompt that they open with, as the users of one application do.
type Conversation struct {
	ID     string
	System string
	Turns  []string // what the user says in each turn
}

// Shape is the size of a workload.
type Shape struct {
	Chats       int // conversations
	Systems     int // system prompts, shared by the conversations in turn
	SystemWords int
	Turns       int // per conversation
	TurnWords   int // per user message
}

// Conversations makes a workload that is the same for the same seed.
func (s Shape) Conversations(seed uint64) []Conversation {
	rng := rand.New(rand.NewPCG(seed, 0))
	systems := make([]string, s.Systems)
	for i := range systems {
		systems[i] = fmt.Sprintf("You are assistant %d. %s", i, words(rng, s.SystemWords))
	}
	out := make([]Conversation, s.Chats)
	for i := range out {
		c := Conversation{ID: fmt.Sprintf("demo-%d-%d", seed, i), System: systems[i%len(systems)]}
		for range s.Turns {
			c.Turns = append(c.Turns, words(rng, s.TurnWords))
		}
		out[i] = c
	}
	// Neighbours in time should not be neighbours in system prompt, or round robin over an even
	// number of engines would look like affinity.
	rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// Requests is how many a workload has.
func (s Shape) Requests() int { return s.Chats * s.Turns }

// Endless makes new conversations, workload after workload, until stop is closed.
func (s Shape) Endless(stop <-chan struct{}) iter.Seq[Conversation] {
	return func(yield func(Conversation) bool) {
		for seed := uint64(2); ; seed++ {
			for _, c := range s.Conversations(seed) {
				select {
				case <-stop:
					return
				default:
				}
				if !yield(c) {
					return
				}
			}
		}
	}
}

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
