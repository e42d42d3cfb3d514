//! Made-up clusters, the same for the same seed: for benches, for trying the extender out, for bug reports.
//!
//! Each node has eight cards of 80 GB on two NUMA nodes. Of its pods with cards a third are legacy (one or two
//! cards), the rest shared in the usual sizes, placed by the same code that places real ones. Some more pods wait, to be bound.

use std::io::{self, Write};

use gpu_migrate_model::ask::{ContainerAsk, ContainerKind, Demand, PodAsk};
use gpu_migrate_model::card::Card;
use gpu_migrate_model::crd::GPUShadowStatus;
use gpu_migrate_model::ledger::{Hold, HolderId, Ledger};
use gpu_migrate_model::names;
use gpu_migrate_model::place::{Constraints, NodeView, footprint, place};
use gpu_migrate_model::topology::{LinkLevel, Topology};
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

/// What to make.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Shape {
    /// Nodes
    #[arg(long, default_value_t = 5_000)]
    pub(crate) nodes: u32,
    /// Pods on each node; a third of them legacy
    #[arg(long, default_value_t = 12)]
    pub(crate) pods_per_node: u32,
    /// Pods without cards on each node besides
    #[arg(long, default_value_t = 4)]
    pub(crate) plain_per_node: u32,
    /// Further pods that wait for a node
    #[arg(long, default_value_t = 2_000)]
    pub(crate) waiting: u32,
    /// Gangs of 32 pods that wait for whole nodes, of which none is free
    #[arg(long, default_value_t = 0)]
    pub(crate) gangs: u32,
    /// Cards on each node
    #[arg(long, default_value_t = 8)]
    pub(crate) cards: u32,
    /// The same seed makes the same cluster
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

const MEMORY_MIB: u64 = 81_559;
const MODEL: &str = "NVIDIA A100-SXM4-80GB";
/// Pods of a gang.
const GANG: u32 = 32;
/// Cores and blocks of shares, as often as they are listed.
const SHARES: [(u32, u32); 8] =
    [(10, 16), (10, 24), (20, 42), (25, 64), (25, 79), (30, 100), (50, 120), (50, 159)];

/// CPU, in thousandths, and MiB of pods without cards.
const SMALL: [(u32, u32); 4] = [(100, 128), (250, 512), (1_000, 2_048), (4_000, 8_192)];

/// Name of the node at `at`.
#[must_use]
pub(crate) fn node_name(at: u32) -> String {
    format!("gpu-node-{at:05}")
}

/// Writes the cluster as a Kubernetes `List` in JSON.
///
/// # Errors
/// Where `out` cannot be written.
pub(crate) fn write(shape: Shape, out: &mut impl Write) -> io::Result<()> {
    let mut rng = StdRng::seed_from_u64(shape.seed);
    write!(out, "{{\"kind\":\"List\",\"apiVersion\":\"v1\",\"items\":[")?;
    for at in 0..shape.nodes {
        if at > 0 {
            out.write_all(b",")?;
        }
        let node = Node::new(shape, at, &mut rng);
        let objects: Vec<String> = node.objects().iter().map(Value::to_string).collect();
        out.write_all(objects.join(",\n").as_bytes())?;
        out.write_all(b"\n")?;
    }
    for at in 0..shape.waiting {
        let share = SHARES.choose(&mut rng).copied().unwrap_or(SHARES[0]);
        let pod = pod(&format!("waiting-{at}"), shape.seed, at, None, share_limits(share.0, share.1));
        writeln!(out, "{}{pod}", if shape.nodes + at > 0 { "," } else { "" })?;
    }
    let whole_node = share_limits(shape.cards * 100, 0);
    for at in 0..shape.gangs * GANG {
        let mut pod = pod(&format!("gang-{at}"), shape.seed, shape.waiting + at, None, whole_node.clone());
        pod["metadata"]["annotations"] = json!({
            names::GANG_NAME: format!("gang-{}", at / GANG),
            names::GANG_SIZE: GANG.to_string(),
        });
        writeln!(out, "{}{pod}", if shape.nodes + shape.waiting + at > 0 { "," } else { "" })?;
    }
    out.write_all(b"]}\n")
}

struct Node {
    name: String,
    cards: u32,
    ledger: Ledger,
    topology: Topology,
    pods: Vec<Value>,
}

impl Node {
    fn new(shape: Shape, at: u32, rng: &mut StdRng) -> Self {
        let name = node_name(at);
        let card = |minor| Card {
            uuid: format!("GPU-{:08x}-{at:04x}-4000-8000-{minor:012x}", shape.seed),
            minor,
            model: MODEL.to_owned(),
            memory_mib: MEMORY_MIB,
            numa: Some(minor / 4),
            ..Card::default()
        };
        let mut node = Self {
            ledger: Ledger::new((0..shape.cards).map(card).collect()),
            topology: Topology::from_fn(shape.cards as usize, link),
            cards: shape.cards,
            pods: Vec::new(),
            name,
        };
        for count in 0..shape.pods_per_node {
            let uid = at * shape.pods_per_node + count;
            let made = if count % 3 == 0 {
                node.add_legacy(shape.seed, uid, if rng.random_ratio(1, 8) { 2 } else { 1 })
            } else {
                let share = SHARES.choose(rng).copied().unwrap_or(SHARES[0]);
                node.add_shared(shape.seed, uid, share)
            };
            node.pods.extend(made);
        }
        for count in 0..shape.plain_per_node {
            let (cpu, memory) = SMALL.choose(rng).copied().unwrap_or(SMALL[0]);
            let uid = 0x4000_0000 | (at * shape.plain_per_node + count);
            let limits = host_limits(cpu, memory);
            node.pods.push(pod(&format!("plain-{uid}"), shape.seed, uid, Some(&node.name), limits));
        }
        node
    }

