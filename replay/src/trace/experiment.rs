//! All policies on all seeds, on as many threads as asked for, and what came of them together.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::replay::{Point, Policy, Replay, Setup};
use crate::node::BindError;

/// A mean, and how far single seeds are from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Spread {
    pub mean: f64,
    /// Standard deviation over seeds (of the sample; 0 for one seed).
    pub deviation: f64,
}

#[derive(Clone, Debug, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    pub policy: Policy,
    /// The curve: mean over seeds for every percent of arrival.
    pub curve: Vec<CurvePoint>,
    /// Pods that fitted nowhere, in percent of those that came.
    pub skipped_percent: Spread,
    /// Time for one seed on one thread.
    pub seconds_per_seed: f64,
}

/// All seeds when so much had arrived. Everything is in percent of the cluster's cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct CurvePoint {
    pub arrived: u32,
    pub allocated: Spread,
    /// Idle and of no use to the usual request.
    pub fragmented: Spread,
}

/// Runs every policy on every seed. `done` is told after each replay, on the calling thread.
///
/// # Errors
/// The first replay that failed.
pub fn run(
    setup: &Setup,
    policies: &[Policy],
    seeds: &[u64],
    threads: usize,
    mut done: impl FnMut(Policy, u64),
) -> Result<Vec<Outcome>, BindError> {
    let jobs: Vec<(usize, u64)> =
        seeds.iter().flat_map(|seed| (0..policies.len()).map(move |policy| (policy, *seed))).collect();
    let next = AtomicUsize::new(0);
    let mut replays: Vec<Vec<(Replay, Duration)>> = vec![Vec::new(); policies.len()];
    std::thread::scope(|scope| {
        let (results, received) = mpsc::channel();
        for _ in 0..threads.clamp(1, jobs.len().max(1)) {
            let (results, next, jobs) = (results.clone(), &next, &jobs);
            scope.spawn(move || {
                while let Some((policy, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let began = Instant::now();
                    let replay = setup.replay(policies[*policy], *seed);
                    if results.send((*policy, *seed, replay, began.elapsed())).is_err() {
                        return;
                    }
                }
            });
        }
        drop(results);
        for (policy, seed, replay, time) in received {
            replays[policy].push((replay?, time));
            done(policies[policy], seed);
        }
        Ok::<(), BindError>(())
    })?;
    Ok(policies.iter().zip(replays).map(|(policy, replays)| outcome(*policy, &replays)).collect())
}

#[allow(clippy::cast_precision_loss)] // a few seeds and some ten thousand pods
fn outcome(policy: Policy, replays: &[(Replay, Duration)]) -> Outcome {
    let length = replays.iter().map(|(replay, _)| replay.points.len()).max().unwrap_or_default();
    let at = |replay: &Replay, percent: usize| -> Point {
        replay.points.get(percent).or(replay.points.last()).copied().unwrap_or_default()
    };
    let curve = (0..length).map(|percent| CurvePoint {
        arrived: u32::try_from(percent).unwrap_or(u32::MAX),
        allocated: spread(replays.iter().map(|(replay, _)| at(replay, percent).allocated)),
        fragmented: spread(replays.iter().map(|(replay, _)| at(replay, percent).fragmented)),
    });
    let skipped = |replay: &Replay| 100.0 * replay.skipped as f64 / replay.pods.max(1) as f64;
    let time: Duration = replays.iter().map(|(_, time)| time).sum();
    Outcome {
        policy,
        curve: curve.collect(),
        skipped_percent: spread(replays.iter().map(|(replay, _)| skipped(replay))),
        seconds_per_seed: time.as_secs_f64() / replays.len().max(1) as f64,
    }
}

#[allow(clippy::cast_precision_loss)] // a few seeds
fn spread(values: impl Iterator<Item = f64>) -> Spread {
    let values: Vec<f64> = values.collect();
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Spread { mean, deviation: (squares / (count - 1.0).max(1.0)).sqrt() }
}

impl Outcome {
    /// The point at this percent of arrival; the last one where so much never arrived.
    #[must_use]
    pub fn at(&self, percent: u32) -> CurvePoint {
        self.curve.get(percent as usize).or(self.curve.last()).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_deviation_are_of_a_sample() {
        let spread = spread([1.0, 2.0, 3.0, 4.0].into_iter());
        assert!((spread.mean - 2.5).abs() < 1e-12);
        assert!((spread.deviation - (5.0_f64 / 3.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn one_seed_has_no_deviation() {
        assert!(spread([7.0].into_iter()).deviation.abs() < 1e-12);
    }
}
