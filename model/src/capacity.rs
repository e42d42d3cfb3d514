//! Whether a pod fits on a node: the one question that filter asks of every node of a cluster, and simulate of every node of a trace.
//!
//! [`NodeCapacity::fast_fit`] answers it for most nodes from a few bytes per card, without an allocation. It must answer exactly as
//! [`crate::place::place`] would, refusals included, or not at all; property tests hold it to that.

use smallvec::SmallVec;

use crate::ask::{Demand, PodAsk, PodKind};
use crate::card::{CardState, CardView};
use crate::place::{Constraints, Placement, Refusal};
use crate::units::{Blocks, Cores};

/// What is left on one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardCapacity {
    /// Cores left for shares; 0 on a card that takes none.
    pub cores: u16,
    /// No container holds it.
    pub free: bool,
    /// It takes shares.
    pub open: bool,
    /// Blocks left.
    pub blocks: u32,
    /// Blocks of the empty card.
    pub of_blocks: u32,
}

/// What is left on a node's cards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeCapacity {
    /// In the order of [`crate::units::CardIndex`].
    pub cards: SmallVec<[CardCapacity; 8]>,
    /// Cards that legacy pods can get, or parts of cards.
    free: u32,
    /// Legacy pods ask for parts of cards here.
    divided: bool,
    /// Cards that shared pods can get whole or begin.
    free_for_shares: u32,
    legacy_only: bool,
}

/// What [`NodeCapacity::fast_fit`] needs of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestSummary {
    /// Asks for no card.
    Nothing,
    /// One container that asks for a share of one card.
    Share(Cores, Blocks),
    /// One container that asks for so many whole cards, and so many blocks on all of them together.
    Whole(u32, Blocks),
    /// So many legacy cards.
    Legacy(u32),
    /// Several containers, or constraints: only placement decides.
    Complex,
}

impl RequestSummary {
    /// The summary of what a pod asks for.
    #[must_use]
    pub fn of(ask: &PodAsk, constraints: &Constraints) -> Self {
        match ask.kind() {
            PodKind::Plain => return Self::Nothing,
            PodKind::Legacy => return Self::Legacy(ask.effective().legacy),
            PodKind::Mixed => return Self::Complex,
            PodKind::Shared => {}
        }
        let mut asking = ask.asking();
        match (asking.next(), asking.next()) {
            (Some(only), None) if *constraints == Constraints::default() => {
                let Demand { cores, blocks, .. } = only.demand;
                cores.whole_cards().map_or(Self::Share(cores, blocks), |cards| Self::Whole(cards, blocks))
            }
            _ => Self::Complex,
        }
    }
}

impl NodeCapacity {
    /// The capacity of a node. `cards` are as shares see them; of the cards that `free` counts for legacy pods, some may be closed
    /// to shares there. `unattributed` as in [`crate::place::NodeView`].
    #[must_use]
    pub fn new(cards: &[CardView], free: u32, unattributed: u32, legacy_only: bool) -> Self {
        let cards: SmallVec<[CardCapacity; 8]> = cards
            .iter()
            .map(|card| CardCapacity {
                cores: if card.takes_shares() {
                    u16::try_from(card.cores_left.0).unwrap_or(u16::MAX)
                } else {
                    0
                },
                free: card.state == CardState::Free,
                open: card.takes_shares(),
                blocks: card.blocks_left.0,
                of_blocks: card.blocks.0,
            })
            .collect();
        let free_for_shares = count(cards.iter().filter(|card| card.free)).saturating_sub(unattributed);
        Self { free_for_shares, free, divided: false, legacy_only, cards }
    }

    /// NVIDIA's plugin divides the cards: `free` is of parts.
    pub fn divide(&mut self) {
        self.divided = true;
    }

    /// Whether a pod fits: by [`NodeCapacity::fast_fit`] where that decides, else by placing it.
    ///
    /// # Errors
    /// [`Refusal`], the same as `place`'s.
    pub fn fits(
        &self,
        summary: RequestSummary,
        place: impl FnOnce() -> Result<Placement, Refusal>,
    ) -> Result<(), Refusal> {
        self.fast_fit(summary).unwrap_or_else(|| place().map(drop))
    }

    /// Whether a pod fits; `None` where only placement decides.
    #[must_use]
    pub fn fast_fit(&self, summary: RequestSummary) -> Option<Result<(), Refusal>> {
        Some(match summary {
            RequestSummary::Nothing => Ok(()),
            RequestSummary::Complex => return None,
            RequestSummary::Legacy(asked) => self.fast_fit_legacy(asked),
            _ if self.legacy_only => Err(Refusal::NoCard),
            RequestSummary::Whole(asked, blocks) => return self.fast_fit_whole(asked, blocks),
            RequestSummary::Share(cores, blocks) => self.fast_fit_share(cores, blocks),
        })
    }

    fn fast_fit_legacy(&self, asked: u32) -> Result<(), Refusal> {
        if !self.divided && self.cards.len() < asked as usize {
            return Err(if self.cards.is_empty() { Refusal::NoCard } else { Refusal::TooBig });
        }
        if self.free < asked { Err(Refusal::FewCards { free: self.free, asked }) } else { Ok(()) }
    }

