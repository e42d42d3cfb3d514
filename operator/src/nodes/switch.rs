//! Steps between plugin modes while pods run. No pod is evicted.
//!
//! Between Bridged and Shared only NVIDIA's plugin changes; the ledger continues. Towards the node agent, a plugin that registers
//! with the kubelet directly must be gone before the agent allocates a share. Away from it, the last share and then the agent must
//! be gone before such a plugin starts. Otherwise one card could be allocated to both kinds.

use super::{Labels, NodePods, NodeView};
use gpu_migrate_model::names;

/// Value of [`names::RUN_NVIDIA`] while the operator's copy of NVIDIA's plugin is paused. The label must stay: the kubelet keeps
/// reporting whole cards for minutes, which would look like an external plugin.
pub const OFF: &str = "Off";

/// Pauses the operator's copy of NVIDIA's plugin, if any.
pub(super) fn pause_nvidia_plugin(labels: &mut Labels) {
    if let Some(mode) = labels.get_mut(names::RUN_NVIDIA) {
        OFF.clone_into(mode);
    }
}

/// The next labels of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The node's pods must be counted first.
    NeedsPodCount,
    Converged(Labels),
    /// Intermediate labels, and what is waited for.
    Waiting(Labels, String),
}

/// Whether a node with these labels has a node agent.
pub(super) fn brings_agent(labels: &Labels) -> bool {
    let mode = labels.get(names::PLUGIN).map(String::as_str);
    labels.contains_key(names::RUN_AGENT) || matches!(mode, Some("Bridged" | "Shared"))
}

/// Reported holders that block the removal of the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemainingHolders {
    pub shares: u32,
    /// Legacy holders on another card than the kubelet checkpoint records.
    pub deviating: u32,
}

/// The next stage of a node on its way to `target`.
#[must_use]
pub fn stage(
    node: &NodeView,
    target: &Labels,
    remaining: RemainingHolders,
    pods: Option<&NodePods>,
) -> Stage {
    let to_agent = brings_agent(target);
    match (node.has_agent(), to_agent) {
        (_, true) => add_agent(node, target, pods),
        (true, false) => remove_agent(node, target, remaining, pods),
        (false, false) => without_agent(node, target, pods),
    }
}

fn add_agent(node: &NodeView, target: &Labels, pods: Option<&NodePods>) -> Stage {
    let direct = node.is(names::RUN_NVIDIA, "Legacy");
    if node.labels.contains_key(names::RUN_AGENT) || !(direct || node.is(names::RUN_NVIDIA, OFF)) {
        return Stage::Converged(target.clone());
    }
    let Some(pods) = pods else { return Stage::NeedsPodCount };
    if direct || pods.direct_plugins > 0 {
        let mut labels = node.current();
        labels.insert(names::RUN_NVIDIA, OFF.into());
        return Stage::Waiting(
            labels,
            "waiting for NVIDIA's plugin to stop before the node agent starts".into(),
        );
    }
    Stage::Converged(target.clone())
}

fn remove_agent(
    node: &NodeView,
    target: &Labels,
    remaining: RemainingHolders,
    pods: Option<&NodePods>,
) -> Stage {
    let Some(pods) = pods else { return Stage::NeedsPodCount };
    let closed = node.is(names::NO_NEW_SHARES, "true");
    let shares = remaining.shares.max(pods.shared);
    let mut labels = node.current();
    labels.insert(names::NO_NEW_SHARES, "true".into());
    if shares > 0 {
        return Stage::Waiting(
            labels,
            format!("{shares} shares are still held; no new share is placed, no pod is evicted"),
        );
    }
    if remaining.deviating > 0 {
        // Only the agent knows which cards they hold: the kubelet would allocate those a second time.
        return Stage::Waiting(
            labels,
            format!(
                "{} legacy containers hold another card than the kubelet checkpoint records; the node agent stays until they end",
                remaining.deviating
            ),
        );
    }
    if !closed {
        return Stage::Waiting(labels, "no new share is placed; removing the node agent next".into());
    }
    if node.labels.contains_key(names::RUN_AGENT) {
        labels.remove(names::RUN_AGENT);
        pause_nvidia_plugin(&mut labels);
        return Stage::Waiting(
            labels,
            "waiting for the node agent to stop before NVIDIA's plugin registers with the kubelet".into(),
        );
    }
    without_agent(node, target, Some(pods))
}

/// NVIDIA's plugin registers with the kubelet, and new shares are allowed again, only where no agent is left.
fn without_agent(node: &NodeView, target: &Labels, pods: Option<&NodePods>) -> Stage {
    let new = target.get(names::RUN_NVIDIA).is_some_and(|mode| !node.is(names::RUN_NVIDIA, mode));
    if !new && !node.is(names::NO_NEW_SHARES, "true") {
        return Stage::Converged(target.clone());
    }
    let Some(pods) = pods else { return Stage::NeedsPodCount };
    if pods.agents > 0 {
        let mut labels = target.clone();
        pause_nvidia_plugin(&mut labels);
        labels.insert(names::NO_NEW_SHARES, "true".into());
        return Stage::Waiting(labels, "waiting for the node agent to stop".into());
    }
    Stage::Converged(target.clone())
}
