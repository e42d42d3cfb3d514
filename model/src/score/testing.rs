//! Rooms and shapes for tests.

use super::capacity::{CardFreeCapacity, CardRequest, FreeCapacity, ModelSet, Shape};
use super::host::HostResources;
use crate::units::{Blocks, Cores};

/// A node with so many cores left on each card, and CPU and memory to spare.
pub(super) fn capacity(cores: &[u16]) -> FreeCapacity {
    let card = |cores: &u16| CardFreeCapacity {
        cores: *cores,
        blocks: u32::from(*cores),
        of_blocks: 100,
        free: *cores == 100,
        models: ModelSet::ANY,
    };
    FreeCapacity { cards: cores.iter().map(card).collect(), host: HostResources::UNLIMITED }
}

pub(super) fn share(cores: u32) -> Shape {
    Shape::cards(CardRequest::Share { cores: Cores(cores), blocks: Blocks(cores) })
}

pub(super) fn cards(count: u32) -> Shape {
    Shape::cards(CardRequest::Cards { count, blocks_each: Blocks::ZERO })
}
