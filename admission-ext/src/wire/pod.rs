//! The part of a Pod that placement depends on; the rest is skipped unread.
//!
//! One view serves the request bodies, the watch and the snapshot file, so that a pod means the same in all three.

use gpu_migrate_model::names;
use serde::Deserialize;

use super::text::{IntoOwned, Picked, QuantityText, Text, Wanted, owned};

/// A borrowed Pod.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct PodView<'a> {
    /// Identity and annotations.
    #[serde(borrow, default)]
    pub metadata: MetaView<'a>,
    /// What it asks for.
    #[serde(borrow, default)]
    pub spec: SpecView<'a>,
    /// Where it stands.
    #[serde(borrow, default)]
    pub status: StatusView<'a>,
}

/// Metadata of a Pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MetaView<'a> {
    /// Name.
    #[serde(borrow)]
    pub name: Text<'a>,
    /// Namespace; absent means `default`.
    #[serde(borrow)]
    pub namespace: Text<'a>,
    /// UID.
    #[serde(borrow)]
    pub uid: Text<'a>,
    /// Version, for the watch.
    #[serde(borrow)]
    pub resource_version: Option<Text<'a>>,
    /// Set once deletion was asked for.
    #[serde(borrow)]
    pub deletion_timestamp: Option<Text<'a>>,
    /// Our annotations, and those of gpu-manager and of gangs.
    #[serde(borrow)]
    pub annotations: Picked<'a, Text<'a>, OurAnnotations>,
}

/// Spec of a Pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SpecView<'a> {
    /// Node it is bound to; absent or empty while it waits.
    #[serde(borrow)]
    pub node_name: Option<Text<'a>>,
    /// Labels that its node must have.
    #[serde(borrow)]
    pub node_selector: Picked<'a, Text<'a>, Everything>,
    /// Priority, resolved from its class.
    pub priority: Option<i32>,
    /// Gates that keep it out of the scheduler's queue.
    #[serde(borrow)]
    pub scheduling_gates: Option<Vec<GateView<'a>>>,
    /// Run before the others, or beside them with `restartPolicy: Always`.
    #[serde(borrow)]
    pub init_containers: Option<Vec<ContainerView<'a>>>,
    /// The containers proper.
    #[serde(borrow)]
    pub containers: Option<Vec<ContainerView<'a>>>,
}

/// A scheduling gate.
#[derive(Clone, Debug, Deserialize)]
pub struct GateView<'a> {
    /// Its name.
    #[serde(borrow)]
    pub name: Text<'a>,
}

/// Status of a Pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StatusView<'a> {
    /// `Pending`, `Running`, `Succeeded`, `Failed`.
    #[serde(borrow)]
    pub phase: Text<'a>,
}

/// A container of any kind.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerView<'a> {
    /// Name.
    #[serde(borrow)]
    pub name: Text<'a>,
    /// `Always` makes an init container a sidecar.
    #[serde(borrow)]
    pub restart_policy: Option<Text<'a>>,
    /// Requests and limits.
    #[serde(borrow)]
    pub resources: ResourcesView<'a>,
}

/// Resources of a container: the extended ones only.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ResourcesView<'a> {
    /// Limits; for extended resources these equal the requests.
    #[serde(borrow)]
    pub limits: Picked<'a, QuantityText<'a>, ExtendedResources>,
    /// Requests.
    #[serde(borrow)]
    pub requests: Picked<'a, QuantityText<'a>, ExtendedResources>,
}

/// Keeps the annotations that placement reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OurAnnotations {}

impl Wanted for OurAnnotations {
    fn wants(key: &str) -> bool {
        key.starts_with("gpu-migrate.io/") && key != names::ORIGINAL
            || key.starts_with("tencent.com/")
            || key == names::GANG_NAME
            || key == names::GANG_SIZE
    }
}

/// Keeps what has a domain: `nvidia.com/gpu`, not `cpu`. The dialect is configuration, so its names are not known here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtendedResources {}

impl Wanted for ExtendedResources {
    fn wants(key: &str) -> bool {
        key.contains('/')
    }
}

/// Keeps every key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Everything {}

impl Wanted for Everything {
    fn wants(_: &str) -> bool {
        true
    }
}

impl<'a> PodView<'a> {
    /// Namespace, `default` where none is written.
    pub fn namespace(&self) -> &str {
        if self.metadata.namespace.is_empty() { "default" } else { &self.metadata.namespace }
    }

    /// The node it is bound to.
    pub fn node(&self) -> Option<&str> {
        self.spec.node_name.as_deref().filter(|name| !name.is_empty())
    }

    /// True once its containers hold nothing any more.
    pub fn is_finished(&self) -> bool {
        matches!(&*self.status.phase, "Succeeded" | "Failed")
    }

    /// True while the gate of an incomplete gang is on it.
    pub fn is_gated(&self) -> bool {
        self.spec.scheduling_gates.iter().flatten().any(|gate| &*gate.name == names::GANG_GATE)
    }

    /// True where any container names `resource`, also with 0.
    pub fn names_resource(&self, resource: &str) -> bool {
        let all = self.spec.init_containers.iter().flatten().chain(self.spec.containers.iter().flatten());
        all.into_iter().any(|container| {
            container.resources.limits.get(resource).is_some()
                || container.resources.requests.get(resource).is_some()
        })
    }

    /// What `container` asks of `resource`, as text: the limit, else the request.
    pub fn quantity<'c>(container: &'c ContainerView<'a>, resource: &str) -> Option<&'c str> {
        let found = container.resources.limits.get(resource);
        found.or_else(|| container.resources.requests.get(resource)).map(|quantity| &*quantity.0)
    }
}

owned!(PodView { metadata, spec, status });
owned!(MetaView { name, namespace, uid, resource_version, deletion_timestamp, annotations });
owned!(SpecView { node_name, node_selector, priority, scheduling_gates, init_containers, containers });
owned!(GateView { name });
owned!(StatusView { phase });
owned!(ContainerView { name, restart_policy, resources });
owned!(ResourcesView { limits, requests });
