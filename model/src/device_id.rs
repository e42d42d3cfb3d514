//! The device IDs of vcuda resources, laid out card by card, so that the kubelet's own books say which card is whose.
//!
//! Forms of gpu-manager (`pkg/services/allocator/nvidia/allocator.go`): `tencent.com/vcuda-core-<i>` with 100 a card, and
//! `tencent.com/vcuda-memory-268435456-<i>` with one for each block. Core *i* is on card *i / 100*; blocks are numbered
//! through the cards in order. FACTS 2.15 saw the kubelet keep to IDs of the card that it was steered to.

use std::fmt::Write as _;
use std::ops::Range;

use crate::names::Dialect;
use crate::units::{Blocks, CardIndex, Cores};

/// One of the two shared resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SharedResource {
    /// Compute.
    Cores,
    /// Memory.
    Memory,
}

/// The numbering of one node's IDs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    core_prefix: String,
    memory_prefix: String,
    /// First block of each card, and one past the last.
    block_starts: Vec<u32>,
}

impl Layout {
    /// The numbering for cards with these amounts of memory, in order.
    #[must_use]
    pub fn new(dialect: &Dialect, cards: impl IntoIterator<Item = Blocks>) -> Self {
        let mut block_starts = vec![0];
        let mut end = 0_u32;
        for blocks in cards {
            end = end.saturating_add(blocks.0);
            block_starts.push(end);
        }
        Self {
            core_prefix: format!("{}-", dialect.cores),
            memory_prefix: format!("{}-{}-", dialect.memory, dialect.mib_per_block << 20),
            block_starts,
        }
    }

    /// How many cards it numbers.
    #[must_use]
    pub fn cards(&self) -> usize {
        self.block_starts.len() - 1
    }

    /// The numbers of a resource that lie on a card; empty for a card that is not there.
    #[must_use]
    pub fn numbers(&self, resource: SharedResource, card: CardIndex) -> Range<u32> {
        if card.position() >= self.cards() {
            return 0..0;
        }
        match resource {
            SharedResource::Cores => card.0 * Cores::CARD.0..(card.0 + 1) * Cores::CARD.0,
            SharedResource::Memory => {
                self.block_starts[card.position()]..self.block_starts[card.position() + 1]
            }
        }
    }

    /// All numbers of a resource.
    #[must_use]
    pub fn all(&self, resource: SharedResource) -> Range<u32> {
        match resource {
            SharedResource::Cores => {
                0..u32::try_from(self.cards()).unwrap_or(u32::MAX).saturating_mul(Cores::CARD.0)
            }
            SharedResource::Memory => 0..self.block_starts.last().copied().unwrap_or(0),
        }
    }

    /// The device ID with this number.
    #[must_use]
    pub fn id(&self, resource: SharedResource, number: u32) -> String {
        format!("{}{number}", self.prefix(resource))
    }

    /// The same, in place of what `id` says.
    pub fn write_id(&self, resource: SharedResource, number: u32, id: &mut String) {
        id.clear();
        id.push_str(self.prefix(resource));
        // Writing into a string cannot fail.
        let _ = write!(id, "{number}");
    }

    fn prefix(&self, resource: SharedResource) -> &str {
        match resource {
            SharedResource::Cores => &self.core_prefix,
            SharedResource::Memory => &self.memory_prefix,
        }
    }

    /// The number in a device ID, if it is one of ours and on a card of this node.
    #[must_use]
    pub fn number(&self, resource: SharedResource, id: &str) -> Option<u32> {
        let digits = id.strip_prefix(self.prefix(resource))?;
        // One spelling only: "+7" and "07" parse as numbers but were never handed out.
        if digits.len() > 1 && digits.starts_with('0') || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        digits.parse().ok().filter(|number| self.all(resource).contains(number))
    }

    /// The card on which a number lies.
    #[must_use]
    pub fn card_of(&self, resource: SharedResource, number: u32) -> Option<CardIndex> {
        if !self.all(resource).contains(&number) {
            return None;
        }
        Some(match resource {
            SharedResource::Cores => CardIndex(number / Cores::CARD.0),
            SharedResource::Memory => {
                // The last card that starts at or before the number; cards without memory share a start.
                CardIndex::from(self.block_starts.partition_point(|start| *start <= number) - 1)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout(blocks: &[u32]) -> Layout {
        Layout::new(&Dialect::default(), blocks.iter().copied().map(Blocks))
    }

    #[test]
    fn ids_are_gpu_managers() {
        let layout = layout(&[320; 8]);
        assert_eq!(layout.id(SharedResource::Cores, 381), "tencent.com/vcuda-core-381");
        assert_eq!(layout.id(SharedResource::Memory, 960), "tencent.com/vcuda-memory-268435456-960");
        assert_eq!(layout.card_of(SharedResource::Cores, 381), Some(CardIndex(3)));
        assert_eq!(layout.card_of(SharedResource::Memory, 960), Some(CardIndex(3)));
        assert_eq!(layout.card_of(SharedResource::Memory, 959), Some(CardIndex(2)));
    }

    #[test]
    fn a_foreign_id_has_no_number() {
        let layout = layout(&[320]);
        for id in [
            "",
            "tencent.com/vcuda-core-",
            "tencent.com/vcuda-core-100",
            "tencent.com/vcuda-core-+1",
            "tencent.com/vcuda-core-01",
            "GPU-1",
            "tencent.com/vcuda-memory-268435456-1",
        ] {
            assert_eq!(layout.number(SharedResource::Cores, id), None, "{id}");
        }
    }

    proptest! {
        #[test]
        fn every_number_is_on_the_card_that_lists_it(blocks in prop::collection::vec(0_u32..400, 0..40)) {
            let layout = layout(&blocks);
            for resource in [SharedResource::Cores, SharedResource::Memory] {
                let mut seen = 0;
                for card in (0..blocks.len()).map(CardIndex::from) {
                    for number in layout.numbers(resource, card) {
                        prop_assert_eq!(number, seen);
                        seen += 1;
                        prop_assert_eq!(layout.card_of(resource, number), Some(card));
                        prop_assert_eq!(layout.number(resource, &layout.id(resource, number)), Some(number));
                    }
                }
                prop_assert_eq!(layout.all(resource), 0..seen);
            }
        }
    }
}
