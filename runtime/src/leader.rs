//! Leader election by Lease: of several replicas one acts.
//!
//! A library would only report that we lead; a writer must know *until when that is certain*, so that no write of an old leader
//! arrives after a new one has listed the cluster. The rules are client-go's (`tools/leaderelection`): a Lease is taken over
//! when it has not changed for its duration by our own clock, so the clocks of the replicas need not agree; and every write of
//! it names the resource version it was decided from, so that of two that try one wins.
//!
//! A new leader lists everything again before it acts. A leader that cannot renew ends its process.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How long a Lease is held without renewal, by default.
pub const DURATION: Duration = Duration::from_secs(15);
/// Of a Lease's duration, the part that passes between two tries: 2 s of 15, as in client-go.
const RETRY: (u32, u32) = (2, 15);

/// What was last seen of the Lease, and when by our own clock.
#[derive(Debug, Default)]
pub struct Observer {
    seen: Option<(LeaseSpec, Instant)>,
}

/// What to do about the Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
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
        let held = duration_of(spec);
        match spec.holder_identity.as_deref() {
            None | Some("") => Step::Take,
            Some(holder) if holder == identity => Step::Renew,
            Some(_) if now.duration_since(changed) > held => Step::Take,
            Some(_) => Step::Wait,
        }
    }
}

fn duration_of(spec: &LeaseSpec) -> Duration {
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    seconds.map_or(DURATION, Duration::from_secs)
}

