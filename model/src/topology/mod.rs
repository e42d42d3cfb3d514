//! How the cards of a node are linked, and the tree that follows from it.
//!
//! gpu-manager builds the same tree (`pkg/device/nvidia/tree.go`) with 32-bit masks; ours takes any number of cards and
//! knows NVLink, NODE and SYS too.

mod mask;
mod matrix;
mod tree;

pub use mask::CardMask;
pub use matrix::{MatrixError, Topology};
pub use tree::{Node, Tree};

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The best path between two cards, nearest first. Names are those of `nvidia-smi topo -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum LinkLevel {
    /// A bonded set of NVLinks (`NV#`).
    #[serde(rename = "NV")]
    NvLink,
    /// At most one PCIe bridge.
    Pix,
    /// Several PCIe bridges, without the host bridge.
    Pxb,
    /// A PCIe host bridge.
    Phb,
    /// Host bridges of one NUMA node.
    Node,
    /// The link between NUMA nodes (older tools say `SOC`).
    Sys,
}

impl LinkLevel {
    /// All levels, nearest first.
    pub const ALL: [Self; 6] = [Self::NvLink, Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys];

    /// Reads one cell of `nvidia-smi topo -m`.
    #[must_use]
    pub fn parse(cell: &str) -> Option<Self> {
        Some(match cell {
            "PIX" | "PSB" => Self::Pix,
            "PXB" => Self::Pxb,
            "PHB" => Self::Phb,
            "NODE" => Self::Node,
            "SYS" | "SOC" => Self::Sys,
            _ => {
                let bonded = cell.strip_prefix("NV")?;
                if bonded.is_empty() || !bonded.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                Self::NvLink
            }
        })
    }
}

impl fmt::Display for LinkLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NvLink => "NV",
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        })
    }
}
