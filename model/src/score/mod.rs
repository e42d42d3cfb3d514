//! Which of the places that fit is best: of the nodes, and of the cards of a node. One code for the scheduler extender and for the
//! simulation, which measures it.
//!
//! - [`ScoringStrategy::Binpack`]: the fullest node and card, as gpu-admission does.
//! - [`ScoringStrategy::BestFit`]: the least CPU and compute left.
//! - [`ScoringStrategy::Fragmentation`]: FGD, see [`fragment`].
//! - [`ScoringStrategy::Lookahead`]: what the usual requests could still use, see [`lookahead`]. The best one that we know.
//! - [`ScoringStrategy::Spread`]: the emptiest node.
//!
//! A [`Scorer`] looks at a [`FreeCapacity`] and a [`Shape`]; [`ScoreCache`] remembers what it said until the node changes. Scores compare
//! nodes for one shape and one scorer, nothing else. Equal scores mean that the caller's own order of nodes decides: keep that
//! order the same from call to call, so that the same nodes fill up first.

mod cache;
mod capacity;
mod host;
mod mix;
mod pack;

pub mod fragment;
pub mod lookahead;
#[cfg(test)]
mod testing;

pub use cache::ScoreCache;
pub use capacity::{CardFreeCapacity, CardRequest, FreeCapacity, ModelSet, Shape};
pub use fragment::Fragmentation;
pub use host::{HostResources, Resources};
pub use lookahead::LookaheadScorer;
pub use mix::Mix;

use crate::units::CardIndex;

/// How nodes and cards that fit are compared. The texts are the `--help` of the commands that take one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum ScoringStrategy {
    /// Fill the fullest node and card, as gpu-admission does
    Binpack,
    /// Least CPU and compute left
    BestFit,
    /// Least growth of what the usual requests cannot use (FGD)
    Fragmentation,
    /// Least loss of what the usual requests are still going to use
    #[default]
    Lookahead,
    /// Emptiest node first
    Spread,
}

/// A place on a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The card for a share; `None` where the shape asks for whole cards, which topology chooses, or for none.
    pub card: Option<CardIndex>,
    /// How good it is; higher is better.
    pub score: f64,
}

/// An strategy, with what it needs of the cluster's mix of requests worked out.
#[derive(Clone, Debug)]
pub struct Scorer {
    strategy: ScoringStrategy,
    fragmentation: Fragmentation,
    lookahead: LookaheadScorer,
}

impl Scorer {
    /// Works out an order for a mix of requests. `fleet` are the nodes as they are when empty; only [`LookaheadScorer`] reads them. An
    /// order that needs the mix is [`ScoringStrategy::Binpack`] while the mix is empty.
    #[must_use]
    pub fn new(strategy: ScoringStrategy, mix: &Mix, fleet: &[FreeCapacity]) -> Self {
        let needs_mix = matches!(strategy, ScoringStrategy::Fragmentation | ScoringStrategy::Lookahead);
        let strategy = if needs_mix && mix.is_empty() { ScoringStrategy::Binpack } else { strategy };
        let fragmentation = match strategy {
            ScoringStrategy::Fragmentation => Fragmentation::new(mix),
            _ => Fragmentation::default(),
        };
        let lookahead = if strategy == ScoringStrategy::Lookahead {
            LookaheadScorer::new(mix, fleet)
        } else {
            LookaheadScorer::default()
        };
        Self { strategy, fragmentation, lookahead }
    }

    /// What the scores of this node are reckoned from. It does not depend on the shape.
    #[must_use]
    pub fn base(&self, capacity: &FreeCapacity) -> f64 {
        match self.strategy {
            ScoringStrategy::Binpack => pack::binpack(capacity),
            ScoringStrategy::Spread => pack::spread(capacity),
            ScoringStrategy::BestFit => 0.0,
            ScoringStrategy::Fragmentation => self.fragmentation.of(capacity),
            ScoringStrategy::Lookahead => self.lookahead.worth(capacity),
        }
    }

    /// The best place for a shape on a node; `None` if it does not fit on the cards. Whether CPU and memory are enough is the
    /// caller's to say, who may know them better: where they are not, none of them is left afterwards.
    #[must_use]
    pub fn choose(&self, capacity: &FreeCapacity, shape: &Shape) -> Option<Choice> {
        self.choose_by(|capacity| self.base(capacity), self.base(capacity), capacity, shape)
    }

    /// As [`Scorer::choose`], with what says [`Scorer::base`] of what is left, and the node's own at hand.
    fn choose_by(
        &self,
        mut base_of: impl FnMut(&FreeCapacity) -> f64,
        base: f64,
        capacity: &FreeCapacity,
        shape: &Shape,
    ) -> Option<Choice> {
        if !capacity.has_cards_for(shape) {
            return None;
        }
        let mut at = |card: Option<CardIndex>| {
            let mut after = capacity.clone();
            after.take(shape, card);
            let score = self.compare(base, &after, &mut base_of) - self.tie(capacity, card);
            Choice { card, score }
        };
        match (shape.request, self.strategy) {
            (CardRequest::Nothing | CardRequest::Cards { .. }, _) => Some(at(None)),
            (CardRequest::Share { .. }, ScoringStrategy::Spread) => capacity
                .choices(shape)
                .max_by_key(|card| capacity.cards[card.position()].cores)
                .map(|card| at(Some(card))),
            (CardRequest::Share { .. }, ScoringStrategy::Binpack | ScoringStrategy::BestFit) => {
                capacity.fullest(shape).map(|card| at(Some(card)))
            }
            (CardRequest::Share { .. }, ScoringStrategy::Fragmentation | ScoringStrategy::Lookahead) => {
                let choices = capacity.choices(shape).map(|card| at(Some(card)));
                choices.reduce(|best, other| if other.score > best.score { other } else { best })
            }
        }
    }

    /// How good any placement on a node is, by the capacity before and after it: for pods of several containers.
    #[must_use]
    pub fn score(&self, before: &FreeCapacity, after: &FreeCapacity) -> f64 {
        self.compare(self.base(before), after, &mut |after| self.base(after))
    }

    /// Of places that cost the future the same, the fuller card, and then the fuller node. It is less than a difference in worth
    /// can be, a core in one of the futures.
    fn tie(&self, capacity: &FreeCapacity, card: Option<CardIndex>) -> f64 {
        if self.strategy != ScoringStrategy::Lookahead {
            return 0.0;
        }
        let card = card.map_or(0.0, |card| f64::from(capacity.cards[card.position()].cores));
        card * 1e-3 + f64::from(capacity.cores()) * 1e-6
    }

    fn compare(
        &self,
        base: f64,
        after: &FreeCapacity,
        base_of: &mut impl FnMut(&FreeCapacity) -> f64,
    ) -> f64 {
        match self.strategy {
            ScoringStrategy::Binpack | ScoringStrategy::Spread => base,
            ScoringStrategy::BestFit => pack::best_fit(after),
            ScoringStrategy::Fragmentation => fragment::score(base, base_of(after)),
            ScoringStrategy::Lookahead => base_of(after) - base,
        }
    }
}

#[cfg(test)]
mod tests;