/// One replica's part in the election.
pub struct Candidate {
    leases: Api<Lease>,
    name: String,
    identity: String,
    duration: Duration,
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
            duration: DURATION,
            observer: Observer::default(),
        }
    }

    /// With another duration of the Lease; whole seconds, at least one.
    #[must_use]
    pub fn with_duration(self, duration: Duration) -> Self {
        Self { duration, ..self }
    }

    fn period(&self) -> Duration {
        self.duration * RETRY.0 / RETRY.1
    }

    /// Tries to take or to renew the Lease. Returns until when it is certainly held; `None` while another replica holds it.
    ///
    /// # Errors
    /// Where the API server cannot be asked. What was certain before stays so until its time.
    pub async fn try_hold(&mut self) -> kube::Result<Option<Instant>> {
        self.attempt(true).await
    }

    /// As [`Candidate::try_hold`], or only renews.
    async fn attempt(&mut self, may_take: bool) -> kube::Result<Option<Instant>> {
        // Counted from before the request: the others count from when they see it.
        let start = now();
        let result = match self.leases.get_opt(&self.name).await? {
            None if !may_take => return Ok(None),
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                let lease = Lease { metadata, spec: Some(self.spec(None)) };
                self.leases.create(&PostParams::default(), &lease).await
            }
            Some(mut lease) => {
                let old = lease.spec.take().unwrap_or_default();
                match self.observer.decide(&old, &self.identity, start) {
                    Step::Wait => return Ok(None),
                    Step::Take if !may_take => return Ok(None),
                    Step::Take | Step::Renew => {}
                }
                lease.spec = Some(self.spec(Some(&old)));
                // With its resource version: of two that try, one wins.
                self.leases.replace(&self.name, &PostParams::default(), &lease).await
            }
        };
        match result {
            Ok(_) => Ok(Some(start + self.duration)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes the Lease from whoever has it. Returns from when on nobody else is certain to hold it: at once where it was free, else
    /// after its duration, as its holder may have renewed it just before. `None` where another replica was faster.
    ///
    /// For a replica that must lead and cannot choose: one beside a scheduler that leads.
    ///
    /// # Errors
    /// Where the API server cannot be asked.
    pub async fn take_over(&mut self) -> kube::Result<Option<Instant>> {
        let (written, former) = match self.leases.get_opt(&self.name).await? {
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                let lease = Lease { metadata, spec: Some(self.spec(None)) };
                (self.leases.create(&PostParams::default(), &lease).await, None)
            }
            Some(mut lease) => {
                let old = lease.spec.take().unwrap_or_default();
                lease.spec = Some(self.spec(Some(&old)));
                // A holder of our own name is a former process of this replica.
                let held = old.holder_identity.as_deref().is_some_and(|holder| !holder.is_empty());
                (
                    self.leases.replace(&self.name, &PostParams::default(), &lease).await,
                    held.then(|| duration_of(&old)),
                )
            }
        };
        match written {
            Ok(_) => Ok(Some(now() + former.unwrap_or_default())),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Releases the Lease, so that the next holder need not wait for it to expire. Only once nothing is written any more.
    ///
    /// # Errors
    /// Where the API server cannot be asked.
    pub async fn release(&self) -> kube::Result<()> {
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
            lease_duration_seconds: i32::try_from(self.duration.as_secs()).ok(),
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

/// Runs for the Lease until `stop`. Calls `elected` once, when it is held, and `until` at every renewal with the time up to
/// which it is certainly held.
///
/// Returns when `stop` is called, or when the Lease was held and is lost. It is not taken a second time: another replica may
/// have led meanwhile, even where it is free again, and what this one knows may be old.
pub async fn run(
    candidate: &mut Candidate,
    stop: CancellationToken,
    elected: impl FnOnce(),
    until: impl Fn(Instant),
) {
    let mut elected = Some(elected);
    let mut certain: Option<Instant> = None;
    let period = candidate.period();
    let mut every = tokio::time::interval(period);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = every.tick() => {}
        }
        match tokio::time::timeout(period * 2, candidate.attempt(certain.is_none())).await {
            Ok(Ok(Some(time))) => {
                certain = Some(time);
                until(time);
                if let Some(elected) = elected.take() {
                    tracing::info!(identity = candidate.identity, "leading");
                    elected();
                }
            }
            Ok(Ok(None)) if certain.is_some() => {
                tracing::error!(lease = candidate.name, "Lease was taken by another replica");
                return;
            }
            Ok(Ok(None)) => {}
            Ok(Err(error)) => tracing::warn!(lease = candidate.name, %error, "Lease not renewed; retrying"),
            Err(_) => tracing::warn!(lease = candidate.name, "Lease not renewed: no answer; retrying"),
        }
        if certain.is_some_and(|time| time < now()) {
            tracing::error!(lease = candidate.name, "Lease could not be renewed in time");
            return;
        }
    }
}

/// Holds the Lease whenever it can, until `stop`, and says in `leading` whether it does. For programs that go on without it: their
/// writes must be harmless where one is still on its way while another replica leads.
pub async fn hold(mut candidate: Candidate, stop: CancellationToken, leading: watch::Sender<bool>) {
    let period = candidate.period();
    let mut every = tokio::time::interval(period);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut certain: Option<Instant> = None;
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = every.tick() => {}
        }
        match tokio::time::timeout(period * 2, candidate.try_hold()).await {
            Ok(Ok(held)) => certain = held,
            Ok(Err(error)) => tracing::warn!(lease = candidate.name, %error, "Lease not renewed; retrying"),
            Err(_) => tracing::warn!(lease = candidate.name, "Lease not renewed: no answer; retrying"),
        }
        certain = certain.filter(|time| *time > now());
        let holds = certain.is_some();
        if leading.send_if_modified(|before| std::mem::replace(before, holds) != holds) {
            tracing::info!(lease = candidate.name, identity = candidate.identity, leading = holds);
        }
    }
    leading.send_replace(false);
    if certain.is_some()
        && let Err(error) = candidate.release().await
    {
        tracing::warn!(lease = candidate.name, %error, "Lease not released; it expires by itself");
    }
}

