//! The gate of a wave: when it fails, waits or passes.

use super::step::REQUEUE;
use super::{ObservedWorkload, workloads};
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

/// A converted workload whose containers restart too often.
pub(super) fn crashes(gate: &Gate, wave: &[&ObservedWorkload]) -> Option<String> {
    let one = wave.iter().find(|one| one.labelled && one.restarts > gate.max_restarts)?;
    Some(format!(
        "{}: a container restarted {} times, maximum is {}",
        one.key, one.restarts, gate.max_restarts
    ))
}

/// Why workloads have failed that are not ready since `since`: of a wave that begins, since one of its workloads last became
/// ready. So the deadline is per workload, independent of how many there are and how few may be unavailable at once.
pub(super) fn too_late(
    gate: &Gate,
    since: Timestamp,
    now: Timestamp,
    (unready, all): (&[&ObservedWorkload], usize),
) -> Option<String> {
    let first = unready.first().filter(|_| is_late(gate, since, now))?;
    Some(format!(
        "{} of {} not ready, no progress for {} s; first {}",
        unready.len(),
        workloads(all),
        gate.ready_within_seconds,
        first.described(),
    ))
}

pub(super) fn is_late(gate: &Gate, since: Timestamp, now: Timestamp) -> bool {
    now.duration_since(since) >= SignedDuration::from_secs(gate.ready_within_seconds.into())
}

/// The verdict once all workloads of the wave were ready at `ready`.
pub(super) fn soak(gate: &Gate, ready: Timestamp, now: Timestamp, answer: Answer<'_>) -> Verdict {
    let left = SignedDuration::from_secs(gate.soak_seconds.into()) - now.duration_since(ready);
    if left.is_positive() {
        return Verdict::Wait {
            why: format!("all ready; soaking for another {} s", left.as_secs().max(1)),
            // What happens meanwhile must be seen.
            again: Duration::try_from(left).unwrap_or(REQUEUE).min(REQUEUE),
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
