//! What containers use of the cards, beside what they requested. A node agent reports it on [`PATH`] and as metrics; `gpu-migrate top` shows it.

use serde::{Deserialize, Serialize};

/// The page of a node agent that has a [`NodeUse`], as JSON, on its port of probes and metrics.
pub const PATH: &str = "/use";

/// What the cards of a node and the containers on them use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeUse {
    /// In the order of their indexes.
    pub cards: Vec<CardUse>,
}

/// One card. What NVML does not report, or has not reported for a while, is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CardUse {
    /// In the GPUShadow and in annotations.
    pub index: u32,
    /// `GPU-…`.
    pub uuid: String,
    /// For example `NVIDIA A100-SXM4-40GB`.
    pub model: String,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Part of the time in which a kernel ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u32>,
    /// By whomever; without what the driver reserves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// What the whole board draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_milliwatts: Option<u32>,
    /// Of the GPU's die.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_celsius: Option<u32>,
    /// Those that hold it or have a process on it.
    pub containers: Vec<ContainerUse>,
}

/// One container on one card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerUse {
    /// Of the pod; empty for processes outside of pods.
    pub namespace: String,
    /// Likewise.
    pub pod: String,
    /// Empty where only the pod is known.
    pub container: String,
    /// How it got the card.
    pub kind: UseKind,
    /// Processes on the card; absent where processes are not seen, like all that is summed over them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
    /// Part of the card's multiprocessors that they kept busy, at most 100; absent where the card does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u32>,
    /// Of the card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// Cores on this card, 100 for a whole one; absent for a part that NVIDIA's plugin made, and for what holds nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores_requested: Option<u32>,
    /// Likewise; a whole card is all of its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_requested_bytes: Option<u64>,
}

/// How a container got a card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum UseKind {
    /// Through `nvidia.com/gpu`.
    Legacy,
    /// Through vcuda resources.
    Shared,
    /// The ledger does not have it: another way than the kubelet's, or not in a pod.
    #[default]
    None,
}

impl UseKind {
    /// As a label of metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Shared => "shared",
            Self::None => "none",
        }
    }
}
