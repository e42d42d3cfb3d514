//! Leader election by Lease: of several replicas one is ready and binds.
//!
//! A library would tell that we lead; bind must know *until when that is certain*, so that a binding of an old leader
//! cannot arrive after a new one has looked at the cluster. Hence the few lines here. The rules are client-go's
//! (`tools/leaderelection`): a Lease is taken over when it has not changed for its duration by our own clock, so the
//! clocks of the replicas need not agree.
//!
//! A new leader lists everything anew before it is ready. A leader that cannot renew ends its process.

use std::time::{Duration, Instant};

use gpu_migrate_model::names;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::{Api, PostParams};
use tokio_util::sync::CancellationToken;

/// How long a Lease is good for without renewal.
pub const DURATION: Duration = Duration::from_secs(15);
/// Pause between two renewals, or two looks.
pub const PERIOD: Duration = Duration::from_secs(2);

/// What was last seen of the Lease, and when by our own clock.
#[derive(Debug, Default)]
pub struct Observer {
    seen: Option<(LeaseSpec, Instant)>,
}

/// What to do about the Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It is ours: renew it.
    Renew,
    /// It is free, or its holder is gone: take it.
    Take,
    /// Someone else has it.
    Wait,
}

impl Observer {
    /// Decides by what is in the Lease now.
    pub fn decide(&mut self, spec: &LeaseSpec, identity: &str, now: Instant) -> Step {
        if self.seen.as_ref().is_none_or(|(before, _)| before != spec) {
            self.seen = Some((spec.clone(), now));
        }
        let changed = self.seen.as_ref().map_or(now, |(_, at)| *at);
        let held = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let held = held.map_or(DURATION, Duration::from_secs);
        match spec.holder_identity.as_deref() {
            None | Some("") => Step::Take,
            Some(holder) if holder == identity => Step::Renew,
            Some(_) if now.duration_since(changed) > held => Step::Take,
            Some(_) => Step::Wait,
        }
    }
}

/// One replica's part in the election.
pub struct Candidate {
    leases: Api<Lease>,
    name: String,
    identity: String,
    observer: Observer,
}

impl Candidate {
    /// The replica `identity`, for the Lease `name` in `namespace`.
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str, identity: &str) -> Self {
        Self {
            leases: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity: identity.to_owned(),
            observer: Observer::default(),
        }
    }

    /// Tries to become or to stay the leader; until when we are it, if we are.
    ///
    /// # Errors
    /// Where the API server cannot be asked. What was certain before stays so until its time.
    pub async fn step(&mut self) -> kube::Result<Option<Instant>> {
        // Counted from before the request: the others count from when they see it.
        let start = Instant::now();
        let Some(mut lease) = self.leases.get_opt(&self.name).await? else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None)) };
            return won(self.leases.create(&PostParams::default(), &lease).await, start);
        };
        let old = lease.spec.take().unwrap_or_default();
        if self.observer.decide(&old, &self.identity, start) == Step::Wait {
            return Ok(None);
        }
        lease.spec = Some(self.spec(Some(&old)));
        // With its resource version: of two who try, one wins.
        won(self.leases.replace(&self.name, &PostParams::default(), &lease).await, start)
    }

    /// Gives the Lease away, so that the next one need not wait for it to run out. Only once nothing is bound any more.
    ///
    /// # Errors
    /// Where the API server cannot be asked.
    pub async fn resign(&self) -> kube::Result<()> {
        let Some(mut lease) = self.leases.get_opt(&self.name).await? else { return Ok(()) };
        let ours = |spec: &LeaseSpec| spec.holder_identity.as_deref() == Some(&self.identity);
        if let Some(spec) = lease.spec.as_mut().filter(|spec| ours(spec)) {
            spec.holder_identity = Some(String::new());
            self.leases.replace(&self.name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }

    fn spec(&self, old: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let same = old.filter(|old| old.holder_identity.as_deref() == Some(&self.identity));
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: same.and_then(|old| old.acquire_time.clone()).or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: match same {
                Some(old) => old.lease_transitions,
                None => Some(old.and_then(|old| old.lease_transitions).unwrap_or(0) + 1),
            },
            ..LeaseSpec::default()
        }
    }
}

fn won(result: kube::Result<Lease>, start: Instant) -> kube::Result<Option<Instant>> {
    match result {
        Ok(_) => Ok(Some(start + DURATION)),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
        Err(error) => Err(error),
    }
}

/// Name of the Lease.
#[must_use]
pub fn lease_name() -> String {
    format!("{}-extender", names::SCHEDULER)
}

/// Runs for the Lease until `stop`. Calls `elected` once, when it is ours, and `until` at every renewal with the time
/// up to which it is certainly ours.
///
/// Returns when `stop` is called, or when the Lease was ours and is lost.
pub async fn run(
    mut candidate: Candidate,
    stop: CancellationToken,
    elected: impl FnOnce(),
    until: impl Fn(Instant),
) {
    let mut elected = Some(elected);
    let mut certain: Option<Instant> = None;
    let mut every = tokio::time::interval(PERIOD);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = every.tick() => {}
        }
        let step = tokio::time::timeout(PERIOD * 2, candidate.step()).await;
        match step {
            Ok(Ok(Some(time))) => {
                certain = Some(time);
                until(time);
                if let Some(elected) = elected.take() {
                    tracing::info!(identity = candidate.identity, "leading");
                    elected();
                }
            }
            Ok(Ok(None)) if certain.is_some() => {
                tracing::error!("the Lease was taken by another replica");
                return;
            }
            Ok(Ok(None)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "Lease"),
            Err(_) => tracing::warn!("Lease: no answer"),
        }
        if certain.is_some_and(|time| time < Instant::now()) {
            tracing::error!("the Lease could not be renewed in time");
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_changes_hands_when_it_is_free_or_has_not_moved_for_its_duration() {
        let start = Instant::now();
        let lease = |holder: &str, renewed: i64| LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: Some(15),
            renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
            ..LeaseSpec::default()
        };
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        // What is written counts only as a change: these renewals are years apart from any clock here.
        let mut observer = Observer::default();
        let table = [
            (lease("b", 5), 0, Step::Wait),
            (lease("b", 5), 14, Step::Wait),
            (lease("b", 9), 15, Step::Wait),
            (lease("b", 9), 30, Step::Wait),
            (lease("b", 9), 31, Step::Take),
            (lease("a", 10), 32, Step::Renew),
            (lease("", 10), 33, Step::Take),
            (LeaseSpec::default(), 34, Step::Take),
        ];
        for (spec, seconds, expected) in table {
            assert_eq!(
                observer.decide(&spec, "a", at(seconds)),
                expected,
                "at {seconds} s: {:?}",
                spec.holder_identity
            );
        }
    }
}
