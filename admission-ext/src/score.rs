//! Which of the nodes and cards that fit is best: [`gpu_migrate_model::score`] over the extender's slots.
//!
//! The scorer is computed again after every few hundred requests. What it said about a node is remembered until the
//! node's occupancy changes, so that a decision over 5,000 nodes is 5,000 look-ups.

use std::sync::Arc;

use arc_swap::ArcSwap;
use gpu_migrate_model::card::same_model;
use gpu_migrate_model::place::Constraints;
use gpu_migrate_model::score::{
    FreeCapacity, HostResources, Mix, ModelSet, ScoreCache, Scorer, ScoringStrategy, Shape,
};
use gpu_migrate_model::units::CardIndex;
use parking_lot::{Mutex, RwLock};

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
    models: Models,
    scorer: ArcSwap<Scorer>,
    cache: Mutex<ScoreCache>,
}

/// Numbers for the card models that pods have named. A model that nobody names has none, and its cards are like any others'.
#[derive(Debug, Default)]
struct Models(RwLock<Vec<String>>);

impl Models {
    /// The number of a model, for the first 64 that are named.
    fn number(&self, name: &str) -> Option<u32> {
        let known = self.0.read();
        known.iter().position(|known| same_model(known, name)).and_then(|at| u32::try_from(at).ok())
    }

    fn of_card(&self, name: &str) -> ModelSet {
        match self.number(name) {
            Some(number) => ModelSet::only(number),
            None if self.0.read().is_empty() => ModelSet::ANY,
            None => ModelSet::only(MODELS),
        }
    }

    /// What a pod asks for, with the models that it names.
    fn shape(&self, pod: &PodFacts) -> Option<Shape> {
        let shape = Shape::of(pod.ask.as_ref().ok()?)?;
        let names = &pod.constraints.models;
        if names.is_empty() {
            return Some(shape);
        }
        for name in names {
            let mut known = self.0.write();
            if known.len() < MODELS as usize && !known.iter().any(|known| same_model(known, name)) {
                known.push(name.clone());
            }
        }
        let set = |set: ModelSet, name: &String| set.with(self.of_card(name));
        Some(Shape { models: names.iter().fold(ModelSet::NONE, set), ..shape })
    }

    fn capacity(&self, occupancy: &NodeOccupancy, inventory: &Inventory) -> FreeCapacity {
        let cards = occupancy.for_shares(inventory);
        let mut capacity = FreeCapacity::of(&cards, occupancy.unattributed, HostResources::UNLIMITED);
        for (card, of) in capacity.cards.iter_mut().zip(&inventory.cards) {
            card.models = self.of_card(&of.model);
        }
        capacity
    }
}

/// Models that have a number of their own.
const MODELS: u32 = 63;

/// Nodes that stand for all when a scorer is computed.
const SAMPLE: usize = 256;

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
            models: Models::default(),
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
        if let Some(shape) = self.models.shape(pod) {
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
            cluster
                .pods()
                .filter_map(|pod| self.models.shape(pod))
                .for_each(|shape| requests.mix.count(shape));
        }
        requests.since = Some(0);
        let fleet: Vec<FreeCapacity> =
            if self.strategy == ScoringStrategy::Lookahead { self.fleet(cluster) } else { Vec::new() };
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
        match (self.strategy, self.models.shape(pod)) {
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
                            Some(self.models.capacity(&info.occupancy, &info.inventory))
                        });
                        // A node that came after the cache was made.
                        choice
                            .or_else(|| {
                                scorer.choose(&self.models.capacity(&info.occupancy, &info.inventory), &shape)
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
        let models = pod.constraints.models.clone();
        if !self.needs_mix() || pod.constraints != (Constraints { models, ..Constraints::default() }) {
            return None;
        }
        let shape = self.models.shape(pod)?;
        self.scorer.load().choose(&self.models.capacity(occupancy, inventory), &shape)?.card
    }

    /// Nodes as they are when empty, a sample of them: each kind as often as it is in the cluster.
    fn fleet(&self, cluster: &Cluster) -> Vec<FreeCapacity> {
        let step = cluster.node_count().div_ceil(SAMPLE).max(1);
        let empty = |info: &NodeInfo| {
            let mut empty = self.models.capacity(&info.occupancy, &info.inventory);
            for card in &mut empty.cards {
                (card.cores, card.blocks, card.free) = (100, card.of_blocks, true);
            }
            empty
        };
        cluster.nodes().step_by(step).map(empty).collect()
    }
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
