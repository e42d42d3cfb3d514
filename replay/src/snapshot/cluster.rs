//! The cluster's cards and who holds them.

use std::collections::{BTreeMap, HashMap};

use gpu_migrate_model::ask::PodKind;
use gpu_migrate_model::card::Card;
use gpu_migrate_model::place::Constraints;
use gpu_migrate_model::score::{Fragmentation, FreeCapacity, Mix, ModelSet};
use gpu_migrate_model::target::Target;
use gpu_migrate_model::units::MIB_PER_BLOCK;

use super::card_map::signs;
use super::read::{Snapshot, SnapshotNode, SnapshotPod};
use crate::node::{ReplayNode, Request};

/// Memory of a card whose memory is not known: more than any share asks for.
const UNKNOWN_MEMORY_MIB: u64 = (1 << 20) * MIB_PER_BLOCK;

#[derive(Clone, Debug)]
pub struct ClusterState {
    /// In the order of the snapshot.
    pub nodes: Vec<ReplayNode>,
    by_name: HashMap<String, usize>,
}

/// How the cards are used, in cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    pub cards: u32,
    /// Held, in whole or in part.
    pub held: u32,
    /// Idle compute on held cards and free cards, together.
    pub idle: f64,
    /// Idle compute of no use to the usual request.
    pub fragmented: f64,
}

impl ClusterState {
    /// The state as the snapshot shows them, and what does not add up in it.
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> (Self, Vec<String>) {
        let by_name = snapshot.nodes.iter().enumerate().map(|(at, node)| (node.name.clone(), at));
        let mut cluster =
            Self { nodes: snapshot.nodes.iter().map(empty).collect(), by_name: by_name.collect() };
        let mut notes = Vec::new();
        let mut foreign: BTreeMap<Target, usize> = BTreeMap::new();
        for pod in &snapshot.pods {
            if let Some(at) = cluster.home(pod) {
                if let Some(target) = pod.template.system {
                    *foreign.entry(target).or_default() += 1;
                }
                notes.extend(cluster.place_running(at, pod));
            }
        }
        notes.extend(foreign.into_iter().map(|(target, pods)| {
            format!(
                "{pods} pods have shares of {target}: on which cards is not in a snapshot, so they are placed where they fit on their nodes"
            )
        }));
        (cluster, notes)
    }

    /// Where a pod runs, if that is a node with cards.
    #[must_use]
    pub fn home(&self, pod: &SnapshotPod) -> Option<usize> {
        pod.node.as_ref().and_then(|node| self.by_name.get(node)).copied()
    }

    /// Puts a pod where it runs.
    pub fn place_running(&mut self, at: usize, pod: &SnapshotPod) -> Option<String> {
        let node = &mut self.nodes[at];
        if let Some(why) = &pod.template.wrong {
            node.occupy(pod.host());
            return Some(format!("pod {}: {why}", pod.key));
        }
        match pod.template.ask.kind() {
            PodKind::Plain | PodKind::Mixed => {
                node.occupy(pod.host());
                None
            }
            PodKind::Legacy => {
                let missing = node.place_legacy(&pod.key, pod.template.ask.effective().legacy, pod.host());
                (missing > 0).then(|| {
                    format!("pod {}: its node has {missing} cards too few for what runs there", pod.key)
                })
            }
            PodKind::Shared => place_shared(node, pod),
        }
    }

    /// How the cards are used; fragmentation is measured by `mix`.
    #[must_use]
    pub fn usage(&self, mix: &Mix) -> Usage {
        let fragmentation = Fragmentation::new(mix);
        let mut usage = Usage::default();
        for node in &self.nodes {
            let capacity = node.capacity();
            usage.cards += count(node.cards().len());
            usage.held += count(node.cards().iter().filter(|card| card.holders > 0).count());
            usage.idle += f64::from(capacity.cores()) / 100.0;
            usage.fragmented += fragmentation.of(&capacity) / 100.0;
        }
        usage
    }

    /// The cards of each node, in the order of the snapshot, one sign a card.
    #[must_use]
    pub fn map(&self) -> Vec<String> {
        self.nodes.iter().map(|node| signs(node.cards())).collect()
    }

    /// The nodes as they are when empty.
    #[must_use]
    pub fn fleet(snapshot: &Snapshot) -> Vec<FreeCapacity> {
        snapshot.nodes.iter().map(|node| empty(node).capacity()).collect()
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn empty(node: &SnapshotNode) -> ReplayNode {
    let card = |minor: u32| Card {
        uuid: format!("{}-{minor}", node.name),
        minor,
        model: node.product.clone(),
        memory_mib: node.card_memory_mib.unwrap_or(UNKNOWN_MEMORY_MIB),
        ..Card::default()
    };
    ReplayNode::new((0..node.cards).map(card).collect(), node.host, ModelSet::ANY)
}

/// On the card of its annotations where it has one container, else where it fits.
fn place_shared(node: &mut ReplayNode, pod: &SnapshotPod) -> Option<String> {
    let (ask, constraints) = (pod.template.ask.clone(), Constraints::default());
    let request = Request { ask, constraints, host: pod.host() };
    let why = node.bind(&pod.key, &request, pod.card).err()?;
    Some(format!("pod {}: its cards cannot be reconstructed on the node where it runs: {why}", pod.key))
}
