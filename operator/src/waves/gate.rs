//! The gate of a wave: when it fails, waits or passes.

use super::ObservedWorkload;
use gpu_migrate_model::crd::Gate;
use jiff::{SignedDuration, Timestamp};
use std::time::Duration;

/// The query's result: `None` before it was sent.
pub(super) type Answer<'a> = Option<&'a Result<f64, String>>;

/// The gate's verdict on a wave.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    /// Not yet; reconcile again after `again`.
    Wait {
        why: String,
        again: Duration,
    },
    Query,
    Pass,
    Fail(String),
}

/// Why a wave in progress has failed. `last_progress` is when it began or when a workload last became ready: the deadline is per
/// workload, independent of how many there are and how few may be unavailable at once.
pub(super) fn failure(
    gate: &Gate,
    last_progress: Timestamp,
    now: Timestamp,
    wave: &[&ObservedWorkload],
) -> Option<String> {
    if let Some(one) = wave.iter().find(|one| one.labelled && one.restarts > gate.max_restarts) {
        return Some(format!(
            "{}: a container restarted {} times, maximum is {}",
            one.key, one.restarts, gate.max_restarts
        ));
    }
    let late =
        now.duration_since(last_progress) >= SignedDuration::from_secs(gate.ready_within_seconds.into());
    let missing = wave.iter().filter(|one| !one.is_converted()).collect::<Vec<_>>();
    match missing.first() {
        Some(first) if late => Some(format!(
            "{} of {} workloads not ready, no progress for {} s; first {}{}",
            missing.len(),
            wave.len(),
            gate.ready_within_seconds,
            first.key,
            if first.unconverted > 0 {
                format!(": {} of its pods were not converted", first.unconverted)
            } else {
                String::new()
            },
        )),
        _ => None,
    }
}

/// The verdict once all workloads of the wave were ready at `ready`.
pub(super) fn soak(gate: &Gate, ready: Timestamp, now: Timestamp, answer: Answer<'_>) -> Verdict {
    let left = SignedDuration::from_secs(gate.soak_seconds.into()) - now.duration_since(ready);
    if left.is_positive() {
        return Verdict::Wait {
            why: format!("all ready; soaking for another {} s", left.as_secs().max(1)),
            again: left.try_into().unwrap_or(Duration::from_secs(1)),
        };
    }
    let Some(query) = &gate.query else { return Verdict::Pass };
    match answer {
        None => Verdict::Query,
        // Without an answer the wave neither continues nor is rolled back.
        Some(Err(why)) => {
            Verdict::Wait { why: format!("the gate query failed: {why}"), again: Duration::from_secs(15) }
        }
        Some(Ok(value)) if *value <= query.max => Verdict::Pass,
        Some(Ok(value)) => {
            Verdict::Fail(format!("the gate query returned {value}, maximum is {}", query.max))
        }
    }
}
