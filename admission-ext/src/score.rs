//! Which of the nodes and cards that fit is best: [`gpu_migrate_model::score`] over the extender's slots.
//!
//! The scorer is worked out anew after every few hundred requests. What it said about a node is remembered until the
//! node's books change, so that a decision over 5,000 nodes is 5,000 look-ups.

use std::sync::Arc;

use arc_swap::ArcSwap;
use gpu_migrate_model::score::{Host, Memo, Mix, Room, Scorer, Shape};
use gpu_migrate_model::units::CardIndex;
use parking_lot::Mutex;

use crate::state::node::{Books, Inventory};
use crate::state::pod::PodFacts;
use crate::state::{Cluster, Slot};

/// How nodes and cards are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Order {
    /// Fill the fullest node and card, as gpu-admission does
    #[default]
    Binpack,
    /// Least compute left
    BestFit,
    /// Least growth of what the usual requests cannot use (FGD)
    Fragmentation,
    /// Least loss of what the usual requests are still going to use
    Outlook,
    /// Emptiest node first
    Spread,
}

impl From<Order> for gpu_migrate_model::score::Order {
    fn from(order: Order) -> Self {
        match order {
            Order::Binpack => Self::Binpack,
            Order::BestFit => Self::BestFit,
            Order::Fragmentation => Self::Fragmentation,
            Order::Outlook => Self::Outlook,
            Order::Spread => Self::Spread,
        }
    }
}

/// Requests after which the scorer is worked out anew.
const STALE_AFTER: u32 = 500;

/// Compares places. Has its own locks, which are never held while one of the cluster's is waited for.
#[derive(Debug)]
pub struct Judge {
    order: Order,
    mix: Mutex<Requests>,
    scorer: ArcSwap<Scorer>,
    memo: Mutex<Memo>,
}

#[derive(Debug, Default)]
struct Requests {
    mix: Mix,
    /// Since the scorer was worked out; `None`: it never was.
    since: Option<u32>,
}

impl Judge {
    /// A judge who has seen no requests yet.
    #[must_use]
    pub fn new(order: Order) -> Self {
        let scorer = Scorer::new(order.into(), &Mix::default(), &[]);
        Self {
            order,
            mix: Mutex::default(),
            memo: Mutex::new(Memo::new(scorer.clone(), 0)),
            scorer: ArcSwap::from_pointee(scorer),
        }
    }

    fn needs_mix(&self) -> bool {
        matches!(self.order, Order::Fragmentation | Order::Outlook)
    }

    /// Counts a request that was placed.
    pub fn count(&self, pod: &PodFacts) {
        if !self.needs_mix() {
            return;
        }
        if let Some(shape) = shape(pod) {
            let mut requests = self.mix.lock();
            requests.mix.count(shape);
            requests.since = requests.since.map(|since| since + 1);
        }
    }

    /// Works the scorer out anew where enough has changed. The first time, the pods that are there are the mix.
    pub fn refresh(&self, cluster: &Cluster) {
        if !self.needs_mix() {
            return;
        }
        let mut requests = self.mix.lock();
        let fresh = requests.since.is_some_and(|since| since < STALE_AFTER);
        if fresh && !requests.mix.is_empty() {
            return;
        }
        if requests.since.is_none() {
            cluster.pods().filter_map(|pod| shape(pod)).for_each(|shape| requests.mix.count(shape));
        }
        requests.since = Some(0);
        let fleet: Vec<Room> =
            if self.order == Order::Outlook { kinds_of_nodes(cluster) } else { Vec::new() };
        let scorer = Scorer::new(self.order.into(), &requests.mix, &fleet);
        drop(requests);
        *self.memo.lock() = Memo::new(scorer.clone(), cluster.slot_count());
        self.scorer.store(Arc::new(scorer));
    }

