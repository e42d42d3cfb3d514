//! The cards as a tree: the nearer two cards are linked, the deeper their smallest common node.

use std::sync::Arc;

use super::{CardMask, LinkLevel, Topology};
use crate::units::CardIndex;

/// A set of cards that reach one another by `level` or better.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The worst link inside; `None` for a single card.
    pub level: Option<LinkLevel>,
    /// The cards below.
    pub cards: CardMask,
    /// Where the nodes below stand in the tree; empty for a single card.
    pub children: Vec<usize>,
    /// The node above; `None` for the root.
    pub parent: Option<usize>,
}

/// The tree of one node's cards, with the cards that are free marked in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// Leaves first, by card index; the root last. Shared by clones: only the marks are a clone's own.
    nodes: Arc<[Node]>,
    cards: usize,
    free: CardMask,
}

impl Tree {
    pub(super) fn new(topology: &Topology) -> Self {
        let cards = topology.cards();
        let mut nodes: Vec<Node> = (0..cards)
            .map(|card| Node {
                level: None,
                cards: [CardIndex::from(card)].into_iter().collect(),
                children: Vec::new(),
                parent: None,
            })
            .collect();
        // The topmost node of each card so far.
        let mut top: Vec<usize> = (0..cards).collect();
        for level in LinkLevel::ALL {
            for group in groups(topology, level, &top) {
                let position = nodes.len();
                let mut mask = CardMask::new();
                for child in &group {
                    mask.insert_all(&nodes[*child].cards);
                    nodes[*child].parent = Some(position);
                }
                for card in mask.iter() {
                    top[card.position()] = position;
                }
                nodes.push(Node { level: Some(level), cards: mask, children: group, parent: None });
            }
        }
        Self { nodes: nodes.into(), cards, free: CardMask::first(cards) }
    }

    /// How many cards.
    #[must_use]
    pub fn cards(&self) -> usize {
        self.cards
    }

    /// Where the root stands; `None` for a tree without cards.
    #[must_use]
    pub fn root(&self) -> Option<usize> {
        self.nodes.len().checked_sub(1)
    }

    /// A node of the tree by where it stands.
    #[must_use]
    pub fn node(&self, position: usize) -> Option<&Node> {
        self.nodes.get(position)
    }

    /// Takes cards out of the free ones.
    pub fn mark(&mut self, cards: &CardMask) {
        self.free.remove_all(cards);
    }

    /// Makes exactly these cards the free ones. Those that the node does not have are ignored.
    pub fn set_free(&mut self, cards: impl IntoIterator<Item = CardIndex>) {
        let count = self.cards;
        self.free = cards.into_iter().filter(|card| card.position() < count).collect();
    }

    /// Puts cards back among the free ones. Those that the node does not have are ignored.
    pub fn free(&mut self, cards: &CardMask) {
        for card in cards.iter().filter(|card| card.position() < self.cards) {
            self.free.insert(card);
        }
    }

    /// The free cards.
    #[must_use]
    pub fn free_cards(&self) -> &CardMask {
        &self.free
    }

    /// How many free cards are below a node.
    #[must_use]
    pub fn available(&self, position: usize) -> usize {
        self.nodes.get(position).map_or(0, |node| node.cards.count_both(&self.free))
    }

    /// The nodes from a card's leaf up to the root.
    pub fn path(&self, card: CardIndex) -> impl Iterator<Item = usize> + '_ {
        let leaf = (card.position() < self.cards).then_some(card.position());
        std::iter::successors(leaf, |position| self.nodes[*position].parent)
    }

    /// The worst link among a set of cards; `None` for fewer than two.
    #[must_use]
    pub fn level_of(&self, cards: &[CardIndex]) -> Option<LinkLevel> {
        let first = cards.first()?;
        let around = self
            .path(*first)
            .find(|position| cards.iter().all(|card| self.nodes[*position].cards.contains(*card)))?;
        self.nodes[around].level
    }
}

/// Sets of topmost nodes that this level joins, each of two or more, in order of their first card.
fn groups(topology: &Topology, level: LinkLevel, top: &[usize]) -> Vec<Vec<usize>> {
    let linked = |one: usize, other: usize| {
        topology.between(one.into(), other.into()).is_some_and(|between| between <= level)
    };
    let mut groups = Vec::new();
    let mut seen = vec![false; top.len()];
    for start in 0..top.len() {
        if seen[start] {
            continue;
        }
        // All cards that can be reached from this one.
        let mut reached = vec![start];
        seen[start] = true;
        let mut next = 0;
        while next < reached.len() {
            let card = reached[next];
            next += 1;
            for other in 0..top.len() {
                if !seen[other] && (top[other] == top[card] || linked(card, other)) {
                    seen[other] = true;
                    reached.push(other);
                }
            }
        }
        reached.sort_unstable();
        let mut group: Vec<usize> = Vec::new();
        for card in reached {
            if !group.contains(&top[card]) {
                group.push(top[card]);
            }
        }
        if group.len() > 1 {
            groups.push(group);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn levels() -> impl Strategy<Value = Topology> {
        (0_usize..70).prop_flat_map(|cards| {
            prop::collection::vec(0_usize..LinkLevel::ALL.len(), cards * cards).prop_map(move |cells| {
                Topology::from_fn(cards, |row, column| {
                    LinkLevel::ALL[cells[row.position() * cards + column.position()]]
                })
            })
        })
    }

    proptest! {
        #[test]
        fn a_tree_partitions_its_cards(topology in levels()) {
            let tree = topology.tree();
            prop_assert_eq!(tree.cards(), topology.cards());
            if let Some(root) = tree.root() {
                prop_assert_eq!(tree.node(root).unwrap().cards.count(), tree.cards());
                prop_assert_eq!(tree.node(root).unwrap().parent, None);
            }
            for position in 0..tree.nodes.len() {
                let node = &tree.nodes[position];
                let mut below = CardMask::new();
                for child in &node.children {
                    let child = &tree.nodes[*child];
                    prop_assert_eq!(child.parent, Some(position));
                    prop_assert!(child.level < node.level);
                    prop_assert_eq!(below.count_both(&child.cards), 0);
                    below.insert_all(&child.cards);
                }
                prop_assert!(node.children.is_empty() || below == node.cards);
            }
        }

        #[test]
        fn no_path_is_worse_than_its_node(topology in levels()) {
            let tree = topology.tree();
            for row in 0..tree.cards() {
                for column in 0..row {
                    let pair = [CardIndex::from(row), CardIndex::from(column)];
                    // The tree may join two cards over a third, never later than their own link does.
                    prop_assert!(tree.level_of(&pair) <= topology.between(pair[0], pair[1]));
                }
            }
        }

        #[test]
        fn marking_and_freeing_counts(topology in levels(), steps in prop::collection::vec((any::<bool>(), 0_u32..80), 0..60)) {
            let mut tree = topology.tree();
            let mut free = CardMask::first(tree.cards());
            for (mark, card) in steps {
                let card: CardMask = [CardIndex(card)].into_iter().collect();
                if mark {
                    tree.mark(&card);
                    free.remove_all(&card);
                } else {
                    tree.free(&card);
                    free.insert_all(&card);
                }
            }
            free = free.iter().filter(|card| card.position() < tree.cards()).collect();
            prop_assert_eq!(tree.free_cards(), &free);
            for position in 0..tree.nodes.len() {
                prop_assert_eq!(tree.available(position), tree.nodes[position].cards.count_both(&free));
            }
        }
    }
}
