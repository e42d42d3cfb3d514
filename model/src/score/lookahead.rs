//! Lookahead: put a request where it costs the future least.
//!
//! What a node is *worth* is the compute that requests like the recent ones would still come to use on it. To estimate it, a few
//! **futures** are drawn from the cluster's own mix of requests, once for all nodes: sequences of shapes in a mixed order. Each
//! future is played on a copy of the node's capacity, every request put on the fullest card that it fits on and skipped where it
//! does not fit, and the mean of the cores used in the end is the worth. A request goes where the worth after it, less the
//! worth before, is greatest.
//!
//! **Why not FGD alone.** FGD asks of each shape by itself whether it could use what is idle. It sees no difference between
//! a node with CPU for one more request and a node with CPU for ten, and none between a remainder that two shapes fill together
//! and one that neither fills. Playing the futures sees both, for CPU, memory, blocks and cores alike.
//!
//! **What is kept free.** Requests for several cards are rare and so hardly appear in a future, but they find no place once
//! every node has been broken into. So a node that could take one is worth more, in proportion to how much of such a request
//! falls to each node of the fleet that could take it when empty: [`KEEP`] times part of all cores that are asked for ×
//! (nodes ÷ nodes that could). Where few nodes could, those are worth more.
//!
//! Likewise a request that **names models** can go nowhere else, and one that names none anywhere. So futures of those requests alone are
//! played on the cards that they name, as far as they are going to ask for these while the whole fleet's cores are asked for, and
//! [`RESERVE`] times that: whole cards must be left for those that ask for whole cards. What they use is worth more, by [`NAMED`].
//!
//! **Pods without cards** go where CPU and memory are to spare, as long as the fleet has enough of both for all. Where it has not, they take
//! it from the others: then they come in the futures with [`PLAIN`] of their part. And as the futures end with every core used, early
//! refusals cost them nothing: what FGD measures, the part of all requests that could use what is left, counts a little too
//! ([`OPTIONS`]). It alone would open a card rather than leave a remainder on another; a free card serves whoever comes ([`WHOLE`]).
//!
//! **Measured** on the openb trace and on what the paper's other workloads are like, at 90, 100 and 130 % of arrival: nowhere behind FGD
//! by more than 0.1 (the tables are in `docs/benchmarks.md`). In a prototype, neither the number of futures (8 or 16), their
//! length (60 or 100), nor the seed that they were drawn with moved the last figure by more than 0.5. Each constant buys fewer refusals
//! at 90 %: without [`KEEP`] requests for 8 cards are refused early, without [`NAMED`] those that name a model, without [`OPTIONS`] large
//! shares, without [`PLAIN`] whatever needs CPU.

use super::capacity::{CardFreeCapacity, CardRequest, FreeCapacity, ModelSet, Shape};
use super::fragment::Fragmentation;
use super::host::HostResources;
use super::mix::Mix;

/// How many futures are played.
pub const FUTURES: usize = 8;
/// Requests in a future: more than an empty 8-card node takes.
pub const LENGTH: usize = 60;
/// For how many cores of requests a node falls free for a request of several cards is planned ahead.
pub const KEEP: f64 = 200.0;
/// What a core is worth, beside itself, to requests that can go on no card but one like it.
pub const NAMED: f64 = 1.5;
/// How many times what such requests are going to ask for is reserved for them.
pub const RESERVE: f64 = 4.0;
/// What a core is worth, beside itself, to every request that could use it at all.
pub const OPTIONS: f64 = 0.15;
/// What it is worth that a card is free: more than [`OPTIONS`] of the remainder that a share leaves on a card that it fills.
pub const WHOLE: f64 = 5.0;
/// How many of the pods without cards a node has to expect where CPU or memory are scarce, of those that come to one.
pub const PLAIN: f64 = 0.6;

/// The futures, and what is kept free for requests of several cards.
#[derive(Clone, Debug, Default)]
pub struct LookaheadScorer {
    futures: Vec<Vec<Shape>>,
    keep: Vec<(Shape, f64)>,
    named: Vec<Named>,
    options: Fragmentation,
}

/// Requests that name these models, and how many cores of each card of them are reserved for them.
#[derive(Clone, Debug)]
struct Named {
    models: ModelSet,
    futures: Vec<Vec<Shape>>,
    cores_per_card: f64,
}

