//! What each node is to have, and how it gets there while pods run. Pure.
//!
//! [`daemonsets`] knows who serves a node already, [`templates`] what the operator would put there, [`driver`] whether the
//! driver is the wanted one, [`switch`] the steps between two modes, [`decide`] what follows for one node and for all.

pub mod daemonsets;
pub mod decide;
pub mod driver;
pub mod switch;
pub mod templates;

#[cfg(test)]
mod tests;

use crate::pools::Place;
use gpu_migrate_model::names;
use k8s_openapi::api::core::v1::Taint;
use std::collections::{BTreeMap, BTreeSet};

/// Labels of nodes that the operator writes.
pub const LABELS: [&str; 6] =
    [names::PLUGIN, names::POOL, names::RUN_AGENT, names::RUN_NVIDIA, names::RUN_DCGM, names::NO_NEW_SHARES];

/// The operator's labels on a node.
pub type Labels = BTreeMap<&'static str, String>;

/// What is known of a Node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeView {
    /// Its name.
    pub name: String,
    /// Its UID: GPUShadows belong to it.
    pub uid: String,
    /// All its labels.
    pub labels: BTreeMap<String, String>,
    /// Those of [`LABELS`] that the operator has written, and may remove.
    pub ours: BTreeSet<String>,
    /// Its taints.
    pub taints: Vec<Taint>,
    /// Somebody has registered whole cards with its kubelet, now or minutes ago.
    pub has_whole_cards: bool,
    /// Somebody has registered shares with its kubelet, now or minutes ago.
    pub has_shares: bool,
}

impl NodeView {
    /// The operator's labels as they are.
    #[must_use]
    pub fn current(&self) -> Labels {
        LABELS.into_iter().filter_map(|key| Some((key, self.labels.get(key)?.clone()))).collect()
    }

    /// Whether a label says so.
    #[must_use]
    pub fn is(&self, key: &str, value: &str) -> bool {
        self.labels.get(key).is_some_and(|found| found == value)
    }

    /// Whether the node agent serves it, or is on its way.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        self.labels.contains_key(names::RUN_AGENT)
            || self.is(names::PLUGIN, "Bridged")
            || self.is(names::PLUGIN, "Shared")
    }
}

/// The pods of a node, counted. Only asked for where a step depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodePods {
    /// That ask for whole cards and have not ended.
    pub legacy: u32,
    /// That ask for shares and have not ended.
    pub shared: u32,
    /// Node agents, whoever runs them.
    pub agents: u32,
    /// The operator's copies of NVIDIA's plugin that register with the kubelet.
    pub direct_plugins: u32,
}

/// What a node is to be, and who says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Pool, mode and what else the GPUConfig says.
    pub place: Place,
    /// An owner has set the label `gpu-migrate.io/plugin` by hand: the operator brings the node agent and nothing else.
    pub by_hand: bool,
}

/// A condition that the operator writes into a GPUShadow or the GPUConfig.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Say {
    /// Its type.
    pub kind: &'static str,
    /// Its status.
    pub holds: bool,
    /// One word.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

impl Say {
    /// A condition.
    #[must_use]
    pub fn new(kind: &'static str, holds: bool, reason: &'static str, message: impl Into<String>) -> Self {
        Self { kind, holds, reason, message: message.into() }
    }
}
