//! The device IDs of vcuda resources, laid out card by card, so that the kubelet checkpoint says which card is whose.
//!
//! Forms of gpu-manager (`pkg/services/allocator/nvidia/allocator.go`): `tencent.com/vcuda-core-<i>` with 100 a card, and
//! `tencent.com/vcuda-memory-268435456-<i>` with one for each block. Core *i* is on card *i / 100*; each card has a range of
//! block numbers. A kubelet was seen to allocate the IDs of the card that it was steered to (`tests/cluster`).

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
    /// The block numbers of each card.
    blocks: Vec<Range<u32>>,
    /// The same ranges with their cards, by first number; without empty ones.
    by_start: Vec<(Range<u32>, CardIndex)>,
}

impl Layout {
    /// The numbering for cards with these amounts of memory: blocks are numbered through the cards in order.
    #[must_use]
    pub fn new(dialect: &Dialect, cards: impl IntoIterator<Item = Blocks>) -> Self {
        let mut end = 0_u32;
        let ranges = cards.into_iter().map(|blocks| {
            let start = end;
            end = end.saturating_add(blocks.0);
            start..end
        });
        Self::with_block_ranges(dialect, ranges.collect())
    }

    /// The numbering in which each card has this range of blocks. Ranges may come in any order and leave gaps: a card keeps its
    /// range when others come, go or change their size. They must not overlap; where they do, a number is on the card whose range
    /// starts last.
    #[must_use]
    pub fn with_block_ranges(dialect: &Dialect, blocks: Vec<Range<u32>>) -> Self {
        let mut by_start: Vec<_> = blocks
            .iter()
            .enumerate()
            .filter(|(_, range)| !range.is_empty())
            .map(|(card, range)| (range.clone(), CardIndex::from(card)))
            .collect();
        by_start.sort_by_key(|(range, _)| range.start);
        Self {
            core_prefix: dialect.device_id_prefix(SharedResource::Cores),
            memory_prefix: dialect.device_id_prefix(SharedResource::Memory),
            blocks,
            by_start,
        }
    }

    /// How many cards it numbers.
    #[must_use]
    pub fn cards(&self) -> usize {
        self.blocks.len()
    }

    /// The numbers of a resource that lie on a card; empty for a card that is not there.
    #[must_use]
    pub fn numbers(&self, resource: SharedResource, card: CardIndex) -> Range<u32> {
        if card.position() >= self.cards() {
            return 0..0;
        }
        match resource {
            SharedResource::Cores => card.0 * Cores::CARD.0..(card.0 + 1) * Cores::CARD.0,
            SharedResource::Memory => self.blocks[card.position()].clone(),
        }
    }

    /// From 0 to one past the largest number of a resource. Of blocks some may belong to no card.
    #[must_use]
    pub fn all(&self, resource: SharedResource) -> Range<u32> {
        match resource {
            SharedResource::Cores => {
                0..u32::try_from(self.cards()).unwrap_or(u32::MAX).saturating_mul(Cores::CARD.0)
            }
            SharedResource::Memory => 0..self.blocks.iter().map(|range| range.end).max().unwrap_or(0),
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
        number(self.prefix(resource), id).filter(|number| self.card_of(resource, *number).is_some())
    }

    /// The card on which a number lies.
    #[must_use]
    pub fn card_of(&self, resource: SharedResource, number: u32) -> Option<CardIndex> {
        match resource {
            SharedResource::Cores => {
                self.all(resource).contains(&number).then_some(CardIndex(number / Cores::CARD.0))
            }
            SharedResource::Memory => {
                let after = self.by_start.partition_point(|(range, _)| range.start <= number);
                let (range, card) = self.by_start.get(after.checked_sub(1)?)?;
                range.contains(&number).then_some(*card)
            }
        }
    }
}

impl Dialect {
    fn device_id_prefix(&self, resource: SharedResource) -> String {
        match resource {
            SharedResource::Cores => format!("{}-", self.cores),
            SharedResource::Memory => format!("{}-{}-", self.memory, self.mib_per_block << 20),
        }
    }

    /// The number in a device ID of this resource, whether or not a card of this node has it.
    #[must_use]
    pub fn device_number(&self, resource: SharedResource, id: &str) -> Option<u32> {
        number(&self.device_id_prefix(resource), id)
    }
}

fn number(prefix: &str, id: &str) -> Option<u32> {
    let digits = id.strip_prefix(prefix)?;
    // One spelling only: "+7" and "07" parse as numbers but are never listed.
    if digits.len() > 1 && digits.starts_with('0') || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
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

    #[test]
    fn a_range_may_lie_anywhere() {
        let layout =
            Layout::with_block_ranges(&Dialect::default(), vec![300..620, 0..160, 160..160, 200..300]);
        let card_of = |number| layout.card_of(SharedResource::Memory, number);
        assert_eq!([0, 159, 200, 300, 619].map(card_of), [1, 1, 3, 0, 0].map(|card| Some(CardIndex(card))));
        assert_eq!([160, 199, 620].map(card_of), [None; 3], "a gap is on no card");
        assert_eq!(layout.number(SharedResource::Memory, "tencent.com/vcuda-memory-268435456-160"), None);
        assert_eq!(layout.all(SharedResource::Memory), 0..620);
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
