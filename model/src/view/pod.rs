//! The part of a Pod that matters to us.

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::json::{Amount, Keys, Map, Text};
use super::{Watchable, Watched};
use crate::ask::{AskError, ContainerKind, merge_amounts};
use crate::into_owned;
use crate::names;

/// A pod, or the pod template of a workload. `R` is how the parts are read that only admission edits: skipped, unless
/// the webhook keeps them as raw text.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(bound(deserialize = "R: Deserialize<'de>"))]
pub struct PodView<'a, R = IgnoredAny> {
    /// Must be there: the webhook's patches add to it.
    #[serde(borrow)]
    pub metadata: MetaView<'a>,
    /// Must be there, likewise.
    #[serde(borrow = "'a")]
    pub spec: SpecView<'a, R>,
    /// Absent in templates.
    #[serde(borrow, default)]
    pub status: StatusView<'a>,
}

/// Metadata of any object.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MetaView<'a> {
    /// Empty where the API server will make it from `generate_name`.
    #[serde(borrow)]
    pub name: Text<'a>,
    /// Prefix of the name that the API server will make.
    #[serde(borrow)]
    pub generate_name: Text<'a>,
    /// Empty where none is written: see [`PodView::namespace`].
    #[serde(borrow)]
    pub namespace: Text<'a>,
    /// Empty before creation.
    #[serde(borrow)]
    pub uid: Text<'a>,
    /// For the watch.
    #[serde(borrow)]
    pub resource_version: Option<Text<'a>>,
    /// RFC 3339.
    #[serde(borrow)]
    pub creation_timestamp: Option<Text<'a>>,
    /// Set once deletion was asked for.
    #[serde(borrow)]
    pub deletion_timestamp: Option<Text<'a>>,
    /// All of them.
    #[serde(borrow)]
    pub labels: Option<Map<'a, Text<'a>>>,
    /// Those that a component of ours reads.
    #[serde(borrow)]
    pub annotations: Option<Map<'a, Text<'a>, KnownAnnotations>>,
    /// Managing controller and others.
    #[serde(borrow)]
    pub owner_references: Option<Vec<OwnerView<'a>>>,
}

/// One owner reference.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct OwnerView<'a> {
    /// `ReplicaSet`, `Job`, …
    #[serde(borrow)]
    pub kind: Text<'a>,
    /// Name of the owner.
    #[serde(borrow)]
    pub name: Text<'a>,
    /// UID of the owner.
    #[serde(borrow)]
    pub uid: Text<'a>,
    /// Whether it is the managing controller.
    pub controller: Option<bool>,
}

/// Spec of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", bound(deserialize = "R: Deserialize<'de>"))]
pub struct SpecView<'a, R = IgnoredAny> {
    /// App containers.
    #[serde(borrow = "'a")]
    pub containers: Option<Vec<ContainerView<'a, R>>>,
    /// Init containers and sidecars.
    #[serde(borrow = "'a")]
    pub init_containers: Option<Vec<ContainerView<'a, R>>>,
    /// Node it is bound to; absent or empty while it waits: see [`PodView::node`].
    #[serde(borrow)]
    pub node_name: Option<Text<'a>>,
    /// Absent before the API server's defaults.
    #[serde(borrow)]
    pub scheduler_name: Option<Text<'a>>,
    /// Handler of the container runtime.
    #[serde(borrow)]
    pub runtime_class_name: Option<Text<'a>>,
    /// Of the pod as a whole.
    #[serde(borrow)]
    pub resources: Option<ResourcesView<'a>>,
    /// Of its RuntimeClass, beside what containers request.
    #[serde(borrow, default)]
    pub overhead: Map<'a, Amount<'a>, CountedResources>,
    /// Labels that its node must have.
    #[serde(borrow)]
    pub node_selector: Option<Map<'a, Text<'a>>>,
    /// Resolved from its PriorityClass.
    pub priority: Option<i32>,
    /// How long its containers may take to end after they were asked to; the API server sets 30 where it is absent.
    pub termination_grace_period_seconds: Option<i64>,
    /// Gates that keep it out of the scheduler's queue.
    #[serde(borrow)]
    pub scheduling_gates: Option<Vec<GateView<'a>>>,
    /// Parsed only where a policy edits them.
    pub tolerations: Option<R>,
    /// Parsed only where a policy depends on the card's product.
    pub affinity: Option<R>,
    /// That there are any.
    pub topology_spread_constraints: Option<IgnoredAny>,
}

