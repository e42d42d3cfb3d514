//! What each container was seen to use of each of its cards, over all samples. Pure.

use jiff::Timestamp;
use std::collections::BTreeMap;

/// One container of one pod on one card.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) container: String,
    /// UUID of the card.
    pub(crate) card: String,
}

/// What it used. Percent are of the card.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Series {
    /// By the pod's labels when it was seen; `None` where they were not.
    pub(crate) project: Option<String>,
    /// Those in which what it used is known.
    pub(crate) samples: u64,
    pub(crate) first: Option<Timestamp>,
    pub(crate) last: Option<Timestamp>,
    pub(crate) p50: Option<f64>,
    pub(crate) p95: Option<f64>,
    pub(crate) peak_bytes: Option<u64>,
    /// Cores that it requested on this card, at last; `None` for a part of a card that NVIDIA's plugin made.
    pub(crate) cores_requested: Option<u32>,
    /// Part of a share's samples, 0 to 1, in which it kept nearly all of its cores busy ([`is_at_limit`]); `None` for a whole card.
    pub(crate) at_limit: Option<f64>,
    /// Cards that the container had at one time, at most.
    pub(crate) cards: u32,
    /// Of the card; empty where it is not known.
    pub(crate) model: String,
    /// Memory of the card.
    pub(crate) card_bytes: Option<u64>,
}

/// All that was seen.
pub(crate) type Seen = BTreeMap<Key, Series>;

/// Percent of its cores from which on a share may be what holds a container back.
pub(crate) const AT_LIMIT_PERCENT: u32 = 90;

/// Whether a container that keeps so much of a card busy may be held back by its share.
pub(crate) const fn is_at_limit(percent: u32, cores_requested: u32) -> bool {
    percent * 100 >= cores_requested * AT_LIMIT_PERCENT
}

/// How often each percentage was seen: exact, and as large after a week as after a minute.
#[derive(Debug, Clone)]
pub(crate) struct Percents([u64; 101]);

impl Default for Percents {
    fn default() -> Self {
        Self([0; 101])
    }
}

impl Percents {
    /// One more sample; above 100 counts as 100.
    pub(crate) fn add(&mut self, percent: u32) {
        if let Some(count) = self.0.get_mut(percent.min(100) as usize) {
            *count += 1;
        }
    }

    /// The quantile `q`, 0 to 1, as Prometheus' `quantile_over_time` has it: between two samples, in proportion.
    pub(crate) fn quantile(&self, q: f64) -> Option<f64> {
        let all: u64 = self.0.iter().sum();
        let rank = q * all.checked_sub(1)? as f64;
        let (below, part) = (rank.floor(), rank.fract());
        let (low, high) = (self.at(below as u64)?, self.at((below as u64 + 1).min(all - 1))?);
        Some(low + (high - low) * part)
    }

    /// The sample of this rank, from 0.
    fn at(&self, rank: u64) -> Option<f64> {
        let mut before = 0;
        let percent = (0_u32..).zip(&self.0).find(|(_, count)| {
            before += **count;
            before > rank
        });
        percent.map(|(percent, _)| f64::from(percent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(samples: impl IntoIterator<Item = u32>) -> Percents {
        let mut percents = Percents::default();
        samples.into_iter().for_each(|percent| percents.add(percent));
        percents
    }

    #[test]
    fn quantiles_are_those_of_prometheus() {
        for (samples, p50, p95) in [
            (vec![7], 7.0, 7.0),
            (vec![10, 20], 15.0, 19.5),
            // Ranks 2 and 3.8 of 0 to 4.
            (vec![50, 10, 30, 20, 40], 30.0, 48.0),
            // Ranks 50 and 95 of 0 to 100.
            ((0..=100).collect(), 50.0, 95.0),
            (vec![0, 0, 0, 300], 0.0, 85.0),
        ] {
            let percents = of(samples.clone());
            let near = |q: f64, expected: f64| (percents.quantile(q).unwrap() - expected).abs() < 1e-9;
            assert!(near(0.5, p50) && near(0.95, p95), "{samples:?}: {percents:?}");
        }
        assert_eq!(of([]).quantile(0.5), None);
    }

    /// Against a sorted list, for many lists.
    #[test]
    fn a_quantile_is_that_of_the_sorted_samples() {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u32
        };
        for _ in 0..500 {
            let mut samples: Vec<u32> = (0..1 + next() % 40).map(|_| next() % 101).collect();
            let percents = of(samples.clone());
            samples.sort_unstable();
            for q in [0.0, 0.5, 0.95, 1.0] {
                let rank = q * (samples.len() - 1) as f64;
                let (low, high) = (samples[rank.floor() as usize], samples[rank.ceil() as usize]);
                let expected = f64::from(low) + (f64::from(high) - f64::from(low)) * rank.fract();
                assert!((percents.quantile(q).unwrap() - expected).abs() < 1e-9, "{q} of {samples:?}");
            }
        }
    }

    #[test]
    fn a_share_is_at_its_limit_from_nine_tenths_of_its_cores() {
        for (percent, cores, expected) in [(44, 50, false), (45, 50, true), (60, 50, true), (0, 10, false)] {
            assert_eq!(is_at_limit(percent, cores), expected, "{percent} of {cores}");
        }
    }
}
