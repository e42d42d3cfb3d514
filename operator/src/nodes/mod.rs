//! Desired state of each node, and the steps towards it while pods run. Pure.
//!
//! [`daemonsets`]: external DaemonSets that serve a node. [`templates`]: the operator's own. [`driver`]: driver version and installer.
//! [`switch`]: the steps between two plugin modes. [`decide`]: the plan for one node and for all.

pub mod daemonsets;
pub mod decide;
pub mod driver;
pub mod switch;
pub mod templates;

#[cfg(test)]
mod tests;

use crate::pools::NodeSettings;
use gpu_migrate_model::names;
use k8s_openapi::api::core::v1::Taint;
use std::collections::{BTreeMap, BTreeSet};

/// Labels of nodes that the operator writes.
pub const LABELS: [&str; 6] =
    [names::PLUGIN, names::POOL, names::RUN_AGENT, names::RUN_NVIDIA, names::RUN_DCGM, names::NO_NEW_SHARES];

/// The operator's labels on a node.
pub type Labels = BTreeMap<&'static str, String>;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeView {
    pub name: String,
    /// Its UID: GPUShadows belong to it.
    pub uid: String,
    pub labels: BTreeMap<String, String>,
    /// Those of [`LABELS`] that the operator has written, and may remove.
    pub own_labels: BTreeSet<String>,
    pub taints: Vec<Taint>,
    /// The operator has cordoned it.
    pub own_cordon: bool,
    /// Its labels may not be complete: other components label a new node after a while.
    pub is_new: bool,
    /// A plugin has registered whole cards with its kubelet, now or minutes ago.
    pub has_whole_cards: bool,
    /// A plugin has registered shares with its kubelet, now or minutes ago.
    pub has_shares: bool,
}

impl NodeView {
    /// The operator's labels as they are.
    #[must_use]
    pub fn current(&self) -> Labels {
        LABELS.into_iter().filter_map(|key| Some((key, self.labels.get(key)?.clone()))).collect()
    }

    #[must_use]
    pub fn is(&self, key: &str, value: &str) -> bool {
        self.labels.get(key).is_some_and(|found| found == value)
    }

    /// Whether the node agent runs there or is about to.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        self.labels.contains_key(names::RUN_AGENT)
            || self.is(names::PLUGIN, "Bridged")
            || self.is(names::PLUGIN, "Shared")
    }
}

/// Counts of a node's pods. Only listed where a step depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodePods {
    /// Requesting whole cards, not finished.
    pub legacy: u32,
    /// Requesting shares, not finished.
    pub shared: u32,
    /// Node agents, the operator's or external.
    pub agents: u32,
    /// The operator's copies of NVIDIA's plugin that register with the kubelet.
    pub direct_plugins: u32,
    /// Using cards without a request: by the host's device files or by the variable of NVIDIA's runtime.
    pub unrequested: u32,
}

/// The desired state of a node and where it is specified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Desired {
    /// Pool, plugin mode and the other settings.
    pub settings: NodeSettings,
    /// Specified by a label `gpu-migrate.io/plugin` set by a user: the operator runs the node agent and nothing else.
    pub by_label: bool,
}

/// A condition that the operator writes into a GPUShadow or the GPUConfig.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorCondition {
    pub kind: &'static str,
    pub status: bool,
    pub reason: &'static str,
    pub message: String,
}

impl OperatorCondition {
    #[must_use]
    pub fn new(kind: &'static str, status: bool, reason: &'static str, message: impl Into<String>) -> Self {
        Self { kind, status, reason, message: message.into() }
    }
}
