//! A card, and what is known of it from its node.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::{Blocks, CardIndex, Cores};

/// Whether a card can be trusted with work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Health {
    /// It works.
    #[default]
    Healthy,
    /// It is lost, off the bus, or reported an error that applications cannot cause.
    Unhealthy,
}

/// What may be put on a card next. Printed by `kubectl get gpushadows`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum CardState {
    /// No container holds it: either kind may come.
    #[default]
    Free,
    /// Legacy containers hold it.
    Legacy,
    /// Shared containers hold it, or parts of it.
    Shared,
    /// It takes nothing new until it is healthy.
    Unhealthy,
    /// An owner took it out of new allocation.
    Cordoned,
    /// Two kinds of containers were *found* on it (never put there by us): it takes nothing new.
    Disputed,
}

/// One physical GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Card {
    /// NVIDIA's identifier, `GPU-…`.
    pub uuid: String,
    /// Number of the device node `/dev/nvidia<minor>`.
    pub minor: u32,
    /// NVML's number of the card, by which container runtimes count (`NVIDIA_VISIBLE_DEVICES=0`). Another order than that of the minor
    /// numbers on some machines, and known on the node alone.
    #[serde(skip)]
    pub nvml_index: u32,
    /// Product name, for example `NVIDIA A100-SXM4-80GB`.
    #[serde(default)]
    pub model: String,
    /// Memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// PCI address, `00000000:65:00.0`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub bus_id: String,
    /// NUMA node, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// MIG is on: the card is carved up by NVIDIA's means and is not for sharing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mig: bool,
}

impl Card {
    /// The whole blocks of memory on it.
    #[must_use]
    pub fn blocks(&self) -> Blocks {
        Blocks::in_mib(self.memory_mib)
    }
}

/// Whether two product names mean the same model. NVML says `NVIDIA A100-SXM4-80GB`; the node label that feature discovery
/// makes of it, and so what people write, has dashes.
#[must_use]
pub fn same_model(one: &str, other: &str) -> bool {
    fn plain(name: &str) -> impl Iterator<Item = u8> + '_ {
        name.bytes().map(|byte| if byte == b' ' { b'-' } else { byte.to_ascii_lowercase() })
    }
    plain(one).eq(plain(other))
}

/// A card as placement sees it: what it is, and what is left on it. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardView {
    /// Its place on the node.
    pub index: CardIndex,
    /// What it is.
    pub card: Arc<Card>,
    /// Memory of the empty card.
    pub blocks: Blocks,
    /// What a shared container can still get; nothing on a card that legacy containers hold.
    pub cores_left: Cores,
    /// What a shared container can still get; nothing on a card that legacy containers hold.
    pub blocks_left: Blocks,
    /// How many containers hold it.
    pub holders: u32,
    /// Which kind holds it, or why it takes nothing.
    pub state: CardState,
}

impl CardView {
    /// No container holds it: it may be allocated whole, to either kind.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.state == CardState::Free
    }

    /// A shared container may come.
    #[must_use]
    pub fn takes_shares(&self) -> bool {
        matches!(self.state, CardState::Free | CardState::Shared)
    }

    /// A share of this size fits.
    #[must_use]
    pub fn fits(&self, cores: Cores, blocks: Blocks) -> bool {
        self.takes_shares() && self.cores_left >= cores && self.blocks_left >= blocks
    }
}