impl LookaheadScorer {
    /// Draws the futures from a mix; the same mix gives the same futures. `fleet` are the nodes as they are when empty, for
    /// what is kept free; without any, every node is taken to be one that could.
    #[must_use]
    pub fn new(mix: &Mix, fleet: &[FreeCapacity]) -> Self {
        let parts = mix.parts();
        let is_plain = |shape: &Shape| shape.request == CardRequest::Nothing;
        let asking: Vec<(Shape, f64)> = parts.iter().filter(|(shape, _)| !is_plain(shape)).copied().collect();
        let plain = if is_host_scarce(&parts, fleet) { PLAIN } else { 0.0 };
        let weigh =
            |&(shape, part): &(Shape, f64)| (shape, if is_plain(&shape) { part * plain } else { part });
        let expected: Vec<(Shape, f64)> = parts.iter().map(weigh).collect();
        let mean = asking.iter().map(cores).sum::<f64>() / asking.iter().map(|(_, part)| part).sum::<f64>();
        let keep = asking
            .iter()
            .filter(|(shape, _)| matches!(shape.request, CardRequest::Cards { count: 2.., .. }))
            .map(|&(shape, part)| (shape, KEEP / mean * cores(&(shape, part)) * scarcity(&shape, fleet)));
        Self {
            keep: keep.collect(),
            named: named(&asking, fleet),
            options: Fragmentation::new(mix),
            futures: if asking.is_empty() { Vec::new() } else { draw(&expected) },
        }
    }

    /// Cores that are still going to be used on this node, and what it is worth to keep it free.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // a few cards
    pub fn worth(&self, capacity: &FreeCapacity) -> f64 {
        if self.futures.is_empty() {
            return 0.0;
        }
        let kept: f64 =
            self.keep.iter().filter(|(shape, _)| capacity.fits(shape)).map(|(_, worth)| worth).sum();
        let used = mean_use(&self.futures, capacity, f64::INFINITY);
        let named: f64 = self.named.iter().map(|named| named.used(capacity)).sum();
        let usable = f64::from(capacity.cores()) - self.options.of(capacity);
        let free = capacity.cards.iter().filter(|card| card.free).count() as f64;
        kept + NAMED * named + OPTIONS * usable + WHOLE * free + used
    }
}

impl Named {
    /// Cores of this node that requests which can only go to such nodes are going to use.
    fn used(&self, capacity: &FreeCapacity) -> f64 {
        let cards = capacity.cards.iter().filter(|card| card.models.meets(self.models)).count();
        if cards == 0 {
            return 0.0;
        }
        mean_use(&self.futures, capacity, self.cores_per_card * cards as f64)
    }
}

/// Cores of the average request that fall to a shape.
fn cores((shape, part): &(Shape, f64)) -> f64 {
    part * f64::from(shape.request.cores())
}

/// The models that requests name, where the fleet is known. A request without a model can go anywhere and needs nothing kept.
fn named(asking: &[(Shape, f64)], fleet: &[FreeCapacity]) -> Vec<Named> {
    let cards = || fleet.iter().flat_map(|capacity| &capacity.cards);
    let all: f64 = asking.iter().map(cores).sum();
    let mut sets: Vec<ModelSet> =
        asking.iter().map(|(shape, _)| shape.models).filter(|models| *models != ModelSet::ANY).collect();
    sets.sort_unstable();
    sets.dedup();
    let of_set = |models: ModelSet| {
        let parts: Vec<(Shape, f64)> =
            asking.iter().filter(|(shape, _)| shape.models == models).copied().collect();
        let able = cards().filter(|card| card.models.meets(models)).count();
        let asked: f64 = parts.iter().map(cores).sum();
        // As much as the whole fleet has is asked for: so much of it of these cards.
        let cores_per_card = RESERVE * 100.0 * (asked / all) * cards().count() as f64 / able.max(1) as f64;
        let futures = draw(&parts);
        (able > 0).then_some(Named { models, futures, cores_per_card: cores_per_card.min(100.0) })
    };
    sets.into_iter().filter_map(of_set).collect()
}

/// Whether the fleet has less CPU or memory than is asked for together with all its cores.
fn is_host_scarce(parts: &[(Shape, f64)], fleet: &[FreeCapacity]) -> bool {
    let all_cores: f64 = fleet.iter().map(|capacity| f64::from(capacity.cores())).sum();
    let requests = all_cores / parts.iter().map(cores).sum::<f64>();
    let scarce = |of: fn(HostResources) -> u32| {
        if fleet.iter().any(|capacity| of(capacity.host) == u32::MAX) {
            return false;
        }
        let asked: f64 = parts.iter().map(|(shape, part)| part * f64::from(of(shape.host))).sum();
        asked * requests > fleet.iter().map(|capacity| f64::from(of(capacity.host))).sum()
    };
    scarce(|host| host.cpu_milli) || scarce(|host| host.memory_mib)
}