/// A scheduling gate.
#[derive(Clone, Debug, Deserialize)]
pub struct GateView<'a> {
    /// Who lifts it.
    #[serde(borrow)]
    pub name: Text<'a>,
}

/// Status of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StatusView<'a> {
    /// `Pending`, `Running`, `Succeeded`, `Failed`.
    #[serde(borrow)]
    pub phase: Text<'a>,
    /// Why it is in this phase, for example `UnexpectedAdmissionError`.
    #[serde(borrow)]
    pub reason: Text<'a>,
    /// Node on which the scheduler's preemption makes room for it.
    #[serde(borrow, rename = "nominatedNodeName")]
    pub nominated_node_name: Option<Text<'a>>,
    /// What was found of it, by type.
    #[serde(borrow)]
    pub conditions: Option<Vec<ConditionView<'a>>>,
    /// Of app containers.
    #[serde(borrow, rename = "containerStatuses")]
    pub containers: Option<Vec<ContainerStatusView<'a>>>,
    /// Of init containers and sidecars.
    #[serde(borrow, rename = "initContainerStatuses")]
    pub init_containers: Option<Vec<ContainerStatusView<'a>>>,
}

/// A condition of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ConditionView<'a> {
    /// `PodScheduled`, `Ready`, …
    #[serde(borrow, rename = "type")]
    pub type_: Text<'a>,
    /// `True`, `False` or `Unknown`.
    #[serde(borrow)]
    pub status: Text<'a>,
    /// In one word.
    #[serde(borrow)]
    pub reason: Option<Text<'a>>,
    /// For people.
    #[serde(borrow)]
    pub message: Option<Text<'a>>,
}

impl<'a> StatusView<'a> {
    /// Of containers of all kinds.
    pub fn all_containers(&self) -> impl Iterator<Item = &ContainerStatusView<'a>> {
        self.init_containers.iter().chain(&self.containers).flatten()
    }
}

/// Status of a container, as the kubelet has last reported it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerStatusView<'a> {
    /// As in the spec.
    #[serde(borrow)]
    pub name: Text<'a>,
    /// `containerd://…`, `cri-o://…`; empty before it was created.
    #[serde(borrow, rename = "containerID")]
    pub container_id: Text<'a>,
    /// What it does now.
    pub state: ContainerStateView,
}

/// State of a container; neither is set while it waits.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ContainerStateView {
    /// It runs.
    pub running: Option<IgnoredAny>,
    /// It has ended.
    pub terminated: Option<IgnoredAny>,
}

/// A container of any kind.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", bound(deserialize = "R: Deserialize<'de>"))]
pub struct ContainerView<'a, R = IgnoredAny> {
    /// Unique in the pod, init containers included.
    #[serde(borrow, default)]
    pub name: Text<'a>,
    /// `Always` makes an init container a sidecar.
    #[serde(borrow)]
    pub restart_policy: Option<Text<'a>>,
    /// Limits and requests.
    #[serde(borrow)]
    pub resources: Option<ResourcesView<'a>>,
    /// Parsed only where it may set a variable that matters.
    pub env: Option<R>,
    /// Likewise.
    pub env_from: Option<R>,
}

/// Limits and requests of a container or a pod: those that [`CountedResources`] keeps.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ResourcesView<'a> {
    /// For extended resources these equal the requests.
    #[serde(borrow)]
    pub limits: Map<'a, Amount<'a>, CountedResources>,
    /// May be absent: limits are their default.
    #[serde(borrow)]
    pub requests: Map<'a, Amount<'a>, CountedResources>,
    /// Claims of dynamic resource allocation: such a container gets its devices another way.
    pub claims: Option<Vec<IgnoredAny>>,
}

/// Keeps the annotations that a component of ours reads: ours, gpu-manager's, those of gangs and of static pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KnownAnnotations {}

