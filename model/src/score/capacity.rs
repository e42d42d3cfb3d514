//! What scores look at: the capacity left on a node, the shape of a request, and what is left after one was put there.
//!
//! These are views, a few bytes per card. Whether a pod may be placed is [`crate::place`]'s to say; scores only compare
//! places, and so never choose a card that the shape does not fit on.

use super::host::HostResources;
use crate::ask::{Demand, PodAsk, PodKind};
use crate::card::CardView;
use crate::units::{Blocks, CardIndex, Cores};

/// A set of card models, by numbers that the caller gives out. 64 and above share the last number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelSet(u64);

impl ModelSet {
    /// Every model; also that of a card whose model is not asked about.
    pub const ANY: Self = Self(u64::MAX);
    /// No model.
    pub const NONE: Self = Self(0);

    /// The set of one model.
    #[must_use]
    pub const fn only(number: u32) -> Self {
        Self(1 << if number > 63 { 63 } else { number })
    }

    /// Both sets together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether they have a model in common.
    #[must_use]
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// What is left on one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CardFreeCapacity {
    /// Cores left for shares; 0 on a card that takes nothing.
    pub cores: u16,
    /// Blocks left for shares.
    pub blocks: u32,
    /// Blocks of the empty card.
    pub of_blocks: u32,
    /// No container holds it: it may be allocated whole.
    pub free: bool,
    /// Its model, a set of one.
    pub models: ModelSet,
}

impl CardFreeCapacity {
    /// As placement sees a card. Its model is not looked at.
    #[must_use]
    pub fn of(card: &CardView) -> Self {
        let open = card.takes_shares();
        Self {
            cores: if open { u16::try_from(card.cores_left.0).unwrap_or(u16::MAX) } else { 0 },
            blocks: if open { card.blocks_left.0 } else { 0 },
            of_blocks: card.blocks.0,
            free: card.is_free(),
            models: ModelSet::ANY,
        }
    }

    /// Whether this card would serve a request, as its only card or as one of several.
    #[must_use]
    pub const fn serves(&self, request: CardRequest, models: ModelSet) -> bool {
        match request {
            CardRequest::Nothing => false,
            CardRequest::Share { cores, blocks } => {
                self.cores as u32 >= cores.0
                    && self.cores > 0
                    && self.blocks >= blocks.0
                    && self.models.meets(models)
            }
            CardRequest::Cards { blocks_each, .. } => {
                self.free && self.of_blocks >= blocks_each.0 && self.models.meets(models)
            }
        }
    }

    /// Takes a share off it.
    pub(super) fn take(&mut self, cores: Cores, blocks: Blocks) {
        self.cores = self.cores.saturating_sub(u16::try_from(cores.0).unwrap_or(u16::MAX));
        self.blocks = self.blocks.saturating_sub(blocks.0);
        self.free = false;
    }

    /// Takes all of it.
    pub(super) fn take_whole(&mut self) {
        self.cores = 0;
        self.blocks = 0;
        self.free = false;
    }
}

/// What is left on one node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FreeCapacity {
    /// In the order of [`CardIndex`].
    pub cards: Vec<CardFreeCapacity>,
    /// CPU and memory, or [`HostResources::UNLIMITED`].
    pub host: HostResources,
}

impl FreeCapacity {
    /// As placement sees a node's cards. `unattributed` free cards are left out, the last ones: legacy pods were bound here
    /// whose cards are not known yet.
    #[must_use]
    pub fn of(cards: &[CardView], unattributed: u32, host: HostResources) -> Self {
        let mut cards: Vec<CardFreeCapacity> = cards.iter().map(CardFreeCapacity::of).collect();
        for card in cards.iter_mut().rev().filter(|card| card.free).take(unattributed as usize) {
            card.cores = 0;
            card.blocks = 0;
            card.free = false;
        }
        Self { cards, host }
    }

    /// Whether the shape fits.
    #[must_use]
    pub fn fits(&self, shape: &Shape) -> bool {
        self.host.has(shape.host) && self.has_cards_for(shape)
    }

    /// Whether the shape fits on the cards.
    #[must_use]
    pub fn has_cards_for(&self, shape: &Shape) -> bool {
        let mut serving = self.cards.iter().filter(|card| card.serves(shape.request, shape.models));
        match shape.request {
            CardRequest::Nothing => true,
            CardRequest::Share { .. } => serving.next().is_some(),
            CardRequest::Cards { count, .. } => serving.count() >= count as usize,
        }
    }

