//! From one mode to another with pods running: a card changes sides when its last holder leaves, and nobody is evicted.
//!
//! Between Bridged and Shared nothing moves but NVIDIA's plugin: the ledger goes on. Towards the bridge, a plugin that
//! registers with the kubelet itself must be gone before the agent hands out a share; away from it, the last share and then
//! the agent must be gone before such a plugin comes. Otherwise one card could be given to both kinds.

use super::{Labels, NodePods, NodeView};
use gpu_migrate_model::names;

/// Value of [`names::RUN_NVIDIA`] where our copy of NVIDIA's plugin pauses. That it was ours must be remembered: the kubelet
/// goes on counting whole cards for minutes, which would look as if somebody else had registered them.
pub const OFF: &str = "Off";

/// Takes our copy of NVIDIA's plugin off, where there is one.
pub(super) fn take_off(labels: &mut Labels) {
    if let Some(mode) = labels.get_mut(names::RUN_NVIDIA) {
        OFF.clone_into(mode);
    }
}

/// What the labels become now, and what is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The node's pods must be counted first; nothing changes until then.
    Count,
    /// These labels, which are final.
    Settled(Labels),
    /// These labels, on the way.
    Waiting(Labels, String),
}

/// Whether these labels are those of a node with an agent.
pub(super) fn brings_agent(labels: &Labels) -> bool {
    let mode = labels.get(names::PLUGIN).map(String::as_str);
    labels.contains_key(names::RUN_AGENT) || matches!(mode, Some("Bridged" | "Shared"))
}

/// Who the agent says stands in the way of its going.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Holders of shares.
    pub shares: u32,
    /// Legacy holders on another card than the kubelet's book says.
    pub deviating: u32,
}

/// The next stage of a node on its way to `target`.
#[must_use]
pub fn stage(node: &NodeView, target: &Labels, held: Held, pods: Option<&NodePods>) -> Stage {
    let to_agent = brings_agent(target);
    match (node.has_agent(), to_agent) {
        (_, true) => towards(node, target, pods),
        (true, false) => away(node, target, held, pods),
        (false, false) => direct(node, target, pods),
    }
}

fn towards(node: &NodeView, target: &Labels, pods: Option<&NodePods>) -> Stage {
    let direct = node.is(names::RUN_NVIDIA, "Legacy");
    if node.labels.contains_key(names::RUN_AGENT) || !(direct || node.is(names::RUN_NVIDIA, OFF)) {
        return Stage::Settled(target.clone());
    }
    let Some(pods) = pods else { return Stage::Count };
    if direct || pods.direct_plugins > 0 {
        let mut labels = node.current();
        labels.insert(names::RUN_NVIDIA, OFF.into());
        return Stage::Waiting(labels, "NVIDIA's plugin leaves the kubelet before the agent comes".into());
    }
    Stage::Settled(target.clone())
}

fn away(node: &NodeView, target: &Labels, held: Held, pods: Option<&NodePods>) -> Stage {
    let Some(pods) = pods else { return Stage::Count };
    let closed = node.is(names::NO_NEW_SHARES, "true");
    let shares = held.shares.max(pods.shared);
    let mut labels = node.current();
    labels.insert(names::NO_NEW_SHARES, "true".into());
    if shares > 0 {
        return Stage::Waiting(
            labels,
            format!("{shares} shares are still held; no new one comes, nothing is evicted"),
        );
    }
    if held.deviating > 0 {
        // Nobody but the agent knows which cards they have: the kubelet would give those out a second time.
        return Stage::Waiting(
            labels,
            format!(
                "{} legacy containers have another card than the kubelet's book says; the agent stays until they end",
                held.deviating
            ),
        );
    }
    if !closed {
        return Stage::Waiting(labels, "closed to new shares".into());
    }
    if node.labels.contains_key(names::RUN_AGENT) {
        labels.remove(names::RUN_AGENT);
        take_off(&mut labels);
        return Stage::Waiting(
            labels,
            "the agent leaves before NVIDIA's plugin registers with the kubelet".into(),
        );
    }
    direct(node, target, Some(pods))
}

/// NVIDIA's plugin registers with the kubelet, and the node opens again, only where no agent is left.
fn direct(node: &NodeView, target: &Labels, pods: Option<&NodePods>) -> Stage {
    let new = target.get(names::RUN_NVIDIA).is_some_and(|mode| !node.is(names::RUN_NVIDIA, mode));
    if !new && !node.is(names::NO_NEW_SHARES, "true") {
        return Stage::Settled(target.clone());
    }
    let Some(pods) = pods else { return Stage::Count };
    if pods.agents > 0 {
        let mut labels = target.clone();
        take_off(&mut labels);
        labels.insert(names::NO_NEW_SHARES, "true".into());
        return Stage::Waiting(labels, "the node agent is on its way out".into());
    }
    Stage::Settled(target.clone())
}