impl Keys for KnownAnnotations {
    fn keep(key: &str) -> bool {
        const PREFIXES: [&str; 3] = ["gpu-migrate.io/", "tencent.com/", "kubernetes.io/config."];
        PREFIXES.iter().any(|prefix| key.starts_with(prefix))
            || [
                names::GANG_NAME,
                names::GANG_SIZE,
                names::VOLCANO_GROUP,
                names::KUEUE_GROUP_SIZE,
                names::KAI_MEMORY,
            ]
            .contains(&key)
    }
}

/// Keeps CPU, memory and what has a domain, such as `nvidia.com/gpu`. The dialect is configuration, so its names are not known here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CountedResources {}

impl Keys for CountedResources {
    fn keep(key: &str) -> bool {
        is_extended(key) || ["cpu", "memory"].contains(&key)
    }
}

fn is_extended(resource: &str) -> bool {
    resource.contains('/')
}

impl MetaView<'_> {
    /// Value of a label.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels.as_ref()?.get(key).map(Text::as_str)
    }

    /// Value of an annotation that [`KnownAnnotations`] keeps.
    #[must_use]
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(key).map(Text::as_str)
    }

    /// The managing controller.
    #[must_use]
    pub fn controller(&self) -> Option<&OwnerView<'_>> {
        self.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
    }
}

impl<'a, R> PodView<'a, R> {
    /// `default` where none is written.
    #[must_use]
    pub fn namespace(&self) -> &str {
        if self.metadata.namespace.is_empty() { "default" } else { &self.metadata.namespace }
    }

    /// The node it is bound to.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.spec.node_name.as_deref().filter(|name| !name.is_empty())
    }

    /// Its containers hold nothing any more.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        crate::lifecycle::is_terminal_phase(&self.status.phase)
    }

    /// Whether the gate of an incomplete gang is on it.
    #[must_use]
    pub fn is_gated(&self) -> bool {
        self.spec.scheduling_gates.iter().flatten().any(|gate| &*gate.name == names::GANG_GATE)
    }

    /// Whether a gate of somebody else keeps it out of the scheduler's queue.
    #[must_use]
    pub fn is_gated_by_others(&self) -> bool {
        self.spec.scheduling_gates.iter().flatten().any(|gate| &*gate.name != names::GANG_GATE)
    }

    /// Every container with its place, in the kubelet's order of admission: init containers first.
    pub fn containers(&self) -> impl Iterator<Item = (Place, &ContainerView<'a, R>)> {
        self.spec.all_containers()
    }
}

impl<'a, R> SpecView<'a, R> {
    /// See [`PodView::containers`].
    pub fn all_containers(&self) -> impl Iterator<Item = (Place, &ContainerView<'a, R>)> {
        let init = self.init_containers.iter().flatten().enumerate();
        let app = self.containers.iter().flatten().enumerate();
        init.map(|(index, container)| (Place { init: true, index }, container))
            .chain(app.map(|(index, container)| (Place { init: false, index }, container)))
    }
}

/// Where a container is in the spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// In `initContainers` (which also hold the sidecars), else in `containers`.
    pub init: bool,
    /// Index in the list.
    pub index: usize,
}

impl Place {
    /// The field of the spec.
    #[must_use]
    pub const fn list(self) -> &'static str {
        if self.init { "initContainers" } else { "containers" }
    }

    /// What kind of container stands here.
    #[must_use]
    pub fn kind<R>(self, container: &ContainerView<'_, R>) -> ContainerKind {
        match (self.init, container.restart_policy.as_deref()) {
            (false, _) => ContainerKind::App,
            (true, Some("Always")) => ContainerKind::Sidecar,
            (true, _) => ContainerKind::Init,
        }
    }
}

impl<'a, R> ContainerView<'a, R> {
    /// Limit and request of a resource, as they were written.
    #[must_use]
    pub fn limit_and_request(&self, resource: &str) -> (Option<&Amount<'a>>, Option<&Amount<'a>>) {
        let resources = self.resources.as_ref();
        (
            resources.and_then(|resources| resources.limits.get(resource)),
            resources.and_then(|resources| resources.requests.get(resource)),
        )
    }

    /// How much of an extended resource it asks for.
    ///
    /// # Errors
    /// See [`merge_amounts`].
    pub fn amount(&self, resource: &str) -> Result<u32, AskError> {
        let (limit, request) = self.limit_and_request(resource);
        merge_amounts(&self.name, resource, limit.map(Amount::as_str), request.map(Amount::as_str))
    }

