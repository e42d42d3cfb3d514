//! Which of the nodes and cards that fit is best: [`gpu_migrate_model::score`] over the extender's slots.
//!
//! The scorer is computed again after every few hundred requests, beside the calls of the scheduler, and says of all nodes what it thinks
//! of the usual shapes before it is used. What it said about a node is remembered until the node's occupancy changes, so that a decision
//! over 5,000 nodes is 5,000 look-ups. CPU and memory are rounded, by a quarter at most, so that there are fewer states of nodes, fewer
//! shapes, and fewer changes.

use std::sync::Arc;

use arc_swap::ArcSwap;
use gpu_migrate_model::card::same_model;
use gpu_migrate_model::place::Constraints;
use gpu_migrate_model::score::{
    CardRequest, FreeCapacity, HostResources, Mix, ModelSet, ScoreCache, Scorer, ScoringStrategy, Shape,
};
use gpu_migrate_model::units::CardIndex;
use parking_lot::{Mutex, RwLock};

use crate::state::node::{Inventory, NodeOccupancy};
use crate::state::pod::PodFacts;
use crate::state::{Cluster, NodeId, NodeInfo};

/// Requests after which the scorer is computed again; fewer while it knows fewer.
const STALE_AFTER: u32 = 500;
/// Of the usual shapes so many are looked at before a new scorer is used.
const USUAL: usize = 16;
/// Nodes looked at in one of the cluster's locks; and where what is left on them is copied.
const NODES_PER_LOCK: usize = 512;
const COPIES_PER_LOCK: usize = 128;

/// Lets one look at the cluster, under its lock.
pub trait Read: Fn(&mut dyn FnMut(&Cluster)) {}
impl<F: Fn(&mut dyn FnMut(&Cluster))> Read for F {}

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
        let shape = Shape { host: pod.host.rounded_up(), ..Shape::of(pod.ask.as_ref().ok()?)? };
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

    fn capacity(
        &self,
        occupancy: &NodeOccupancy,
        inventory: &Inventory,
        host: HostResources,
    ) -> FreeCapacity {
        let cards = occupancy.for_shares(inventory);
        let mut capacity = FreeCapacity::of(&cards, occupancy.unattributed, host);
        for (card, of) in capacity.cards.iter_mut().zip(inventory.cards.iter()) {
            card.models = self.of_card(&of.model);
        }
        capacity
    }
}

fn plain(host: HostResources) -> Shape {
    Shape { host: host.rounded_up(), ..Shape::cards(CardRequest::Nothing) }
}

/// Models that have a number of their own.
const MODELS: u32 = 63;

/// Nodes that stand for all when a scorer is computed.
const SAMPLE: usize = 256;

