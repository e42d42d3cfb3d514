//! Which cards of one node a single container gets: gpu-manager's share, fragment and link evaluators
//! (`pkg/algorithm/nvidia/{share,fragment,link}.go`).
//!
//! - **share** (< 100 cores): the fullest card that still fits, by (cores left, blocks left, holders, index).
//! - **fragment** (= 100 cores): free cards out of the smallest set that has enough, so that large sets stay whole.
//! - **link** (> 100 cores): free cards that reach one another by the best link.
//!
//! All three only look; the caller writes the choice into the ledger and the tree.

use std::cmp::Reverse;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::card::CardView;
use crate::topology::{LinkLevel, Tree};
use crate::units::{Blocks, CardIndex, Cores};

/// Which card a share goes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum CardOrder {
    /// The fullest card that fits.
    #[default]
    Binpack,
    /// The emptiest card.
    Spread,
}

/// The card for a share, if one fits.
#[must_use]
pub fn share(cards: &[CardView], cores: Cores, blocks: Blocks, order: CardOrder) -> Option<CardIndex> {
    let fitting = cards.iter().filter(|card| card.fits(cores, blocks));
    let by_capacity = |card: &&CardView| (card.cores_left, card.blocks_left, card.holders, card.index);
    match order {
        CardOrder::Binpack => fitting.min_by_key(by_capacity),
        CardOrder::Spread => fitting
            .min_by_key(|card| (Reverse((card.cores_left, card.blocks_left)), card.holders, card.index)),
    }
    .map(|card| card.index)
}

/// `count` free cards out of the smallest sets that have them.
#[must_use]
pub fn fragment(tree: &Tree, count: usize) -> Option<Vec<CardIndex>> {
    let root = tree.root()?;
    (count > 0 && tree.available(root) >= count).then(|| tidy(take_from(tree, root, count)))
}

/// `count` free cards with the best link among them.
#[must_use]
pub fn link(tree: &Tree, count: usize) -> Option<Vec<CardIndex>> {
    if count == 0 {
        return None;
    }
    let smallest = tree
        .free_cards()
        .iter()
        .filter_map(|card| {
            let around = tree.path(card).find(|position| tree.available(*position) >= count)?;
            Some((level(tree, around), tree.available(around), card, around))
        })
        .min()?;
    Some(tidy(take_from(tree, smallest.3, count)))
}

/// The cards for a container's cores: by link, fragment or share, as its size asks for.
#[must_use]
pub fn cards_for(
    cards: &[CardView],
    tree: &Tree,
    cores: Cores,
    blocks: Blocks,
    order: CardOrder,
) -> Option<Vec<CardIndex>> {
    match cores.whole_cards() {
        Some(count) => whole(tree, count as usize),
        None => share(cards, cores, blocks, order).map(|card| vec![card]),
    }
}

/// `count` free cards: one by fragment, more by link.
#[must_use]
pub fn whole(tree: &Tree, count: usize) -> Option<Vec<CardIndex>> {
    if count == 1 { fragment(tree, 1) } else { link(tree, count) }
}

/// The tree with just those cards free that may be allocated whole.
#[must_use]
pub fn with_free(tree: &Tree, cards: &[CardView]) -> Tree {
    let mut marked = tree.clone();
    marked.set_free(cards.iter().filter(|card| card.is_free()).map(|card| card.index));
    marked
}

fn level(tree: &Tree, position: usize) -> Option<LinkLevel> {
    tree.node(position).and_then(|node| node.level)
}

/// `count` free cards below a node that has as many: first out of one child that suffices, the smallest such;
/// otherwise out of several, the fullest child first so that few children are broken.
fn take_from(tree: &Tree, position: usize, count: usize) -> Vec<CardIndex> {
    let Some(node) = tree.node(position) else { return Vec::new() };
    if node.children.is_empty() {
        return node.cards.iter().filter(|card| tree.free_cards().contains(*card)).take(count).collect();
    }
    let first_card = |child: &usize| tree.node(*child).and_then(|node| node.cards.iter().next());
    let mut children: Vec<usize> = node.children.clone();
    children.sort_by_key(|child| (tree.available(*child), first_card(child)));
    if let Some(enough) = children.iter().find(|child| tree.available(**child) >= count) {
        return take_from(tree, *enough, count);
    }
    children.sort_by_key(|child| (Reverse(tree.available(*child)), first_card(child)));
    let mut taken = Vec::with_capacity(count);
    for child in children {
        let wanted = (count - taken.len()).min(tree.available(child));
        if wanted > 0 {
            taken.extend(take_from(tree, child, wanted));
        }
    }
    taken
}