    fn free(&self) -> Vec<CardIndex> {
        self.ledger.view().iter().filter(|card| card.is_free()).map(|card| card.index).collect()
    }

    fn add_legacy(&mut self, seed: u64, uid: u32, cards: usize) -> Option<Value> {
        // One card is left to the shared pods.
        let free = self.free();
        let chosen = free.get(..cards).filter(|_| free.len() > cards)?;
        let holder = HolderId::new(uid_text(seed, uid), "main");
        for card in chosen {
            self.ledger.hold(&holder, *card, Hold::whole()).ok()?;
        }
        let list = chosen.iter().map(|card| card.0.to_string()).collect::<Vec<_>>().join(",");
        let mut pod = pod(
            &format!("legacy-{uid}"),
            seed,
            uid,
            Some(&self.name),
            with_host(json!({"nvidia.com/gpu": cards.to_string()}), u32::try_from(cards).unwrap_or(0) * 100),
        );
        pod["metadata"]["annotations"] = json!({format!("{}main", names::LEGACY_CARDS_PREFIX): list});
        Some(pod)
    }

    fn add_shared(&mut self, seed: u64, uid: u32, (cores, blocks): (u32, u32)) -> Option<Value> {
        let demand = Demand { cores: Cores(cores), blocks: Blocks(blocks), ..Demand::NONE };
        let container =
            ContainerAsk { name: "main".to_owned(), kind: ContainerKind::App, position: 0, demand };
        let ask = PodAsk { containers: vec![container] };
        let (cards, tree) = (self.ledger.view(), self.topology.tree());
        let view = NodeView { cards: &cards, tree: &tree, unattributed: 0 };
        let placed = place(&view, &ask, &Constraints::default()).ok()?;
        let card = *placed.containers.first()?.1.first()?;
        let holder = HolderId::new(uid_text(seed, uid), "main");
        self.ledger.hold(&holder, card, footprint(&ask.containers[0])).ok()?;
        let mut pod = pod(&format!("shared-{uid}"), seed, uid, Some(&self.name), share_limits(cores, blocks));
        pod["metadata"]["annotations"] = json!({
            format!("{}0", names::PREDICATE_GPU_INDEX_PREFIX): card.0.to_string(),
            names::PREDICATE_NODE: self.name,
            names::PREDICATE_TIME: "1790000000000000000",
            names::GPU_ASSIGNED: "true",
        });
        Some(pod)
    }

    fn objects(&self) -> Vec<Value> {
        let blocks = u32::try_from(MEMORY_MIB / 256).unwrap_or(0) * self.cards;
        let amounts = json!({
            "cpu": "128", "memory": "2Ti", "pods": "110",
            "nvidia.com/gpu": self.cards.to_string(),
            "tencent.com/vcuda-core": (self.cards * 100).to_string(),
            "tencent.com/vcuda-memory": blocks.to_string(),
        });
        let node = json!({
            "kind": "Node", "apiVersion": "v1",
            "metadata": {"name": self.name, "uid": format!("node-{}", self.name), "labels": {
                "kubernetes.io/hostname": self.name, names::GPU_PRODUCT: "NVIDIA-A100-SXM4-80GB", "pool": "a100"}},
            "status": {"capacity": amounts, "allocatable": amounts},
        });
        let status = GPUShadowStatus::of(&self.ledger, &self.topology, |_| None);
        let shadow = json!({
            "kind": "GPUShadow", "apiVersion": "gpu-migrate.io/v1alpha1",
            "metadata": {"name": self.name}, "spec": {}, "status": status,
        });
        let mut all = vec![node, shadow];
        all.extend(self.pods.iter().cloned());
        all
    }
}

fn link(one: CardIndex, other: CardIndex) -> LinkLevel {
    match (one.0 / 2 == other.0 / 2, one.0 / 4 == other.0 / 4) {
        (true, _) => LinkLevel::Pix,
        (_, true) => LinkLevel::Phb,
        _ => LinkLevel::Sys,
    }
}

fn uid_text(seed: u64, uid: u32) -> String {
    format!("{uid:08x}-0000-4000-8000-{seed:012x}")
}

fn share_limits(cores: u32, blocks: u32) -> Value {
    let cards =
        json!({"tencent.com/vcuda-core": cores.to_string(), "tencent.com/vcuda-memory": blocks.to_string()});
    with_host(cards, cores)
}

fn host_limits(cpu_milli: u32, memory_mib: u32) -> Value {
    json!({"cpu": format!("{cpu_milli}m"), "memory": format!("{memory_mib}Mi")})
}

/// Of a node's CPU and memory three quarters of what falls to so many cores of its cards.
fn with_host(mut limits: Value, cores: u32) -> Value {
    limits["cpu"] = json!(format!("{}m", cores * 120));
    limits["memory"] = json!(format!("{}Mi", cores * 1_966));
    limits
}

fn pod(name: &str, seed: u64, uid: u32, node: Option<&str>, limits: Value) -> Value {
    // Waiting pods have UIDs of their own.
    let uid = if node.is_some() { uid } else { uid | 0x8000_0000 };
    let mut spec = json!({
        "containers": [{"name": "main", "image": "registry.example/train:1", "resources": {"limits": limits, "requests": limits}}],
        "schedulerName": names::SCHEDULER, "priority": 0,
    });
    if let Some(node) = node {
        spec["nodeName"] = json!(node);
    }
    json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "training", "uid": uid_text(seed, uid), "annotations": {}},
        "spec": spec,
        "status": {"phase": if node.is_some() { "Running" } else { "Pending" }},
    })
}