#[derive(Debug, Default)]
struct Requests {
    mix: Mix,
    /// Counted until the scorer is to be worked out again; `None`: it never was.
    left: Option<u32>,
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
            requests.left = requests.left.map(|left| left.saturating_sub(1));
        }
    }

    /// Counts a pod without cards that was placed on a node with cards.
    pub fn count_plain(&self, host: HostResources) {
        if self.needs_mix() {
            self.mix.lock().mix.count(plain(host));
        }
    }

    /// Computes the scorer again where enough was asked for since. The first time, the pods that are there are the mix.
    pub fn refresh(&self, read: impl Read) {
        let left = self.mix.lock().left;
        if !self.needs_mix() || left.is_some_and(|left| left > 0) {
            return;
        }
        if left.is_none() {
            // Nobody asks yet.
            let mut shapes = Vec::new();
            read(&mut |cluster| {
                shapes.extend(cluster.pods().filter_map(|pod| self.models.shape(pod)));
                shapes.extend(cluster.plain_on_cards().map(plain));
            });
            let mut requests = self.mix.lock();
            shapes.into_iter().for_each(|shape| requests.mix.count(shape));
        }
        let mix = {
            let mut requests = self.mix.lock();
            // After as many as are known, at first.
            requests.left = Some(requests.mix.weight().clamp(1.0, f64::from(STALE_AFTER)) as u32);
            requests.mix.clone()
        };
        let (mut fleet, mut ids) = (Vec::new(), 0);
        read(&mut |cluster| {
            ids = cluster.node_id_count();
            if self.strategy == ScoringStrategy::Lookahead {
                fleet = self.fleet(cluster);
            }
        });
        let scorer = Scorer::new(self.strategy, &mix, &fleet);
        let mut cache = ScoreCache::new(scorer.clone(), ids);
        let shapes = mix.parts().into_iter().map(|(shape, _)| shape);
        let asking = shapes.filter(|shape| shape.request != CardRequest::Nothing);
        let usual: Vec<Shape> = asking.take(USUAL).collect();
        for part in (0..ids).step_by(COPIES_PER_LOCK) {
            let here: Vec<NodeId> = (part..ids.min(part + COPIES_PER_LOCK)).collect();
            let capacities = self.capacities(&here, &read);
            for shape in &usual {
                let mut row = cache.row(shape);
                for (id, generation, capacity) in capacities.iter().flatten() {
                    row.choose(*id, *generation, || Some(capacity.clone()));
                }
            }
        }
        *self.cache.lock() = cache;
        self.scorer.store(Arc::new(scorer));
    }

    /// What is left on each of these nodes.
    fn capacities(&self, ids: &[NodeId], read: &impl Read) -> Vec<Option<(NodeId, u64, FreeCapacity)>> {
        let mut all = Vec::with_capacity(ids.len());
        for part in ids.chunks(COPIES_PER_LOCK) {
            read(&mut |cluster| {
                all.extend(part.iter().map(|id| {
                    let info = cluster.node_at(*id)?;
                    let capacity = self.models.capacity(&info.occupancy, &info.inventory, info.host);
                    Some((*id, info.generation, capacity))
                }));
            });
        }
        all
    }

    /// How good each of these nodes is for `pod`; only comparable among themselves. Higher is better; `None`: it is not known, or the
    /// pod does not fit.
    pub fn scores(&self, pod: &PodFacts, names: &[&str], read: impl Read) -> Vec<Option<f64>> {
        let shape = match self.strategy {
            // No memory is faster than counting eight cards.
            ScoringStrategy::Binpack | ScoringStrategy::Spread => None,
            _ => self.models.shape(pod),
        };
        let left = |info: &NodeInfo| match self.strategy {
            ScoringStrategy::Spread => f64::from(info.capacity.cores_left()),
            _ => -f64::from(info.capacity.cores_left()),
        };
        let mut scores = Vec::with_capacity(names.len());
        for part in names.chunks(NODES_PER_LOCK) {
            let Some(shape) = &shape else {
                read(&mut |cluster| scores.extend(part.iter().map(|name| cluster.node(name).map(left))));
                continue;
            };
            let mut nodes = Vec::with_capacity(part.len());
            read(&mut |cluster| {
                let generation = |(id, info): (NodeId, &NodeInfo)| (id, info.generation);
                nodes.extend(part.iter().map(|name| cluster.node_with_id(name).map(generation)));
            });
            self.cached_scores(shape, &nodes, &read, &mut scores);
        }
        scores
    }

    /// Adds the scores of nodes at their generations.
    fn cached_scores(
        &self,
        shape: &Shape,
        nodes: &[Option<(NodeId, u64)>],
        read: &impl Read,
        scores: &mut Vec<Option<f64>>,
    ) {
        let (mut changed, mut places) = (Vec::new(), Vec::new());
        {
            let mut cache = self.cache.lock();
            let row = cache.row(shape);
            for node in nodes {
                let known = node.map(|(id, generation)| row.known(id, generation));
                if let (Some((id, _)), Some(None)) = (node, known) {
                    changed.push(*id);
                    places.push(scores.len());
                }
                scores.push(known.flatten().flatten().map(|choice| choice.score));
            }
        }
        if changed.is_empty() {
            return;
        }
        let capacities = self.capacities(&changed, read);
        let mut cache = self.cache.lock();
        let mut row = cache.row(shape);
        for (at, capacity) in places.into_iter().zip(capacities) {
            scores[at] = capacity
                .and_then(|(id, generation, capacity)| row.choose(id, generation, || Some(capacity)))
                .map(|choice| choice.score);
        }
    }

    /// The card that a share should go to, where the order says something else than the model's evaluators.
    #[must_use]
    pub fn card(&self, occupancy: &NodeOccupancy, info: &NodeInfo, pod: &PodFacts) -> Option<CardIndex> {
        let models = pod.constraints.models.clone();
        if !self.needs_mix() || pod.constraints != (Constraints { models, ..Constraints::default() }) {
            return None;
        }
        let shape = self.models.shape(pod)?;
        self.scorer.load().choose(&self.models.capacity(occupancy, &info.inventory, info.host), &shape)?.card
    }

    /// Nodes with cards as they are when empty, a sample of them: each kind as often as it is in the cluster.
    fn fleet(&self, cluster: &Cluster) -> Vec<FreeCapacity> {
        let with_cards = || cluster.nodes().filter(|info| !info.inventory.cards.is_empty());
        let step = with_cards().count().div_ceil(SAMPLE).max(1);
        let empty = |info: &NodeInfo| {
            let host = info.facts.as_ref().map_or(HostResources::UNLIMITED, |facts| facts.host);
            let mut empty = self.models.capacity(&info.occupancy, &info.inventory, host);
            for card in &mut empty.cards {
                (card.cores, card.blocks, card.free) = (100, card.of_blocks, true);
            }
            empty
        };
        with_cards().step_by(step).map(empty).collect()
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
    if let Some(best) = best(raw, name) {
        scores[best] = 10;
    }
    scores
}

/// The place of the best score; of equals, the one whose name comes first.
pub fn best<'a>(raw: &[Option<f64>], name: impl Fn(usize) -> &'a str) -> Option<usize> {
    let known = (0..raw.len()).filter_map(|at| Some((at, raw[at]?)));
    let order = |(one, score): &(usize, f64), (other, than): &(usize, f64)| {
        score.total_cmp(than).then_with(|| name(*other).cmp(name(*one)))
    };
    known.max_by(order).map(|(at, _)| at)
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
