//! Nodes by what is left on them: whether a pod fits anywhere is asked of those alone that could have room for it.

use std::collections::BTreeSet;

use gpu_migrate_model::ask::Demand;
use gpu_migrate_model::capacity::{NodeCapacity, RequestSummary};

use super::NodeId;

/// What is left on a node, each by itself: a pod that needs more of any does not fit, one that needs less may not fit either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Room {
    /// Of one card, for shares.
    cores: u32,
    /// Of one card, for shares.
    blocks: u32,
    /// On all cards together, for shares.
    all_cores: u32,
    /// Cards that are free, for shares.
    free: u32,
    /// Cards that legacy pods can get.
    legacy: u32,
}

impl Room {
    fn of(capacity: &NodeCapacity) -> Self {
        let open = || capacity.cards.iter().filter(|card| card.open);
        Self {
            cores: open().map(|card| u32::from(card.cores)).max().unwrap_or(0),
            blocks: open().map(|card| card.blocks).max().unwrap_or(0),
            all_cores: capacity.cores_left(),
            free: u32::try_from(open().filter(|card| card.free).count()).unwrap_or(u32::MAX),
            legacy: capacity.free(),
        }
    }
}

type Order = BTreeSet<(u32, NodeId)>;
type Of = fn(&Room) -> u32;

#[derive(Debug, Default)]
pub(super) struct Headroom {
    rooms: Vec<Option<Room>>,
    cores: Order,
    blocks: Order,
    all_cores: Order,
    free: Order,
    legacy: Order,
}

impl Headroom {
    /// What is left on a node now; `None` for one that is gone.
    pub(super) fn set(&mut self, id: NodeId, capacity: Option<&NodeCapacity>) {
        if self.rooms.len() <= id {
            self.rooms.resize(id + 1, None);
        }
        let now = capacity.map(Room::of);
        let before = std::mem::replace(&mut self.rooms[id], now);
        let orders: [(&mut Order, Of); 5] = [
            (&mut self.cores, |room| room.cores),
            (&mut self.blocks, |room| room.blocks),
            (&mut self.all_cores, |room| room.all_cores),
            (&mut self.free, |room| room.free),
            (&mut self.legacy, |room| room.legacy),
        ];
        for (order, of) in orders {
            let (before, now) = (before.as_ref().map(of), now.as_ref().map(of));
            if before != now {
                before.map(|value| order.remove(&(value, id)));
                now.map(|value| order.insert((value, id)));
            }
        }
    }

    /// The nodes that may have room, those with least left first.
    pub(super) fn for_request(
        &self,
        summary: RequestSummary,
        demand: Demand,
    ) -> impl Iterator<Item = NodeId> + '_ {
        let (order, least) = match summary {
            RequestSummary::Share(cores, blocks) => {
                let (by_cores, by_blocks) = ((&self.cores, cores.0), (&self.blocks, blocks.0));
                if is_shorter(by_blocks, by_cores) { by_blocks } else { by_cores }
            }
            RequestSummary::Legacy(cards) => (&self.legacy, cards),
            RequestSummary::Whole(cards, _) => (&self.free, cards),
            RequestSummary::Complex if demand.legacy > 0 => (&self.legacy, demand.legacy),
            RequestSummary::Complex => (&self.all_cores, demand.cores.0),
            RequestSummary::Nothing => (&self.all_cores, 0),
        };
        order.range((least, 0)..).map(|(_, id)| *id)
    }
}

/// Whether fewer nodes have so much of the one than of the other; looks at no more nodes than twice the fewer.
fn is_shorter((one, from): (&Order, u32), (other, other_from): (&Order, u32)) -> bool {
    let mut others = other.range((other_from, 0)..);
    one.range((from, 0)..).all(|_| others.next().is_some())
}
