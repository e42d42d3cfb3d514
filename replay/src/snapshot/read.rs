//! A snapshot: nodes and pods as the API server gives them.

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::sync::Arc;

use gpu_migrate_model::annotation::Choice;
use gpu_migrate_model::ask::{AskError, ContainerKind, Demand, PodAsk, PodKind};
use gpu_migrate_model::lifecycle::is_terminal_phase;
use gpu_migrate_model::names::{self, Dialect};
use gpu_migrate_model::quantity::Quantity as Amount;
use gpu_migrate_model::score::HostResources;
use gpu_migrate_model::target::Target;
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::dump::{as_created, items};

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

/// What pods of one workload have in common.
#[derive(Clone, Debug)]
pub struct Template {
    /// Its number in the snapshot.
    pub number: usize,
    /// As its controller would create it, for the webhook.
    pub value: Value,
    /// What it asks for; of shares of other systems what they are in cores and blocks.
    pub ask: PodAsk,
    /// Why its request makes no sense; `ask` is then empty.
    pub wrong: Option<AskError>,
    /// The system whose shares it has, if that is not ours.
    pub system: Option<Target>,
    /// Selector, affinity and tolerations.
    pub spec: PodSpec,
    /// CPU and memory that the scheduler reserves for it.
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
    /// The card that its annotations name, where it has one container with a share.
    pub card: Option<CardIndex>,
    pub template: Arc<Template>,
}

impl SnapshotPod {
    /// What kind of pod it is; `None` where its request makes no sense.
    #[must_use]
    pub fn kind(&self) -> Option<PodKind> {
        self.template.wrong.is_none().then(|| self.template.ask.kind())
    }

