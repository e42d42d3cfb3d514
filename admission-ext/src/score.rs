//! Which of the nodes and cards that fit is best.
//!
//! - **binpack**, as gpu-admission sorts (`pkg/predicate/gpu_predicate.go`): the node with least left that fits.
//! - **fragmentation**, after FGD ("Beware of Fragmentation", USENIX ATC '23): the node and card where the remainder
//!   that the usual mix of requests cannot use grows least.
//! - **spread**: the emptiest node.
//!
//! For one card FGD needs no sums over the node: what a request of class `m` cannot use on a node is `S − R(m)`, all that
//! is left less what is left on the cards that `m` fits on. Taking `d` cores of a card with `r` left changes that by
//! `−d + [m fit before]·r − [m fits after]·(r − d)`. So growth is a property of the card, and costs one look per class.

use std::sync::Arc;

use gpu_migrate_model::units::{Blocks, Cores};
use serde::{Deserialize, Serialize};

use crate::state::room::{Glance, Room, Rooms};

/// How nodes and cards are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Fill the fullest node and card.
    #[default]
    Binpack,
    /// Least growth of unusable remainder.
    Fragmentation,
    /// Emptiest node first.
    Spread,
}

/// The order, and the mix that fragmentation is measured by.
#[derive(Clone, Debug, Default)]
pub struct Scoring {
    /// How nodes and cards are compared.
    pub order: Order,
    /// Recent requests.
    pub mix: Arc<Mix>,
}

/// The cluster's own mix of recent requests, most frequent first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mix {
    classes: Vec<(Glance, f32)>,
}

/// How many classes are told apart when fragmentation is measured.
const CLASSES: usize = 16;
/// How many are counted, so that a new frequent one can rise.
const COUNTED: usize = 64;
/// A request weighs half after this many later ones.
const HALF_LIFE: f32 = 2_000.0;

impl Mix {
    /// Counts one request. Old ones fade.
    pub fn count(&mut self, glance: Glance) {
        if matches!(glance, Glance::Unclear | Glance::Nothing) {
            return;
        }
        let fade = 0.5f32.powf(1.0 / HALF_LIFE);
        for (_, weight) in &mut self.classes {
            *weight *= fade;
        }
        let counted = self.classes.len();
        match self.classes.iter_mut().find(|(class, _)| *class == glance) {
            Some((_, weight)) => *weight += 1.0,
            None if counted < COUNTED => self.classes.push((glance, 1.0)),
            None => {
                // The rarest gives way: a heavy hitter gets in by coming again.
                if let Some(last) = self.classes.last_mut() {
                    *last = (glance, last.1 + 1.0);
                }
            }
        }
        self.classes.sort_by(|a, b| b.1.total_cmp(&a.1));
    }

    fn measured(&self) -> impl Iterator<Item = (Glance, f32)> + '_ {
        self.classes.iter().take(CLASSES).copied()
    }

    /// How many classes were counted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.classes.len()
    }

    /// Nothing was counted yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }
}

/// Whether one card serves a request of this class (or is one of those that do).
fn serves(card: Room, class: Glance) -> bool {
    match class {
        Glance::Share(cores, blocks) => card.open && u32::from(card.cores) >= cores.0 && card.blocks >= blocks.0,
        Glance::Whole(cards, blocks) => card.free && card.of_blocks >= blocks.0.div_ceil(cards.max(1)),
        Glance::Legacy(_) => card.free,
        Glance::Nothing | Glance::Unclear => true,
    }
}

fn taken(card: Room, cores: Cores, blocks: Blocks) -> Room {
    let cores = u16::try_from(cores.0).unwrap_or(u16::MAX);
    Room {
        cores: card.cores.saturating_sub(cores),
        blocks: card.blocks.saturating_sub(blocks.0),
        free: false,
        ..card
    }
}

/// Expected growth of the unusable remainder, in cores, when `cores` and `blocks` are taken of `card`.
#[must_use]
pub fn growth(card: Room, cores: Cores, blocks: Blocks, mix: &Mix) -> f32 {
    let after = taken(card, cores, blocks);
    let (left, left_after) = (f32::from(card.cores), f32::from(after.cores));
    let d = left - left_after;
    let (mut sum, mut weights) = (0.0, 0.0);
    for (class, weight) in mix.measured() {
        let before = if serves(card, class) { left } else { 0.0 };
        let still = if serves(after, class) { left_after } else { 0.0 };
        sum += weight * (before - still - d);
        weights += weight;
    }
    if weights > 0.0 { sum / weights } else { 0.0 }
}

/// The card that a share should go to, where the order says something else than the model's evaluators.
#[must_use]
pub fn card_to_prefer(rooms: &Rooms, glance: Glance, scoring: &Scoring) -> Option<usize> {
    match (scoring.order, glance) {
        (Order::Fragmentation, Glance::Share(cores, blocks)) if !scoring.mix.is_empty() => {
            best_card(rooms, cores, blocks, &scoring.mix).map(|(at, _)| at)
        }
        _ => None,
    }
}

