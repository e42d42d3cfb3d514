//! A snapshot: nodes and pods as the API server gives them.

use std::collections::BTreeMap;

use gpu_migrate_model::lifecycle::is_terminal;
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_model::quantity::Quantity as Amount;
use gpu_migrate_model::score::HostResources;
use gpu_migrate_model::units::Cores;
use k8s_openapi::api::core::v1::{Container, Node, Pod, PodSpec, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Deserialize;
use serde_json::Value;

/// NVIDIA's feature discovery says here how much memory a card of the node has, in MiB.
const CARD_MEMORY: &str = "nvidia.com/gpu.memory";

#[derive(Clone, Debug)]
pub struct SnapshotNode {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    /// Its taints; being cordoned is one.
    pub taints: Vec<Taint>,
    pub cards: u32,
    /// Their model; empty where no label tells.
    pub product: String,
    /// Memory of each, in MiB, where it is known.
    pub card_memory_mib: Option<u64>,
    /// CPU and memory for pods.
    pub host: HostResources,
}

/// A pod that has not ended.
#[derive(Clone, Debug)]
pub struct SnapshotPod {
    /// `namespace/name`.
    pub key: String,
    pub namespace: String,
    /// What made it: `Deployment/name`; `Pod/name` if nothing did.
    pub workload: String,
    pub node: Option<String>,
    /// CPU and memory that the scheduler reserves for it.
    pub host: HostResources,
    /// As the API server gave it.
    pub pod: Pod,
    /// The same as JSON, for the webhook.
    pub value: Value,
}

#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Nodes with cards, in order of their names.
    pub nodes: Vec<SnapshotNode>,
    /// Pods that have not ended, in order of their keys.
    pub pods: Vec<SnapshotPod>,
    /// Labels of the namespaces that are among the objects.
    pub namespaces: BTreeMap<String, BTreeMap<String, String>>,
}