/// How many nodes there are to one that could take the shape.
#[allow(clippy::cast_precision_loss)] // a fleet has far fewer than 2^52 nodes
fn scarcity(shape: &Shape, fleet: &[FreeCapacity]) -> f64 {
    let able = fleet.iter().filter(|capacity| capacity.fits(shape)).count();
    if able == 0 { 1.0 } else { fleet.len() as f64 / able as f64 }
}

/// Each future has every shape as often as the mix has, up to rounding, which the futures spread among them; in an order of
/// its own.
#[allow(clippy::cast_precision_loss)] // indexes of a few thousand
fn draw(parts: &[(Shape, f64)]) -> Vec<Vec<Shape>> {
    let all: f64 = parts.iter().map(|(_, part)| part).sum();
    let Some(((last, _), _)) = parts.split_last() else { return Vec::new() };
    let mut order = Shuffle(1);
    let at = |mut mark: f64| {
        let found = parts.iter().find(|(_, part)| {
            mark -= part;
            mark <= 0.0
        });
        found.map_or(*last, |(shape, _)| *shape)
    };
    let future = |number: usize| {
        let offset = (number as f64 + 0.5) / FUTURES as f64;
        let mut shapes: Vec<Shape> =
            (0..LENGTH).map(|k| at((k as f64 + offset) / LENGTH as f64 * all)).collect();
        order.shuffle(&mut shapes);
        shapes
    };
    (0..FUTURES).map(future).collect()
}

/// Cores that the futures use on a node, in the mean.
#[allow(clippy::cast_precision_loss)] // a few
fn mean_use(futures: &[Vec<Shape>], capacity: &FreeCapacity, most: f64) -> f64 {
    let used: u32 = futures.iter().map(|future| play(future, capacity, most)).sum();
    f64::from(used) / futures.len().max(1) as f64
}

/// Cores that a future uses on a node, up to the request with which it has asked for `most` cores, by half or more of that request.
fn play(future: &[Shape], capacity: &FreeCapacity, most: f64) -> u32 {
    let before = capacity.cores();
    if before == 0 {
        return 0;
    }
    let mut cards = capacity.cards.clone();
    let mut host = capacity.host;
    let (mut left, mut asked) = (before, 0.0);
    for shape in future {
        let cores = shape.request.cores();
        if left == 0 || asked + f64::from(cores) / 2.0 > most {
            break;
        }
        asked += f64::from(cores);
        if host.has(shape.host) && put(&mut cards, shape) {
            host = host.less(shape.host);
            left = left.saturating_sub(cores);
        }
    }
    before - left
}

