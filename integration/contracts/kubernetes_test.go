package contracts

import (
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// cluster is everything that an overlay makes, decoded.
type cluster struct {
	deployments  map[string]*apps.Deployment
	statefulSets map[string]*apps.StatefulSet
	services     map[string]*core.Service
	secrets      map[string]*core.Secret
	configs      map[string]*core.ConfigMap
	scalers      map[string]*autoscaling.HorizontalPodAutoscaler
	budgets      map[string]*policy.PodDisruptionBudget
	policies     map[string]*networking.NetworkPolicy
	accounts     map[string]*core.ServiceAccount
}

// build runs kustomize and decodes every object strictly: a misspelt field is an error.
func build(t *testing.T, dirs ...string) *cluster {
	t.Helper()
	c := &cluster{
		map[string]*apps.Deployment{}, map[string]*apps.StatefulSet{}, map[string]*core.Service{}, map[string]*core.Secret{},
		map[string]*core.ConfigMap{}, map[string]*autoscaling.HorizontalPodAutoscaler{}, map[string]*policy.PodDisruptionBudget{},
		map[string]*networking.NetworkPolicy{}, map[string]*core.ServiceAccount{},
	}
	for _, dir := range dirs {
		made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), "../../deploy/kubernetes/"+dir)
		if err != nil {
			t.Fatalf("kustomize build %s: %v", dir, err)
		}
		if made.Size() == 0 {
			t.Fatalf("%s makes nothing", dir)
		}
		for _, r := range made.Resources() {
			text, err := r.AsYAML()
			if err != nil {
				t.Fatal(err)
			}
			kind, name := r.GetApiVersion()+" "+r.GetKind(), r.GetName()
			if r.GetNamespace() != "warmroute" && r.GetKind() != "Namespace" && dir != "base" {
				t.Errorf("%s %s is in namespace %q", kind, name, r.GetNamespace())
			}
			switch kind {
			case "v1 Namespace":
				decode(t, kind, text, &core.Namespace{})
			case "v1 ServiceAccount":
				c.accounts[name] = decode(t, kind, text, &core.ServiceAccount{})
			case "v1 Service":
				c.services[name] = decode(t, kind, text, &core.Service{})
			case "v1 Secret":
				c.secrets[name] = decode(t, kind, text, &core.Secret{})
			case "v1 ConfigMap":
				c.configs[name] = decode(t, kind, text, &core.ConfigMap{})
			case "apps/v1 Deployment":
				c.deployments[name] = decode(t, kind, text, &apps.Deployment{})
			case "apps/v1 StatefulSet":
				c.statefulSets[name] = decode(t, kind, text, &apps.StatefulSet{})
			case "autoscaling/v2 HorizontalPodAutoscaler":
				c.scalers[name] = decode(t, kind, text, &autoscaling.HorizontalPodAutoscaler{})
			case "policy/v1 PodDisruptionBudget":
				c.budgets[name] = decode(t, kind, text, &policy.PodDisruptionBudget{})
			case "networking.k8s.io/v1 NetworkPolicy":
				c.policies[name] = decode(t, kind, text, &networking.NetworkPolicy{})
			default:
				t.Errorf("%s %s: this test does not know the kind; a role or binding should not be needed", kind, name)
			}
		}
	}
	return c
}

func decode[T any](t *testing.T, kind string, text []byte, v *T) *T {
	t.Helper()
	if err := yaml.UnmarshalStrict(text, v); err != nil {
		t.Fatalf("%s: %v\n%s", kind, err, text)
	}
	return v
}

func TestStrictDecodingRefusesMisspeltFields(t *testing.T) {
	if err := yaml.UnmarshalStrict([]byte("apiVersion: apps/v1\nkind: Deployment\nspec: {replica: 2}\n"), &apps.Deployment{}); err == nil {
		t.Error("replica instead of replicas passes")
	}
}

// pods are all pod templates by the name of what makes them.
func (c *cluster) pods() map[string]core.PodTemplateSpec {
	pods := map[string]core.PodTemplateSpec{}
	for name, d := range c.deployments {
		pods[name] = d.Spec.Template
	}
	for name, s := range c.statefulSets {
		pods[name] = s.Spec.Template
	}
	return pods
}