    /// CPU and memory that the scheduler reserves for it.
    #[must_use]
    pub fn host(&self) -> HostResources {
        self.template.host
    }
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

impl Snapshot {
    /// Reads a v1 List, object by object: of pods that are equal but for their names one is kept.
    ///
    /// # Errors
    /// [`SnapshotError`] with the first object that cannot be read.
    pub fn read(text: impl Read, dialect: &Dialect) -> Result<Self, SnapshotError> {
        let mut reader = Reader { dialect, snapshot: Self::default(), templates: HashMap::new(), nodes: 0 };
        let mut failed = None;
        items(text, |value| {
            if failed.is_none() {
                failed = reader.take(value).err();
            }
        })?;
        if let Some(failed) = failed {
            return Err(failed);
        }
        let Reader { mut snapshot, nodes, .. } = reader;
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

fn typed<T: DeserializeOwned>(kind: &'static str, name: &str, value: &Value) -> Result<T, SnapshotError> {
    T::deserialize(value).map_err(|source| SnapshotError::Object { kind, name: name.to_owned(), source })
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

struct Reader<'d> {
    dialect: &'d Dialect,
    snapshot: Snapshot,
    /// By their JSON.
    templates: HashMap<String, Arc<Template>>,
    nodes: usize,
}

impl Reader<'_> {
    fn take(&mut self, value: Value) -> Result<(), SnapshotError> {
        match value.get("kind").and_then(Value::as_str) {
            Some("Node") => {
                self.nodes += 1;
                let node = typed("Node", &name_of(&value), &value)?;
                self.snapshot.nodes.extend(SnapshotNode::of(node, self.dialect));
            }
            Some("Pod") => {
                let pod = self.pod(value)?;
                self.snapshot.pods.extend(pod);
            }
            Some("Namespace") => {
                let labels = value.pointer("/metadata/labels").cloned().unwrap_or_default();
                let labels = serde_json::from_value(labels).unwrap_or_default();
                self.snapshot.namespaces.insert(name_of(&value), labels);
            }
            _ => {}
        }
        Ok(())
    }

    fn pod(&mut self, mut value: Value) -> Result<Option<SnapshotPod>, SnapshotError> {
        let text = |value: &Value, key: &str| value.pointer(key).and_then(Value::as_str).map(str::to_owned);
        if text(&value, "/status/phase").is_some_and(|phase| is_terminal_phase(&phase))
            || !value.get("spec").is_some_and(Value::is_object)
        {
            return Ok(None);
        }
        let name = name_of(&value);
        let namespace = text(&value, "/metadata/namespace").unwrap_or_else(|| "default".to_owned());
        let node = text(&value, "/spec/nodeName").filter(|node| !node.is_empty());
        let metadata = value.get("metadata").map(|metadata| typed("Pod", &name, metadata));
        let metadata: ObjectMeta = metadata.transpose()?.unwrap_or_default();
        as_created(&mut value);
        let key = value.to_string();
        let template = match self.templates.get(&key) {
            Some(template) => Arc::clone(template),
            None => {
                let pod = typed("Pod", &name, &value)?;
                let template = Arc::new(Template::of(self.templates.len(), pod, value, self.dialect));
                self.templates.insert(key, Arc::clone(&template));
                template
            }
        };
        Ok(Some(SnapshotPod {
            key: format!("{namespace}/{name}"),
            workload: workload(&metadata),
            namespace,
            node,
            card: named_card(&metadata, &template.ask),
            template,
        }))
    }
}

/// The card that the annotations name for the one container that has a share of one.
fn named_card(metadata: &ObjectMeta, ask: &PodAsk) -> Option<CardIndex> {
    let mut asking = ask.asking();
    let one = asking.next().filter(|one| one.demand.cores.whole_cards().is_none())?;
    if one.demand.legacy > 0 || asking.next().is_some() {
        return None;
    }
    let choice = Choice::read(metadata.annotations.as_ref()?, ask).ok().flatten()?;
    choice.cards.values().next()?.first().copied()
}

impl Template {
    fn of(number: usize, pod: Pod, value: Value, dialect: &Dialect) -> Self {
        let spec = pod.spec.unwrap_or_default();
        let (mut ask, wrong) = match PodAsk::of_spec(&spec, dialect) {
            Ok(ask) => (ask, None),
            Err(wrong) => (PodAsk::default(), Some(wrong)),
        };
        let system = others(&mut ask, &spec, pod.metadata.annotations.as_ref());
        let host = HostResources::requested_by(&spec);
        // Its containers have been looked at.
        let (node_selector, affinity, tolerations) = (spec.node_selector, spec.affinity, spec.tolerations);
        let spec = PodSpec { node_selector, affinity, tolerations, ..PodSpec::default() };
        Self { number, value, ask, wrong, system, spec, host }
    }
}

/// Writes shares of other systems into `ask` as cores and blocks, and says whose they are.
fn others(
    ask: &mut PodAsk,
    spec: &PodSpec,
    annotations: Option<&BTreeMap<String, String>>,
) -> Option<Target> {
    let mut system = None;
    for one in &mut ask.containers {
        let list = if one.kind == ContainerKind::App {
            Some(&spec.containers)
        } else {
            spec.init_containers.as_ref()
        };
        let Some(container) = list.and_then(|list| list.get(one.position)) else { continue };
        let amounts = |name: &str| {
            let resources = container.resources.as_ref()?;
            let limit = resources.limits.as_ref().and_then(|limits| limits.get(name));
            let quantity = limit.or_else(|| resources.requests.as_ref()?.get(name));
            quantity.map(|quantity| whole(Some(quantity)))
        };
        for target in Target::ALL.into_iter().filter(|target| !target.is_ours()) {
            if let Some((cores, blocks)) = target.share(amounts) {
                one.demand = Demand { legacy: 0, cores, blocks };
                system = Some(target);
            }
        }
    }
    // KAI names the memory of the one container with a share in an annotation, and its compute nowhere.
    let marked = Target::ALL.into_iter().find_map(|target| {
        let mib = annotations?.get(target.share_annotation()?)?.parse().ok()?;
        Some((target, Blocks::in_mib(mib).max(Blocks(1))))
    });
    if let (Some((target, blocks)), None, Some(first)) =
        (marked, system, ask.containers.iter_mut().find(|one| one.kind == ContainerKind::App))
    {
        first.demand = Demand { legacy: 0, cores: Cores(1), blocks };
        system = Some(target);
    }
    system
}

/// A ReplicaSet of a Deployment is named after it and the hash of the template.
fn workload(metadata: &ObjectMeta) -> String {
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    let Some(owner) = owners.iter().find(|owner| owner.controller == Some(true)) else {
        return format!("Pod/{}", metadata.name.as_deref().unwrap_or_default());
    };
    let hash = metadata.labels.as_ref().and_then(|labels| labels.get("pod-template-hash"));
    let deployment = hash.and_then(|hash| owner.name.strip_suffix(hash.as_str())?.strip_suffix('-'));
    match (owner.kind.as_str(), deployment) {
        ("ReplicaSet", Some(name)) => format!("Deployment/{name}"),
        (kind, _) => format!("{kind}/{}", owner.name),
    }
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