/// The clock of the tokio runtime: tests advance it.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

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

    type Handle = tower_test::mock::Handle<Request<Body>, Response<Body>>;

    /// A candidate and the server's end of its connection.
    fn candidate() -> (Candidate, Handle) {
        let (service, handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        (Candidate::new(Client::new(service, "default"), "gpu-migrate", "lease", "me"), handle)
    }

    fn held_by(holder: &str) -> (u16, Value) {
        let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": 3,
            "renewTime": "2026-01-01T00:00:00.000000Z"});
        let metadata = json!({"name": "lease", "resourceVersion": "5"});
        (
            200,
            json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}),
        )
    }

    fn failure(code: u16) -> (u16, Value) {
        let reason = if code == 404 { "NotFound" } else { "Conflict" };
        (
            code,
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": reason, "code": code}),
        )
    }

    /// Answers one call after the other; returns the methods and bodies.
    async fn serve(mut handle: Handle, answers: Vec<(u16, Value)>) -> Vec<(String, Value)> {
        let mut calls = Vec::new();
        for (status, answer) in answers {
            let (request, respond) = handle.next_request().await.expect("a call");
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await.unwrap();
            calls.push((parts.method.to_string(), serde_json::from_slice(&body).unwrap_or_default()));
            let answer = Body::from(serde_json::to_vec(&answer).unwrap());
            respond.send_response(Response::builder().status(status).body(answer).unwrap());
        }
        calls
    }

    #[tokio::test]
    async fn a_lease_is_made_and_renewed() {
        let (mut candidate, handle) = candidate();
        // There is none: made. Ours: renewed.
        let answers = vec![failure(404), held_by("me"), held_by("me"), held_by("me")];
        let server = tokio::spawn(serve(handle, answers));
        for _ in 0..2 {
            assert!(candidate.try_hold().await.unwrap().is_some());
        }
        let calls = server.await.unwrap();
        assert_eq!(
            calls.iter().map(|call| call.0.as_str()).collect::<Vec<_>>(),
            ["GET", "POST", "GET", "PUT"]
        );
        assert_eq!(calls[1].1["spec"]["holderIdentity"], "me");
        let renewed = &calls[3].1;
        assert_eq!(renewed["metadata"]["resourceVersion"], "5", "of two that write, one wins");
        assert_eq!(renewed["spec"]["leaseTransitions"], 3, "it did not change hands");
    }

    #[tokio::test]
    async fn a_lease_is_left_to_its_holder_and_to_the_faster_of_two() {
        let (mut candidate, handle) = candidate();
        let server = tokio::spawn(serve(handle, vec![held_by("other"), held_by(""), failure(409)]));
        for _ in 0..2 {
            assert!(candidate.try_hold().await.unwrap().is_none());
        }
        let calls = server.await.unwrap();
        assert_eq!(calls.iter().map(|call| call.0.as_str()).collect::<Vec<_>>(), ["GET", "GET", "PUT"]);
        assert_eq!(calls[2].1["spec"]["leaseTransitions"], 4);
    }

    #[tokio::test]
    async fn a_lease_is_held_until_the_end_and_then_released() {
        let (candidate, handle) = candidate();
        let answers = vec![failure(404), held_by("me"), held_by("me"), held_by("")];
        let server = tokio::spawn(serve(handle, answers));
        let (leading, mut seen) = watch::channel(false);
        let stop = CancellationToken::new();
        let holding = tokio::spawn(hold(candidate, stop.clone(), leading));
        seen.wait_for(|leading| *leading).await.unwrap();
        stop.cancel();
        holding.await.unwrap();
        assert!(!*seen.borrow());
        let calls = server.await.unwrap();
        let methods: Vec<_> = calls.iter().map(|call| call.0.as_str()).collect();
        assert_eq!(methods, ["GET", "POST", "GET", "PUT"]);
        assert_eq!(calls[3].1["spec"]["holderIdentity"], "");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_taken_over_is_ours_alone_after_its_duration() {
        let now = now();
        let table = [
            (failure(404), held_by("me"), Some(0)),
            (held_by(""), held_by("me"), Some(0)),
            (held_by("other"), held_by("me"), Some(15)),
            (held_by("me"), held_by("me"), Some(15)),
            (held_by("other"), failure(409), None),
        ];
        for (found, written, expected) in table {
            let (mut candidate, handle) = candidate();
            let shown = found.1["spec"]["holderIdentity"].clone();
            let server = tokio::spawn(serve(handle, vec![found, written]));
            let over = candidate.take_over().await.unwrap();
            assert_eq!(over.map(|over| (over - now).as_secs()), expected, "{shown}");
            let calls = server.await.unwrap();
            assert_eq!(calls[1].1["spec"]["holderIdentity"], "me", "{shown}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_former_leader_does_not_take_a_lease_that_is_free_again() {
        for now in [held_by(""), failure(404)] {
            let (mut candidate, handle) = candidate();
            let server = tokio::spawn(serve(handle, vec![failure(404), held_by("me"), now]));
            let elected = std::cell::Cell::new(0);
            run(&mut candidate, CancellationToken::new(), || elected.set(elected.get() + 1), |_| {}).await;
            assert_eq!(
                (elected.get(), server.await.unwrap().len()),
                (1, 3),
                "another replica may have led meanwhile"
            );
        }
    }
}