fn tidy(mut cards: Vec<CardIndex>) -> Vec<CardIndex> {
    cards.sort_unstable();
    cards
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::Card;
    use crate::ledger::{Hold, HolderId, Ledger};
    use crate::topology::Topology;
    use proptest::prelude::*;

    /// Six cards: 0-1 PIX, 2-3 PIX, {0,1}-{2,3} PHB, 4-5 PIX, the rest SOC.
    const SIX: &str = "\
        GPU0 X   PIX PHB PHB SOC SOC\n\
        GPU1 PIX X   PHB PHB SOC SOC\n\
        GPU2 PHB PHB X   PIX SOC SOC\n\
        GPU3 PHB PHB PIX X   SOC SOC\n\
        GPU4 SOC SOC SOC SOC X   PIX\n\
        GPU5 SOC SOC SOC SOC PIX X\n";

    struct Bench {
        ledger: Ledger,
        tree: Tree,
        next: u32,
    }

    impl Bench {
        fn six() -> Self {
            let card =
                |minor| Card { uuid: format!("GPU-{minor}"), minor, memory_mib: 8 * 256, ..Card::default() };
            Self {
                ledger: Ledger::new((0..6).map(card).collect()),
                tree: Topology::parse(SIX).unwrap().tree(),
                next: 0,
            }
        }

        fn hold(&mut self, card: u32, hold: Hold) {
            self.next += 1;
            let holder = HolderId::new(format!("pod-{}", self.next), "main");
            self.ledger.hold(&holder, CardIndex(card), hold).unwrap();
        }

        fn share(&mut self, cores: u32) -> Option<u32> {
            let card = share(&self.ledger.view(), Cores(cores), Blocks(1), CardOrder::Binpack)?;
            self.hold(card.0, Hold::share(Cores(cores), Blocks(1)));
            Some(card.0)
        }

        fn tree(&self) -> Tree {
            with_free(&self.tree, &self.ledger.view())
        }
    }

    fn numbers(cards: Option<Vec<CardIndex>>) -> Vec<u32> {
        cards.unwrap_or_default().into_iter().map(|card| card.0).collect()
    }

    #[test]
    fn a_share_goes_to_the_fullest_card_that_fits() {
        let mut bench = Bench::six();
        assert_eq!(bench.share(50), Some(0));
        assert_eq!(bench.share(60), Some(1));
        assert_eq!(bench.share(40), Some(1));
        assert_eq!(bench.share(50), Some(0));
    }

    #[test]
    fn a_spread_share_goes_to_the_emptiest_card() {
        let mut bench = Bench::six();
        bench.hold(0, Hold::share(Cores(10), Blocks(1)));
        assert_eq!(share(&bench.ledger.view(), Cores(10), Blocks(1), CardOrder::Spread), Some(CardIndex(1)));
    }

    #[test]
    fn fragment_leaves_large_sets_whole() {
        let mut bench = Bench::six();
        assert_eq!(numbers(fragment(&bench.tree(), 2)), [4, 5]);
        bench.hold(4, Hold::whole());
        assert_eq!(numbers(fragment(&bench.tree(), 1)), [5]);
        assert_eq!(numbers(fragment(&bench.tree(), 5)), [0, 1, 2, 3, 5]);
        assert_eq!(fragment(&bench.tree(), 6), None);
    }

    #[test]
    fn link_takes_the_nearest_cards() {
        let mut bench = Bench::six();
        assert_eq!(numbers(link(&bench.tree(), 3)), [0, 1, 2]);
        bench.hold(2, Hold::whole());
        assert_eq!(numbers(link(&bench.tree(), 2)), [0, 1]);
        assert_eq!(link(&bench.tree(), 6), None);
    }

    #[test]
    fn a_card_with_a_share_is_not_whole() {
        let mut bench = Bench::six();
        bench.hold(4, Hold::share(Cores(1), Blocks(1)));
        assert_eq!(numbers(fragment(&bench.tree(), 1)), [5]);
    }

    proptest! {
        #[test]
        fn what_is_chosen_is_free_and_enough(taken in prop::collection::btree_set(0_u32..6, 0..6), count in 1_usize..7) {
            let mut bench = Bench::six();
            for card in &taken {
                bench.hold(*card, Hold::whole());
            }
            for chosen in [fragment(&bench.tree(), count), link(&bench.tree(), count)] {
                match chosen {
                    None => prop_assert!(count > 6 - taken.len()),
                    Some(cards) => {
                        prop_assert_eq!(cards.len(), count);
                        prop_assert!(cards.is_sorted_by(|one, other| one < other));
                        prop_assert!(cards.iter().all(|card| !taken.contains(&card.0)));
                    }
                }
            }
        }

        #[test]
        fn no_set_of_cards_is_better_linked(taken in prop::collection::btree_set(0_u32..6, 0..5), count in 2_usize..4) {
            let mut bench = Bench::six();
            for card in &taken {
                bench.hold(*card, Hold::whole());
            }
            let tree = bench.tree();
            let Some(chosen) = link(&tree, count) else { return Ok(()) };
            let free: Vec<CardIndex> = tree.free_cards().iter().collect();
            for bits in 0_u32..1 << free.len() {
                if bits.count_ones() as usize == count {
                    let other: Vec<CardIndex> =
                        free.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1).map(|(_, card)| *card).collect();
                    prop_assert!(tree.level_of(&chosen) <= tree.level_of(&other));
                }
            }
        }
    }
}