    /// Names of all extended resources in limits and requests; one that is in both comes twice.
    pub fn resource_names(&self) -> impl Iterator<Item = &str> {
        let resources = self.resources.iter();
        let all = resources.flat_map(|r| r.limits.iter().chain(r.requests.iter())).map(|(name, _)| name);
        all.filter(|name| is_extended(name))
    }
}

/// A pod of a watch.
pub type WatchedPod = Watched<PodView<'static>>;

impl Watchable for PodView<'static> {
    type Borrowed<'a> = PodView<'a>;
    type Scope = k8s_openapi::NamespaceResourceScope;
    const KIND: &'static str = "Pod";
    const PLURAL: &'static str = "pods";

    fn metadata(&self) -> &MetaView<'static> {
        &self.metadata
    }
}

into_owned!(PodView { metadata, spec, status });
into_owned!(MetaView {
    name,
    generate_name,
    namespace,
    uid,
    resource_version,
    creation_timestamp,
    deletion_timestamp,
    labels,
    annotations,
    owner_references,
});
into_owned!(OwnerView { kind, name, uid, controller });
into_owned!(SpecView {
    containers,
    init_containers,
    node_name,
    scheduler_name,
    runtime_class_name,
    resources,
    overhead,
    node_selector,
    priority,
    termination_grace_period_seconds,
    scheduling_gates,
    tolerations,
    affinity,
    topology_spread_constraints,
});
into_owned!(GateView { name });
into_owned!(StatusView { phase, reason, nominated_node_name, conditions, containers, init_containers });
into_owned!(ContainerStatusView { name, container_id, state });
into_owned!(ConditionView { type_, status, reason, message });
into_owned!(ContainerView { name, restart_policy, resources, env, env_from });
into_owned!(ResourcesView { limits, requests, claims });

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn strings_are_borrowed_and_unknown_fields_skipped() {
        let text = r#"{"metadata":{"name":"p","labels":{"a":"b"},"managedFields":[{"x":1}],"creationTimestamp":null,
                "annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{}","gpu-migrate.io/policy":"p@1"}},
            "spec":{"tolerations":[],"containers":[{"name":"c","image":"i",
                "resources":{"limits":{"nvidia.com/gpu":1,"cpu":"1"},"requests":null}}]}}"#;
        let pod: PodView<'_, &RawValue> = serde_json::from_str(text).unwrap();
        assert!(matches!(pod.metadata.name, Text(Cow::Borrowed("p"))));
        assert_eq!(pod.metadata.label("a"), Some("b"));
        assert_eq!(pod.metadata.annotations.as_ref().unwrap().iter().count(), 1);
        assert_eq!(pod.spec.tolerations.unwrap().get(), "[]");
        let (_, container) = pod.containers().next().unwrap();
        assert_eq!(container.resource_names().collect::<Vec<_>>(), ["nvidia.com/gpu"]);
        assert_eq!(container.amount("nvidia.com/gpu"), Ok(1));
    }

    #[test]
    fn null_is_absent() {
        let text = r#"{"metadata":{"name":null,"labels":null,"annotations":null},
            "spec":{"nodeName":null,"containers":[{"name":"c","env":null,"resources":{"limits":null}}]}}"#;
        let pod: PodView<'_, &RawValue> = serde_json::from_str(text).unwrap();
        assert!(pod.metadata.name.is_empty() && pod.metadata.labels.is_none());
        assert!(pod.metadata.annotations.is_none() && pod.node().is_none());
        assert!(pod.containers().all(|(_, container)| container.env.is_none()));
    }

    #[test]
    fn an_owned_copy_outlives_any_reader() {
        let value = serde_json::json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7"},
            "spec": {"containers": [{"name": "c", "env": [{"name": "A"}]}]}, "status": {"phase": "Failed"},
        });
        // From a value nothing can be borrowed: kube reads objects in this way where a malformed one is to be skipped.
        let pod: WatchedPod = serde_json::from_value(value).unwrap();
        assert_eq!(pod.metadata.resource_version.as_deref(), Some("7"));
        assert_eq!((pod.view.namespace(), pod.view.is_finished()), ("n", true));
    }
}
