//! Which of the places that fit is best: of the nodes, and of the cards of a node. One code for the scheduler extender and for the
//! simulation, which measures it.
//!
//! - [`Order::Binpack`]: the fullest node and card, as gpu-admission does.
//! - [`Order::BestFit`]: the least CPU and compute left.
//! - [`Order::Fragmentation`]: FGD, see [`fragment`].
//! - [`Order::Outlook`]: what the usual requests could still use, see [`outlook`]. The best one that we know.
//! - [`Order::Spread`]: the emptiest node.
//!
//! A [`Scorer`] looks at a [`Room`] and a [`Shape`]; [`Memo`] remembers what it said until the node changes. Merits compare
//! nodes for one shape and one scorer, nothing else. Equal merits mean that the caller's own order of nodes decides: keep that
//! order the same from call to call, so that the same nodes fill up first.

mod memo;
mod mix;
mod pack;
mod room;

pub mod fragment;
pub mod outlook;
#[cfg(test)]
mod testing;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use fragment::Fragmentation;
pub use memo::Memo;
pub use mix::Mix;
pub use outlook::Outlook;
pub use room::{CardRoom, Host, ModelSet, Room, Shape, Want};

use crate::units::CardIndex;

/// How places are compared.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Fill the fullest node and card.
    #[default]
    Binpack,
    /// Least CPU and compute left.
    BestFit,
    /// Least growth of what the usual requests cannot use: FGD as published.
    Fragmentation,
    /// Least loss of what the usual requests are still going to use.
    Outlook,
    /// Emptiest node first.
    Spread,
}

/// A place on a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The card for a share; `None` where the shape asks for whole cards, which topology chooses, or for none.
    pub card: Option<CardIndex>,
    /// How good it is; higher is better.
    pub merit: f64,
}

/// An order, with what it needs of the cluster's mix of requests worked out.
#[derive(Clone, Debug)]
pub struct Scorer {
    order: Order,
    fragmentation: Fragmentation,
    outlook: Outlook,
}

impl Scorer {
    /// Works out an order for a mix of requests. `fleet` are the nodes as they are when empty; only [`Outlook`] reads them. An
    /// order that needs the mix is [`Order::Binpack`] while the mix is empty.
    #[must_use]
    pub fn new(order: Order, mix: &Mix, fleet: &[Room]) -> Self {
        let needs_mix = matches!(order, Order::Fragmentation | Order::Outlook);
        let order = if needs_mix && mix.is_empty() { Order::Binpack } else { order };
        let fragmentation = match order {
            Order::Fragmentation => Fragmentation::new(mix),
            _ => Fragmentation::default(),
        };
        let outlook = if order == Order::Outlook { Outlook::new(mix, fleet) } else { Outlook::default() };
        Self { order, fragmentation, outlook }
    }

    /// What the merits of this node are reckoned from. It does not depend on the shape.
    #[must_use]
    pub fn base(&self, room: &Room) -> f64 {
        match self.order {
            Order::Binpack => pack::binpack(room),
            Order::Spread => pack::spread(room),
            Order::BestFit => 0.0,
            Order::Fragmentation => self.fragmentation.of(room),
            Order::Outlook => self.outlook.worth(room),
        }
    }

    /// The best place for a shape on a node; `None` if it does not fit.
    #[must_use]
    pub fn choose(&self, room: &Room, shape: &Shape) -> Option<Choice> {
        self.choose_from(self.base(room), room, shape)
    }

    /// As [`Scorer::choose`], with the node's [`Scorer::base`] at hand.
    #[must_use]
    pub fn choose_from(&self, base: f64, room: &Room, shape: &Shape) -> Option<Choice> {
        if !room.fits(shape) {
            return None;
        }
        let at = |card: Option<CardIndex>| {
            let mut after = room.clone();
            after.take(shape, card);
            Choice { card, merit: self.compare(base, &after) - self.tie(room, card) }
        };
        match (shape.want, self.order) {
            (Want::Nothing | Want::Cards { .. }, _) => Some(at(None)),
            (Want::Share { .. }, Order::Spread) => room
                .choices(shape)
                .max_by_key(|card| room.cards[card.position()].cores)
                .map(|card| at(Some(card))),
            (Want::Share { .. }, Order::Binpack | Order::BestFit) => {
                room.fullest(shape).map(|card| at(Some(card)))
            }
            (Want::Share { .. }, Order::Fragmentation | Order::Outlook) => {
                let choices = room.choices(shape).map(|card| at(Some(card)));
                choices.reduce(|best, other| if other.merit > best.merit { other } else { best })
            }
        }
    }

    /// How good any placement on a node is, by the room before and after it: for pods of several containers.
    #[must_use]
    pub fn merit(&self, before: &Room, after: &Room) -> f64 {
        self.compare(self.base(before), after)
    }

    /// Of places that cost the future the same, the fuller card, and then the fuller node. It is less than a difference in worth
    /// can be, a core in one of the futures.
    fn tie(&self, room: &Room, card: Option<CardIndex>) -> f64 {
        if self.order != Order::Outlook {
            return 0.0;
        }
        let card = card.map_or(0.0, |card| f64::from(room.cards[card.position()].cores));
        card * 1e-3 + f64::from(room.cores()) * 1e-6
    }

    fn compare(&self, base: f64, after: &Room) -> f64 {
        match self.order {
            Order::Binpack | Order::Spread => base,
            Order::BestFit => pack::best_fit(after),
            Order::Fragmentation => self.fragmentation.merit(base, after),
            Order::Outlook => self.outlook.worth(after) - base,
        }
    }
}

#[cfg(test)]
mod tests;