fn put(cards: &mut [CardFreeCapacity], shape: &Shape) -> bool {
    match shape.request {
        CardRequest::Nothing => true,
        CardRequest::Share { cores, blocks } => {
            let serving = cards.iter_mut().filter(|card| card.serves(shape.request, shape.models));
            let fullest = serving.min_by_key(|card| (card.cores, card.blocks));
            fullest.is_some_and(|card| {
                card.take(cores, blocks);
                true
            })
        }
        CardRequest::Cards { count, .. } => {
            let serves = |card: &&mut CardFreeCapacity| card.serves(shape.request, shape.models);
            let enough = cards.iter_mut().filter(serves).count() >= count as usize;
            if enough {
                cards.iter_mut().filter(serves).take(count as usize).for_each(CardFreeCapacity::take_whole);
            }
            enough
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014) for a shuffle that is the same everywhere: not a source of chance.
struct Shuffle(u64);

impl Shuffle {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let bound = last as u64 + 1;
            items.swap(last, usize::try_from(self.next() % bound).unwrap_or(last));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::testing::{capacity, cards, share};
    use proptest::prelude::*;

    #[test]
    fn a_node_is_worth_what_the_future_uses_of_it() {
        let halves = LookaheadScorer::new(&[share(50)].into_iter().collect(), &[]);
        // Halves could use 160 of the 200 cores, each by itself.
        assert!((halves.worth(&capacity(&[100, 60, 40])) - 150.0 - OPTIONS * 160.0 - WHOLE).abs() < 1e-9);
        let whole = LookaheadScorer::new(&[cards(1)].into_iter().collect(), &[]);
        assert!((whole.worth(&capacity(&[100, 60, 40])) - 100.0 - OPTIONS * 100.0 - WHOLE).abs() < 1e-9);
        assert!(whole.worth(&capacity(&[0, 0])).abs() < 1e-9);
    }

    #[test]
    fn cpu_for_one_is_worth_less_than_cpu_for_two() {
        let mut shape = share(50);
        shape.host.cpu_milli = 1_000;
        let lookahead = LookaheadScorer::new(&[shape].into_iter().collect(), &[]);
        let with_cpu =
            |cpu_milli| FreeCapacity { host: HostResources { cpu_milli, memory_mib: 0 }, ..capacity(&[100]) };
        let worth = |cpu_milli| lookahead.worth(&with_cpu(cpu_milli)) - WHOLE;
        assert!((worth(2_500) - 100.0 - OPTIONS * 100.0).abs() < 1e-9);
        assert!((worth(1_500) - 50.0 - OPTIONS * 100.0).abs() < 1e-9);
        assert!(worth(999).abs() < 1e-9);
    }

    #[test]
    fn a_node_that_few_could_replace_is_worth_more() {
        let mix: Mix = std::iter::repeat_n(share(50), 99).chain([cards(2)]).collect();
        let fleet = [capacity(&[100, 100]), capacity(&[100]), capacity(&[100]), capacity(&[100])];
        let worth = |fleet: &[FreeCapacity]| LookaheadScorer::new(&mix, fleet).worth(&capacity(&[100, 100]));
        // By hand: 1 of 100 requests × 200 of 51.5 cores × (4 nodes ÷ 1 that could − 1) × KEEP.
        assert!((worth(&fleet) - worth(&[]) - 0.01 * 200.0 / 51.5 * 3.0 * KEEP).abs() < 1e-9);
    }

    fn of_model(mut capacity: FreeCapacity, model: u32) -> FreeCapacity {
        capacity.cards.iter_mut().for_each(|card| card.models = ModelSet::only(model));
        capacity
    }

    /// Of ten requests one names a model that every tenth card is of: so much of those cards is for it.
    #[test]
    fn cards_of_a_model_that_requests_name_are_spared_as_far_as_they_are_going_to_be_asked_for() {
        let naming = Shape { models: ModelSet::only(0), ..share(50) };
        let cost = |named: usize| {
            let mix: Mix = std::iter::repeat_n(share(50), 10 - named)
                .chain(std::iter::repeat_n(naming, named))
                .collect();
            let fleet: Vec<_> = (0..10).map(|at| of_model(capacity(&[100]), u32::from(at > 0))).collect();
            let lookahead = LookaheadScorer::new(&mix, &fleet);
            // What half a card costs, on a card that is free.
            move |model| {
                let worth = |left: u16| lookahead.worth(&of_model(capacity(&[left]), model));
                worth(100) - worth(50)
            }
        };
        assert!((cost(0)(0) - cost(0)(1)).abs() < 1e-9, "nobody names it");
        assert!(cost(1)(0) > cost(1)(1) + NAMED * 49.0);
        let narrow: Vec<_> = (0..10).map(|at| of_model(capacity(&[100]), u32::from(at > 4))).collect();
        let mix: Mix = std::iter::repeat_n(share(50), 39).chain([naming]).collect();
        let lookahead = LookaheadScorer::new(&mix, &narrow);
        let worth = |left: u16| lookahead.worth(&of_model(capacity(&[left, left]), 0));
        // A fifth of a card is reserved: the first half of one is nobody's in particular.
        let cost = worth(100) - worth(50);
        assert!((cost - 2.0 * (50.0 * (1.0 + OPTIONS) + WHOLE)).abs() < 10.0, "{cost}");
    }

    #[test]
    fn futures_follow_the_mix_and_repeat() {
        let mix: Mix = [share(10), share(20), share(20), share(20)].into_iter().collect();
        let lookahead = LookaheadScorer::new(&mix, &[]);
        for future in &lookahead.futures {
            assert_eq!(future.iter().filter(|shape| **shape == share(10)).count(), LENGTH / 4);
        }
        assert_ne!(lookahead.futures[0], lookahead.futures[1]);
        assert_eq!(lookahead.futures, LookaheadScorer::new(&mix, &[]).futures);
        assert!(LookaheadScorer::new(&Mix::default(), &[]).worth(&capacity(&[100])).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn nothing_is_worth_more_than_what_is_left(
            left in prop::collection::vec(0_u16..=100, 0..9),
            mix in prop::collection::vec(1_u32..=100, 1..6),
        ) {
            let shapes = mix.into_iter().map(|cores| if cores == 100 { cards(1) } else { share(cores) });
            let capacity = capacity(&left);
            let worth = LookaheadScorer::new(&shapes.collect(), &[]).worth(&capacity);
            prop_assert!(worth >= -1e-9 && worth <= f64::from(capacity.cores()) * (1.0 + OPTIONS + WHOLE / 100.0) + 1e-9);
        }
    }
}
