//! What a scorer cached, until the node changes. A bind changes one node, so that the next decision over the whole cluster costs
//! a look-up per node and one score.
//!
//! Nodes with the same CPU, memory and cards left have the same [`Scorer::base`], in whatever order their cards are. What each such state
//! is worth is remembered too: where CPU and memory are not looked at, or rounded, there are few, and a shape that comes for the first
//! time mostly costs a look-up for each card that it could go to.

use std::collections::HashMap;

use ahash::RandomState;

use super::{Choice, FreeCapacity, Scorer, Shape};

/// Shapes that are remembered. When another comes, all are forgotten.
const SHAPES: usize = 256;
/// States of nodes that are remembered, likewise; 24 bytes each.
const STATES: usize = 1 << 16;

/// A scorer that remembers.
#[derive(Clone, Debug)]
pub struct ScoreCache {
    scorer: Scorer,
    nodes: usize,
    bases: Vec<Option<(u64, f64)>>,
    cached: HashMap<Shape, Vec<Option<Cached>>, RandomState>,
    states: States,
}

#[derive(Clone, Copy, Debug)]
struct Cached {
    version: u64,
    choice: Option<Choice>,
}

/// What nodes with the same cards left are worth. Of the states only a hash is kept: one that is taken for another costs a worse place
/// once in billions.
#[derive(Clone, Debug)]
struct States {
    hash: RandomState,
    bases: HashMap<u64, f64, RandomState>,
}

impl States {
    fn base(&mut self, scorer: &Scorer, capacity: &FreeCapacity) -> f64 {
        let mut sorted = capacity.clone();
        sorted.cards.sort_unstable();
        if self.bases.len() >= STATES {
            self.bases.clear();
        }
        *self.bases.entry(self.hash.hash_one(&sorted)).or_insert_with(|| scorer.base(&sorted))
    }
}

impl ScoreCache {
    /// Remembers for nodes numbered from 0; there are about `nodes`. A new scorer needs a new cache.
    #[must_use]
    pub fn new(scorer: Scorer, nodes: usize) -> Self {
        // The same on every run.
        let hash = RandomState::with_seeds(1, 2, 3, 4);
        let states = States { bases: HashMap::with_hasher(hash.clone()), hash: hash.clone() };
        Self { scorer, nodes, bases: vec![None; nodes], cached: HashMap::with_hasher(hash), states }
    }

    /// The places of one shape on all nodes.
    pub fn row(&mut self, shape: &Shape) -> Row<'_> {
        if self.cached.len() >= SHAPES && !self.cached.contains_key(shape) {
            self.cached.clear();
        }
        let cached = self.cached.entry(*shape).or_insert_with(|| vec![None; self.nodes]);
        let (scorer, bases, states) = (&self.scorer, &mut self.bases, &mut self.states);
        Row { scorer, bases, states, cached, shape: *shape }
    }
}

/// What was cached about one shape.
#[derive(Debug)]
pub struct Row<'a> {
    scorer: &'a Scorer,
    bases: &'a mut Vec<Option<(u64, f64)>>,
    states: &'a mut States,
    cached: &'a mut Vec<Option<Cached>>,
    shape: Shape,
}

impl Row<'_> {
    /// What is known of a node at this version: its place, or that it has none. `None`: nothing.
    #[must_use]
    pub fn known(&self, node: usize, version: u64) -> Option<Option<Choice>> {
        let cached = self.cached.get(node)?.filter(|cached| cached.version == version)?;
        Some(cached.choice)
    }

    /// As [`Scorer::choose`]. `version` must change whenever the node's capacity does; `capacity` is asked only if it has, and says
    /// `None` where the pod must not go for reasons that the capacity does not show.
    pub fn choose(
        &mut self,
        node: usize,
        version: u64,
        capacity: impl FnOnce() -> Option<FreeCapacity>,
    ) -> Option<Choice> {
        if let Some(known) = self.known(node, version) {
            return known;
        }
        if self.bases.len() <= node {
            self.bases.resize(node + 1, None);
        }
        if self.cached.len() <= node {
            self.cached.resize(node + 1, None);
        }
        let (scorer, states) = (self.scorer, &mut *self.states);
        let choice = capacity().filter(|capacity| capacity.has_cards_for(&self.shape)).and_then(|capacity| {
            let base = match self.bases[node] {
                Some((known, base)) if known == version => base,
                _ => states.base(scorer, &capacity),
            };
            self.bases[node] = Some((version, base));
            scorer.choose_by(|after| states.base(scorer, after), base, &capacity, &self.shape)
        });
        self.cached[node] = Some(Cached { version, choice });
        choice
    }
}
