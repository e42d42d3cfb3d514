//! The units that everything is counted in: cores, blocks, cards.
//!
//! gpu-manager's units (`pkg/types/types.go`): one card is 100 cores of `vcuda-core`; one unit of
//! `vcuda-memory` is a block of 256 MiB.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// MiB in one block.
pub const MIB_PER_BLOCK: u64 = 256;
/// Bytes in one block; part of gpu-manager's memory device IDs.
pub const BYTES_PER_BLOCK: u64 = MIB_PER_BLOCK << 20;

/// Hundredths of one card's compute.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(transparent)]
pub struct Cores(pub u32);

/// Card memory in blocks of 256 MiB.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(transparent)]
pub struct Blocks(pub u32);

/// A card's place in its node's inventory, which is sorted by minor number.
///
/// It is the index in gpu-manager's `predicate-gpu-idx` annotations and the hundreds of a core's device ID.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(transparent)]
pub struct CardIndex(pub u32);

impl Cores {
    /// No compute.
    pub const ZERO: Self = Self(0);
    /// The compute of one whole card.
    pub const CARD: Self = Self(100);

    /// The whole cards in this many cores, if they are whole cards and at least one.
    #[must_use]
    pub const fn whole_cards(self) -> Option<u32> {
        if self.0 > 0 && self.0.is_multiple_of(Self::CARD.0) { Some(self.0 / Self::CARD.0) } else { None }
    }

    /// What is left after taking `other`, not below zero.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// What is left after taking `other`; `None` where it does not fit.
    #[must_use]
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(left) => Some(Self(left)),
            None => None,
        }
    }
}

impl Blocks {
    /// No memory.
    pub const ZERO: Self = Self(0);

    /// The whole blocks in `mib` MiB; a remainder is not allocated.
    #[must_use]
    pub fn in_mib(mib: u64) -> Self {
        Self(u32::try_from(mib / MIB_PER_BLOCK).unwrap_or(u32::MAX))
    }

    /// This many blocks in MiB.
    #[must_use]
    pub const fn mib(self) -> u64 {
        self.0 as u64 * MIB_PER_BLOCK
    }

    /// What is left after taking `other`, not below zero.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// What is left after taking `other`; `None` where it does not fit.
    #[must_use]
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(left) => Some(Self(left)),
            None => None,
        }
    }
}

impl CardIndex {
    /// The index as an array position.
    #[must_use]
    pub const fn position(self) -> usize {
        self.0 as usize
    }
}

impl From<usize> for CardIndex {
    fn from(position: usize) -> Self {
        Self(u32::try_from(position).unwrap_or(u32::MAX))
    }
}

macro_rules! additive {
    ($unit:ident, $label:literal) => {
        impl Add for $unit {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }
        }
        impl AddAssign for $unit {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }
        impl Sum for $unit {
            fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
                all.fold(Self::ZERO, Add::add)
            }
        }
        impl fmt::Display for $unit {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!("{} ", $label), self.0)
            }
        }
    };
}
additive!(Cores, "cores");
additive!(Blocks, "blocks");

impl fmt::Display for CardIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "card {}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_cards_are_multiples_of_a_hundred() {
        let table = [(0, None), (50, None), (100, Some(1)), (150, None), (300, Some(3))];
        for (cores, cards) in table {
            assert_eq!(Cores(cores).whole_cards(), cards, "{cores} cores");
        }
    }

    #[test]
    fn a_remainder_of_memory_is_not_a_block() {
        assert_eq!(Blocks::in_mib(81_559), Blocks(318));
        assert_eq!(Blocks(318).mib(), 81_408);
        assert_eq!(Blocks::in_mib(255), Blocks::ZERO);
    }
}