/// The card with the least growth, and that growth; the fullest of equals.
fn best_card(rooms: &Rooms, cores: Cores, blocks: Blocks, mix: &Mix) -> Option<(usize, f32)> {
    let mut best: Option<(usize, f32)> = None;
    let mut last: Option<Room> = None;
    for (at, card) in rooms.cards.iter().enumerate() {
        if !serves(*card, Glance::Share(cores, blocks)) || (card.free && rooms.free() == 0) || last == Some(*card) {
            continue;
        }
        last = Some(*card);
        let growth = growth(*card, cores, blocks, mix);
        let better = best.is_none_or(|(other, least)| {
            growth < least || (growth == least && card.cores < rooms.cards[other].cores)
        });
        if better {
            best = Some((at, growth));
        }
    }
    best
}

/// How good a node is for a pod; only comparable with others of the same call. Higher is better.
#[must_use]
pub fn merit(rooms: &Rooms, glance: Glance, scoring: &Scoring) -> f32 {
    // Cores in use count more finely than free cards, for whole-card and legacy pods too.
    #[allow(clippy::cast_precision_loss)] // a node has a few thousand cores
    let left = rooms.cores_left() as f32;
    match (scoring.order, glance) {
        (Order::Spread, _) => left,
        (Order::Fragmentation, Glance::Share(cores, blocks)) if !scoring.mix.is_empty() => {
            best_card(rooms, cores, blocks, &scoring.mix).map_or(f32::MIN, |(_, growth)| -growth)
        }
        (Order::Binpack | Order::Fragmentation, _) => -left,
    }
}

/// Brings merits to the scheduler's 0 to 10; all equal: all 10.
#[must_use]
pub fn scale(merits: &[f32]) -> Vec<u8> {
    let known = || merits.iter().copied().filter(|merit| *merit > f32::MIN);
    let (least, most) = known().fold((f32::MAX, f32::MIN), |(a, b), merit| (a.min(merit), b.max(merit)));
    let span = most - least;
    let score = |merit: &f32| {
        if *merit <= f32::MIN {
            return 0;
        }
        let part = if span > 0.0 { (merit - least) / span } else { 1.0 };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 0 to 10
        let score = (part * 10.0).round() as u8;
        score.min(10)
    };
    merits.iter().map(score).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(cores: u16, blocks: u32) -> Room {
        Room { cores, free: cores == 100, open: true, blocks, of_blocks: 100 }
    }

    fn mix(classes: &[Glance]) -> Mix {
        let mut mix = Mix::default();
        classes.iter().for_each(|class| mix.count(*class));
        mix
    }

    #[test]
    fn filling_a_rest_grows_nothing_and_breaking_a_card_does() {
        let half = Glance::Share(Cores(50), Blocks(10));
        let mix = mix(&[half]);
        // A half of a half card: nothing is left to be unusable.
        assert!(growth(card(50, 50), Cores(50), Blocks(10), &mix).abs() < 1e-3);
        // 20 of a half card leaves 30 that no half fits on.
        assert!((growth(card(50, 50), Cores(20), Blocks(10), &mix) - 30.0).abs() < 1e-3);
        // What was unusable before and is taken now makes fragmentation shrink.
        assert!((growth(card(30, 50), Cores(30), Blocks(10), &mix) + 30.0).abs() < 1e-3);
        // Breaking a whole card where whole cards are the mix.
        let whole = self::mix(&[Glance::Whole(1, Blocks(0))]);
        assert!((growth(card(100, 100), Cores(20), Blocks(10), &whole) - 80.0).abs() < 1e-3);
    }

    #[test]
    fn memory_can_be_what_makes_a_rest_unusable() {
        let half = mix(&[Glance::Share(Cores(50), Blocks(50))]);
        assert!((growth(card(100, 100), Cores(10), Blocks(60), &half) - 90.0).abs() < 1e-3);
    }

    #[test]
    fn merits_are_spread_over_the_whole_scale() {
        assert_eq!(scale(&[-3.0, -1.0, -2.0, f32::MIN]), [0, 10, 5, 0]);
        assert_eq!(scale(&[7.0, 7.0]), [10, 10]);
        assert_eq!(scale(&[]), [0; 0]);
    }

    #[test]
    fn old_requests_fade_and_the_mix_stays_small() {
        let mut mix = Mix::default();
        for cores in 1..=99u32 {
            mix.count(Glance::Share(Cores(cores), Blocks(1)));
        }
        assert_eq!(mix.len(), COUNTED);
        for _ in 0..100 {
            mix.count(Glance::Share(Cores(99), Blocks(2)));
        }
        assert_eq!(mix.measured().next().map(|(class, _)| class), Some(Glance::Share(Cores(99), Blocks(2))));
    }
}