    fn fast_fit_whole(&self, asked: u32, blocks: Blocks) -> Option<Result<(), Refusal>> {
        let each = blocks.0.div_ceil(asked.max(1));
        let large_enough = self.cards.iter().filter(|card| card.of_blocks >= each).count();
        if large_enough < asked as usize {
            return Some(Err(if self.cards.is_empty() { Refusal::NoCard } else { Refusal::TooBig }));
        }
        if self.free_for_shares < asked {
            return Some(Err(Refusal::FewCards { free: self.free_for_shares, asked }));
        }
        // Cards of different memory on one node are for placement to sort out.
        (large_enough == self.cards.len()).then_some(Ok(()))
    }

    fn fast_fit_share(&self, cores: Cores, blocks: Blocks) -> Result<(), Refusal> {
        let spare = self.free_for_shares > 0;
        let fits = |card: &CardCapacity| {
            card.open && u32::from(card.cores) >= cores.0 && card.blocks >= blocks.0 && (spare || !card.free)
        };
        if self.cards.iter().any(fits) { Ok(()) } else { Err(self.no_share(cores, blocks)) }
    }

    fn no_share(&self, asked_cores: Cores, asked_blocks: Blocks) -> Refusal {
        if !self.cards.iter().any(|card| card.of_blocks >= asked_blocks.0) {
            return if self.cards.is_empty() { Refusal::NoCard } else { Refusal::TooBig };
        }
        let open = || self.cards.iter().filter(|card| card.open);
        let largest = open().map(|card| (card.cores, card.blocks)).max().unwrap_or_default();
        Refusal::NoShare {
            open: count(open()),
            total: count(self.cards.iter()),
            cores: Cores(u32::from(largest.0)),
            blocks: Blocks(largest.1),
            asked_cores,
            asked_blocks,
        }
    }

    /// Takes what a pod that fits would take, for trying out several; binpack.
    pub fn take(&mut self, summary: RequestSummary) {
        match summary {
            RequestSummary::Nothing | RequestSummary::Complex => {}
            RequestSummary::Legacy(parts) if self.divided => self.free = self.free.saturating_sub(parts),
            RequestSummary::Legacy(cards) => self.take_whole(cards, 0),
            RequestSummary::Whole(cards, blocks) => self.take_whole(cards, blocks.0.div_ceil(cards.max(1))),
            RequestSummary::Share(cores, blocks) => {
                let spare = self.free_for_shares > 0;
                let fits = |card: &&mut CardCapacity| {
                    card.open
                        && u32::from(card.cores) >= cores.0
                        && card.blocks >= blocks.0
                        && (spare || !card.free)
                };
                let Some(card) =
                    self.cards.iter_mut().filter(fits).min_by_key(|card| (card.cores, card.blocks))
                else {
                    return;
                };
                self.free = self.free.saturating_sub(u32::from(card.free));
                self.free_for_shares = self.free_for_shares.saturating_sub(u32::from(card.free));
                card.free = false;
                card.cores = card.cores.saturating_sub(u16::try_from(cores.0).unwrap_or(u16::MAX));
                card.blocks = card.blocks.saturating_sub(blocks.0);
            }
        }
    }

    fn take_whole(&mut self, cards: u32, blocks: u32) {
        let fitting = self.cards.iter_mut().filter(|card| card.free && card.of_blocks >= blocks);
        for card in fitting.take(cards as usize) {
            *card = CardCapacity { cores: 0, blocks: 0, free: false, open: false, ..*card };
            self.free = self.free.saturating_sub(1);
            self.free_for_shares = self.free_for_shares.saturating_sub(1);
        }
    }

    /// Cards free of everyone and not unattributed, or parts of cards that legacy pods can get.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Cores left for shares on all cards together.
    #[must_use]
    pub fn cores_left(&self) -> u32 {
        self.cards.iter().map(|card| u32::from(card.cores)).sum()
    }

    /// Blocks left on all cards together.
    #[must_use]
    pub fn blocks_left(&self) -> u32 {
        self.cards.iter().filter(|card| card.open).map(|card| card.blocks).sum()
    }

    /// Cards that a share can go to.
    fn cards_for_shares(&self) -> u32 {
        self.free_for_shares + count(self.cards.iter().filter(|card| card.open && !card.free))
    }

    /// Whether some card has more left than before, or more cards are free.
    #[must_use]
    pub fn more_than(&self, before: &Self) -> bool {
        self.free > before.free
            || self.free_for_shares > before.free_for_shares
            || self.cards.len() > before.cards.len()
            || !self.legacy_only && before.legacy_only
            // A share on a card that was kept for a legacy pod leaves the rest of it to others.
            || self.cards_for_shares() > before.cards_for_shares()
            || self
                .cards
                .iter()
                .zip(&before.cards)
                .any(|(now, then)| now.cores > then.cores || now.blocks > then.blocks)
    }
}

fn count<'a>(cards: impl Iterator<Item = &'a CardCapacity>) -> u32 {
    u32::try_from(cards.count()).unwrap_or(u32::MAX)
}
