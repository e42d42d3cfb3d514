//! The gate of a wave: what fails it, what it still waits for.

use super::Seen;
use gpu_migrate_model::crd::Gate;
use jiff::{SignedDuration, Timestamp};
use std::time::Duration;

/// The answer of the gate's query: not asked yet, no answer, or a value.
pub(super) type Answer<'a> = Option<&'a Result<f64, String>>;

/// What the gate says of a wave.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    /// It waits; say why, and look again then.
    Wait { why: String, again: Duration },
    /// The query has to be asked.
    Ask,
    /// The wave is done.
    Pass,
    /// The wave is taken back.
    Fail(String),
}

/// What fails a wave at any time while it is under way. `got_on` is when it began or a workload last arrived: each
/// workload has its own time, however many there are and however few may move at once.
pub(super) fn broken(gate: &Gate, got_on: Timestamp, now: Timestamp, wave: &[&Seen]) -> Option<String> {
    if let Some(one) = wave.iter().find(|one| one.sent && one.restarts > gate.max_restarts) {
        return Some(format!(
            "{}: a container restarted {} times, at most {} are allowed",
            one.key, one.restarts, gate.max_restarts
        ));
    }
    let late = now.duration_since(got_on) >= SignedDuration::from_secs(gate.ready_within_seconds.into());
    let missing = wave.iter().filter(|one| !one.arrived()).collect::<Vec<_>>();
    match missing.first() {
        Some(first) if late => Some(format!(
            "{} of {} workloads not ready, and nothing got on for {} s; first {}{}",
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

/// What the gate says once all of the wave were ready at `ready`.
pub(super) fn soak(gate: &Gate, ready: Timestamp, now: Timestamp, answer: Answer<'_>) -> Verdict {
    let left = SignedDuration::from_secs(gate.soak_seconds.into()) - now.duration_since(ready);
    if left.is_positive() {
        return Verdict::Wait {
            why: format!("all ready; watched for another {} s", left.as_secs().max(1)),
            again: left.try_into().unwrap_or(Duration::from_secs(1)),
        };
    }
    let Some(query) = &gate.query else { return Verdict::Pass };
    match answer {
        None => Verdict::Ask,
        // Not knowing is no reason to go on, and none to throw away what works.
        Some(Err(why)) => Verdict::Wait {
            why: format!("the gate's query has no answer: {why}"),
            again: Duration::from_secs(15),
        },
        Some(Ok(value)) if *value <= query.max => Verdict::Pass,
        Some(Ok(value)) => {
            Verdict::Fail(format!("the gate's query gave {value}, at most {} is allowed", query.max))
        }
    }
}
