//! A set of cards, of any size.

use crate::units::CardIndex;

/// A set of cards as bits, 64 a word.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CardMask {
    words: Vec<u64>,
}

impl CardMask {
    /// No card.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The cards 0 to `count` - 1.
    #[must_use]
    pub fn first(count: usize) -> Self {
        (0..count).map(CardIndex::from).collect()
    }

    /// Adds a card. Returns whether it is new.
    pub fn insert(&mut self, card: CardIndex) -> bool {
        let (word, bit) = Self::place(card);
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    /// Takes a card out. Returns whether it was in.
    pub fn remove(&mut self, card: CardIndex) -> bool {
        let (word, bit) = Self::place(card);
        let was = self.contains(card);
        if was {
            self.words[word] &= !bit;
            self.trim();
        }
        was
    }

    /// Whether a card is in.
    #[must_use]
    pub fn contains(&self, card: CardIndex) -> bool {
        let (word, bit) = Self::place(card);
        self.words.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Adds all of `other`.
    pub fn insert_all(&mut self, other: &Self) {
        if self.words.len() < other.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine |= theirs;
        }
    }

    /// Takes all of `other` out.
    pub fn remove_all(&mut self, other: &Self) {
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine &= !theirs;
        }
        self.trim();
    }

    /// How many cards are in.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// How many cards are in both.
    #[must_use]
    pub fn count_both(&self, other: &Self) -> usize {
        self.words.iter().zip(&other.words).map(|(mine, theirs)| (mine & theirs).count_ones() as usize).sum()
    }

    /// Whether no card is in.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The cards in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = CardIndex> + '_ {
        self.words.iter().enumerate().flat_map(|(position, word)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| CardIndex::from(position * 64 + bit))
        })
    }

    const fn place(card: CardIndex) -> (usize, u64) {
        (card.position() / 64, 1 << (card.position() % 64))
    }

    /// Equal sets have equal words.
    fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }
}

impl FromIterator<CardIndex> for CardMask {
    fn from_iter<I: IntoIterator<Item = CardIndex>>(cards: I) -> Self {
        let mut mask = Self::new();
        for card in cards {
            mask.insert(card);
        }
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_as_a_set(steps in prop::collection::vec((any::<bool>(), 0_u32..200), 0..200)) {
            let (mut mask, mut set) = (CardMask::new(), BTreeSet::new());
            for (insert, card) in steps {
                let card = CardIndex(card);
                if insert {
                    prop_assert_eq!(mask.insert(card), set.insert(card));
                } else {
                    prop_assert_eq!(mask.remove(card), set.remove(&card));
                }
                prop_assert_eq!(mask.count(), set.len());
                prop_assert_eq!(mask.is_empty(), set.is_empty());
            }
            prop_assert!(mask.iter().eq(set.iter().copied()));
            prop_assert_eq!(&mask, &set.into_iter().collect::<CardMask>());
        }
    }
}