    /// How good each of these nodes is for `pod`; only comparable among themselves. Higher is better.
    pub fn merits<'a>(
        &self,
        pod: &PodFacts,
        nodes: impl Iterator<Item = Option<(usize, &'a Slot)>>,
    ) -> Vec<Option<f64>> {
        let left = |slot: &Slot| f64::from(slot.rooms.cores_left());
        match (self.order, shape(pod)) {
            // No memory is faster than counting eight cards.
            (Order::Spread, _) => nodes.map(|node| node.map(|(_, slot)| left(slot))).collect(),
            (Order::Fragmentation | Order::Outlook | Order::BestFit, Some(shape)) => {
                let mut memo = self.memo.lock();
                let mut row = memo.row(&shape);
                let scorer = self.scorer.load();
                nodes
                    .map(|node| {
                        let (id, slot) = node?;
                        let choice =
                            row.choose(id, slot.generation, || Some(room(&slot.books, &slot.inventory)));
                        // A node that came after the memo was made.
                        choice
                            .or_else(|| scorer.choose(&room(&slot.books, &slot.inventory), &shape))
                            .map(|choice| choice.merit)
                    })
                    .collect()
            }
            (_, _) => nodes.map(|node| node.map(|(_, slot)| -left(slot))).collect(),
        }
    }

    /// The card that a share should go to, where the order says something else than the model's evaluators.
    #[must_use]
    pub fn card(&self, books: &Books, inventory: &Inventory, pod: &PodFacts) -> Option<CardIndex> {
        if !self.needs_mix() || pod.constraints != Default::default() {
            return None;
        }
        self.scorer.load().choose(&room(books, inventory), &shape(pod)?)?.card
    }
}

fn shape(pod: &PodFacts) -> Option<Shape> {
    Shape::of(pod.ask.as_ref().ok()?)
}

fn room(books: &Books, inventory: &Inventory) -> Room {
    Room::of(&books.for_shares(inventory), books.promised, Host::AMPLE)
}

/// One empty node of each kind that there is.
fn kinds_of_nodes(cluster: &Cluster) -> Vec<Room> {
    let mut kinds: Vec<Room> = Vec::new();
    for slot in cluster.slots() {
        let mut empty = room(&slot.books, &slot.inventory);
        for card in &mut empty.cards {
            (card.cores, card.blocks, card.free) = (100, card.of_blocks, true);
        }
        // Kinds are few; a cluster of many is sampled.
        if !kinds.contains(&empty) && kinds.len() < 64 {
            kinds.push(empty);
        }
    }
    kinds
}

/// Brings merits to the scheduler's 0 to 10.
///
/// The best node alone gets 10, of equals the one whose name comes first: the scheduler picks at random among equal
/// scores, and that would break the nodes up one after the other.
#[must_use]
pub fn scale<'a>(merits: &[Option<f64>], name: impl Fn(usize) -> &'a str) -> Vec<u8> {
    let known = || merits.iter().copied().flatten();
    let (least, most) = known().fold((f64::MAX, f64::MIN), |(a, b), merit| (a.min(merit), b.max(merit)));
    let span = most - least;
    let score = |merit: f64| {
        let part = if span > 0.0 { (merit - least) / span } else { 1.0 };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 0 to 9
        let score = (part * 9.0).round() as u8;
        score.min(9)
    };
    let mut scores: Vec<u8> = merits.iter().map(|merit| merit.map_or(0, score)).collect();
    let best = (0..merits.len())
        .filter(|at| merits[*at].is_some_and(|merit| merit >= most))
        .min_by_key(|at| name(*at));
    if let Some(best) = best {
        scores[best] = 10;
    }
    scores
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_node_is_best_and_the_rest_are_ranked_below() {
        let names = ["d", "c", "b", "a"];
        let scaled = |merits: &[Option<f64>]| scale(merits, |at| names[at]);
        assert_eq!(scaled(&[Some(-3.0), Some(-1.0), Some(-2.0), None]), [0, 10, 5, 0]);
        assert_eq!(scaled(&[Some(7.0), Some(7.0), Some(1.0)]), [9, 10, 0]);
        assert_eq!(scaled(&[None]), [0]);
        assert_eq!(scaled(&[]), [0; 0]);
    }
}
