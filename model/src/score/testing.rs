//! Rooms and shapes for tests.

use super::room::{CardRoom, Host, ModelSet, Room, Shape, Want};
use crate::units::{Blocks, Cores};

/// A node with so many cores left on each card, and CPU and memory to spare.
pub(super) fn room(cores: &[u16]) -> Room {
    let card = |cores: &u16| CardRoom {
        cores: *cores,
        blocks: u32::from(*cores),
        of_blocks: 100,
        free: *cores == 100,
        models: ModelSet::ANY,
    };
    Room { cards: cores.iter().map(card).collect(), host: Host::AMPLE }
}

pub(super) fn share(cores: u32) -> Shape {
    Shape::cards(Want::Share { cores: Cores(cores), blocks: Blocks(cores) })
}

pub(super) fn cards(count: u32) -> Shape {
    Shape::cards(Want::Cards { count, blocks_each: Blocks::ZERO })
}