// matching are the names of the pods that carry the labels.
func (c *cluster) matching(labels map[string]string) (names []string) {
	for name, pod := range c.pods() {
		all := len(labels) > 0
		for k, v := range labels {
			all = all && pod.Labels[k] == v
		}
		if all {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

var overlays = []string{"overlays/external-redis", "overlays/bundled-redis"}

func TestOverlaysFitTogether(t *testing.T) {
	for _, overlay := range overlays {
		t.Run(overlay, func(t *testing.T) {
			c := build(t, overlay, "engines/vllm")
			for name, d := range c.deployments {
				if got := c.matching(d.Spec.Selector.MatchLabels); !slices.Equal(got, []string{name}) {
					t.Errorf("deployment %s selects the pods of %v", name, got)
				}
			}
			for name, want := range map[string]string{
				"warmroute": "warmroute-frontend", "warmroute-indexer": "warmroute-indexer", "engines": "vllm", "warmroute-redis": "warmroute-redis",
			} {
				s := c.services[name]
				if s == nil {
					if name != "warmroute-redis" || strings.Contains(overlay, "bundled") {
						t.Errorf("no service %s", name)
					}
					continue
				}
				if got := c.matching(s.Spec.Selector); !slices.Equal(got, []string{want}) {
					t.Errorf("service %s leads to %v", name, got)
				}
				for _, p := range s.Spec.Ports {
					if !slices.Contains(portNames(c.pods()[want]), p.TargetPort.String()) {
						t.Errorf("service %s: %s has no port %s", name, want, p.TargetPort.String())
					}
				}
			}
			if c.services["engines"].Spec.ClusterIP != "None" {
				t.Error("the engines' service is not headless")
			}
			for name, b := range c.budgets {
				if got := c.matching(b.Spec.Selector.MatchLabels); !slices.Equal(got, []string{name}) {
					t.Errorf("budget %s is of %v", name, got)
				}
			}
			for name, h := range c.scalers {
				if c.deployments[h.Spec.ScaleTargetRef.Name] == nil || *h.Spec.MinReplicas < 2 || h.Spec.MaxReplicas <= *h.Spec.MinReplicas {
					t.Errorf("scaler %s: %+v", name, h.Spec)
				}
			}
			indexers, frontends := c.deployments["warmroute-indexer"].Spec.Replicas, c.deployments["warmroute-frontend"].Spec.Replicas
			if len(c.scalers) != 1 || len(c.budgets) != 2 || *indexers != 2 || frontends != nil {
				t.Error("want a scaler, two budgets, two indexers, and no number of frontends beside the scaler's")
			}
			checkReferences(t, c)
		})
	}
}

func portNames(pod core.PodTemplateSpec) (names []string) {
	for _, container := range pod.Spec.Containers {
		for _, p := range container.Ports {
			names = append(names, p.Name)
		}
	}
	return names
}

// checkReferences looks whether the Secrets, ConfigMaps and accounts that pods name exist, with the keys.
func checkReferences(t *testing.T, c *cluster) {
	t.Helper()
	for name, pod := range c.pods() {
		if a := pod.Spec.ServiceAccountName; a != "" && (c.accounts[a] == nil || *c.accounts[a].AutomountServiceAccountToken) {
			t.Errorf("%s: no account %s, or one with a token", name, a)
		}
		for _, v := range pod.Spec.Volumes {
			if v.ConfigMap != nil && c.configs[v.ConfigMap.Name] == nil {
				t.Errorf("%s: no ConfigMap %s, only %v", name, v.ConfigMap.Name, slices.Collect(maps.Keys(c.configs)))
			}
			if v.Secret == nil {
				continue
			}
			for _, item := range v.Secret.Items {
				if s := c.secrets[v.Secret.SecretName]; s == nil || len(s.Data[item.Key]) == 0 {
					t.Errorf("%s: volume %s: no key %s in Secret %s", name, v.Name, item.Key, v.Secret.SecretName)
				}
			}
		}
		for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			for _, e := range container.Env {
				if strings.HasSuffix(e.Name, "_FILE") && !mounted(pod.Spec, container, e.Value) {
					t.Errorf("%s: %s: nothing is mounted at %s", name, e.Name, e.Value)
				}
				if e.ValueFrom == nil || e.ValueFrom.SecretKeyRef == nil {
					continue
				}
				ref := e.ValueFrom.SecretKeyRef
				var found bool
				if s := c.secrets[ref.Name]; s != nil {
					_, found = s.Data[ref.Key]
				}
				if !found && (ref.Optional == nil || !*ref.Optional) {
					t.Errorf("%s: %s: no key %s in Secret %s", name, e.Name, ref.Key, ref.Name)
				}
			}
		}
	}
}

// mounted tells whether a file is one of a Secret that the container mounts.
func mounted(pod core.PodSpec, container core.Container, file string) bool {
	for _, m := range container.VolumeMounts {
		for _, v := range pod.Volumes {
			if v.Name != m.Name || v.Secret == nil {
				continue
			}
			for _, item := range v.Secret.Items {
				if m.MountPath+"/"+item.Path == file {
					return true
				}
			}
		}
	}
	return false
}

func TestPodsAreHardened(t *testing.T) {
	for name, pod := range build(t, "overlays/bundled-redis").pods() {
		s := pod.Spec
		if s.AutomountServiceAccountToken == nil || *s.AutomountServiceAccountToken || s.SecurityContext == nil ||
			s.SecurityContext.RunAsNonRoot == nil || !*s.SecurityContext.RunAsNonRoot || s.SecurityContext.SeccompProfile == nil {
			t.Errorf("%s: %+v", name, s.SecurityContext)
		}
		for _, c := range s.Containers {
			sc := c.SecurityContext
			if sc == nil || !*sc.ReadOnlyRootFilesystem || *sc.AllowPrivilegeEscalation || len(sc.Capabilities.Drop) != 1 || sc.Capabilities.Drop[0] != "ALL" {
				t.Errorf("%s: %+v", name, sc)
			}
			if c.Resources.Requests.Memory().IsZero() || c.Resources.Limits.Memory().IsZero() {
				t.Errorf("%s: memory without request or limit", name)
			}
			if c.ReadinessProbe == nil || c.LivenessProbe == nil {
				t.Fatalf("%s: a probe is missing", name)
			}
		}
	}
}

// A frontend that goes is taken out of the endpoints before it stops to listen, and is not killed before it is done.
func TestFrontendsDrain(t *testing.T) {
	c := build(t, "base")
	var settings struct {
		Delay string `json:"drain-delay"`
		Limit string `json:"drain-limit"`
	}
	for _, config := range c.configs {
		if err := yaml.Unmarshal([]byte(config.Data["warmroute.yaml"]), &settings); err != nil {
			t.Fatal(err)
		}
	}
	delay, limit := seconds(t, settings.Delay), seconds(t, settings.Limit)
	pod := c.deployments["warmroute-frontend"].Spec.Template.Spec
	probe := pod.Containers[0].ReadinessProbe
	if noticed := int64(probe.FailureThreshold*probe.PeriodSeconds + probe.TimeoutSeconds); delay <= noticed {
		t.Errorf("drain-delay %d s, but readiness takes up to %d s to fail", delay, noticed)
	}
	if *pod.TerminationGracePeriodSeconds <= delay+limit {
		t.Errorf("terminationGracePeriodSeconds %d, but draining takes up to %d s", *pod.TerminationGracePeriodSeconds, delay+limit)
	}
	if pod.Containers[0].Lifecycle != nil {
		t.Error("a preStop hook would add to the time")
	}
	if probe.HTTPGet.Path != "/ready" || pod.Containers[0].LivenessProbe.HTTPGet.Path != "/health" {
		t.Error("liveness must not depend on anything but the process; readiness must tell that it drains")
	}
}

func seconds(t *testing.T, text string) (n int64) {
	t.Helper()
	if _, err := fmt.Sscanf(text, "%ds", &n); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return n
}

// What must reach what does, and nothing else is let through to Redis.
func TestNetworkPoliciesLetThroughWhatIsNeeded(t *testing.T) {
	c := build(t, "overlays/bundled-redis", "engines/vllm")
	for from, ports := range map[string][]int32{"warmroute-frontend": {6379, 53, 8000}, "warmroute-indexer": {6379, 53, 5557, 5657}} {
		p := c.policies[from]
		if got := c.matching(p.Spec.PodSelector.MatchLabels); !slices.Equal(got, []string{from}) {
			t.Fatalf("policy %s is of the pods of %v", from, got)
		}
		for _, port := range ports {
			open := false
			for _, e := range p.Spec.Egress {
				for _, r := range e.Ports {
					end := r.Port.IntVal
					if r.EndPort != nil {
						end = *r.EndPort
					}
					open = open || r.Port.IntVal <= port && port <= end && c.reaches(e.To, port)
				}
			}
			if !open {
				t.Errorf("policy %s: port %d is closed", from, port)
			}
		}
	}
	redis := c.policies["warmroute-redis"].Spec
	if len(redis.Ingress) != 1 || len(redis.Ingress[0].From) != 1 || len(redis.Egress) != 0 {
		t.Fatalf("Redis: %+v", redis)
	}
	if got := c.selected(redis.Ingress[0].From[0]); !slices.Equal(got, []string{"warmroute-frontend", "warmroute-indexer"}) {
		t.Errorf("Redis is open to %v", got)
	}
}

// An overlay with the component for traces opens the collector's port to frontends alone, and tells them where it is.
func TestComponentForTraces(t *testing.T) {
	overlay := t.TempDir()
	home, err := filepath.Abs("../../deploy/kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	up, err := filepath.Rel(overlay, home)
	if err != nil {
		t.Fatal(err)
	}
	down, err := filepath.Rel(home, overlay)
	if err != nil {
		t.Fatal(err)
	}
	text := "namespace: warmroute\nresources: [" + up + "/overlays/external-redis]\ncomponents: [" + up + "/components/traces]\n"
	if err := os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c := build(t, down)
	p := c.policies["warmroute-traces"]
	if p == nil {
		t.Fatal("there is no policy")
	}
	if got := c.matching(p.Spec.PodSelector.MatchLabels); !slices.Equal(got, []string{"warmroute-frontend"}) {
		t.Errorf("the policy is of the pods of %v", got)
	}
	at := ""
	for _, e := range c.deployments["warmroute-frontend"].Spec.Template.Spec.Containers[0].Env {
		if e.Name == "WARMROUTE_OTLP_ENDPOINT" {
			at = e.Value
		}
	}
	u, err := url.Parse(at)
	if err != nil || u.Port() == "" {
		t.Fatalf("frontends send traces to %q", at)
	}
	open := slices.ContainsFunc(p.Spec.Egress[0].Ports, func(o networking.NetworkPolicyPort) bool { return o.Port.String() == u.Port() })
	if !open || len(p.Spec.Ingress) != 0 || len(p.Spec.Egress[0].To) != 1 {
		t.Errorf("the way to %s is closed, or others are open: %+v", at, p.Spec)
	}
}

// reaches reports whether one of the peers is the engines, for their ports, or anybody.
func (c *cluster) reaches(peers []networking.NetworkPolicyPeer, port int32) bool {
	if len(peers) == 0 {
		return port == 53 || port == 6379
	}
	return slices.ContainsFunc(peers, func(p networking.NetworkPolicyPeer) bool { return slices.Contains(c.selected(p), "vllm") })
}

// selected are the pods of a peer. The policies here use In expressions alone for it.
func (c *cluster) selected(p networking.NetworkPolicyPeer) (names []string) {
	for name, pod := range c.pods() {
		all := len(p.PodSelector.MatchLabels) == 0 && len(p.PodSelector.MatchExpressions) > 0
		for _, e := range p.PodSelector.MatchExpressions {
			all = all && e.Operator == "In" && slices.Contains(e.Values, pod.Labels[e.Key])
		}
		if all {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
