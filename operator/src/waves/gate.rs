//! The gate of a wave: when it fails, waits or passes.

use super::step::REQUEUE;
use super::{ObservedWorkload, workloads};
use gpu_migrate_model::crd::{Gate, QueryStatus};
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

/// The verdict once all workloads of the wave were ready at `ready`. The query is asked all along, `asked` has its answers so far.
pub(super) fn soak(
    gate: &Gate,
    ready: Timestamp,
    now: Timestamp,
    asked: &mut Option<QueryStatus>,
    answer: Answer<'_>,
) -> Verdict {
    let left = SignedDuration::from_secs(gate.soak_seconds.into()) - now.duration_since(ready);
    let soaking = left.is_positive();
    // What happens meanwhile must be seen.
    let again = if soaking { Duration::try_from(left).unwrap_or(REQUEUE).min(REQUEUE) } else { REQUEUE };
    let wait = |why: String| Verdict::Wait { why, again };
    let soaks = || wait(format!("all ready; soaking for another {} s", left.as_secs().max(1)));
    let Some(query) = &gate.query else { return if soaking { soaks() } else { Verdict::Pass } };
    let before = asked.clone().unwrap_or_default();
    let last: Option<Timestamp> = before.asked_at.parse().ok();
    let interval = SignedDuration::from_secs(query.interval_seconds.max(5).into());
    let due = last.is_none_or(|last| now.duration_since(last) >= interval);
    // One answer decides at the end: the first after the soak, and after one that was too high the next of the interval.
    let decides = !soaking && (due || last.is_some_and(|last| last.duration_since(ready) < gate_soak(gate)));
    match answer {
        None if due || decides => Verdict::Query,
        None if soaking => soaks(),
        None => wait(format!(
            "the last answer of the gate query was above {}; asking again every {} s",
            query.max, query.interval_seconds
        )),
        // Without an answer the wave neither continues nor is rolled back.
        Some(Err(why)) => {
            Verdict::Wait { why: format!("the gate query failed: {why}"), again: Duration::from_secs(15) }
        }
        Some(Ok(value)) => {
            let failures = before.failures + u32::from(*value > query.max);
            *asked = Some(QueryStatus { asked_at: now.to_string(), failures });
            if failures > query.failure_limit {
                return Verdict::Fail(format!("the gate query returned {value}, maximum is {}", query.max));
            }
            match (soaking, *value > query.max) {
                (true, _) => soaks(),
                (false, false) => Verdict::Pass,
                (false, true) => wait(format!(
                    "the gate query returned {value}, maximum is {}; {} of {} such answers",
                    query.max, failures, query.failure_limit
                )),
            }
        }
    }
}

fn gate_soak(gate: &Gate) -> SignedDuration {
    SignedDuration::from_secs(gate.soak_seconds.into())
}