/// Why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Not a JSON list of objects.
    #[error(
        "not a list of Kubernetes objects in JSON: {0} (expected the output of kubectl get nodes,pods -A -o json)"
    )]
    Json(#[from] serde_json::Error),
    #[error("{kind} {name}: {source}")]
    Object { kind: &'static str, name: String, source: serde_json::Error },
    #[error("no node has cards: {nodes} nodes, none with {resource} in status.capacity")]
    NoCards { nodes: usize, resource: String },
}

#[derive(Deserialize)]
struct List {
    items: Vec<Value>,
}

impl Snapshot {
    /// Reads a v1 List.
    ///
    /// # Errors
    /// [`SnapshotError`] with the object that cannot be read.
    pub fn parse(text: &str, dialect: &Dialect) -> Result<Self, SnapshotError> {
        let list: List = serde_json::from_str(text)?;
        let mut snapshot = Self::default();
        let mut nodes = 0;
        for value in list.items {
            match value.get("kind").and_then(Value::as_str) {
                Some("Node") => {
                    nodes += 1;
                    let node: Node = typed("Node", &value)?;
                    snapshot.nodes.extend(SnapshotNode::of(node, dialect));
                }
                Some("Pod") => {
                    let pod: Pod = typed("Pod", &value)?;
                    snapshot.pods.extend(SnapshotPod::of(pod, value));
                }
                Some("Namespace") => {
                    let name = name_of(&value);
                    let labels = value.pointer("/metadata/labels").cloned().unwrap_or_default();
                    snapshot.namespaces.insert(name, serde_json::from_value(labels).unwrap_or_default());
                }
                _ => {}
            }
        }
        if snapshot.nodes.is_empty() {
            return Err(SnapshotError::NoCards { nodes, resource: dialect.legacy.clone() });
        }
        snapshot.nodes.sort_by(|one, other| one.name.cmp(&other.name));
        snapshot.pods.sort_by(|one, other| one.key.cmp(&other.key));
        Ok(snapshot)
    }

    /// Nodes whose card memory is not known: there memory is not a limit.
    #[must_use]
    pub fn without_memory(&self) -> usize {
        self.nodes.iter().filter(|node| node.card_memory_mib.is_none()).count()
    }
}

fn name_of(value: &Value) -> String {
    value.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn typed<T: serde::de::DeserializeOwned>(kind: &'static str, value: &Value) -> Result<T, SnapshotError> {
    T::deserialize(value).map_err(|source| SnapshotError::Object { kind, name: name_of(value), source })
}

impl SnapshotNode {
    fn of(node: Node, dialect: &Dialect) -> Option<Self> {
        let status = node.status.unwrap_or_default();
        let capacity = status.capacity.unwrap_or_default();
        let allocatable = status.allocatable.unwrap_or_else(|| capacity.clone());
        let amount = |resource: &str| whole(capacity.get(resource));
        let cards = amount(&dialect.legacy).max(amount(&dialect.cores) / u64::from(Cores::CARD.0));
        if cards == 0 {
            return None;
        }
        let labels = node.metadata.labels.unwrap_or_default();
        let labelled = labels.get(CARD_MEMORY).and_then(|mib| mib.parse().ok());
        let blocks = Some(amount(&dialect.memory)).filter(|blocks| *blocks > 0);
        let spec = node.spec.unwrap_or_default();
        Some(Self {
            name: node.metadata.name.unwrap_or_default(),
            product: labels.get(names::GPU_PRODUCT).cloned().unwrap_or_default(),
            card_memory_mib: labelled.or(blocks.map(|blocks| blocks / cards * dialect.mib_per_block)),
            taints: taints(spec.taints.unwrap_or_default(), spec.unschedulable == Some(true)),
            labels,
            cards: u32::try_from(cards).unwrap_or(u32::MAX),
            host: HostResources {
                cpu_milli: milli(allocatable.get("cpu")).unwrap_or(u32::MAX),
                memory_mib: mib(allocatable.get("memory")).unwrap_or(u32::MAX),
            },
        })
    }
}

/// A cordoned node refuses new pods also before the node controller has tainted it.
fn taints(mut taints: Vec<Taint>, cordoned: bool) -> Vec<Taint> {
    let key = "node.kubernetes.io/unschedulable";
    if cordoned && taints.iter().all(|taint| taint.key != key) {
        taints.push(Taint { key: key.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() });
    }
    taints
}

impl SnapshotPod {
    fn of(pod: Pod, value: Value) -> Option<Self> {
        if is_terminal(&pod) {
            return None;
        }
        let spec = pod.spec.as_ref()?;
        let namespace = pod.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
        Some(Self {
            key: format!("{namespace}/{}", pod.metadata.name.as_deref().unwrap_or_default()),
            workload: workload(&pod),
            namespace,
            node: spec.node_name.clone().filter(|node| !node.is_empty()),
            host: reserved(spec),
            pod,
            value,
        })
    }
}

/// A ReplicaSet of a Deployment is named after it and the hash of the template.
fn workload(pod: &Pod) -> String {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    let Some(owner) = owners.iter().find(|owner| owner.controller == Some(true)) else {
        return format!("Pod/{}", pod.metadata.name.as_deref().unwrap_or_default());
    };
    let hash = pod.metadata.labels.as_ref().and_then(|labels| labels.get("pod-template-hash"));
    let deployment = hash.and_then(|hash| owner.name.strip_suffix(hash.as_str())?.strip_suffix('-'));
    match (owner.kind.as_str(), deployment) {
        ("ReplicaSet", Some(name)) => format!("Deployment/{name}"),
        (kind, _) => format!("{kind}/{}", owner.name),
    }
}

/// What the scheduler reserves: the larger of what runs together and of each init container with the sidecars before
/// it, and the overhead (KEP-753).
fn reserved(spec: &PodSpec) -> HostResources {
    let plus = |one: HostResources, other: HostResources| HostResources {
        cpu_milli: one.cpu_milli.saturating_add(other.cpu_milli),
        memory_mib: one.memory_mib.saturating_add(other.memory_mib),
    };
    let larger = |one: HostResources, other: HostResources| HostResources {
        cpu_milli: one.cpu_milli.max(other.cpu_milli),
        memory_mib: one.memory_mib.max(other.memory_mib),
    };
    let (mut sidecars, mut peak) = (HostResources::NONE, HostResources::NONE);
    for container in spec.init_containers.iter().flatten() {
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars = plus(sidecars, requested(container));
        } else {
            peak = larger(peak, plus(sidecars, requested(container)));
        }
    }
    let running = spec.containers.iter().map(requested).fold(sidecars, plus);
    let overhead = spec.overhead.as_ref().map_or(HostResources::NONE, |overhead| HostResources {
        cpu_milli: milli(overhead.get("cpu")).unwrap_or(0),
        memory_mib: mib(overhead.get("memory")).unwrap_or(0),
    });
    plus(larger(peak, running), overhead)
}

fn requested(container: &Container) -> HostResources {
    let resources = container.resources.as_ref();
    let of = |name: &str| {
        let requests = resources.and_then(|resources| resources.requests.as_ref()?.get(name));
        requests.or_else(|| resources.and_then(|resources| resources.limits.as_ref()?.get(name)))
    };
    HostResources { cpu_milli: milli(of("cpu")).unwrap_or(0), memory_mib: mib(of("memory")).unwrap_or(0) }
}

fn amount(quantity: Option<&Quantity>) -> Option<Amount> {
    quantity.and_then(|quantity| quantity.0.parse().ok())
}

fn whole(quantity: Option<&Quantity>) -> u64 {
    amount(quantity).and_then(Amount::whole).unwrap_or(0)
}

fn milli(quantity: Option<&Quantity>) -> Option<u32> {
    amount(quantity).map(|amount| u32::try_from(amount.milli()).unwrap_or(u32::MAX))
}

fn mib(quantity: Option<&Quantity>) -> Option<u32> {
    amount(quantity).map(|amount| u32::try_from(amount.ceil() >> 20).unwrap_or(u32::MAX))
}
