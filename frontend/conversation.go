package frontend

import (
	"github.com/zeebo/xxh3"

	"github.com/warmroute/warmroute/frontend/openai"
	"github.com/warmroute/warmroute/kvcache"
)

// namer hashes what names a conversation. What decides over the cache beside the prompt comes first: no
// block is shared across pools, adapters and salts.
type namer struct{ xxh3.Hasher }

func newNamer(pool kvcache.PoolID, lora, salt string) *namer {
	n := &namer{}
	for _, s := range [...]string{pool.String(), lora, salt} {
		_, _ = n.WriteString(s) // a hash takes every write
		_, _ = n.Write([]byte{0})
	}
	return n
}

func (n *namer) named(by string) conversation { return conversation{n.Sum64(), by} }

func (n *namer) session(id string) conversation {
	_, _ = n.WriteString(id)
	return n.named(reasonSession)
}

// conversation is what the request belongs to. It is worked out when it is first asked for, while
// the body is still held.
func (x *exchange) conversation() conversation {
	if x.name.by != "" {
		return x.name
	}
	n := newNamer(x.target.Pool, x.target.LoRA, x.parsed.CacheSalt)
	if x.session != "" {
		x.name = n.session(x.session)
		return x.name
	}
	switch x.parsed.Opening(n) {
	case openai.ByMessages:
		x.name = n.named(reasonConversation)
	case openai.ByPrompt:
		x.name = n.named(reasonPrompt)
	default:
		x.name = conversation{by: reasonUnnamed}
	}
	return x.name
}

// prefix is how the prompt begins, whosever it is.
func (x *exchange) prefix() conversation {
	if x.opening.by == "" {
		n := newNamer(x.target.Pool, x.target.LoRA, x.parsed.CacheSalt)
		x.opening = conversation{by: reasonUnnamed}
		if x.parsed.Beginning(n) {
			x.opening = n.named(reasonPrompt)
		}
	}
	return x.opening
}

// prefix is how the prompt begins, whosever it is.
func (q *question) prefix() conversation {
	session := q.session
	defer func() { q.session = session }()
	q.session = ""
	return q.conversation()
}

// conversation is what the prompt of a question belongs to: the same as for a proxied request
// that has the session or the tokens.
func (q *question) conversation() conversation {
	n := newNamer(q.pool, q.LoRA, q.Salt)
	switch {
	case q.session != "":
		return n.session(q.session)
	case q.tokens != nil:
		openai.TokenOpening(n, q.tokens)
		return n.named(reasonPrompt)
	}
	hashes, _ := q.blocks()
	if len(hashes) == 0 {
		return conversation{by: reasonUnnamed}
	}
	// The hash of a block stands for all before it.
	b := hashes[openai.Beginning(len(hashes), hashedOpening)-1]
	_, _ = n.Write(b.AppendHex(nil))
	return n.named(reasonPrompt)
}

// hashedOpening is how many blocks name a prompt whose tokens are unknown: about as much as of one whose
// tokens are known, with blocks of 16.
const hashedOpening = 64