    /// Cores left on all cards together.
    #[must_use]
    pub fn cores(&self) -> u32 {
        self.cards.iter().map(|card| u32::from(card.cores)).sum()
    }

    /// The cards that a share could go to, each kind of card once: two cards with the same capacity are the same choice.
    pub fn choices(&self, shape: &Shape) -> impl Iterator<Item = CardIndex> {
        self.cards.iter().enumerate().filter_map(move |(at, card)| {
            let first = !self.cards[..at].contains(card);
            (first && card.serves(shape.request, shape.models)).then(|| CardIndex::from(at))
        })
    }

    /// The fullest card that a share fits on, as [`crate::evaluate::share`] would take.
    #[must_use]
    pub fn fullest(&self, shape: &Shape) -> Option<CardIndex> {
        let serving =
            self.cards.iter().enumerate().filter(|(_, card)| card.serves(shape.request, shape.models));
        serving.min_by_key(|(at, card)| (card.cores, card.blocks, *at)).map(|(at, _)| CardIndex::from(at))
    }

    /// Takes a shape: a share off `card`, whole cards off the first free ones that will do, and CPU and memory with
    /// them.
    pub fn take(&mut self, shape: &Shape, card: Option<CardIndex>) {
        self.host = self.host.less(shape.host);
        match shape.request {
            CardRequest::Nothing => {}
            CardRequest::Share { cores, blocks } => {
                if let Some(card) = card.and_then(|card| self.cards.get_mut(card.position())) {
                    card.take(cores, blocks);
                }
            }
            CardRequest::Cards { count, .. } => {
                let serving = self.cards.iter_mut().filter(|card| card.serves(shape.request, shape.models));
                serving.take(count as usize).for_each(CardFreeCapacity::take_whole);
            }
        }
    }
}

/// What a request asks of a node's cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CardRequest {
    /// No card.
    Nothing,
    /// A share of one card.
    Share {
        /// Compute, below 100.
        cores: Cores,
        /// Memory.
        blocks: Blocks,
    },
    /// Whole cards, of either kind.
    Cards {
        /// How many.
        count: u32,
        /// Memory that each must have.
        blocks_each: Blocks,
    },
}

impl CardRequest {
    /// What one container asks for.
    #[must_use]
    pub fn of(demand: Demand) -> Self {
        match (demand.legacy, demand.cores.whole_cards()) {
            (0, None) if !demand.is_shared() => Self::Nothing,
            (0, None) => Self::Share { cores: demand.cores, blocks: demand.blocks },
            (0, Some(count)) => {
                Self::Cards { count, blocks_each: Blocks(demand.blocks.0.div_ceil(count.max(1))) }
            }
            (count, _) => Self::Cards { count, blocks_each: Blocks::ZERO },
        }
    }

    /// Cores asked for on all cards together.
    #[must_use]
    pub const fn cores(self) -> u32 {
        match self {
            Self::Nothing => 0,
            Self::Share { cores, .. } => cores.0,
            Self::Cards { count, .. } => count.saturating_mul(Cores::CARD.0),
        }
    }
}

/// What a request asks for. Requests of one shape are scored alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    /// Of the cards.
    pub request: CardRequest,
    /// Of the node beside them.
    pub host: HostResources,
    /// Models that will do.
    pub models: ModelSet,
}

impl Shape {
    /// A request for cards alone.
    #[must_use]
    pub const fn cards(request: CardRequest) -> Self {
        Self { request, host: HostResources::NONE, models: ModelSet::ANY }
    }

    /// The shape of a pod with at most one container that asks for cards; `None` for other pods: those are scored by the
    /// rooms before and after, [`super::Scorer::score`].
    #[must_use]
    pub fn of(ask: &PodAsk) -> Option<Self> {
        match ask.kind() {
            PodKind::Mixed => return None,
            PodKind::Legacy => return Some(Self::cards(CardRequest::of(ask.effective()))),
            PodKind::Plain | PodKind::Shared => {}
        }
        let mut asking = ask.asking();
        let first = asking.next().map_or(Demand::NONE, |container| container.demand);
        asking.next().is_none().then(|| Self::cards(CardRequest::of(first)))
    }
}
