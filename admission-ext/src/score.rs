//! Which of the nodes and cards that fit is best: [`gpu_migrate_model::score`] over the extender's slots.
//!
//! The scorer is computed again after every few hundred requests. What it said about a node is remembered until the
//! node's occupancy changes, so that a decision over 5,000 nodes is 5,000 look-ups.

use std::sync::Arc;

use arc_swap::ArcSwap;
use gpu_migrate_model::score::{
    FreeCapacity, HostResources, Mix, ScoreCache, Scorer, ScoringStrategy, Shape,
};
use gpu_migrate_model::units::CardIndex;
use parking_lot::Mutex;

use crate::state::node::{Inventory, NodeOccupancy};
use crate::state::pod::PodFacts;
use crate::state::{Cluster, NodeInfo};

/// Requests after which the scorer is computed again.
const STALE_AFTER: u32 = 500;

/// Compares places. Has its own locks, which are never held while one of the cluster's is waited for.
#[derive(Debug)]
pub struct NodeScorer {
    strategy: ScoringStrategy,
    mix: Mutex<Requests>,
    scorer: ArcSwap<Scorer>,
    cache: Mutex<ScoreCache>,
}

#[derive(Debug, Default)]
struct Requests {
    mix: Mix,
    /// Since the scorer was worked out; `None`: it never was.
    since: Option<u32>,
}

impl NodeScorer {
    /// A scorer who has seen no requests yet.
    #[must_use]
    pub fn new(strategy: ScoringStrategy) -> Self {
        let scorer = Scorer::new(strategy, &Mix::default(), &[]);
        Self {
            strategy,
            mix: Mutex::default(),
            cache: Mutex::new(ScoreCache::new(scorer.clone(), 0)),
            scorer: ArcSwap::from_pointee(scorer),
        }
    }

    fn needs_mix(&self) -> bool {
        matches!(self.strategy, ScoringStrategy::Fragmentation | ScoringStrategy::Lookahead)
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

    /// Computes the scorer again where enough has changed. The first time, the pods that are there are the mix.
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
        let fleet: Vec<FreeCapacity> =
            if self.strategy == ScoringStrategy::Lookahead { kinds_of_nodes(cluster) } else { Vec::new() };
        let scorer = Scorer::new(self.strategy, &requests.mix, &fleet);
        drop(requests);
        *self.cache.lock() = ScoreCache::new(scorer.clone(), cluster.node_id_count());
        self.scorer.store(Arc::new(scorer));
    }

    /// How good each of these nodes is for `pod`; only comparable among themselves. Higher is better.
    pub fn scores<'a>(
        &self,
        pod: &PodFacts,
        nodes: impl Iterator<Item = Option<(usize, &'a NodeInfo)>>,
    ) -> Vec<Option<f64>> {
        let left = |info: &NodeInfo| f64::from(info.capacity.cores_left());
        match (self.strategy, shape(pod)) {
            // No memory is faster than counting eight cards.
            (ScoringStrategy::Spread, _) => nodes.map(|node| node.map(|(_, info)| left(info))).collect(),
            (
                ScoringStrategy::Fragmentation | ScoringStrategy::Lookahead | ScoringStrategy::BestFit,
                Some(shape),
            ) => {
                let mut cache = self.cache.lock();
                let mut row = cache.row(&shape);
                let scorer = self.scorer.load();
                nodes
                    .map(|node| {
                        let (id, info) = node?;
                        let choice = row.choose(id, info.generation, || {
                            Some(free_capacity(&info.occupancy, &info.inventory))
                        });
                        // A node that came after the cache was made.
                        choice
                            .or_else(|| {
                                scorer.choose(&free_capacity(&info.occupancy, &info.inventory), &shape)
                            })
                            .map(|choice| choice.score)
                    })
                    .collect()
            }
            (_, _) => nodes.map(|node| node.map(|(_, info)| -left(info))).collect(),
        }
    }

    /// The card that a share should go to, where the order says something else than the model's evaluators.
    #[must_use]
    pub fn card(
        &self,
        occupancy: &NodeOccupancy,
        inventory: &Inventory,
        pod: &PodFacts,
    ) -> Option<CardIndex> {
        if !self.needs_mix() || pod.constraints != Default::default() {
            return None;
        }
        self.scorer.load().choose(&free_capacity(occupancy, inventory), &shape(pod)?)?.card
    }
}

fn shape(pod: &PodFacts) -> Option<Shape> {
    Shape::of(pod.ask.as_ref().ok()?)
}

fn free_capacity(occupancy: &NodeOccupancy, inventory: &Inventory) -> FreeCapacity {
    FreeCapacity::of(&occupancy.for_shares(inventory), occupancy.unattributed, HostResources::UNLIMITED)
}

/// One empty node of each kind that there is.
fn kinds_of_nodes(cluster: &Cluster) -> Vec<FreeCapacity> {
    let mut kinds: Vec<FreeCapacity> = Vec::new();
    for info in cluster.nodes() {
        let mut empty = free_capacity(&info.occupancy, &info.inventory);
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

/// Brings scores to the scheduler's 0 to 10.
///
/// The best node alone gets 10, of equals the one whose name comes first: the scheduler picks at random among equal
/// scores, and that would break the nodes up one after the other.
#[must_use]
pub fn scale<'a>(raw: &[Option<f64>], name: impl Fn(usize) -> &'a str) -> Vec<u8> {
    let known = || raw.iter().copied().flatten();
    let (least, most) = known().fold((f64::MAX, f64::MIN), |(a, b), score| (a.min(score), b.max(score)));
    let span = most - least;
    let scaled = |score: f64| {
        let part = if span > 0.0 { (score - least) / span } else { 1.0 };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 0 to 9
        let scaled = (part * 9.0).round() as u8;
        scaled.min(9)
    };
    let mut scores: Vec<u8> = raw.iter().map(|score| score.map_or(0, scaled)).collect();
    let best =
        (0..raw.len()).filter(|at| raw[*at].is_some_and(|score| score >= most)).min_by_key(|at| name(*at));
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
        let scaled = |scores: &[Option<f64>]| scale(scores, |at| names[at]);
        assert_eq!(scaled(&[Some(-3.0), Some(-1.0), Some(-2.0), None]), [0, 10, 5, 0]);
        assert_eq!(scaled(&[Some(7.0), Some(7.0), Some(1.0)]), [9, 10, 0]);
        assert_eq!(scaled(&[None]), [0]);
        assert_eq!(scaled(&[]), [0; 0]);
    }
}
