package fleet

import (
	"cmp"

	"github.com/warmroute/warmroute/kvcache"
)

// Key names a worker in a fleet: two tenants may have workers of the same id.
type Key struct {
	Tenant string // never ""
	ID     string
}

// KeyOf is the key of a tenant's worker; "" means [kvcache.DefaultTenant].
func KeyOf(tenant, id string) Key {
	return Key{cmp.Or(tenant, kvcache.DefaultTenant), id}
}

func (k Key) compare(o Key) int {
	return cmp.Or(cmp.Compare(k.ID, o.ID), cmp.Compare(k.Tenant, o.Tenant))
}

// String is the id, after the tenant where that is not the default.
func (k Key) String() string {
	if k.Tenant == kvcache.DefaultTenant {
		return k.ID
	}
	return k.Tenant + "/" + k.ID
}

// Key is the worker's key.
func (w Worker) Key() Key { return KeyOf(w.Tenant, w.ID) }

// Key is the worker's key.
func (n *Node) Key() Key { return Key{n.Tenant, n.ID} }

// State is what may be sent to a worker.
type State int

// The states.
const (
	Unhealthy State = iota // does not answer as it should
	Healthy                // takes requests
	Draining               // gets no new ones: it was unregistered, or answers /health with 503
)

func (s State) String() string { return [...]string{"unhealthy", "healthy", "draining"}[s] }
