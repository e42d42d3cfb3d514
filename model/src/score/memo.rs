//! What a scorer said, until the node changes. A bind changes one node, so that the next decision over the whole cluster costs
//! a look-up per node and one score.

use std::collections::HashMap;

use super::{Choice, Room, Scorer, Shape};

/// Shapes that are remembered. When another comes, all are forgotten.
const SHAPES: usize = 256;

/// A scorer that remembers.
#[derive(Clone, Debug)]
pub struct Memo {
    scorer: Scorer,
    nodes: usize,
    bases: Vec<Option<(u64, f64)>>,
    said: HashMap<Shape, Vec<Option<Said>>>,
}

#[derive(Clone, Copy, Debug)]
struct Said {
    version: u64,
    choice: Option<Choice>,
}

impl Memo {
    /// Remembers for nodes numbered from 0 to `nodes - 1`. A new scorer needs a new memo.
    #[must_use]
    pub fn new(scorer: Scorer, nodes: usize) -> Self {
        Self { scorer, nodes, bases: vec![None; nodes], said: HashMap::new() }
    }

    /// The scorer.
    #[must_use]
    pub fn scorer(&self) -> &Scorer {
        &self.scorer
    }

    /// The places of one shape on all nodes.
    pub fn row(&mut self, shape: &Shape) -> Row<'_> {
        if self.said.len() >= SHAPES && !self.said.contains_key(shape) {
            self.said.clear();
        }
        let said = self.said.entry(*shape).or_insert_with(|| vec![None; self.nodes]);
        Row { scorer: &self.scorer, bases: &mut self.bases, said, shape: *shape }
    }
}

/// What was said about one shape.
#[derive(Debug)]
pub struct Row<'a> {
    scorer: &'a Scorer,
    bases: &'a mut [Option<(u64, f64)>],
    said: &'a mut [Option<Said>],
    shape: Shape,
}

impl Row<'_> {
    /// As [`Scorer::choose`]. `version` must change whenever the node's room does; `room` is asked only if it has, and says
    /// `None` where the pod must not go for reasons that the room does not show.
    ///
    /// A node number that the memo was not made for has no place.
    pub fn choose(
        &mut self,
        node: usize,
        version: u64,
        room: impl FnOnce() -> Option<Room>,
    ) -> Option<Choice> {
        let slot = self.said.get_mut(node)?;
        if let Some(said) = slot.filter(|said| said.version == version) {
            return said.choice;
        }
        let choice = room().filter(|room| room.fits(&self.shape)).and_then(|room| {
            let base = match self.bases[node] {
                Some((known, base)) if known == version => base,
                _ => self.scorer.base(&room),
            };
            self.bases[node] = Some((version, base));
            self.scorer.choose_from(base, &room, &self.shape)
        });
        *slot = Some(Said { version, choice });
        choice
    }
}
