//! The cards that are really in the node, and those that NVIDIA's plugin has found.

use gpu_migrate_model::card::{Card, Health};
use gpu_migrate_model::topology::{LinkLevel, Topology};

use super::super::agent::uuid;
use super::{BLOCKS, CARDS};
use crate::inventory::Inventory;

/// With the one that comes later.
pub(in super::super) const ALL_CARDS: usize = CARDS + 1;

/// What happens to the cards. That a card is lost is seen at once; a card that comes is seen by processes that start then; and minor numbers
/// and sizes change while no agent runs.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Change {
    /// A card falls off the bus.
    Vanish(usize),
    /// It is back, or comes for the first time.
    Return(usize),
    /// Another firmware, or ECC: it has so many blocks now.
    Resize(usize, u32),
    /// The minor numbers are others.
    Renumber(usize),
}

#[derive(Debug)]
struct Physical {
    present: bool,
    healthy: bool,
    blocks: u32,
    /// From the next start of the agent on.
    blocks_then: u32,
}

#[derive(Debug)]
pub(in super::super) struct Hardware {
    /// By number: card 2 is GPU-2 for ever.
    cards: Vec<Physical>,
    /// Those numbers in the order of the minor numbers.
    order: Vec<usize>,
    /// From the next start of the agent on.
    order_then: Vec<usize>,
    /// What NVIDIA's plugin found when it started; it lists no others.
    plugin: Vec<usize>,
    plugin_is_away: bool,
}

impl Hardware {
    pub(super) fn new() -> Self {
        let card = |n| Physical { present: n < CARDS, healthy: true, blocks: BLOCKS, blocks_then: BLOCKS };
        let mut hardware = Self {
            cards: (0..ALL_CARDS).map(card).collect(),
            order: (0..ALL_CARDS).collect(),
            order_then: (0..ALL_CARDS).collect(),
            plugin: Vec::new(),
            plugin_is_away: true,
        };
        hardware.plugin_starts();
        hardware
    }

    pub(super) fn change(&mut self, change: Change) {
        match change {
            Change::Vanish(card) => self.cards[card].present = false,
            Change::Return(card) => {
                (self.cards[card].present, self.cards[card].healthy) = (true, true);
            }
            Change::Resize(card, blocks) => self.cards[card].blocks_then = blocks,
            Change::Renumber(turn) => {
                self.order_then.rotate_left(turn % ALL_CARDS);
                self.order_then.swap(0, 1);
            }
        }
    }

    /// All cards are there and healthy.
    pub(super) fn repair(&mut self) {
        for card in &mut self.cards {
            (card.present, card.healthy) = (true, true);
        }
    }

    pub(super) fn agent_starts(&mut self) {
        self.cards.iter_mut().for_each(|card| card.blocks = card.blocks_then);
        self.order.clone_from(&self.order_then);
    }

    pub(super) fn set_healthy(&mut self, card: usize, healthy: bool) {
        self.cards[card].healthy = healthy;
    }

    pub(in super::super) fn is_healthy(&self, card: usize) -> bool {
        self.cards[card].present && self.cards[card].healthy
    }

    pub(super) fn blocks(&self, card: usize) -> u32 {
        self.cards[card].blocks
    }

    pub(super) fn present(&self) -> impl Iterator<Item = usize> {
        self.order.iter().copied().filter(|card| self.cards[*card].present)
    }

    pub(super) fn minor(&self, card: usize) -> usize {
        self.order.iter().position(|n| *n == card).unwrap_or(ALL_CARDS)
    }

    /// What a process finds that starts now.
    pub(in super::super) fn inventory(&self) -> Inventory {
        let card = |n: usize| Card {
            uuid: uuid(n),
            minor: self.minor(n) as u32,
            memory_mib: u64::from(self.cards[n].blocks) * 256,
            ..Card::default()
        };
        let health = |n| if self.is_healthy(n) { Health::Healthy } else { Health::Unhealthy };
        Inventory {
            cards: self.present().map(card).collect(),
            topology: Topology::uniform(self.present().count(), LinkLevel::Pix),
            mig_devices: Default::default(),
            driver_version: String::new(),
            cuda_version: String::new(),
            health: self.present().map(health).collect(),
        }
    }

    /// The list of NVIDIA's plugin.
    pub(in super::super) fn plugin_list(&self) -> Vec<(usize, bool)> {
        self.plugin.iter().map(|card| (*card, self.is_healthy(*card))).collect()
    }

    pub(in super::super) const fn plugin_goes(&mut self) {
        self.plugin_is_away = true;
    }

    /// A new process of it, if there is none.
    pub(in super::super) fn plugin_starts(&mut self) {
        if std::mem::take(&mut self.plugin_is_away) {
            self.plugin = self.present().collect();
        }
    }
}
