//! What a scorer cached, until the node changes. A bind changes one node, so that the next decision over the whole cluster costs
//! a look-up per node and one score.

use std::collections::HashMap;

use super::{Choice, FreeCapacity, Scorer, Shape};

/// Shapes that are remembered. When another comes, all are forgotten.
const SHAPES: usize = 256;

/// A scorer that remembers.
#[derive(Clone, Debug)]
pub struct ScoreCache {
    scorer: Scorer,
    nodes: usize,
    bases: Vec<Option<(u64, f64)>>,
    cached: HashMap<Shape, Vec<Option<Cached>>>,
}

#[derive(Clone, Copy, Debug)]
struct Cached {
    version: u64,
    choice: Option<Choice>,
}

impl ScoreCache {
    /// Remembers for nodes numbered from 0 to `nodes - 1`. A new scorer needs a new cache.
    #[must_use]
    pub fn new(scorer: Scorer, nodes: usize) -> Self {
        Self { scorer, nodes, bases: vec![None; nodes], cached: HashMap::new() }
    }

    /// The scorer.
    #[must_use]
    pub fn scorer(&self) -> &Scorer {
        &self.scorer
    }

    /// The places of one shape on all nodes.
    pub fn row(&mut self, shape: &Shape) -> Row<'_> {
        if self.cached.len() >= SHAPES && !self.cached.contains_key(shape) {
            self.cached.clear();
        }
        let cached = self.cached.entry(*shape).or_insert_with(|| vec![None; self.nodes]);
        Row { scorer: &self.scorer, bases: &mut self.bases, cached, shape: *shape }
    }
}

/// What was cached about one shape.
#[derive(Debug)]
pub struct Row<'a> {
    scorer: &'a Scorer,
    bases: &'a mut [Option<(u64, f64)>],
    cached: &'a mut [Option<Cached>],
    shape: Shape,
}

impl Row<'_> {
    /// As [`Scorer::choose`]. `version` must change whenever the node's capacity does; `capacity` is asked only if it has, and says
    /// `None` where the pod must not go for reasons that the capacity does not show.
    ///
    /// A node number that the cache was not made for has no place.
    pub fn choose(
        &mut self,
        node: usize,
        version: u64,
        capacity: impl FnOnce() -> Option<FreeCapacity>,
    ) -> Option<Choice> {
        let slot = self.cached.get_mut(node)?;
        if let Some(cached) = slot.filter(|cached| cached.version == version) {
            return cached.choice;
        }
        let choice = capacity().filter(|capacity| capacity.fits(&self.shape)).and_then(|capacity| {
            let base = match self.bases[node] {
                Some((known, base)) if known == version => base,
                _ => self.scorer.base(&capacity),
            };
            self.bases[node] = Some((version, base));
            self.scorer.choose_from(base, &capacity, &self.shape)
        });
        *slot = Some(Cached { version, choice });
        choice
    }
}
